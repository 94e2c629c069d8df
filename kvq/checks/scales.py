"""Rules about the scales themselves: present, shaped, plausible, calibrated, as expected."""

import math
import re
from collections.abc import Iterator

import numpy as np

from kvq.checks.context import SUFFIXES, Context, file_of, rule
from kvq.checks.findings import Finding
from kvq.checks.recorded import status_of, vouched
from kvq.checks.spelled import conflicts, crossed
from kvq.dialects.spellings import SPELLINGS

SMALLEST, LARGEST = 1e-6, 1e3
_EXPORT = "`kvq export` with the model's calibration"
ACCEPTED_DTYPES = ("F32", "F64", "BF16", "F16")


@rule(spelling=True)
def both_scales_present(context: Context) -> Iterator[Finding]:
    """Every layer with a KV cache has a K and a V scale, under the dialect's own name."""
    for layer in context.geometry.layers:
        for side in ("k", "v"):
            if (layer.attention, side) not in context.by_side:
                yield Finding(
                    "scale.missing", "error",
                    f"there is no {side} scale under its name: an engine that finds none uses 1.0"
                    f"{context.elsewhere}",
                    layer.layer_idx, context.name(layer.attention, side),
                    expected="a scale tensor", found="none",
                    fix=_EXPORT,
                )  # fmt: skip
    for scale in context.scales:
        name = context.name(scale.attention, scale.side)
        if scale.tensor != name:
            yield Finding(
                "scale.spelling", "error",
                f"`{scale.tensor}` is the spelling of {SPELLINGS[scale.spelling].whose}; readers "
                f"of {context.dialect.name} are sure to know another",
                scale.layer_idx, scale.tensor, file_of(context, scale.tensor), name, scale.tensor,
                fix=f"`kvq export CHECKPOINT --scales CHECKPOINT` renames it to `{name}`",
            )  # fmt: skip


@rule()
def shape_and_dtype(context: Context) -> Iterator[Finding]:
    """Each scale has one value, or one per head, in a float dtype that holds it."""
    granularity = context.dialect.declared(context.view).granularity
    heads = {layer.attention: layer for layer in context.geometry.layers}
    for scale in context.scales:
        info = context.view.tensors[scale.tensor]
        layer = heads[scale.attention]
        per_head = layer.num_attention_heads if scale.side == "q" else layer.num_key_value_heads
        expected = per_head if granularity == "head" else 1
        where = (scale.layer_idx, scale.tensor, info.path.name)
        if info.numel != expected:
            yield Finding(
                "scale.shape", "error", f"`{scale.tensor}` has {info.numel} values",
                *where, f"{expected} (per {granularity})", str(info.shape),
                fix=f"`kvq export --granularity {granularity}` with the model's calibration",
            )  # fmt: skip
    for scale in context.scales + context.drafts:
        info = context.view.tensors[scale.tensor]
        if info.dtype not in ACCEPTED_DTYPES:
            yield Finding(
                "scale.dtype", "error",
                f"`{scale.tensor}` is {info.dtype}: integers truncate to 0, 8-bit floats round",
                scale.layer_idx, scale.tensor, info.path.name, "F32", info.dtype, fix=_EXPORT,
            )  # fmt: skip


@rule()
def finite_positive_plausible(context: Context) -> Iterator[Finding]:
    """Each value is finite, positive and within [1e-6, 1e3]."""
    for scale in context.scales + context.drafts:
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
                file_of(context, scale.tensor), expected, repr(number), fix=_EXPORT,
            )  # fmt: skip
            break


# Leaves that weight quantization puts under an attention path; all others must be known scales.
_WEIGHT_LEAF = re.compile(
    r"(weight|input)_(scale|zero_point|global_scale)(_inv|_2)?|pre_quant_scale|scales"
)
_SCALE_LEAF = re.compile(r"scale|zero_point")
_AFFINE = ("_proj.k_bias", "_proj.v_bias")  # ModelOpt's zero points


@rule(spelling=True)
def no_stray_scales(context: Context) -> Iterator[Finding]:
    """Every scale tensor belongs to a layer with a KV cache, and has one name."""
    known = {scale.tensor for scale in context.scales + context.drafts}
    known |= {other.tensor for other, _ in conflicts(context)} | crossed(context).keys()
    second = {scale.tensor: scale for scale in context.found.others}
    attentions = {layer.attention for layer in context.geometry.layers}
    for tensor in sorted(context.view.tensors):
        leaf = tensor.rpartition(".")[2]
        if not _SCALE_LEAF.search(leaf) and not tensor.endswith(_AFFINE):
            continue
        suspect = f".{tensor}".endswith(SUFFIXES) or (
            not _WEIGHT_LEAF.fullmatch(leaf) and bool(_parents(tensor) & attentions)
        )
        if suspect and tensor not in known and not _zero(context, tensor, leaf):
            message = f"`{tensor}` is no scale that engines take from this layer"
            expected = f"`{context.name('<attention>', 'k')}` and the like"
            if tensor in second:
                first = context.by_side[second[tensor].attention, second[tensor].side].tensor
                message = f"`{tensor}` stands beside `{first}`: which one is used differs"
                expected = f"`{first}` alone"
            yield Finding(
                "scale.stray", "error", message, tensor=tensor, file=file_of(context, tensor),
                expected=expected, found=tensor,
                fix="`kvq export --strip`, then `kvq export` with the model's calibration",
            )  # fmt: skip


def _parents(tensor: str) -> set[str]:
    parts = tensor.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def _zero(context: Context, tensor: str, leaf: str) -> bool:
    """Whether a tensor is a zero point that changes nothing."""
    return leaf in ("k_zero_point", "v_zero_point", "q_zero_point") and not np.any(
        context.view.read(tensor)
    )


@rule()
def query_scales_in_all_layers_or_none(context: Context) -> Iterator[Finding]:
    """A query scale in some layers leaves 1.0 in the others."""
    have = {scale.attention for scale in context.scales if scale.side == "q"}
    for layer in context.geometry.layers:
        if have and layer.attention not in have:
            yield Finding(
                "scale.missing", "error", "there is no q scale, and other layers have one",
                layer.layer_idx, context.name(layer.attention, "q"),
                expected="a scale tensor", found="none", fix=_EXPORT,
            )  # fmt: skip


@rule()
def looks_calibrated(context: Context) -> Iterator[Finding]:
    """Neither K nor V is one number throughout, unless the provenance says that was meant."""
    for side in ("k", "v"):
        scales = [
            scale for scale in context.scales
            if scale.side == side and status_of(context, scale) != "constant"
        ]  # fmt: skip
        numbers = [float(v) for s in scales for v in context.values.get(s.tensor, _NONE).ravel()]
        if len(numbers) > 1 and len(set(numbers)) == 1:
            code = "scale.all_one" if numbers[0] == 1.0 else "scale.all_equal"
            yield Finding(
                code, "error",
                f"all {len(numbers)} {side} scales are {numbers[0]!r}: this looks uncalibrated",
                expected="different values, or a recorded constant", found=repr(numbers[0]),
                fix=_EXPORT,
            )  # fmt: skip
            continue
        unvouched = [context.values.get(s.tensor, _NONE) for s in scales if not vouched(context, s)]
        if any((values == 1.0).any() for values in unvouched):
            yield Finding(
                "scale.one", "warning", f"a {side} scale is exactly 1.0: it may be a lost one",
                expected="a calibrated value", found="1.0", fix=_EXPORT,
            )  # fmt: skip


_NONE = np.zeros(0)
