"""Whether scales fit a checkpoint, and whether it is clear what they are."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.dialects.spellings import FoundScales
from kvq.errors import CheckpointError
from kvq.geometry import Geometry, LayerGeometry
from kvq.quantizers import QUERY
from kvq.state import Calibration


def check_same_model(calibration: Calibration, geometry: Geometry) -> None:
    """Refuse a calibration of another architecture, or of other layers or heads.

    Raises:
        CheckpointError: with what differs.
    """
    if calibration.model["architecture"] != geometry.architecture:
        raise CheckpointError(
            f"the calibration is of `{calibration.model['architecture']}`, "
            f"the checkpoint is `{geometry.architecture}`",
            code="export.architecture",
            hint="calibrate this model",
        )
    check_paths([layer.attention for layer in calibration.layers], geometry, "calibration")
    for layer, stats in zip(geometry.layers, calibration.layers, strict=True):
        if {*stats.amax} - {QUERY} != {*layer.quantizers} - {QUERY}:
            raise CheckpointError(
                f"layer {layer.layer_idx} has statistics of {sorted(stats.amax)}, the checkpoint "
                f"caches {sorted(name for name, _ in layer.cached)}",
                code="export.quantizers",
                hint="calibrate this model",
            )
        check_heads(layer, stats.amax)


def check_heads(layer: LayerGeometry, found: Mapping[str, np.ndarray]) -> None:
    """Refuse amax of another number of heads than a layer has.

    Raises:
        CheckpointError: with quantizer and layer.
    """
    for quantizer, amax in found.items():
        heads = layer.num_attention_heads if quantizer == QUERY else layer.num_key_value_heads
        if amax.size != heads:
            raise CheckpointError(
                f"`{quantizer}` of layer {layer.layer_idx} has statistics of {amax.size} heads, "
                f"the checkpoint has {heads}",
                code="export.heads",
                hint="calibrate this model",
            )


def check_paths(paths: Sequence[str], geometry: Geometry, what: str) -> None:
    """Refuse other attention modules than the checkpoint has.

    Raises:
        CheckpointError: with the first and the number of both.
    """
    wanted = [layer.attention for layer in geometry.layers]
    if list(paths) != wanted:
        first, other = (f"`{found[0]}`" if found else "none" for found in (paths, wanted))
        raise CheckpointError(
            f"the {what} holds {len(paths)} layers, first {first}; the checkpoint has "
            f"{len(wanted)}, first {other}",
            code="export.layers",
            hint="calibrate this model",
        )


def check_unambiguous(
    source: CheckpointView, geometry: Geometry, found: FoundScales, name: str
) -> None:
    """Refuse a source of which it is not clear what its scales are.

    Raises:
        CheckpointError: two scales of one layer and side that differ, one in two files, or a zero
            point or affine bias that means something.
    """
    first = {(one.attention, one.side): one.tensor for one in found.scales}
    for other in found.others:
        tensor = first[other.attention, other.side]
        if not np.array_equal(source.read(tensor).ravel(), source.read(other.tensor).ravel()):
            raise CheckpointError(
                f"`{name}` has two scales of one layer that differ: `{tensor}` and "
                f"`{other.tensor}`",
                code="scales.conflict",
                hint="look with `kvq verify`; remove the wrong one, or calibrate",
            )
    twice = next((one.tensor for one in found.all if one.tensor in source.duplicates), None)
    if twice is not None:
        raise CheckpointError(
            f"`{twice}` lies in {' and '.join(source.duplicates[twice])} of `{name}`",
            code="scales.duplicate",
            hint="remove the wrong one",
        )
    for layer in geometry.layers:
        names = [f"{layer.attention}.{side}_zero_point" for side in "kvq"]
        names += [f"{layer.attention}.{side}_proj.{side}_bias" for side in "kv"]
        for tensor in names:
            if tensor in source.tensors and np.any(source.read(tensor)):
                raise CheckpointError(
                    f"`{tensor}` in `{name}` is not 0: its scales are of an asymmetric "
                    "quantization, which no engine runs",
                    code="scales.zero_point",
                    hint="calibrate the model",
                )
