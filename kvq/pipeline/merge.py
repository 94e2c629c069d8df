"""Merge calibrations of one model: what several data sets or machines saw, by exact maximum."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import CheckpointError, InputError
from kvq.files import check_target
from kvq.state import Calibration, LayerStats, read_calibration, write_calibration

# What must agree: attribute of a calibration, and how to call it.
_SAME = {
    "kv_cfg": "configuration",
    "margin": "--margin",
    "skip_layers": "--skip-layers",
    "quantizers": "set of quantizers",
    "modules": "module tree",
}


def merge(paths: Sequence[Path], target: Path, *, overwrite: bool = False) -> Calibration:
    """Merge calibration folders into one; their order does not matter.

    Args:
        paths: two or more calibrations of the same weights under the same options.
        target: the folder to write.
        overwrite: replace an existing one.

    Raises:
        KvqError: they are not of one model, were made under different options, or one of them is
            given twice or is already part of another.
    """
    if len(paths) < 2:
        raise InputError(
            f"merge needs two calibrations or more, not {len(paths)}", code="merge.too_few"
        )
    check_target(target, overwrite=overwrite, inputs=paths)
    named = [(path, read_calibration(path)) for path in paths]
    for path, one in named:
        _check_parts(path, one)
    first_path, first = named[0]
    for path, other in named[1:]:
        _check_same(first_path, first, path, other)
    parts = sorted((part for _, one in named for part in _parts(one)), key=_text)
    texts = [_text(part) for part in parts]
    twice = next((a for a, b in pairwise(texts) if a == b), None)
    if twice is not None:
        digest = json.loads(twice)["calibration"]
        raise InputError(
            f"the calibration {digest[:12]} is given twice, alone or as part of a merged one",
            code="merge.twice",
            hint="a source counts once, else its tokens would be counted double",
        )
    merged = replace(
        first,
        layers=tuple(map(_merged_layer, zip(*(one.layers for _, one in named), strict=True))),
        data={
            "source": {"name": f"{len(parts)} calibrations", "type": "merged"},
            "sequences": sum(part["data"]["sequences"] for part in parts),
            "tokens": sum(part["data"]["tokens"] for part in parts),
            "merged": parts,
        },
        run={},
    )
    write_calibration(merged, target, overwrite=overwrite)
    return merged


def _check_same(first_path: Path, first: Calibration, path: Path, other: Calibration) -> None:
    differing: list[tuple[str, Any, Any]] = [
        (f"`{key}`", first.model.get(key), other.model.get(key))
        for key in sorted(first.model.keys() | other.model.keys())
    ]
    differing += [
        ("set of observed layers and heads", _shape(first), _shape(other)),
        *((words, getattr(first, name), getattr(other, name)) for name, words in _SAME.items()),
    ]
    for what, one, two in differing:
        if one != two:
            shown = "" if len(f"{one}{two}") > 200 else f": {two!r}, not {one!r}"
            raise InputError(
                f"`{path}` has another {what} than `{first_path}`{shown}",
                code="merge.differs",
                hint="merge calibrations of the same weights under the same options",
            )


def _shape(calibration: Calibration) -> list[tuple[Any, ...]]:
    return [
        (layer.layer_idx, layer.attention, layer.shared_from,
         {name: amax.shape for name, amax in layer.amax.items()})
        for layer in calibration.layers
    ]  # fmt: skip


def _parts(calibration: Calibration) -> Iterable[dict[str, Any]]:
    """Return the sources of a calibration: those of a merged one, else itself."""
    merged = calibration.data.get("merged")
    if merged is not None:
        return [dict(part) for part in merged]
    run = dict(calibration.run)
    return [{"calibration": calibration.digest, "data": dict(calibration.data), "run": run}]


def _check_parts(path: Path, calibration: Calibration) -> None:
    try:
        sound = all(
            isinstance(part["calibration"], str)
            and all(type(part["data"][key]) is int for key in ("sequences", "tokens"))
            for part in _parts(calibration)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"`data` in `{path}` is damaged: {error!r}", code="calibration.damaged"
        ) from error
    if not sound:
        raise CheckpointError(f"`data` in `{path}` is damaged", code="calibration.damaged")


def _text(part: dict[str, Any]) -> str:
    return json.dumps(part, sort_keys=True)


def _merged_layer(layers: Sequence[LayerStats]) -> LayerStats:
    amax = {
        name: reduce(np.maximum, [layer.amax[name] for layer in layers]) for name in layers[0].amax
    }
    # `raised` counts the batches of one run, and the runs have no order among them; a percentile
    # of all is not to be had from the percentiles of each
    return replace(
        layers[0], amax=amax, tokens=sum(one.tokens for one in layers), raised={},
        percentile_99_9={},
    )  # fmt: skip
