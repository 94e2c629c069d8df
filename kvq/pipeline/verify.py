"""Verify a checkpoint's KV scales from its files alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvq.checkpoint import CheckpointView, open_checkpoint
from kvq.checks import RULES
from kvq.checks.context import Context
from kvq.checks.findings import Finding, Report
from kvq.configs import as_fp8, get_config
from kvq.dialects.compressed_tensors import CompressedTensors
from kvq.errors import CheckpointError, InputError
from kvq.files import read_json
from kvq.geometry import read_geometry
from kvq.scales import compute_scales
from kvq.state import is_calibration, read_calibration


def verify(path: Path, *, against: Path | None = None, rtol: float = 0.0) -> Report:
    """Run every rule over a checkpoint and return all findings at once.

    Raises:
        KvqError: no answer is possible: unreadable files, an unsupported model, no checks.
    """
    if rtol < 0:
        raise InputError(f"--rtol is {rtol}, expected >= 0", code="option.rtol")
    view = open_checkpoint(path)
    if not view.config:
        raise InputError(
            f"`{path}` is a single file; verify needs the folder with its config.json",
            code="verify.not_folder",
        )
    geometry = read_geometry(view.config, view.tensors)
    scales = CompressedTensors().find(view, geometry)
    values, unreadable = _read_values(view, [scale.tensor for scale in scales])
    context = Context(
        view=view,
        geometry=geometry,
        scales=scales,
        values=values,
        provenance=read_provenance(view),
        reference=None if against is None else read_reference(against, _granularity(view)),
        rtol=rtol,
        by_layer={(scale.layer_idx, scale.side): scale for scale in scales},
    )
    findings = unreadable + [finding for rule in RULES for finding in rule(context)]
    findings.sort(key=lambda f: (-1 if f.layer_idx is None else f.layer_idx, f.tensor or ""))
    checks = len(RULES) * bool(geometry.layers)
    return Report(tuple(findings), checks, len(geometry.layers))


def _read_values(
    view: CheckpointView, names: list[str]
) -> tuple[dict[str, np.ndarray], list[Finding]]:
    values, findings = {}, []
    for name in names:
        try:
            values[name] = view.read(name)
        except CheckpointError as error:
            findings.append(Finding("scale.unreadable", "error", str(error), tensor=name))
    return values, findings


def read_provenance(view: CheckpointView) -> dict[str, Any] | None:
    """Return what kvq recorded in the added shard, if the checkpoint has it."""
    for name in view.loaded_files:
        text = view.files[name].metadata.get("kvq")
        if text is None:
            continue
        try:
            found = json.loads(text)
        except ValueError as error:
            raise CheckpointError(
                f"the kvq metadata of `{name}` is not JSON", code="provenance.invalid"
            ) from error
        return found if isinstance(found, dict) else None
    return None


def _granularity(view: CheckpointView) -> str:
    scheme = (view.quantization_config or {}).get("kv_cache_scheme")
    per_head = isinstance(scheme, dict) and scheme.get("strategy") == "attn_head"
    return "head" if per_head else "tensor"


def read_reference(path: Path, granularity: str) -> dict[str, list[float]]:
    """Return tensor name → values from a calibration, a checkpoint or a scales JSON file.

    A calibration holds amax per head; `granularity` says which scales to derive from it.
    """
    if path.is_file() and path.suffix == ".json":
        return _reference_json(path)
    if path.is_dir() and is_calibration(path):
        calibration = read_calibration(path)
        entries = as_fp8(get_config(calibration.kv_cfg), granularity)
        return {
            f"{layer.attention}.{side}_scale": list(values)
            for layer in compute_scales(calibration, entries).layers
            for side, values in layer.scales.items()
        }
    view = open_checkpoint(path)
    geometry = read_geometry(view.config, view.tensors)
    found = CompressedTensors().find(view, geometry)
    if not found:
        raise InputError(f"the reference `{path}` holds no scales", code="reference.no_scales")
    return {s.tensor: [float(v) for v in view.read(s.tensor).ravel()] for s in found}


def _reference_json(path: Path) -> dict[str, list[float]]:
    document = read_json(path)
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
        if not all(type(number) in (int, float) for number in numbers):
            raise InputError(
                f"`{name}` in `{path}` is not a number or a list of numbers",
                code="reference.invalid",
            )
    return values
