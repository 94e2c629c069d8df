"""Plan an export: which scales go where, and what happens to every file of the source."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import kvq
from kvq.checkpoint import CheckpointView, open_checkpoint, weight_fingerprint
from kvq.dialects import dialect_of, get_dialect
from kvq.dialects.base import Dialect, DialectPlan, Target
from kvq.dialects.documents import LEGACY_NAME, method_of, other_method
from kvq.errors import CheckpointError
from kvq.geometry import read_geometry
from kvq.pipeline.convert import Wanted
from kvq.pipeline.layout import declares_more, old_scales
from kvq.pipeline.plan import ExportPlan, assemble
from kvq.pipeline.scale_source import ScaleSource, read_source
from kvq.provenance import UNKNOWN
from kvq.scales import ScaleSet


@dataclass(frozen=True)
class ExportOptions:
    """How scales are to be written.

    Args:
        wanted: configuration and granularity, each perhaps left out.
        dialect: its name, or `auto` for the one that the checkpoint speaks.
        engines: who must read the result.
        tp: number of GPUs, for dialects that list scales for each.
        for_other_weights: write scales of other weights than the checkpoint's, and record it.
    """

    wanted: Wanted = field(default_factory=Wanted)
    dialect: str = "auto"
    engines: tuple[str, ...] = ("vllm",)
    tp: int = 1
    for_other_weights: bool = False


def plan_export(model: Path, scales_path: Path, options: ExportOptions) -> ExportPlan:
    """Plan an export without writing anything.

    Args:
        model: the checkpoint folder to add scales to.
        scales_path: a calibration, a checkpoint with scales, or a scales JSON file.
        options: how.

    Raises:
        KvqError: whatever would make the result wrong or unreadable, with the way that works.
    """
    view = open_checkpoint(model)
    geometry = read_geometry(view.config, view.tensors)
    source = _same_weights(read_source(scales_path, options.wanted, view), view, options)
    dialect = _dialect(view, source.scales, options)
    target = Target(options.engines, source.attention_class, options.tp)
    written = dialect.plan(source.scales, view, target)
    metadata = _metadata(source, written.stored, dialect.name) if written.tensors else {}
    plan = assemble(view, geometry, written, metadata, carry=dialect.name)
    notices = (*source.notices, *plan.notices, *written.losses)
    return replace(
        plan, notices=notices, skip_layers=source.skip_layers, dialect=dialect.name,
        scales=written.stored, unread=written.unread,
    )  # fmt: skip


def record_unread(plan: ExportPlan, unread: Mapping[str, str]) -> ExportPlan:
    """Return a plan that records which engines would not use its scales, and why."""
    if not unread or "kvq" not in plan.metadata:
        return plan
    record = {**json.loads(plan.metadata["kvq"]), "allowed_unread": dict(unread)}
    return replace(plan, metadata={**plan.metadata, "kvq": _text(record)})


def plan_strip(model: Path) -> ExportPlan:
    """Plan a copy without scales and their declarations; no other tensor changes.

    Raises:
        CheckpointError: the checkpoint has neither.
    """
    view = open_checkpoint(model)
    geometry = read_geometry(view.config, view.tensors)
    dialect = dialect_of(view)
    documents = dialect.strip(view)
    if not old_scales(view, geometry) and not declares_more(view, documents):
        raise CheckpointError(
            f"`{model}` has no scales and declares no quantized cache", code="strip.nothing"
        )
    written = DialectPlan({}, documents, ScaleSet("fp8_e4m3", "tensor", ()))
    return assemble(view, geometry, written, {}, carry=dialect.name)


def _same_weights(source: ScaleSource, view: CheckpointView, options: ExportOptions) -> ScaleSource:
    """Refuse scales of other weights, or record that they were asked for."""
    found, expected = weight_fingerprint(view), source.weight_fingerprint
    if expected in (None, UNKNOWN):
        notice = "nothing says on which weights these scales were observed"
        return replace(source, weight_fingerprint=UNKNOWN, notices=(*source.notices, notice))
    if found == expected:
        return replace(source, record={**source.record, "exported_onto": None})
    if source.record.get("exported_onto") == found:
        return source
    if not options.for_other_weights:
        raise CheckpointError(
            "the scales belong to other weights: the K/V projections have fingerprint "
            f"{found[:12]}, expected {expected[:12]}",
            code="export.weights",
            hint="calibrate this checkpoint itself; --for-other-weights writes them nevertheless, "
            "e.g. onto a quantized copy of the same model, and records it",
        )
    notice = f"scales of other weights ({expected[:12]}) are written onto {found[:12]}"
    record = {**source.record, "exported_onto": found}
    return replace(source, record=record, notices=(*source.notices, notice))


def _dialect(view: CheckpointView, scales: ScaleSet, options: ExportOptions) -> Dialect:
    """Return the dialect asked for, else the one that the base speaks.

    An unquantized base takes compressed-tensors; for TensorRT-LLM alone ModelOpt's, since it
    refuses the other without quantized weights.
    """
    if options.dialect != "auto":
        return get_dialect(options.dialect)
    method = method_of(view.quantization_config)
    if method is None and not (view.root / LEGACY_NAME).is_file():
        alone = options.engines == ("tensorrt-llm",)
        return get_dialect("modelopt" if alone else "compressed-tensors")
    dialect = dialect_of(view)
    if dialect.name == "compressed-tensors" and method != dialect.name:
        raise other_method(str(method), None)
    return dialect


def _metadata(source: ScaleSource, scales: ScaleSet, dialect: str) -> dict[str, str]:
    provenance = {
        "schema": 1,
        "kvq_version": kvq.__version__,
        "dialect": dialect,
        "format": scales.format,
        "granularity": scales.granularity,
        "convention": "scale = amax / scale_divisor, dequantization multiplier",
        "weight_fingerprint": source.weight_fingerprint,
        "attention_class": source.attention_class,
        "status": {layer.attention: dict(layer.provenance) for layer in scales.layers},
        **source.record,
    }
    return {"format": "pt", "kvq": _text(provenance)}


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
