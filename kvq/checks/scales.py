"""Rules about the scales themselves: present, shaped, plausible, calibrated, as expected."""

import math
from collections.abc import Iterator

import numpy as np

from kvq.checkpoint import weight_fingerprint
from kvq.checks.context import SUFFIXES, Context, file_of, kv_cache_scheme, rule
from kvq.checks.findings import Finding
from kvq.dialects.base import FoundScale

SMALLEST, LARGEST = 1e-6, 1e3
ACCEPTED_DTYPES = ("F32", "F64", "BF16", "F16")


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
    strategy = kv_cache_scheme(context).get("strategy", "tensor")
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
                file_of(context, scale.tensor), expected, repr(number),
            )  # fmt: skip
            break


@rule
def no_stray_scales(context: Context) -> Iterator[Finding]:
    """Every scale tensor belongs to a layer with a KV cache, under the expected name."""
    known = {scale.tensor for scale in context.scales}
    for tensor in sorted(context.view.tensors):
        if tensor.endswith(SUFFIXES) and tensor not in known:
            yield Finding(
                "scale.stray", "error", f"`{tensor}` belongs to no attention layer of the config",
                tensor=tensor, file=file_of(context, tensor),
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
                layers.get(tensor), tensor, file_of(context, tensor) if tensor in layers else None,
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
