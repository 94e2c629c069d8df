"""Rules that hold for every engine. Each takes the context and yields findings.

A rule is one function with the decorator `rule`; it yields one `Finding` per thing wrong and
nothing when all is well.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.checks.findings import Finding
from kvq.dialects.base import FoundScale
from kvq.geometry import Geometry

SMALLEST, LARGEST = 1e-6, 1e3
ACCEPTED_DTYPES = ("F32", "F64", "BF16", "F16")
SUFFIXES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")


@dataclass(frozen=True)
class Context:
    """What the rules look at; `values` holds the scales that could be decoded."""

    view: CheckpointView
    geometry: Geometry
    scales: tuple[FoundScale, ...]
    values: dict[str, np.ndarray]
    provenance: dict[str, Any] | None = None
    reference: dict[str, list[float]] | None = None
    rtol: float = 0.0
    by_layer: dict[tuple[int, str], FoundScale] = field(default_factory=dict)


Rule = Callable[[Context], Iterator[Finding]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule."""
    RULES.append(function)
    return function


def _file(context: Context, tensor: str) -> str:
    return context.view.tensors[tensor].path.name


@rule
def both_scales_present(context: Context) -> Iterator[Finding]:
    """Every layer with a KV cache has a K and a V scale."""
    for layer in context.geometry.layers:
        for side in ("k", "v"):
            if (layer.layer_idx, side) not in context.by_layer:
                yield Finding(
                    "scale.missing", "error",
                    f"layer {layer.layer_idx} has no {side} scale: engines would use 1.0",
                    layer.layer_idx, f"{layer.attention}.{side}_scale",
                    expected="a scale tensor", found="none",
                )  # fmt: skip


@rule
def shape_and_dtype(context: Context) -> Iterator[Finding]:
    """Each scale has one value, or one per head, in a float dtype that holds it."""
    strategy = _scheme(context).get("strategy", "tensor")
    heads = {g.layer_idx: g for g in context.geometry.layers}
    for scale in context.scales:
        info = context.view.tensors[scale.tensor]
        layer = heads[scale.layer_idx]
        per_head = layer.num_attention_heads if scale.side == "q" else layer.num_key_value_heads
        expected = per_head if strategy == "attn_head" else 1
        where = (scale.layer_idx, scale.tensor, info.path.name)
        if info.numel != expected:
            yield Finding(
                "scale.shape", "error", f"`{scale.tensor}` has {info.numel} values",
                *where, f"{expected} (strategy `{strategy}`)", str(info.shape),
            )  # fmt: skip
        if info.dtype not in ACCEPTED_DTYPES:
            yield Finding(
                "scale.dtype", "error",
                f"`{scale.tensor}` is {info.dtype}: integers truncate to 0, 8-bit floats round",
                *where, "F32", info.dtype,
            )  # fmt: skip


@rule
def finite_positive_plausible(context: Context) -> Iterator[Finding]:
    """Each value is finite, positive and within [1e-6, 1e3]."""
    for scale in context.scales:
        for value in context.values.get(scale.tensor, np.zeros(0)).ravel():
            number = float(value)
            if not math.isfinite(number):
                code, expected = "scale.nonfinite", "a finite number"
            elif number <= 0:
                code, expected = "scale.nonpositive", "> 0"
            elif not SMALLEST <= number <= LARGEST:
                code, expected = "scale.range", f"{SMALLEST:g} to {LARGEST:g}"
            else:
                continue
            yield Finding(
                code, "error", f"`{scale.tensor}` is {number!r}", scale.layer_idx, scale.tensor,
                _file(context, scale.tensor), expected, repr(number),
            )  # fmt: skip
            break


def _scheme(context: Context) -> dict[str, Any]:
    config = context.view.quantization_config or {}
    scheme = config.get("kv_cache_scheme")
    return scheme if isinstance(scheme, dict) else {}


@rule
def config_declares_scales(context: Context) -> Iterator[Finding]:
    """The configuration declares a static symmetric FP8 cache exactly when scales exist."""
    config, scheme = context.view.quantization_config, _scheme(context)
    if context.scales and config is None:
        yield Finding(
            "config.missing", "error",
            "scales exist, but config.json has no `quantization_config`: vLLM fails to load",
            file="config.json", expected="quantization_config", found="none",
        )  # fmt: skip
        return
    if context.scales and not scheme:
        yield Finding(
            "config.no_scheme", "error",
            "scales exist, but no `kv_cache_scheme` declares them: the cache stays unquantized",
            file="config.json", expected="kv_cache_scheme", found="none",
        )  # fmt: skip
    if scheme and not context.scales:
        yield Finding(
            "config.no_scales", "error",
            "`kv_cache_scheme` declares a quantized cache, but no scale exists: all layers use 1.0",
            file="config.json", expected="scale tensors", found="none",
        )  # fmt: skip
    if scheme:
        yield from _scheme_findings(config or {}, scheme)


def _scheme_findings(config: Any, scheme: dict[str, Any]) -> Iterator[Finding]:
    wanted = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    for key, expected in wanted.items():
        if scheme.get(key) != expected:
            yield Finding(
                "config.scheme", "error", f"`kv_cache_scheme.{key}` is not what engines accept",
                file="config.json", expected=repr(expected), found=repr(scheme.get(key)),
            )  # fmt: skip
    if scheme.get("strategy") not in ("tensor", "attn_head"):
        yield Finding(
            "config.strategy", "error", "`kv_cache_scheme.strategy` is not what engines accept",
            file="config.json", expected="`tensor` or `attn_head`",
            found=repr(scheme.get("strategy")),
        )  # fmt: skip
    if config.get("quant_method") != "compressed-tensors":
        yield Finding(
            "config.quant_method", "error", "the scales' names belong to compressed-tensors",
            file="config.json", expected="compressed-tensors",
            found=repr(config.get("quant_method")),
        )  # fmt: skip
    if "config_groups" not in config:
        yield Finding(
            "config.groups", "error", "vLLM and transformers need `config_groups`, even if empty",
            file="config.json", expected="{}", found="none",
        )  # fmt: skip


@rule
def index_agrees(context: Context) -> Iterator[Finding]:
    """Index, files and tensors say the same."""
    view = context.view
    for name in view.unindexed_files:
        held = [t for t in view.files[name].tensors if t.endswith(SUFFIXES)]
        if held:
            yield Finding(
                "index.unindexed", "error",
                f"`{name}` holds {len(held)} scales, but the index does not name it: not loaded",
                tensor=held[0], file=name, expected="an index entry", found="none",
            )  # fmt: skip
    for tensor, file in sorted((view.weight_map or {}).items()):
        if file not in view.files:
            yield Finding(
                "index.missing_file", "error", f"the index names `{file}`, which does not exist",
                tensor=tensor, file=file, expected="the file", found="none",
            )  # fmt: skip
        elif tensor not in view.files[file].tensors:
            yield Finding(
                "index.missing_tensor", "error", f"`{file}` does not hold `{tensor}`",
                tensor=tensor, file=file, expected="the tensor", found="none",
            )  # fmt: skip
    for tensor in sorted(view.tensors):
        if view.weight_map is not None and tensor not in view.weight_map:
            yield Finding(
                "index.missing_entry", "error", f"the index does not list `{tensor}`",
                tensor=tensor, file=_file(context, tensor), expected="an entry", found="none",
            )  # fmt: skip


@rule
def one_place_per_scale(context: Context) -> Iterator[Finding]:
    """No scale lies in two files, and nothing hides the shards from a loader."""
    view = context.view
    for tensor, files in sorted(view.duplicates.items()):
        if tensor.endswith(SUFFIXES):
            yield Finding(
                "scale.duplicate", "error", f"`{tensor}` lies in {len(files)} files",
                tensor=tensor, file=files[-1], expected="one file", found=", ".join(files),
            )  # fmt: skip
    for name in view.files:
        if name.startswith("consolidated") and len(view.files) > 1:
            yield Finding(
                "files.consolidated", "error",
                f"vLLM reads `{name}` instead of the other shards: scales elsewhere become 1.0",
                file=name, expected="no consolidated file", found=name,
            )  # fmt: skip
    if "model.safetensors" in view.files and len(view.files) > 1:
        yield Finding(
            "files.single_and_shards", "error",
            "transformers reads only `model.safetensors` and never the other files",
            file="model.safetensors", expected="model-0000i-of-0000n.safetensors and an index",
            found=", ".join(view.files),
        )  # fmt: skip


@rule
def no_stray_scales(context: Context) -> Iterator[Finding]:
    """Every scale tensor belongs to a layer with a KV cache, under the expected name."""
    known = {scale.tensor for scale in context.scales}
    for tensor in sorted(context.view.tensors):
        if tensor.endswith(SUFFIXES) and tensor not in known:
            yield Finding(
                "scale.stray", "error", f"`{tensor}` belongs to no attention layer of the config",
                tensor=tensor, file=_file(context, tensor),
                expected="`<attention>.k_scale`, `.v_scale` or `.q_scale`", found=tensor,
            )  # fmt: skip


@rule
def looks_calibrated(context: Context) -> Iterator[Finding]:
    """Not all values are 1.0 or equal, unless the provenance says that was meant."""
    per_tensor = {s.tensor: context.values[s.tensor] for s in context.scales
                  if s.tensor in context.values and not _constant(context, s)}  # fmt: skip
    numbers = [float(v) for values in per_tensor.values() for v in values.ravel()]
    if len(numbers) < 2 or len(set(numbers)) > 1:
        return
    code = "scale.all_one" if numbers[0] == 1.0 else "scale.all_equal"
    yield Finding(
        code,
        "error",
        f"all {len(numbers)} scales are {numbers[0]!r}: this looks uncalibrated",
        expected="different values, or a recorded constant",
        found=repr(numbers[0]),
    )


def _constant(context: Context, scale: FoundScale) -> bool:
    attention = scale.tensor.rpartition(".")[0]
    status = (context.provenance or {}).get("status", {}).get(attention, {})
    return bool(status.get(scale.side) == "constant")


@rule
def weights_unchanged(context: Context) -> Iterator[Finding]:
    """The weights are those that were calibrated, if the provenance says which."""
    from kvq.checkpoint import weight_fingerprint

    expected = (context.provenance or {}).get("weight_fingerprint")
    if expected is None:
        return
    found = weight_fingerprint(context.view)
    if found != expected:
        yield Finding(
            "provenance.weights", "error", "the scales were calibrated on other weights",
            expected=expected, found=found,
        )  # fmt: skip


@rule
def matches_reference(context: Context) -> Iterator[Finding]:
    """With --against: the same scales, value by value, within rtol."""
    if context.reference is None:
        return
    layers = {scale.tensor: scale.layer_idx for scale in context.scales}
    for tensor in sorted(context.reference.keys() | layers.keys()):
        expected = context.reference.get(tensor)
        found = context.values.get(tensor)
        have = None if found is None else [float(v) for v in found.ravel()]
        if expected is None or have is None or not _close(have, expected, context.rtol):
            yield Finding(
                "reference.differs", "error", f"`{tensor}` differs from the reference",
                layers.get(tensor), tensor, _file(context, tensor) if tensor in layers else None,
                _short(expected), _short(have),
            )  # fmt: skip


def _close(found: list[float], expected: list[float], rtol: float) -> bool:
    if len(found) != len(expected):
        return False
    return all(abs(a - b) <= rtol * abs(b) for a, b in zip(found, expected, strict=True))


def _short(values: list[float] | None) -> str:
    if values is None:
        return "none"
    return repr(values[0]) if len(values) == 1 else repr(values)
