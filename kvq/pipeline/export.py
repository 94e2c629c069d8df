"""Plan an export: which scales go where, and what happens to every file of the source."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kvq
from kvq.checkpoint import (
    CONFIG_NAME,
    INDEX_NAME,
    CheckpointView,
    open_checkpoint,
    weight_fingerprint,
)
from kvq.configs import get_config, with_granularity
from kvq.dialects import get_dialect
from kvq.dialects.base import DialectPlan, Target
from kvq.errors import CheckpointError, DialectError
from kvq.files import MARKER
from kvq.geometry import Geometry, read_geometry, text_config
from kvq.outliers import skip_flag
from kvq.quantizers import QUERY
from kvq.scales import ScaleSet, compute_scales
from kvq.state import Calibration, read_calibration

_REPLACED = (MARKER, "hf_quant_config.json", INDEX_NAME, CONFIG_NAME)


SERVE = {
    "vllm": "vllm serve",
    "sglang": "python -m sglang.launch_server --model-path",
    "tensorrt-llm": "trtllm-serve",
    "transformers": "transformers serve",
}


@dataclass(frozen=True)
class Shard:
    """One source shard: its new name, and the old scales it must lose (empty: linked whole)."""

    source: str
    target: str
    drop: tuple[str, ...]


@dataclass(frozen=True)
class ExportPlan:
    """Everything an export will do, as plain data."""

    shards: tuple[Shard, ...]
    scale_shard: str
    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]
    config: Mapping[str, Any]
    weight_map: Mapping[str, str]
    total_size: int
    side_files: tuple[str, ...]
    notices: tuple[str, ...]
    scales: ScaleSet
    skip_layers: tuple[int, ...] = ()

    def serve_command(self, out: Path, engine: str = "vllm") -> str:
        """Return the command that serves the result, with what a checkpoint cannot carry."""
        flags = [skip_flag(self.skip_layers)] if self.skip_layers and engine == "vllm" else []
        return " ".join([SERVE.get(engine, engine), shlex.quote(str(out)), *flags])

    def to_json(self) -> dict[str, Any]:
        """Return the form that `--dry-run --json` prints."""
        return {
            "shards": [vars(shard) | {"drop": list(shard.drop)} for shard in self.shards],
            "scale_shard": self.scale_shard,
            "scales": {name: scale.ravel().tolist() for name, scale in self.tensors.items()},
            "quantization_config": self.config["quantization_config"],
            "side_files": list(self.side_files),
            "notices": list(self.notices),
        }


def plan_export(
    model: Path, calibration_path: Path, *, kv_cfg: str | None = None,
    granularity: str | None = None, dialect: str = "auto", allow_unread: bool = False,
    engines: Sequence[str] = ("vllm",),
) -> ExportPlan:  # fmt: skip
    """Plan an export without writing anything.

    With `allow_unread`, scales that one of `engines` would not read are planned nevertheless.

    Raises:
        KvqError: whatever would make the result wrong or unreadable, with the way that works.
    """
    calibration = read_calibration(calibration_path)
    view = open_checkpoint(model)
    geometry = check_same_model(calibration, view)
    unread = _unread(geometry, view.config) if "vllm" in engines else None
    if unread and not allow_unread:
        raise DialectError(
            unread,
            code="export.unread",
            hint="--allow-unread writes the scales nevertheless, for engines that read them",
        )
    entries = get_config(kv_cfg or calibration.kv_cfg)
    if granularity is not None:
        entries = with_granularity(entries, granularity)
    scales = compute_scales(calibration, entries)
    name = "compressed-tensors" if dialect == "auto" else dialect
    target = Target(tuple(engines), calibration.model.get("attention_class"))
    written = get_dialect(name).plan(scales, view, target)
    return _assemble(view, calibration, scales, written, name, unread)


# Models whose vLLM class builds attention without the checkpoint's quantization, so that scale
# tensors have no place: loading fails.
_NO_PLACE = ("jamba", "lfm2", "zamba2")


def _unread(geometry: Geometry, config: Mapping[str, Any]) -> str | None:
    """Return why vLLM would not read the scales as meant, None if it would. Seen with 0.32."""
    model_type = text_config(config).get("model_type")
    if model_type == "minicpm3":
        return (
            "vLLM 0.32 caches MiniCPM3's expanded keys and values, and would apply the scale of "
            "the latent row to them"
        )
    if geometry.is_mla:
        return (
            f"`{geometry.architecture}` caches a latent row (MLA): vLLM 0.32 reads no scale of "
            "such a layer under any name, and an fp8 cache would run at scale 1.0"
        )
    if model_type in _NO_PLACE:
        return f"vLLM 0.32 has no place for scales in `{geometry.architecture}` and fails to load"
    return None


def check_same_model(calibration: Calibration, view: CheckpointView) -> Geometry:
    """Return the checkpoint's geometry; refuse scales of another architecture or other weights."""
    geometry = read_geometry(view.config, view.tensors)
    if calibration.model["architecture"] != geometry.architecture:
        raise CheckpointError(
            f"the calibration is of `{calibration.model['architecture']}`, "
            f"the checkpoint is `{geometry.architecture}`",
            code="export.architecture",
            hint="calibrate this model",
        )
    paths = [layer.attention for layer in geometry.layers]
    if [layer.attention for layer in calibration.layers] != paths:
        raise CheckpointError(
            f"the calibration holds {len(calibration.layers)} layers, first "
            f"`{calibration.layers[0].attention}`; the checkpoint has {len(paths)}, first "
            f"`{paths[0]}`",
            code="export.layers",
            hint="calibrate this model",
        )
    for layer, stats in zip(geometry.layers, calibration.layers, strict=True):
        if {*stats.amax} - {QUERY} != {*layer.quantizers} - {QUERY}:
            raise CheckpointError(
                f"layer {layer.layer_idx} has statistics of {sorted(stats.amax)}, the checkpoint "
                f"caches {sorted(name for name, _ in layer.cached)}",
                code="export.quantizers",
                hint="calibrate this model",
            )
        for quantizer, amax in stats.amax.items():
            query = quantizer == QUERY
            heads = layer.num_attention_heads if query else layer.num_key_value_heads
            if amax.size != heads:
                raise CheckpointError(
                    f"`{quantizer}` of layer {layer.layer_idx} has statistics of {amax.size} "
                    f"heads, the checkpoint has {heads}",
                    code="export.heads",
                    hint="calibrate this model",
                )
    fingerprint = weight_fingerprint(view)
    if calibration.model["weight_fingerprint"] != fingerprint:
        raise CheckpointError(
            "the calibration belongs to other weights: the K/V projections have fingerprint "
            f"{fingerprint[:12]}, expected {calibration.model['weight_fingerprint'][:12]}",
            code="export.weights",
            hint="calibrate this model; scales of other weights clip or waste range",
        )
    return geometry


def _old_scales(view: CheckpointView) -> set[str]:
    suffixes = (".k_scale", ".v_scale", ".q_scale", ".kv_scale",
                ".k_zero_point", ".v_zero_point", ".q_zero_point")  # fmt: skip
    return {name for name in view.tensors if name.endswith(suffixes)}


def _assemble(
    view: CheckpointView, calibration: Calibration, scales: ScaleSet, written: DialectPlan,
    dialect: str, unread: str | None,
) -> ExportPlan:  # fmt: skip
    old = _old_scales(view)
    notices = _left_behind(view)
    if unread:
        notices.append(unread)
    kept = []
    for source in view.loaded_files:
        if source.startswith("consolidated"):
            continue
        names = set(view.files[source].tensors)
        if names - old:
            kept.append((source, tuple(sorted(names & old))))
    count = len(kept) + 1
    shards = tuple(
        Shard(source, _shard_name(i, count), drop) for i, (source, drop) in enumerate(kept, 1)
    )
    scale_shard = _shard_name(count, count)
    weight_map = {
        name: shard.target
        for shard in shards
        for name in view.files[shard.source].tensors
        if name not in shard.drop
    }
    weight_map |= dict.fromkeys(written.tensors, scale_shard)
    if old:
        notices.append(f"{len(old)} scale tensors of the source are replaced")
    sizes = sum(info.end - info.start for name, info in view.tensors.items() if name in weight_map)
    return ExportPlan(
        shards=shards,
        scale_shard=scale_shard,
        tensors=written.tensors,
        metadata=_metadata(calibration, scales, dialect),
        config=dict(written.documents[CONFIG_NAME]),
        weight_map=weight_map,
        total_size=sizes + sum(t.nbytes for t in written.tensors.values()),
        side_files=_side_files(view),
        notices=tuple(notices),
        scales=scales,
        skip_layers=calibration.skip_layers,
    )


def _shard_name(number: int, count: int) -> str:
    # the one naming that vLLM, SGLang, TensorRT-LLM and transformers all read
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _left_behind(view: CheckpointView) -> list[str]:
    notices = []
    consolidated = [name for name in view.files if name.startswith("consolidated")]
    if consolidated:
        notices.append(
            f"{', '.join(consolidated)} not carried along: vLLM would read it instead of the "
            "shards and never see the scales"
        )
    if (view.root / "hf_quant_config.json").exists():
        notices.append(
            "hf_quant_config.json not carried along: TensorRT-LLM would follow it, not config.json"
        )
    stray = [name for name in view.unindexed_files if name not in consolidated]
    if stray:
        notices.append(f"{', '.join(stray)} not carried along: the index does not name it")
    return notices


def _side_files(view: CheckpointView) -> tuple[str, ...]:
    return tuple(
        sorted(
            path.name
            for path in view.root.iterdir()
            if path.is_file() and path.suffix != ".safetensors" and path.name not in _REPLACED
        )
    )


def _metadata(calibration: Calibration, scales: ScaleSet, dialect: str) -> dict[str, str]:
    provenance = {
        "schema": 1,
        "kvq_version": kvq.__version__,
        "dialect": dialect,
        "format": scales.format,
        "granularity": scales.granularity,
        "convention": "scale = amax / scale_divisor, dequantization multiplier",
        "calibration": calibration.digest,
        "weight_fingerprint": calibration.model["weight_fingerprint"],
        "attention_class": calibration.model.get("attention_class"),
        "margin": calibration.margin,
        "skip_layers": list(calibration.skip_layers),
        "amax": {
            f"{layer.attention}.{quantizer}": [float(value) for value in amax]
            for layer in calibration.layers
            for quantizer, amax in layer.amax.items()
        },
        "tokens": {layer.attention: layer.tokens for layer in calibration.layers},
        "status": {layer.attention: dict(layer.provenance) for layer in scales.layers},
    }
    text = json.dumps(provenance, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {"format": "pt", "kvq": text}
