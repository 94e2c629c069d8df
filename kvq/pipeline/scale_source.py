"""Where the scales of an export come from: a calibration, another checkpoint, or a JSON file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvq.checkpoint import CheckpointView, open_checkpoint, weight_fingerprint
from kvq.configs import KV, Q, QuantizerEntry, with_granularity
from kvq.dialects import dialect_of, find, read_scales
from kvq.dialects.documents import LEGACY_NAME
from kvq.dialects.modelopt import declared_formats
from kvq.errors import CheckpointError, InputError
from kvq.formats import get_format
from kvq.geometry import Geometry, read_geometry
from kvq.pipeline.convert import Wanted, check_complete, check_lengths, convert_scales
from kvq.pipeline.reference import json_scales
from kvq.pipeline.source_checks import (
    check_heads,
    check_paths,
    check_same_model,
    check_unambiguous,
)
from kvq.provenance import Provenance, read_provenance
from kvq.quantizers import QUERY, QuantizerConfig
from kvq.scales import LayerScales, ScaleSet, compute_scales, layer_scales
from kvq.state import Calibration, LayerStats, is_calibration, read_calibration


@dataclass(frozen=True)
class ScaleSource:
    """Scales on their way into a checkpoint, and what is known of where they come from.

    `weight_fingerprint` is that of the weights they were observed on, None where nothing says;
    `record` holds further entries of the provenance.
    """

    scales: ScaleSet
    weight_fingerprint: str | None
    record: Mapping[str, Any]
    attention_class: str | None = None
    skip_layers: tuple[int, ...] = ()
    notices: tuple[str, ...] = ()


def read_source(path: Path, wanted: Wanted, view: CheckpointView) -> ScaleSource:
    """Read scales for the checkpoint `view`.

    Raises:
        KvqError: they cannot be read, belong to another architecture, or are not complete.
    """
    geometry = read_geometry(view.config, view.tensors)
    if not path.exists():
        raise InputError(
            f"`{path}` does not exist",
            code="scales.missing",
            hint="--scales takes a calibration, a checkpoint folder or a JSON file of scales",
        )
    if path.is_file() and path.suffix == ".json":
        return _from_json(path, wanted, view, geometry)
    if is_calibration(path) or not _is_checkpoint(path):
        return _from_calibration(read_calibration(path), wanted, geometry)
    return _from_checkpoint(path, wanted, geometry)


def _is_checkpoint(path: Path) -> bool:
    return path.suffix == ".safetensors" or (path.is_dir() and any(path.glob("*.safetensors")))


def _from_calibration(calibration: Calibration, wanted: Wanted, geometry: Geometry) -> ScaleSource:
    check_same_model(calibration, geometry)
    scales = compute_scales(calibration, wanted.entries(calibration.kv_cfg))
    record = {
        "calibration": calibration.digest,
        "margin": calibration.margin,
        "skip_layers": list(calibration.skip_layers),
        "amax": {
            f"{layer.attention}.{quantizer}": [float(value) for value in amax]
            for layer in calibration.layers
            for quantizer, amax in layer.amax.items()
        },
        "tokens": {layer.attention: layer.tokens for layer in calibration.layers},
    }
    return ScaleSource(
        scales, calibration.model["weight_fingerprint"], record,
        calibration.model.get("attention_class"), calibration.skip_layers,
    )  # fmt: skip


def _from_checkpoint(path: Path, wanted: Wanted, geometry: Geometry) -> ScaleSource:
    source = open_checkpoint(path)
    if not source.config:
        raise InputError(
            f"`{path}` is a single file; give the folder with its config.json",
            code="scales.not_folder",
        )
    own = read_geometry(source.config, source.tensors)
    check_paths([layer.attention for layer in own.layers], geometry, "source of the scales")
    found = find(source, own)
    check_unambiguous(source, own, found, path.name)
    scales = read_scales(source, own, found)
    check_complete(scales, path.name)
    check_lengths(scales, own, path.name)
    provenance = read_provenance(source, [scale.tensor for scale in found.scales])
    if provenance is not None and provenance.amax:
        return _from_provenance(scales, provenance, wanted, own)
    scales = replace(scales, format=_stored_format(source, scales, provenance, wanted))
    fingerprint = provenance.weight_fingerprint if provenance else weight_fingerprint(source)
    legacy = sorted({x.tensor for x in found.scales if x.spelling in ("single", "native-single")})
    notices = (
        (f"{len(legacy)} single scales, as `{legacy[0]}`, stand for K and V alike",)
        if legacy
        else ()
    )
    attention_class, record = None, {}
    if provenance is not None:
        scales = _with_status(scales, provenance)
        attention_class = provenance.attention_class
        record = {"exported_onto": provenance.exported_onto}
    converted = convert_scales(scales, wanted)
    return ScaleSource(converted, fingerprint, record, attention_class, notices=notices)


def _with_status(scales: ScaleSet, provenance: Provenance) -> ScaleSet:
    """Return the set with what was recorded of each scale's origin."""
    return replace(scales, layers=tuple(
        replace(one, provenance={
            side: provenance.status.get(one.attention, {}).get(side, word)
            for side, word in one.provenance.items()
        })
        for one in scales.layers
    ))  # fmt: skip


def _stored_format(
    source: CheckpointView, scales: ScaleSet, provenance: Provenance | None, wanted: Wanted
) -> str:
    """Return the format of a checkpoint's scales: as recorded, else as all of its files declare.

    Raises:
        CheckpointError: its two files declare different ones, and none is asked for.
    """
    if provenance is not None:
        return provenance.format
    declared = declared_formats(source) if dialect_of(source).name == "modelopt" else set()
    if len(declared) > 1 and not wanted.kv_cfg:
        raise CheckpointError(
            f"config.json and {LEGACY_NAME} declare different caches: "
            f"{', '.join(sorted(declared))}",
            code="scales.declarations",
            hint="say which one is meant: --kv-cfg FP8_KV_CFG or NVFP4_KV_CFG",
        )
    return declared.pop() if len(declared) == 1 else scales.format


def _from_provenance(
    scales: ScaleSet, provenance: Provenance, wanted: Wanted, geometry: Geometry
) -> ScaleSource:
    """Return scales from the amax recorded beside them, whatever format is wanted.

    Raises:
        CheckpointError: the record lacks a layer.
    """
    sides = KV + Q if scales.has_query else KV
    same = (QuantizerEntry(sides, QuantizerConfig(provenance.format, provenance.granularity)),)
    entries = wanted.entries(wanted.kv_cfg) if wanted.kv_cfg else same
    if wanted.granularity:
        entries = with_granularity(entries, wanted.granularity)
    layers = []
    for layer in geometry.layers:
        prefix = f"{layer.attention}."
        amax = {
            name: np.array(provenance.amax[prefix + name], np.float32)
            for name in layer.quantizers
            if prefix + name in provenance.amax
        }
        if {*amax} - {QUERY} != {*layer.quantizers} - {QUERY}:
            raise CheckpointError(
                f"the record of the scales lacks amax of layer {layer.layer_idx}",
                code="provenance.damaged",
            )
        check_heads(layer, amax)
        tokens = provenance.tokens.get(layer.attention, 0)
        layers.append(LayerStats(layer.layer_idx, layer.attention, amax, tokens, layer.shared_from))
    _check_follows(layer_scales(layers, same, provenance.margin), scales, provenance)
    computed = layer_scales(layers, entries, provenance.margin)
    if not wanted.kv_cfg:
        computed = _with_constants(computed, provenance)
    record = {
        "calibration": provenance.calibration,
        "margin": provenance.margin,
        "skip_layers": list(provenance.skip_layers),
        "amax": dict(provenance.amax),
        "tokens": dict(provenance.tokens),
        "exported_onto": provenance.exported_onto,  # asked for once, it holds for these weights
    }
    return ScaleSource(
        computed, provenance.weight_fingerprint, record, provenance.attention_class,
        tuple(provenance.skip_layers),
    )  # fmt: skip


def _check_follows(computed: ScaleSet, stored: ScaleSet, provenance: Provenance) -> None:
    """Refuse scales that are not those of the amax recorded beside them.

    A dialect may have rounded them up to a 16-bit number, by less than one part in 128.
    """
    expected = _with_constants(computed, provenance)
    for meant, found in zip(expected.layers, stored.layers, strict=True):
        for side, values in found.scales.items():
            want = np.array(meant.scales.get(side, ()), np.float32)
            have = np.array(values, np.float32)
            same = want.shape == have.shape
            if not same or not ((have >= want) & (have <= want * (1 + 2**-7))).all():
                raise CheckpointError(
                    f"the {side} scale of layer {found.layer_idx} is not that of the amax recorded "
                    f"beside it: {have.tolist()}, expected {want.tolist()}",
                    code="scales.provenance",
                    hint="look with `kvq verify`; export from the calibration instead",
                )


def _with_constants(scales: ScaleSet, provenance: Provenance) -> ScaleSet:
    """Return the set with those sides constant that were constant by request."""
    constant = get_format(scales.format).scale(get_format("fp8_e4m3").element.max)
    layers = []
    for layer in scales.layers:
        status = provenance.status.get(layer.attention, {})
        sides = {
            side: (constant,) * len(values) if status.get(side) == "constant" else values
            for side, values in layer.scales.items()
        }
        words = {side: status.get(side, word) for side, word in layer.provenance.items()}
        layers.append(replace(layer, scales=sides, provenance=words))
    return replace(scales, layers=tuple(layers))


def _from_json(path: Path, wanted: Wanted, view: CheckpointView, geometry: Geometry) -> ScaleSource:
    found, strangers = json_scales(path, view.config, geometry)
    if strangers:
        raise InputError(
            f"`{strangers[0]}` in `{path.name}` is no scale of this model ({len(strangers)} such)",
            code="scales.stranger",
        )
    layers, per_head = [], False
    for layer in geometry.layers:
        sides = {
            side: tuple(float(np.float32(x)) for x in values)
            for (attention, side), values in found.items()
            if attention == layer.attention
        }
        per_head |= any(len(values) > 1 for values in sides.values())
        layers.append(
            LayerScales(layer.layer_idx, layer.attention, sides, dict.fromkeys(sides, "user"))
        )
    scales = ScaleSet("fp8_e4m3", "head" if per_head else "tensor", tuple(layers))
    check_complete(scales, path.name)
    check_lengths(scales, geometry, path.name)
    return ScaleSource(convert_scales(scales, wanted), None, {})
