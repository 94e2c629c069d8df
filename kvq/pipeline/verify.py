"""Verify a checkpoint's KV scales from its files alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvq.checkpoint import CheckpointView, open_checkpoint
from kvq.checks import rules_for
from kvq.checks.agreement import agreement_findings
from kvq.checks.context import Context
from kvq.checks.engines import engine_findings
from kvq.checks.findings import Finding, Report
from kvq.checks.platform import platform_findings
from kvq.checks.required import REQUIREMENTS, required_findings
from kvq.dialects import dialect_of, find
from kvq.engines import get_engines
from kvq.engines.base import EngineOptions, EngineReading
from kvq.errors import CheckpointError, InputError
from kvq.geometry import Geometry, read_geometry
from kvq.pipeline.locate import refuse_calibration
from kvq.pipeline.probe import live_findings, probe
from kvq.pipeline.reference import Compared, read_reference
from kvq.provenance import Provenance, read_provenance


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
    require: Sequence[str] = (),
) -> Report:
    """Run every rule over a checkpoint and return all findings at once.

    Args:
        path: the checkpoint folder.
        against: what to compare the scales with.
        rtol: relative tolerance of that comparison.
        ask: engines that must use the scales as written.
        require: what must be there at all, keys of `REQUIREMENTS`.

    Raises:
        KvqError: no answer is possible: unreadable files, an unsupported model, no checks.
    """
    if not 0 <= rtol < math.inf:
        raise InputError(f"--rtol is {rtol}, expected a number >= 0", code="option.rtol")
    unknown = [name for name in require if name not in REQUIREMENTS]
    if unknown:
        raise InputError(
            f"unknown --require `{unknown[0]}`; known: {', '.join(REQUIREMENTS)}",
            code="option.require",
        )
    refuse_calibration(path)
    view = open_checkpoint(path)
    if not view.config:
        raise InputError(
            f"`{path}` is a single file; verify needs the folder with its config.json",
            code="verify.not_folder",
        )
    geometry = read_geometry(view.config, view.tensors)
    context, findings = _context(view, geometry, against, rtol)
    rules = rules_for(context, engine_asked=bool(ask and ask.names))
    findings += [finding for rule in rules for finding in rule.check(context)]
    findings += required_findings(require, context)
    readings: tuple[EngineReading, ...] = ()
    if ask is not None:
        readings, found = _ask(ask, view, geometry, context.provenance)
        findings += found
    findings.sort(key=lambda f: (-1 if f.layer_idx is None else f.layer_idx, f.tensor or ""))
    checks = (len(rules) + len(require) + len(readings)) * bool(geometry.layers)
    return Report(tuple(findings), checks, len(geometry.layers), readings)


def _context(
    view: CheckpointView, geometry: Geometry, against: Path | None, rtol: float
) -> tuple[Context, list[Finding]]:
    found = find(view, geometry)
    provenance = read_provenance(view, [scale.tensor for scale in found.scales])
    compared = Compared(view, geometry, found, provenance)
    reference = None if against is None else read_reference(against, compared)
    values, unreadable = _read_values(view, [scale.tensor for scale in found.all])
    context = Context(
        view=view,
        geometry=geometry,
        dialect=dialect_of(view),
        found=found,
        values=values,
        provenance=provenance,
        reference=None if reference is None else reference.values,
        strangers=() if reference is None else reference.strangers,
        rtol=rtol,
    )
    return context, unreadable


def _ask(
    ask: EngineQuestion, view: CheckpointView, geometry: Geometry, provenance: Provenance | None
) -> tuple[tuple[EngineReading, ...], list[Finding]]:
    engines = get_engines(ask.names, ask.version)
    readings = {name: engine.read(view, geometry, ask.options) for name, engine in engines.items()}
    constant = provenance is not None and provenance.constant
    skipped = provenance.skip_layers if provenance is not None else ()
    findings = [
        finding
        for reading in readings.values()
        for finding in (
            *engine_findings(reading, view, constant=constant, skipped=skipped),
            *platform_findings(reading, geometry),
        )
    ]
    findings += agreement_findings(tuple(readings.values()))
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
            findings.append(
                Finding(
                    "scale.unreadable", "error", str(error), tensor=name,
                    fix="`kvq export` with the model's calibration, which writes F32",
                )
            )  # fmt: skip
    return values, findings
