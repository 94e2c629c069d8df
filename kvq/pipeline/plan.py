"""The plan of an export as data: what becomes of every file of the source."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq.checkpoint import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, CheckpointView
from kvq.dialects import find
from kvq.dialects.base import DialectPlan, Documents
from kvq.dialects.documents import LEGACY_NAME
from kvq.dialects.sglang_json import FILE_NAME
from kvq.files import MARKER
from kvq.geometry import Geometry
from kvq.scales import ScaleSet

_OWN = (MARKER, INDEX_NAME)


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


def old_scales(view: CheckpointView, geometry: Geometry) -> set[str]:
    """Return the names of all scales and zero points of attention that a checkpoint holds."""
    suffixes = (".k_scale", ".v_scale", ".q_scale", ".kv_scale",
                ".k_zero_point", ".v_zero_point", ".q_zero_point")  # fmt: skip
    named = {name for name in view.tensors if name.endswith(suffixes)}
    return named | {scale.tensor for scale in find(view, geometry).all}


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
    kept = []
    for source in view.loaded_files:
        if source.startswith("consolidated"):
            continue
        names = set(view.files[source].tensors)
        if names - old:
            kept.append((source, tuple(sorted(names & old))))
    count = len(kept) + bool(written.tensors)
    named = [SINGLE_NAME] if count == 1 else [_shard_name(i, count) for i in range(1, count + 1)]
    shards = tuple(
        Shard(source, target, drop) for (source, drop), target in zip(kept, named, strict=False)
    )
    scale_shard = named[-1] if written.tensors else None
    weight_map = {
        name: shard.target
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
    documents = dict(written.documents)
    return ExportPlan(
        shards=shards,
        scale_shard=scale_shard,
        tensors=written.tensors,
        metadata=metadata,
        documents=documents,
        config=documents.get(CONFIG_NAME) or view.config,
        weight_map=weight_map if count > 1 else None,
        total_size=sizes + sum(t.nbytes for t in written.tensors.values()),
        side_files=_side_files(view, documents, carry),
        notices=(*_left_behind(view, documents, carry), *((replaced,) if old else ())),
        dialect=None,
    )


def _strips(written: DialectPlan) -> bool:
    return not written.stored.layers


def _shard_name(number: int, count: int) -> str:
    # the one naming that vLLM, SGLang, TensorRT-LLM and transformers all read
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _left_behind(view: CheckpointView, documents: Mapping[str, Any], carry: str) -> list[str]:
    notices = []
    consolidated = [name for name in view.files if name.startswith("consolidated")]
    if consolidated:
        notices.append(
            f"{', '.join(consolidated)} not carried along: vLLM would read it instead of the "
            "shards and never see the scales"
        )
    reasons = {
        LEGACY_NAME: "TensorRT-LLM would follow it, not config.json",
        FILE_NAME: "its scales may be others",
    }
    for name, reason in reasons.items():
        if _is_stale(name, documents, carry) and (view.root / name).exists():
            notices.append(f"{name} not carried along: {reason}")
    stray = [name for name in view.unindexed_files if name not in consolidated]
    if stray:
        notices.append(f"{', '.join(stray)} not carried along: the index does not name it")
    code = sorted(path.name for path in view.root.glob("*.py"))
    if code:
        notices.append(f"code of the model is copied, never run: {', '.join(code)}")
    return notices


def _is_stale(name: str, documents: Mapping[str, Any], carry: str) -> bool:
    """Whether a side file would contradict what is written."""
    if name in documents:
        return documents[name] is None
    return name == FILE_NAME or (name == LEGACY_NAME and carry == "compressed-tensors")


def _side_files(view: CheckpointView, documents: Mapping[str, Any], carry: str) -> tuple[str, ...]:
    return tuple(
        sorted(
            path.name
            for path in view.root.iterdir()
            if path.is_file()
            and path.suffix != ".safetensors"
            and path.name not in (*_OWN, *documents)
            and not _is_stale(path.name, documents, carry)
        )
    )
