"""Describe a calibration or a checkpoint: tree, per-layer table, one sentence."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvq.checkpoint import CheckpointView, natural_key, open_checkpoint
from kvq.configs import get_config
from kvq.dialects import dialect_of, find, read_scales
from kvq.dialects.base import Dialect
from kvq.dialects.compressed_tensors import quantizes_weights
from kvq.dialects.spellings import SPELLINGS, FoundScales
from kvq.errors import CalibrationError
from kvq.formats import get_format
from kvq.geometry import Geometry, read_geometry
from kvq.outliers import advice, amax_flags, bias_flags, read_key_traits
from kvq.pipeline.convergence import convergence
from kvq.pipeline.inspection import Inspection, LayerRow
from kvq.provenance import Provenance, read_provenance
from kvq.quantizers import KEY_PE, KV_C, QuantizerConfig
from kvq.scales import SHORT, compute_scales
from kvq.state import Calibration, Module, is_calibration, read_calibration
from kvq.tree import attention_lines, calibration_tree, render_tree

N = TypeVar("N", int, float)
SHORT_FORMAT = {"fp8_e4m3": "fp8"}
SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def inspect(path: Path) -> Inspection:
    """Inspect a calibration folder, a checkpoint folder or a single safetensors file.

    Raises:
        KvqError: the path is none of them, or damaged.
    """
    if os.path.isdir(path) and is_calibration(path):  # False for a name that is no path
        return inspect_calibration(read_calibration(path))
    return _inspect_checkpoint(open_checkpoint(path))


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
            _by_side({name: float(amax.max()) for name, amax in layer.amax.items()}),
            by_layer.get(layer.attention, {}), layer.tokens,
            (f"shared from {layer.shared_from}",) if layer.shared_from else (),
            raised=_by_side({name: number + 1 for name, number in layer.raised.items()}),
            percentile_99_9=_by_side(layer.percentile_99_9),
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
    return Inspection(
        "calibration", calibration_tree(calibration), flagged, summary,
        batches=calibration.batches, batches_run=calibration.batches_run,
        convergence=convergence(calibration),
    )  # fmt: skip


def _by_side(found: Mapping[str, N]) -> dict[str, N]:
    """Return numbers by side; under MLA the latent stands under k, the rotary part under v."""
    names = {KV_C: "k", KEY_PE: "v"}
    return {names.get(name, SHORT[name]): value for name, value in found.items()}


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
    dialect, found = dialect_of(view), find(view, geometry)
    scales = read_scales(view, geometry, found)
    number_format = get_format(scales.format)
    provenance = read_provenance(view, [scale.tensor for scale in found.scales])
    rows = []
    for layer in scales.layers:
        amax = {
            side: _recorded(provenance, layer.attention, side) or number_format.amax(max(values))
            for side, values in layer.scales.items()
            if values
        }
        tokens = provenance.tokens.get(layer.attention) if provenance else None
        tensors = {s.side: s.tensor for s in found.scales if s.attention == layer.attention}
        rows.append(LayerRow(layer.layer_idx, layer.attention, amax, layer.scales, tokens, (),
                             read_key_traits(view, layer.attention), tensors))  # fmt: skip
    flagged = _flagged(rows, provenance.skip_layers if provenance else ())
    config = QuantizerConfig(scales.format, scales.granularity)
    tree = _attention_trees(geometry, flagged, provenance, config)
    drafts = {path: {s.side: s.tensor for s in found.drafts if s.attention == path}
              for path in geometry.drafts}  # fmt: skip
    words = _kv_words(view, geometry, dialect, found)
    summary = _summary(view, geometry, words) + _draft_words(drafts) + _outlook(flagged)
    return Inspection("checkpoint", tree, flagged, summary, geometry.uncached, drafts)


def _recorded(provenance: Provenance | None, attention: str, side: str) -> float | None:
    """Return the observed amax that was recorded; the scale may have a margin on it."""
    if provenance is None or provenance.status.get(attention, {}).get(side) == "constant":
        return None
    return max(provenance.observed(attention, side) or [], default=None)


def _attention_trees(
    geometry: Geometry, rows: tuple[LayerRow, ...], provenance: Provenance | None,
    config: QuantizerConfig,
) -> str:  # fmt: skip
    family = geometry.architecture.removesuffix("ForCausalLM")
    recorded = provenance.attention_class if provenance else None
    name = recorded or f"{family}Attention [derived name]"
    parts = []
    for layer, row in zip(geometry.layers, rows, strict=True):
        enabled = {}
        for quantizer in layer.quantizers:
            values = row.scale.get(SHORT[quantizer])
            if values and "skipped" not in row.flags:
                recorded_amax = provenance.amax.get(f"{row.attention}.{quantizer}") if (
                    provenance and layer.kv_lora_rank is not None) else None  # fmt: skip
                amax = recorded_amax or [config.number_format.amax(value) for value in values]
                enabled[quantizer] = (config, np.array(amax))
        path, _, leaf = row.attention.rpartition(".")
        lines = attention_lines(leaf, layer.quantizers, enabled)
        body = render_tree([Module("", "", ""), Module(leaf, name, "")], lines)
        inner = "\n".join(line[2:] for line in body.splitlines()[1:-1])
        parts.append(f"{path}:\n{inner}")
    return "\n".join(parts)


def _kv_words(
    view: CheckpointView, geometry: Geometry, dialect: Dialect, found: FoundScales
) -> str:
    """Return what there is of scales: format, layers, and names that are not the dialect's."""
    have = {(scale.attention, scale.side) for scale in found.scales}
    pairs = sum({(x.attention, "k"), (x.attention, "v")} <= have for x in geometry.layers)
    if pairs == 0 and not have:
        return "KV scales: none; an fp8 cache would run at scale 1.0"
    declared = dialect.declared(view).format
    name = SHORT_FORMAT.get(declared or "", declared or "undeclared")
    foreign = [x for x in found.scales if SPELLINGS[dialect.spelling].tensor(
        x.attention, x.side) != x.tensor]  # fmt: skip
    spelt = f", {len(foreign)} spelt as `{min(x.tensor for x in foreign)}`" if foreign else ""
    return f"KV scales: {name}, {pairs} of {len(geometry.layers)} layers{spelt}"


def _summary(view: CheckpointView, geometry: Geometry, kv: str) -> str:
    config = view.quantization_config or {}
    quantized = any(map(quantizes_weights, view.config_groups.values()))
    method = config.get("quant_method")
    weights = config.get("format") if quantized else None
    if method not in (None, "compressed-tensors"):
        weights = method
    dtype = str(view.config.get("dtype") or view.config.get("torch_dtype") or "unknown")
    weights = weights or SHORT_DTYPE.get(dtype, dtype)
    skipped = geometry.uncached
    without = f"; {len(skipped)} layers keep no KV cache" if skipped else ""
    return f"{kv}; weights {weights}{without}"


def _draft_words(drafts: Mapping[str, Mapping[str, str]]) -> str:
    """Say which layers that a server may draft with have scales of their own."""
    paired = sum({"k", "v"} <= tensors.keys() for tensors in drafts.values())
    counts = {"with scales": paired, "without scales": len(drafts) - paired}
    return "".join(f"; {count} draft layers {how}" for how, count in counts.items() if count)


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
