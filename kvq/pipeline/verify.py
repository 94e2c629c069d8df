"""Verify a checkpoint's KV scales from its files alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvq.checkpoint import CheckpointView, open_checkpoint
from kvq.checks import RULES
from kvq.checks.context import Context, Rule
from kvq.checks.engines import engine_findings
from kvq.checks.findings import Finding, Report
from kvq.configs import KV, Q, QuantizerEntry
from kvq.dialects.base import FoundScale
from kvq.dialects.compressed_tensors import CompressedTensors, scale_name
from kvq.engines import get_engines
from kvq.engines.base import EngineOptions, EngineReading
from kvq.errors import CheckpointError, InputError
from kvq.files import read_json
from kvq.formats import FP8_E4M3
from kvq.geometry import Geometry, read_geometry
from kvq.pipeline.probe import live_findings, probe
from kvq.provenance import Provenance, read_provenance
from kvq.quantizers import QuantizerConfig
from kvq.scales import ScaleSet, compute_scales
from kvq.state import Calibration, is_calibration, read_calibration


@dataclass(frozen=True)
class EngineQuestion:
    """Who must use the scales as written.

    Args:
        engines: what each of these would do is predicted from the files.
        options: how the engines are run.
        live: load the checkpoint in this engine too, on the CPU, and compare what it then holds.
        python: the interpreter that has it.
        version: the version that the one engine must have.
    """

    engines: Sequence[str] = ()
    options: EngineOptions = field(default_factory=EngineOptions)
    live: str | None = None
    python: str | None = None
    version: str | None = None

    @property
    def names(self) -> list[str]:
        """All engines that are asked."""
        return list(dict.fromkeys([*self.engines, *([self.live] if self.live else [])]))


def verify(
    path: Path,
    *,
    against: Path | None = None,
    rtol: float = 0.0,
    ask: EngineQuestion | None = None,
) -> Report:
    """Run every rule over a checkpoint and return all findings at once.

    Args:
        path: the checkpoint folder.
        against: what to compare the scales with.
        rtol: relative tolerance of that comparison.
        ask: engines that must use the scales as written.

    Raises:
        KvqError: no answer is possible: unreadable files, an unsupported model, no checks.
    """
    if not 0 <= rtol < math.inf:
        raise InputError(f"--rtol is {rtol}, expected a number >= 0", code="option.rtol")
    view = open_checkpoint(path)
    if not view.config:
        raise InputError(
            f"`{path}` is a single file; verify needs the folder with its config.json",
            code="verify.not_folder",
        )
    geometry = read_geometry(view.config, view.tensors)
    context, findings = _context(view, geometry, against, rtol)
    rules = _rules(view) if ask and ask.names else RULES
    findings += [finding for rule in rules for finding in rule(context)]
    readings: tuple[EngineReading, ...] = ()
    if ask is not None:
        constant = context.provenance is not None and context.provenance.constant
        readings, found = _ask(ask, view, geometry, constant=constant)
        findings += found
    findings.sort(key=lambda f: (-1 if f.layer_idx is None else f.layer_idx, f.tensor or ""))
    checks = (len(rules) + len(readings)) * bool(geometry.layers)
    return Report(tuple(findings), checks, len(geometry.layers), readings)


def _context(
    view: CheckpointView, geometry: Geometry, against: Path | None, rtol: float
) -> tuple[Context, list[Finding]]:
    scales = CompressedTensors().find(view, geometry)
    provenance = read_provenance(view, [scale.tensor for scale in scales])
    drafts = tuple(
        FoundScale(geometry.num_hidden_layers, path, side, name)
        for path in geometry.drafts
        for side in ("k", "v")
        if (name := scale_name(path, side)) in view.tensors
    )
    values, unreadable = _read_values(view, [scale.tensor for scale in scales + drafts])
    context = Context(
        view=view,
        geometry=geometry,
        scales=scales,
        values=values,
        provenance=provenance,
        reference=None if against is None else read_reference(against, view, scales, provenance),
        rtol=rtol,
        drafts=drafts,
        by_side={(scale.attention, scale.side): scale for scale in scales},
    )
    return context, unreadable


def _rules(view: CheckpointView) -> Sequence[Rule]:
    """Return the rules that apply where an engine is asked as well.

    Most speak of compressed-tensors' names; what other names mean, the engine's reading says.
    """
    method = (view.quantization_config or {}).get("quant_method")
    legacy = view.quantization_config is None and (view.root / "hf_quant_config.json").exists()
    if legacy or method not in (None, "compressed-tensors"):
        return [rule for rule in RULES if rule.__module__ == "kvq.checks.shards"]
    return RULES


def _ask(
    ask: EngineQuestion, view: CheckpointView, geometry: Geometry, *, constant: bool
) -> tuple[tuple[EngineReading, ...], list[Finding]]:
    engines = get_engines(ask.names, ask.version)
    readings = {name: engine.read(view, geometry, ask.options) for name, engine in engines.items()}
    findings = [
        finding
        for reading in readings.values()
        for finding in engine_findings(reading, view, constant=constant)
    ]
    if ask.live is not None:
        options = EngineOptions(ask.options.kv_cache_dtype, "cpu")
        answer = probe(
            ask.live, view.root, python=ask.python, kv_cache_dtype=options.kv_cache_dtype
        )
        findings += live_findings(engines[ask.live].read(view, geometry, options), answer)
    return tuple(readings.values()), findings


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


def read_reference(
    path: Path, view: CheckpointView, scales: Sequence[FoundScale], provenance: Provenance | None
) -> dict[str, list[float]]:
    """Return tensor name → values from a calibration, a checkpoint or a scales JSON file.

    A calibration holds amax per head; the checkpoint in question says which scales to derive from
    it: per tensor or head, with or without the query, constant where its provenance says so.
    """
    if path.is_file() and path.suffix == ".json":
        return _reference_json(path)
    if path.is_dir() and is_calibration(path):
        return _reference_calibration(read_calibration(path), view, scales, provenance)
    view = open_checkpoint(path)
    geometry = read_geometry(view.config, view.tensors)
    found = CompressedTensors().read(view, geometry)
    if not any(layer.scales for layer in found.layers):
        raise InputError(f"the reference `{path}` holds no scales", code="reference.no_scales")
    return _by_tensor(found)


def _by_tensor(scales: ScaleSet) -> dict[str, list[float]]:
    return {
        scale_name(layer.attention, side): list(values)
        for layer in scales.layers
        for side, values in layer.scales.items()
    }


def _reference_calibration(
    calibration: Calibration,
    view: CheckpointView,
    scales: Sequence[FoundScale],
    provenance: Provenance | None,
) -> dict[str, list[float]]:
    per_head = view.kv_cache_scheme.get("strategy") == "attn_head"
    queries = any(scale.side == "q" for scale in scales)
    entries = (
        QuantizerEntry(
            KV + Q if queries else KV,
            QuantizerConfig("fp8_e4m3", "head" if per_head else "tensor"),
        ),
    )
    derived = _by_tensor(compute_scales(calibration, entries))
    for attention, sides in (provenance.status if provenance else {}).items():
        for side, status in sides.items():
            name = scale_name(attention, side)
            if status == "constant" and name in derived:
                constant = FP8_E4M3.scale(FP8_E4M3.element.max)
                derived[name] = [constant] * len(derived[name])
    return derived


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
        if not all(type(number) in (int, float) and abs(number) < 1e38 for number in numbers):
            raise InputError(
                f"`{name}` in `{path}` is not a number or a list of numbers",
                code="reference.invalid",
            )
    return values
