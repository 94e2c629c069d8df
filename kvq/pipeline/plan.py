"""The plan of an export as data: what becomes of every file of the source."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq.checkpoint import CONFIG_NAME, SINGLE_NAME, CheckpointView
from kvq.dialects.base import DialectPlan, Documents
from kvq.errors import CheckpointError
from kvq.geometry import Geometry
from kvq.pipeline.layout import (
    draft_scales,
    index_metadata,
    left_behind,
    old_scales,
    shard_name,
    side_files,
)
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
    documents: Documents
    config: Mapping[str, Any]
    weight_map: Mapping[str, str] | None
    index_metadata: Mapping[str, Any]
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


def assemble(
    view: CheckpointView, geometry: Geometry, written: DialectPlan, metadata: Mapping[str, str],
    *, carry: str,
) -> ExportPlan:  # fmt: skip
    """Lay out the files: only a shard that holds old scales is written anew.

    Args:
        view: the source.
        geometry: its layers.
        written: what the dialect adds; without scales, what is there is removed.
        metadata: of the added shard.
        carry: the dialect, whose own files come along.
    """
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
    documents = {name: found for name, found in written.documents.items() if found is not None}
    return ExportPlan(
        shards=shards,
        scale_shard=scale_shard,
        tensors=written.tensors,
        metadata=metadata,
        documents=documents,
        config=documents.get(CONFIG_NAME, view.config),
        weight_map=weight_map if count > 1 else None,
        index_metadata={
            **index_metadata(view),
            "total_size": sizes + sum(t.nbytes for t in written.tensors.values()),
        },
        side_files=side_files(view, written.documents, carry),
        notices=(
            *left_behind(view, written.documents, carry),
            *_replaced(view, geometry, old, written),
        ),
        dialect=None,
    )


def _indexed(view: CheckpointView, name: str) -> str:
    """Return the shard that the source's index names for a tensor, where it is really there."""
    named = (view.weight_map or {}).get(name, "")
    return named if named in view.files and name in view.files[named].tensors else ""


def _strips(written: DialectPlan) -> bool:
    return not written.stored.layers


def _replaced(
    view: CheckpointView, geometry: Geometry, old: set[str], written: DialectPlan
) -> list[str]:
    """Say what becomes of the source's own scales."""
    verb = "replaced" if written.tensors else "removed"
    words = [f"{len(old)} scale tensors of the source are {verb}"] if old else []
    if written.tensors and old & draft_scales(view, geometry):
        words.append("scales of draft layers are removed: per tensor, beside others per head")
    return words
