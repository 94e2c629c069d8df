"""Triton's interpreter with the arithmetic of the hardware where its own differs.

The interpreter runs kernels on the CPU in NumPy. As of Triton 3.7 it truncates and carries wrongly
when it narrows floats, rounds twice in `fma`, multiplies the bits of bfloat16 as integers, and
finds NaN the minimum of NaN and a number. `faithful` replaces these four; what kernels compute from
them is then bit-equal to the GPU's. It also puts plain Triton in the place of the inline PTX that
takes NVFP4 words apart, and of that which works on pairs of 16-bit numbers.
"""

from contextlib import contextmanager
from unittest.mock import patch

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from kvq.kernels import nvfp4_codes, nvfp4_tiles

DTYPES = {
    tl.float32: np.float32,
    tl.float16: np.float16,
    tl.bfloat16: ml_dtypes.bfloat16,
    tl.float8e4nv: ml_dtypes.float8_e4m3fn,
    tl.float8e5: ml_dtypes.float8_e5m2,
}


def convert(data, source, target, _rounding_mode):
    """Round to nearest, ties to even; returns bits, as the function in its place does."""
    values = data.view(DTYPES[source]).astype(np.float32).astype(DTYPES[target])
    return values.view(f"uint{target.primitive_bitwidth}")


def fma(x, y, z):
    """x * y + z of float32, rounded once.

    The product is exact in float64. Their sum is rounded to odd, after which rounding to float32
    is as if the sum had been exact (Boldo and Melquiond, 2008).
    """
    product, z = x.astype(np.float64) * y, np.asarray(z, np.float64)
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)
    odd = total.view(np.int64) & 1
    towards = np.where(error > 0, np.inf, -np.inf)
    inexact = (error != 0) & np.isfinite(total) & (odd == 0)
    return np.where(inexact, np.nextafter(total, towards), total).astype(np.float32)


def values(handle):
    """What a tile holds, as float32."""
    return handle.data.view(DTYPES[handle.dtype.scalar]).astype(np.float32)


@triton.jit
def code(bits, sign):
    """Float16 of a code whose bits E E M were brought to place, and its sign to bit 15."""
    return (bits & 0x0E00 | sign & 0x8000).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def expand(pairs):
    """Of bytes `S e e m E E M s` the codes `s e e m` and `S E E M`."""
    pairs = pairs.to(tl.int32)
    low = code(pairs << 5, pairs << 15), code(pairs >> 3, pairs << 7)
    return low[0], low[1], code(pairs << 8, pairs << 8), code(pairs, pairs)


@triton.jit
def product(x, y):
    return x * y


@triton.jit
def scale_of_byte(words, byte):
    codes = (words >> byte * 8 & 0xFF).to(tl.uint8)
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def token_scales(words):
    return scale_of_byte(words, 0), scale_of_byte(words, 1)


@triton.jit
def pair_scales(words):
    return (scale_of_byte(words, 0), scale_of_byte(words, 2),
            scale_of_byte(words, 1), scale_of_byte(words, 3))  # fmt: skip


@triton.jit
def floats(words, DTYPE: tl.constexpr):
    """Both numbers of each word, as float32."""
    first = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return first, (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def word(first, second, DTYPE: tl.constexpr):
    """Undo `floats`."""
    first = first.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    return first & 0xFFFF | second.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16


@triton.jit
def magnitudes(words, DTYPE: tl.constexpr):
    return words & 0x7FFF7FFF


@triton.jit
def larger(a, b, DTYPE: tl.constexpr):
    a, b = floats(a, DTYPE), floats(b, DTYPE)
    first = tl.maximum(a[0], b[0], propagate_nan=tl.PropagateNan.ALL)
    return word(first, tl.maximum(a[1], b[1], propagate_nan=tl.PropagateNan.ALL), DTYPE)


@triton.jit
def larger_bfloat16(a, b):
    return larger(a, b, tl.bfloat16)


@triton.jit
def larger_float16(a, b):
    return larger(a, b, tl.float16)


@triton.jit
def within(words, limits, DTYPE: tl.constexpr):
    x, limits = floats(words, DTYPE), floats(limits, DTYPE)
    return word(tl.where(x[0] <= limits[0], 1.0, 0.0), tl.where(x[1] <= limits[1], 1.0, 0.0), DTYPE)


@triton.jit
def beyond(words, limits, DTYPE: tl.constexpr):
    x, limits = floats(words, DTYPE), floats(limits, DTYPE)
    return word(tl.where(x[0] <= limits[0], 0.0, 1.0), tl.where(x[1] <= limits[1], 0.0, 1.0), DTYPE)


@triton.jit
def pair_fma(x, y, z, DTYPE: tl.constexpr):
    """Rounded once here, too: products of 11 bits are exact in float32, and what is added to them
    is another such number or at most 2**11 times as large."""
    x, y, z = floats(x, DTYPE), floats(y, DTYPE), floats(z, DTYPE)
    return word(x[0] * y[0] + z[0], x[1] * y[1] + z[1], DTYPE)


@triton.jit
def truncated(x, y, z, DTYPE: tl.constexpr):
    """The sum, of positive numbers, fits in float64."""
    exact = x.to(tl.float64) * y + z
    near = exact.to(tl.float32).to(DTYPE)
    below = (near.to(tl.int16, bitcast=True) - 1).to(DTYPE, bitcast=True)
    near = tl.where(near.to(tl.float64) > exact, below, near)
    return word(near, near, DTYPE)


@triton.jit
def low_bytes(a, b):
    a = a & 0xFF | a >> 8 & 0xFF00
    return a | (b & 0xFF) << 16 | (b >> 16 & 0xFF) << 24


@triton.jit
def high_bytes(a, b):
    return low_bytes(a >> 8, b >> 8)


@contextmanager
def faithful():
    """Correct the interpreter."""
    handle = interpreter.TensorHandle

    def create_fma(_, x, y, z):
        return handle(fma(x.data, y.data, z.data), z.dtype.scalar)

    def create_dot(_, a, b, acc, _precision, _imprecise):
        return handle(values(a) @ values(b) + acc.data, acc.dtype.scalar)

    def create_minnumf(_, x, y):
        return handle(np.fmin(x.data, y.data), x.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    with (
        patch.object(interpreter, "_convert_float", convert),
        patch.object(builder, "create_fma", create_fma),
        patch.object(builder, "create_dot", create_dot),
        patch.object(builder, "create_minnumf", create_minnumf),
        patch.multiple(
            nvfp4_tiles,
            expand=expand,
            product=product,
            token_scales=token_scales,
            pair_scales=pair_scales,
        ),
        patch.multiple(
            nvfp4_codes,
            magnitudes=magnitudes,
            larger_bfloat16=larger_bfloat16,
            larger_float16=larger_float16,
            within=within,
            beyond=beyond,
            pair_fma=pair_fma,
            truncated=truncated,
            low_bytes=low_bytes,
            high_bytes=high_bytes,
        ),
        np.errstate(all="ignore"),
    ):
        yield
