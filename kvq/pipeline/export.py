"""Plan an export: which scales go where, and what happens to every file of the source."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import kvq
from kvq.checkpoint import (
    CONFIG_NAME,
    SINGLE_NAME,
    CheckpointView,
    open_checkpoint,
    weight_fingerprint,
)
from kvq.dialects import dialect_of, get_dialect
from kvq.dialects.base import Dialect, DialectPlan, Target
from kvq.dialects.documents import LEGACY_NAME, method_of, other_method
from kvq.errors import CheckpointError
from kvq.geometry import Geometry, read_geometry
from kvq.pipeline.convert import Wanted
from kvq.pipeline.layout import (
    declares_more,
    draft_scales,
    left_behind,
    old_scales,
    shard_name,
    side_files,
)
from kvq.pipeline.scale_source import ScaleSource, read_source
from kvq.scales import ScaleSet


@dataclass(frozen=True)
class Shard:
    """One source shard: its new name, and the old scales it must lose (empty: linked whole)."""

    source: str
    target: str
    drop: tuple[str, ...]


@dataclass(frozen=True)
class ExportPlan:
    """Everything an export will do, as plain data.

    `documents` are JSON files to write, whole, by name; `scale_shard` is None where no tensor is
    added, and `weight_map` where no index is written. `unread` says why the dialect's own reader
    would not use the scales as meant.
    """

    shards: tuple[Shard, ...]
    scale_shard: str | None
    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]
    documents: Mapping[str, Mapping[str, Any]]
    config: Mapping[str, Any]
    weight_map: Mapping[str, str] | None
    total_size: int
    side_files: tuple[str, ...]
    notices: tuple[str, ...]
    dialect: str | None
    scales: ScaleSet | None = None
    skip_layers: tuple[int, ...] = ()
    unread: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the form that `--dry-run --json` prints."""
        return {
            "dialect": self.dialect,
            "shards": [vars(shard) | {"drop": list(shard.drop)} for shard in self.shards],
            "scale_shard": self.scale_shard,
            "scales": {name: scale.ravel().tolist() for name, scale in self.tensors.items()},
            "quantization_config": self.config.get("quantization_config"),
            "documents": sorted(self.documents),
            "side_files": list(self.side_files),
            "notices": list(self.notices),
        }


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
    plan = _assemble(view, geometry, written, metadata, carry=dialect.name)
    notices = (*source.notices, *plan.notices, *written.losses)
    return replace(
        plan, notices=notices, skip_layers=source.skip_layers, dialect=dialect.name,
        scales=written.stored, unread=written.unread,
    )  # fmt: skip


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
    return _assemble(view, geometry, written, {}, carry=dialect.name)


def _same_weights(source: ScaleSource, view: CheckpointView, options: ExportOptions) -> ScaleSource:
    """Refuse scales of other weights, or record that they were asked for."""
    found, expected = weight_fingerprint(view), source.weight_fingerprint
    if expected is None:
        notice = "nothing says on which weights these scales were observed"
        return replace(source, weight_fingerprint=found, notices=(*source.notices, notice))
    if found == expected or source.record.get("exported_onto") == found:
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
    if dialect.name == "compressed-tensors" and method != "compressed-tensors":
        raise other_method(str(method), None)
    return dialect


def _assemble(
    view: CheckpointView, geometry: Geometry, written: DialectPlan, metadata: Mapping[str, str],
    *, carry: str,
) -> ExportPlan:  # fmt: skip
    """Lay out the files: only a shard that holds old scales is written anew."""
    old = set() if not written.tensors and not _strips(written) else old_scales(view, geometry)
    if not _strips(written) and written.stored.granularity == "tensor":
        old -= draft_scales(view, geometry)  # nothing replaces these
    kept = []
    for source in view.loaded_files:
        if source.startswith("consolidated"):
            continue
        names = set(view.files[source].tensors)
        if names - old:
            kept.append((source, tuple(sorted(names & old))))
    if not kept:
        raise CheckpointError(
            f"`{view.root}` has no weights beside {', '.join(view.files)}, not carried along",
            code="export.no_weights",
            hint="convert it to Hugging Face's names first",
        )
    count = len(kept) + bool(written.tensors)
    named = [SINGLE_NAME] if count == 1 else [shard_name(i, count) for i in range(1, count + 1)]
    shards = tuple(
        Shard(source, target, drop) for (source, drop), target in zip(kept, named, strict=False)
    )
    scale_shard = named[-1] if written.tensors else None
    targets = {shard.source: shard.target for shard in shards}
    weight_map = {
        name: targets.get(_indexed(view, name), shard.target)
        for shard in shards
        for name in view.files[shard.source].tensors
        if name not in shard.drop
    }
    sizes = sum(info.end - info.start for name, info in view.tensors.items() if name in weight_map)
    if scale_shard:
        weight_map |= dict.fromkeys(written.tensors, scale_shard)
    replaced = (
        f"{len(old)} scale tensors of the source are {'replaced' if scale_shard else 'removed'}"
    )
    documents = {name: found for name, found in written.documents.items() if found is not None}
    return ExportPlan(
        shards=shards,
        scale_shard=scale_shard,
        tensors=written.tensors,
        metadata=metadata,
        documents=documents,
        config=documents.get(CONFIG_NAME, view.config),
        weight_map=weight_map if count > 1 else None,
        total_size=sizes + sum(t.nbytes for t in written.tensors.values()),
        side_files=side_files(view, written.documents, carry),
        notices=(*left_behind(view, written.documents, carry), *((replaced,) if old else ())),
        dialect=None,
    )


def _indexed(view: CheckpointView, name: str) -> str:
    """Return the shard that the source's index names for a tensor, where it is really there."""
    named = (view.weight_map or {}).get(name, "")
    return named if named in view.files and name in view.files[named].tensors else ""


def _strips(written: DialectPlan) -> bool:
    return not written.stored.layers


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
    text = json.dumps(provenance, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {"format": "pt", "kvq": text}
