"""Quantize-dequantize in one pass, bit-equal to `kvq.reference` for numbers that are not NaN."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.errors import FormatError
from kvq.formats import (
    E2M1,
    E4M3,
    FP8_E4M3,
    INT8,
    INT8_CODE,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_KV,
    KVFormat,
)
from kvq.kernels.checks import FLOATS, Scale, require
from kvq.kernels.launch import check_device, on_device
from kvq.kernels.numerics import (
    E2M1_MAX,
    INFINITY_BITS,
    larger,
    largest,
    magnitude,
    magnitude_bits,
    nvfp4_block_scale,
    power_of_two,
    quantize_e4m3,
    quantize_int8,
    quotient,
    round_e2m1,
    round_e4m3,
    sign_bits,
    with_sign,
)

_KINDS = {FP8_E4M3: "fp8", INT8: "int8", NVFP4: "nvfp4", NVFP4_KV: "nvfp4",
          MXFP8: "mx", MXFP4: "mx"}  # fmt: skip
_ELEMENT_NAMES = {E4M3: "e4m3", E2M1: "e2m1", INT8_CODE: "int8"}
_ELEMENTS = 4096  # of one program


@triton.jit
def _offsets(rows, sizes, strides):
    """Offset of each row in a tensor whose leading sizes and strides are given."""
    offsets = tl.zeros(rows.shape, tl.int64)
    for i in tl.static_range(len(sizes) - 1, 0, -1):
        offsets += (rows % sizes[i]).to(tl.int64) * strides[i]
        rows = rows // sizes[i]
    return offsets + rows.to(tl.int64) * strides[0]


@triton.jit
def _mx(x, ELEMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Round [ROWS, COLS] in blocks of BLOCK along the columns, with power-of-two scales."""
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    x = tl.reshape(x.to(tl.float32), [ROWS, COLS // BLOCK, BLOCK])
    MAX_EXPONENT: tl.constexpr = 8 if ELEMENT == "e4m3" else 2
    bits = magnitude_bits(x)
    if ELEMENT == "e4m3":
        # NaN does not count and infinity counts as the largest number
        amax_bits = tl.max(tl.where(bits > INFINITY_BITS, 0, bits), 2)
        value, inverse = power_of_two(amax_bits, MAX_EXPONENT)
        y = round_e4m3(x * inverse[:, :, None]).to(tl.float32) * value[:, :, None]
    else:
        amax_bits = tl.max(bits, 2)
        value, inverse = power_of_two(amax_bits, MAX_EXPONENT)
        value = tl.where(amax_bits > INFINITY_BITS, float("nan"), value)
        scaled = tl.minimum(magnitude(x) * inverse[:, :, None], E2M1_MAX)
        value = value[:, :, None]
        y = with_sign(round_e2m1(scaled) * value, sign_bits(x, value))
    return tl.reshape(y, [ROWS, COLS])


@triton.jit
def _nvfp4(x, effective):
    """Round part of each block [ROWS, BLOCKS, PART] with its effective scale."""
    y = round_e2m1(quotient(x, effective, E2M1_MAX)) * effective
    return with_sign(y, sign_bits(x, effective))


@triton.jit
def _quantize_dequantize(
    x_ptr, scale_ptr, out_ptr, num_rows, num_cols, sizes, scale_sizes, x_strides, scale_strides,
    out_strides, x_col_stride, scale_col_stride, out_col_stride,
    KIND: tl.constexpr, ELEMENT: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(num_rows, ROWS)
    pid = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    rows = (pid % row_blocks) * ROWS + tl.arange(0, ROWS)
    begin = (pid // row_blocks).to(tl.int64) * COLS
    x_ptrs = x_ptr + _offsets(rows, sizes, x_strides)[:, None]
    out_ptrs = out_ptr + _offsets(rows, sizes, out_strides)[:, None]
    scale_ptrs = scale_ptr
    if SCALE == "rows" or SCALE == "all":
        scale_ptrs += _offsets(rows, scale_sizes, scale_strides)[:, None]
    row_inside = (rows < num_rows)[:, None]
    if SCALE == "one":
        scale = tl.load(scale_ptr)
    elif SCALE == "rows":
        scale = tl.load(scale_ptrs, mask=row_inside, other=1.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if KIND == "nvfp4":
        # [BLOCKS, ROWS, PART]: two parts, so that a thread has whole blocks, and blocks first, so
        # that neighbouring threads have neighbouring ones
        PART: tl.constexpr = BLOCK // 2
        block = begin + tl.arange(0, COLS // BLOCK)[:, None, None] * BLOCK
        cols = block + tl.arange(0, PART)[None, None, :]
        inside = row_inside[None] & (cols < num_cols)
        rest = row_inside[None] & (cols + PART < num_cols)
        x_ptrs = x_ptrs[None] + cols * x_col_stride
        out_ptrs = out_ptrs[None] + cols * out_col_stride
        first = tl.load(x_ptrs, mask=inside, other=0.0)
        second = tl.load(x_ptrs + PART * x_col_stride, mask=rest, other=0.0)
        amax = largest(larger(magnitude(first), magnitude(second)), 2)
        if SCALE == "rows":
            scale = tl.reshape(scale, [1, ROWS])
        block_scale = nvfp4_block_scale(amax, scale).to(tl.float32)
        effective = (block_scale * scale)[:, :, None]
        tl.store(out_ptrs, _nvfp4(first, effective).to(dtype), mask=inside)
        out_ptrs += PART * out_col_stride
        tl.store(out_ptrs, _nvfp4(second, effective).to(dtype), mask=rest)
    else:
        cols = begin + tl.arange(0, COLS)[None, :]
        inside = row_inside & (cols < num_cols)
        x = tl.load(x_ptrs + cols * x_col_stride, mask=inside, other=0.0)
        if SCALE == "all":
            scale = tl.load(scale_ptrs + cols * scale_col_stride, mask=inside, other=1.0)
        if KIND == "fp8":
            y = quantize_e4m3(x, scale).to(tl.float32) * scale
        elif KIND == "int8":
            y = quantize_int8(x, scale) * scale
        else:
            y = _mx(x, ELEMENT, BLOCK)
        tl.store(out_ptrs + cols * out_col_stride, y.to(dtype), mask=inside)


def quantize_dequantize(
    x: Tensor, fmt: KVFormat, *, scale: Scale, out: Tensor | None = None
) -> Tensor:
    """Return `x` rounded to the format, in x's dtype, on the GPU in one pass.

    Blocks lie along the last dimension. Values are not read on the host: a NaN gives NaN, with
    4-bit elements for its whole block, and a scale tensor that is zero, negative or not finite is
    not found.

    Args:
        x: bfloat16, float16 or float32 on CUDA, any shape and strides.
        fmt: FP8 E4M3, INT8, NVFP4, MXFP8 or MXFP4.
        scale: the dequantization multiplier, a number or float32 that broadcasts to `x` without
            growing it, and is the same for all values of a block; None for MXFP8 and MXFP4.
        out: where to write; of x's shape and dtype, any strides, `x` itself included.

    Raises:
        FormatError: `format.scale`, or `kernel.format` for other formats.
        InputError: `kernel.device`, `kernel.dtype`, `kernel.out`.
    """
    if fmt not in _KINDS:
        raise FormatError(f"`{fmt.name}` has no kernel", code="kernel.format")
    check_device(x, "x")
    require(x.dtype in FLOATS, f"x is {x.dtype}", "dtype")
    x = x.detach()
    if out is None:
        out = torch.empty_like(x)
    require(
        out.shape == x.shape and out.dtype == x.dtype and out.device == x.device,
        f"out is {out.dtype} {tuple(out.shape)}, expected {x.dtype} {tuple(x.shape)}",
        "out",
    )
    expanded, how = _expanded_scale(x, fmt, scale)
    if x.numel() == 0:
        return out
    # the scale has rows of its own: then those of x and out often need no division
    alone = expanded is not None and how != "one"
    block = x.shape[-1] + 1 if alone else fmt.block_size or 1
    sizes, strides = _coalesce(x.shape, [x.stride(), out.stride()], block)
    scale_sizes, scale_strides = sizes, [(0,) * len(sizes)]
    if expanded is not None and alone:
        scale_sizes, scale_strides = _coalesce(x.shape, [expanded.stride()], block)
    cols = min(_ELEMENTS, max(triton.next_power_of_2(sizes[-1]), fmt.block_size or 1))
    rows = 1 if math.prod(sizes[:-1]) == 1 else _ELEMENTS // cols
    leading = math.prod(sizes[:-1])
    grid = (triton.cdiv(leading, rows) * triton.cdiv(sizes[-1], cols),)
    with on_device(x):
        _quantize_dequantize[grid](
            x, expanded, out, leading, sizes[-1], _known(sizes[:-1]), _known(scale_sizes[:-1]),
            strides[0][:-1], scale_strides[0][:-1], strides[1][:-1],
            strides[0][-1], scale_strides[0][-1], strides[1][-1],
            KIND=_KINDS[fmt], ELEMENT=_ELEMENT_NAMES[fmt.element],
            BLOCK=fmt.block_size or 0, SCALE=how, ROWS=rows, COLS=cols,
            WIDE=leading + rows >= 2**31, num_warps=4,
        )  # fmt: skip
    return out


def _known(sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Make small sizes, such as a number of heads, constants: rows are divided by them."""
    return tuple(tl.constexpr(size) if size <= 256 else size for size in sizes)


def _expanded_scale(x: Tensor, fmt: KVFormat, scale: Scale) -> tuple[Tensor | None, str]:
    """Return the scale as x's shape sees it, and how many it is: none, one, rows, all."""
    if (scale is None) != (fmt.scale_divisor is None):
        wanted = "no" if fmt.scale_divisor is None else "a"
        raise FormatError(f"`{fmt.name}` takes {wanted} tensor scale", code="format.scale")
    if scale is None:
        return None, "none"
    if not isinstance(scale, Tensor):
        if not (math.isfinite(scale) and scale > 0):
            raise FormatError(f"scale is {scale}", code="format.scale")
        return torch.full((), scale, dtype=torch.float32, device=x.device), "one"
    splits = fmt.block_size is not None and scale.dim() > 0 and scale.shape[-1] != 1
    pairs = zip(reversed(scale.shape), reversed(x.shape), strict=False)
    grows = scale.dim() > x.dim() or any(size not in (1, wanted) for size, wanted in pairs)
    if grows or splits:
        raise FormatError(
            f"a scale of shape {tuple(scale.shape)} does not fit {tuple(x.shape)}",
            code="format.scale",
        )
    if scale.dtype != torch.float32 or scale.device != x.device:
        raise FormatError(
            f"scale is {scale.dtype} on {scale.device}, expected float32 on {x.device}",
            code="format.scale",
        )
    expanded = scale.detach().expand(x.shape)
    if scale.numel() == 1:
        return expanded, "one"
    return expanded, "rows" if expanded.stride(-1) == 0 else "all"


def _coalesce(
    shape: tuple[int, ...], strides: list[tuple[int, ...]], block: int
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge neighbouring dimensions that every tensor lays out as one.

    The last one, whose size is the number of columns, only if it is a multiple of `block`. Returns
    at least two sizes, and as many strides of each tensor.
    """
    sizes, merged = [1], [[0] for _ in strides]
    last = len(shape) - 1
    for i, size in enumerate(shape):
        joins = all(m[-1] == s[i] * size for m, s in zip(merged, strides, strict=True))
        if len(sizes) > 1 and joins and (i < last or size % block == 0):
            sizes[-1] *= size
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[i]
        elif size != 1 or i == last:
            sizes.append(size)
            for m, s in zip(merged, strides, strict=True):
                m.append(s[i])
    if len(sizes) == 1:
        sizes.append(1)
        merged = [[0, 1] for _ in strides]
    return tuple(sizes), [tuple(m) for m in merged]
