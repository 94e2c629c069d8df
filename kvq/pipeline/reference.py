"""What scales are compared with: a calibration, another checkpoint, or a JSON file."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.checkpoint import CheckpointView, open_checkpoint
from kvq.configs import KV, Q, QuantizerEntry
from kvq.dialects import dialect_of, read_scales
from kvq.dialects.sglang_json import FILE_NAME, is_sglang_json, read_sglang_json
from kvq.dialects.spellings import SIDES, SPELLINGS, FoundScales
from kvq.errors import CheckpointError, InputError
from kvq.files import read_json
from kvq.formats import FP8_E4M3
from kvq.geometry import Geometry, read_geometry
from kvq.provenance import Provenance
from kvq.quantizers import QuantizerConfig
from kvq.scales import ScaleSet, compute_scales
from kvq.state import Calibration, is_calibration, read_calibration

Values = dict[tuple[str, str], list[float]]  # (attention, side) → expected


@dataclass(frozen=True)
class Reference:
    """Expected values by attention module and side; names that are none stand in `strangers`."""

    values: Values
    strangers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compared:
    """The checkpoint in question, as far as a reference depends on it."""

    view: CheckpointView
    geometry: Geometry
    found: FoundScales
    provenance: Provenance | None


def read_reference(path: Path, compared: Compared) -> Reference:
    """Return what a checkpoint's scales should be.

    A calibration holds amax per head; the checkpoint says which scales to derive from it: format,
    per tensor or head, with or without the query, constant where its provenance says so. Nothing
    is rounded to what the checkpoint's dialect stores.

    Raises:
        KvqError: the reference cannot be read, or belongs to another architecture.
    """
    exists = False
    with suppress(OSError):  # a path that no file can have
        exists = path.exists()
    if not exists:
        raise InputError(
            f"the reference `{path}` does not exist",
            code="reference.missing",
            hint="--against takes a calibration, a checkpoint folder or a JSON file of scales",
        )
    if path.is_file() and path.suffix == ".json":
        found = Reference(*json_scales(path, compared.view.config, compared.geometry))
    elif path.is_dir() and is_calibration(path):
        found = Reference(_calibration(read_calibration(path), compared))
    else:
        view = open_checkpoint(path)
        found = Reference(_by_side(read_scales(view, read_geometry(view.config, view.tensors))))
    if not found.values and not found.strangers:
        own_file = path / FILE_NAME
        raise InputError(
            f"the reference `{path}` holds no scales",
            code="reference.no_scales",
            hint=f"give `{own_file}` itself" if own_file.is_file() else None,
        )
    return found


def _by_side(scales: ScaleSet) -> Values:
    return {
        (layer.attention, side): list(values)
        for layer in scales.layers
        for side, values in layer.scales.items()
    }


def _calibration(calibration: Calibration, compared: Compared) -> Values:
    architecture = calibration.model["architecture"]
    if architecture != compared.geometry.architecture:
        raise CheckpointError(
            f"the calibration is of `{architecture}`, the checkpoint is "
            f"`{compared.geometry.architecture}`",
            code="reference.architecture",
            hint="compare with the calibration of this model",
        )
    declared = dialect_of(compared.view).declared(compared.view)
    sides = KV + Q if any(scale.side == "q" for scale in compared.found.scales) else KV
    config = QuantizerConfig(declared.format or "fp8_e4m3", declared.granularity)
    derived = _by_side(compute_scales(calibration, (QuantizerEntry(sides, config),)))
    status = compared.provenance.status if compared.provenance else {}
    for attention, by_side in status.items():
        for side, word in by_side.items():
            if word == "constant" and (attention, side) in derived:
                constant = config.number_format.scale(FP8_E4M3.element.max)
                derived[attention, side] = [constant] * len(derived[attention, side])
    return derived


def json_scales(
    path: Path, config: Mapping[str, Any], geometry: Geometry
) -> tuple[Values, tuple[str, ...]]:
    """Return the scales of a JSON file, kvq's own or SGLang's, and names that are none.

    Args:
        path: the file.
        config: config.json of the model that it is for.
        geometry: the layers of that model.

    Raises:
        KvqError: the file has neither form.
    """
    document = read_json(path)
    if is_sglang_json(document):
        return _by_side(read_sglang_json(path, config, geometry)), ()
    known: dict[str, list[tuple[str, str]]] = {}
    for spelling in SPELLINGS.values():
        for layer in geometry.layers:
            for side in ("k", "v") if "single" in spelling.name else SIDES:
                name = spelling.tensor(layer.attention, side)
                known.setdefault(name, []).append((layer.attention, side))
    values: Values = {}
    strangers = []
    for name, numbers in _numbers(document, path).items():
        if name in known:
            values |= dict.fromkeys(known[name], numbers)
        else:
            strangers.append(name)
    return values, tuple(sorted(strangers))


def _numbers(document: Mapping[str, Any], path: Path) -> dict[str, list[float]]:
    scales = document.get("scales")
    if document.get("schema") != 1 or not isinstance(scales, dict):
        raise InputError(
            f"`{path}` is not a scales file",
            code="reference.invalid",
            hint='expected {"schema": 1, "scales": {NAME: NUMBER}}, as `kvq inspect --scales '
            "--json` prints",
        )
    values = {name: value if isinstance(value, list) else [value] for name, value in scales.items()}
    for name, numbers in values.items():
        if not all(type(number) in (int, float) and abs(number) < 1e38 for number in numbers):
            raise InputError(
                f"`{name}` in `{path}` is not a number or a list of numbers",
                code="reference.invalid",
            )
    return values
