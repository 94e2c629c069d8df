"""Describe a calibration or a checkpoint: tree, per-layer table, one sentence."""

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvq.checkpoint import CheckpointView, natural_key, open_checkpoint
from kvq.configs import get_config
from kvq.dialects.compressed_tensors import CompressedTensors, scale_name
from kvq.engines import get_engines
from kvq.engines.base import EngineOptions, EngineReading
from kvq.errors import CalibrationError, InputError
from kvq.formats import FP8_E4M3
from kvq.geometry import Geometry, read_geometry
from kvq.outliers import KeyTraits, advice, amax_flags, bias_flags, read_key_traits
from kvq.provenance import Provenance, read_provenance
from kvq.quantizers import KEY_PE, KV_C, QuantizerConfig
from kvq.scales import SHORT, compute_scales
from kvq.state import Calibration, Module, is_calibration, read_calibration
from kvq.tree import attention_lines, calibration_tree, render_tree

OTHER_SPELLINGS = re.compile(
    r"\.(k_proj|qkv_proj|attn|kv_b_proj)\.k_scale$|\.v_proj\.v_scale$|\.[kv]_proj\.output_scale$"
    r"|\.kv_scale$|\.[kv]_cache\.scale$"
)
SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class LayerRow:
    """One line of the per-layer table; amax and scale per side, flags in words."""

    layer_idx: int
    attention: str
    amax: Mapping[str, float]
    scale: Mapping[str, tuple[float, ...]]
    tokens: int | None
    flags: tuple[str, ...]
    traits: KeyTraits | None = None


@dataclass(frozen=True)
class Inspection:
    """What `inspect` shows."""

    kind: str
    tree: str
    rows: tuple[LayerRow, ...]
    summary: str

    def scales(self) -> dict[str, Any]:
        """Return the scales document that `verify --against` reads."""
        named = {
            scale_name(row.attention, side): numbers[0] if len(numbers) == 1 else numbers
            for row in self.rows
            for side, values in row.scale.items()
            for numbers in [_json_numbers(values)]
        }
        return {"schema": 1, "scales": named}

    def to_json(self) -> dict[str, Any]:
        """Return the document of `inspect --json`."""
        return {
            "schema": 1,
            "command": "inspect",
            "kind": self.kind,
            "summary": self.summary,
            "layers": [
                {
                    "layer_idx": row.layer_idx,
                    "attention": row.attention,
                    "amax": {side: _json_numbers([value])[0] for side, value in row.amax.items()},
                    "scale": {side: _json_numbers(values) for side, values in row.scale.items()},
                    "tokens": row.tokens,
                    "flags": list(row.flags),
                    **_json_traits(row.traits),
                }
                for row in self.rows
            ],
        }


def inspect(path: Path) -> Inspection:
    """Inspect a calibration folder, a checkpoint folder or a single safetensors file.

    Raises:
        KvqError: the path is none of them, or damaged.
    """
    if os.path.isdir(path) and is_calibration(path):  # False for a name that is no path
        return inspect_calibration(read_calibration(path))
    return _inspect_checkpoint(open_checkpoint(path))


def read_engines(
    path: Path, names: Sequence[str], options: EngineOptions, version: str | None = None
) -> tuple[EngineReading, ...]:
    """Predict from a checkpoint's files which scales engines would use.

    Raises:
        KvqError: the path is no checkpoint folder, or an engine or its version is not known.
    """
    engines = get_engines(names, version)
    view = open_checkpoint(path)
    if not view.config:
        raise InputError(
            f"`{path}` is a single file; an engine reads the folder with its config.json",
            code="inspect.not_folder",
        )
    geometry = read_geometry(view.config, view.tensors)
    return tuple(engine.read(view, geometry, options) for engine in engines.values())


def inspect_calibration(calibration: Calibration) -> Inspection:
    """Describe a calibration from its recorded classes and statistics."""
    try:
        scales = compute_scales(calibration, get_config(calibration.kv_cfg))
        by_layer = {layer.attention: layer.scales for layer in scales.layers}
        problem = ""
    except CalibrationError as error:
        by_layer, problem = {}, f"; NO SCALES: {error}"
    rows = [
        LayerRow(
            layer.layer_idx, layer.attention,
            _amax_by_side({name: float(amax.max()) for name, amax in layer.amax.items()}),
            by_layer.get(layer.attention, {}), layer.tokens,
            (f"shared from {layer.shared_from}",) if layer.shared_from else (),
        )
        for layer in calibration.layers
    ]  # fmt: skip
    data = calibration.data
    summary = (
        f"KV statistics: {len(rows)} cached layers, {calibration.kv_cfg}, "
        f"{data['sequences']} sequences, {data['tokens']} tokens of "
        f"{data['source']['name']}{problem}"
    )
    flagged = _flagged(rows, calibration.skip_layers)
    return Inspection("calibration", calibration_tree(calibration), flagged, summary)


def _amax_by_side(amax: Mapping[str, float]) -> dict[str, float]:
    """Return amax by side; under MLA the latent stands under k, the rotary part under v."""
    names = {KV_C: "k", KEY_PE: "v"}
    return {names.get(name, SHORT[name]): value for name, value in amax.items()}


def _flagged(rows: list[LayerRow], skipped: Collection[int] = ()) -> tuple[LayerRow, ...]:
    """Return the rows with their flags: skipped layers, outliers among amax and key biases."""
    flags = [
        amax_flags({row.attention: row.amax for row in rows}),
        bias_flags({row.attention: row.traits for row in rows if row.traits is not None}),
    ]
    return tuple(
        replace(
            row,
            flags=row.flags
            + (("skipped",) if row.layer_idx in skipped else ())
            + tuple(word for found in flags for word in found.get(row.attention, ())),
        )
        for row in rows
    )


def _inspect_checkpoint(view: CheckpointView) -> Inspection:
    if not view.config:
        return _inspect_file(view)
    geometry = read_geometry(view.config, view.tensors)
    dialect = CompressedTensors()
    scales = dialect.read(view, geometry)
    provenance = read_provenance(view, [scale.tensor for scale in dialect.find(view, geometry)])
    rows = []
    for layer in scales.layers:
        amax = {
            side: _recorded(provenance, layer.attention, side) or FP8_E4M3.amax(max(values))
            for side, values in layer.scales.items()
            if values
        }
        tokens = provenance.tokens.get(layer.attention) if provenance else None
        rows.append(LayerRow(layer.layer_idx, layer.attention, amax, layer.scales, tokens, (),
                             read_key_traits(view, layer.attention)))  # fmt: skip
    flagged = _flagged(rows, provenance.skip_layers if provenance else ())
    tree = _attention_trees(view, geometry, flagged, provenance)
    return Inspection("checkpoint", tree, flagged, _summary(view, geometry, flagged))


def _recorded(provenance: Provenance | None, attention: str, side: str) -> float | None:
    """Return the observed amax that was recorded; the scale may have a margin on it."""
    if provenance is None or provenance.status.get(attention, {}).get(side) == "constant":
        return None
    return max(provenance.observed(attention, side) or [], default=None)


def _attention_trees(
    view: CheckpointView, geometry: Geometry, rows: tuple[LayerRow, ...],
    provenance: Provenance | None,
) -> str:  # fmt: skip
    family = geometry.architecture.removesuffix("ForCausalLM")
    recorded = provenance.attention_class if provenance else None
    name = recorded or f"{family}Attention [derived name]"
    granularity = "head" if view.kv_cache_scheme.get("strategy") == "attn_head" else "tensor"
    config = QuantizerConfig("fp8_e4m3", granularity)
    parts = []
    for layer, row in zip(geometry.layers, rows, strict=True):
        enabled = {}
        for quantizer in layer.quantizers:
            values = row.scale.get(SHORT[quantizer])
            if values and "skipped" not in row.flags:
                recorded_amax = provenance.amax.get(f"{row.attention}.{quantizer}") if (
                    provenance and layer.kv_lora_rank is not None) else None  # fmt: skip
                amax = recorded_amax or [FP8_E4M3.amax(value) for value in values]
                enabled[quantizer] = (config, np.array(amax))
        path, _, leaf = row.attention.rpartition(".")
        lines = attention_lines(leaf, layer.quantizers, enabled)
        body = render_tree([Module("", "", ""), Module(leaf, name, "")], lines)
        inner = "\n".join(line[2:] for line in body.splitlines()[1:-1])
        parts.append(f"{path}:\n{inner}")
    return "\n".join(parts)


def _summary(view: CheckpointView, geometry: Geometry, rows: tuple[LayerRow, ...]) -> str:
    config = view.quantization_config or {}
    pairs = sum(1 for row in rows if "k" in row.scale and "v" in row.scale)
    quantized = any(group.get("weights") for group in view.config_groups.values())
    method = config.get("quant_method")
    weights = config.get("format") if quantized else None
    if method not in (None, "compressed-tensors"):
        weights = method
    dtype = str(view.config.get("dtype") or view.config.get("torch_dtype") or "unknown")
    weights = weights or SHORT_DTYPE.get(dtype, dtype)
    skipped = geometry.uncached
    without = f"; {len(skipped)} layers keep no KV cache" if skipped else ""
    others = [name for name in view.tensors if OTHER_SPELLINGS.search(name)]
    if pairs == 0 and others:
        kv = f"KV scales: {len(others)} under names this version does not read (`{min(others)}`)"
    elif pairs == 0:
        kv = "KV scales: none; an fp8 cache would run at scale 1.0"
    else:
        kv = f"KV scales: fp8, {pairs} of {len(geometry.layers)} layers"
    drafts = f"; {len(geometry.drafts)} draft layers without scales" if geometry.drafts else ""
    return f"{kv}; weights {weights}{without}{drafts}{_outlook(rows)}"


def _outlook(rows: Sequence[LayerRow]) -> str:
    """Say what the key biases promise where no statistics do."""
    biased = [row for row in rows if any("bias" in flag for flag in row.flags)]
    if not biased:
        return ""
    layers = [row.layer_idx for row in biased]
    normed = all(row.traits is not None and row.traits.k_norm for row in biased)
    return f"; {'K is normed' if normed else 'no norm on K'}: {advice(layers, heads_differ=False)}"


def _inspect_file(view: CheckpointView) -> Inspection:
    scales = [name for name in view.tensors if _FILE_SCALE.search(name)]
    rows: dict[str, dict[str, tuple[float, ...]]] = {}
    for name in sorted(scales, key=natural_key):
        attention, _, leaf = name.rpartition(".")
        values = tuple(float(v) for v in view.read(name).ravel())
        rows.setdefault(attention, {})[leaf[0]] = values
    table = tuple(
        LayerRow(_layer_number(attention), attention, {}, scale, None, ())
        for attention, scale in rows.items()
    )
    summary = f"{len(view.tensors)} tensors, {len(scales)} KV scales (no config.json beside it)"
    return Inspection("file", "", table, summary)


_FILE_SCALE = re.compile(r"\.[qkv]_scale$")


def _layer_number(attention: str) -> int:
    numbers = re.findall(r"\.(\d+)\.", attention)
    return int(numbers[0]) if numbers else -1


def _json_traits(traits: KeyTraits | None) -> dict[str, Any]:
    found = {} if traits is None else vars(traits)
    return {
        key: _json_numbers([value])[0] if isinstance(value, float) else value
        for key, value in found.items()
    }


def _json_numbers(values: Iterable[float]) -> list[float | str]:
    """Return numbers as JSON has them; NaN and infinity, which it has not, as text."""
    return [value if math.isfinite(value) else repr(value) for value in values]
