"""Pairs of 16-bit numbers in int32 words, the first in the low half, two to an instruction.

Triton's own operations take such numbers one at a time. These are PTX of compute capability 9.0;
DTYPE is bfloat16 or float16.
"""

import triton
import triton.language as tl


@triton.jit
def pair_words(x):
    """Words [ITEMS, N // 2] of numbers [ITEMS, N]."""
    x = tl.reshape(x.to(tl.int16, bitcast=True), [x.shape[0], x.shape[1] // 2, 2])
    first, second = tl.split(x)
    return (first.to(tl.int32) & 0xFFFF) | (second.to(tl.int32) << 16)


@triton.jit
def halves(words, DTYPE: tl.constexpr):
    """The first and the second number of each word."""
    first = words.to(tl.int16).to(DTYPE, bitcast=True)
    return first, (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def pair_numbers(words, DTYPE: tl.constexpr):
    """Undo `pair_words`, as float32."""
    first, second = halves(words, DTYPE)
    x = tl.join(first, second).to(tl.float32)
    return tl.reshape(x, [words.shape[0], 2 * words.shape[1]])


@triton.jit
def twice(value: tl.constexpr, DTYPE: tl.constexpr):
    """The word [1, 1] that holds a number in both halves."""
    x = tl.full([1, 1], value, tl.float32).to(DTYPE)
    return (x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001


@triton.jit
def magnitudes(words, DTYPE: tl.constexpr):
    """Take signs away."""
    TYPE: tl.constexpr = "bf16x2" if DTYPE == tl.bfloat16 else "f16x2"
    return tl.inline_asm_elementwise(f"abs.{TYPE} $0, $1;", "=r,r", [words], dtype=tl.int32,
                                     is_pure=True, pack=1)  # fmt: skip


@triton.jit
def larger_bfloat16(a, b):
    """The larger number of each half; NaN if either is."""
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b],
                                     dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip


@triton.jit
def larger_float16(a, b):
    """The larger number of each half; NaN if either is."""
    return tl.inline_asm_elementwise("max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b],
                                     dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip


@triton.jit
def within(words, limits, DTYPE: tl.constexpr):
    """1.0 in each half whose number is the limit's at most, else 0.0."""
    TYPE: tl.constexpr = "bf16x2" if DTYPE == tl.bfloat16 else "f16x2"
    return tl.inline_asm_elementwise(f"set.le.{TYPE}.{TYPE} $0, $1, $2;", "=r,r,r",
                                     [words, limits], dtype=tl.int32, is_pure=True,
                                     pack=1)  # fmt: skip


@triton.jit
def beyond(words, limits, DTYPE: tl.constexpr):
    """1.0 in each half where `within` gives 0.0, and the other way round; NaN is beyond all."""
    TYPE: tl.constexpr = "bf16x2" if DTYPE == tl.bfloat16 else "f16x2"
    return tl.inline_asm_elementwise(f"set.gtu.{TYPE}.{TYPE} $0, $1, $2;", "=r,r,r",
                                     [words, limits], dtype=tl.int32, is_pure=True,
                                     pack=1)  # fmt: skip


@triton.jit
def pair_fma(x, y, z, DTYPE: tl.constexpr):
    """Return x * y + z, rounded once."""
    TYPE: tl.constexpr = "bf16x2" if DTYPE == tl.bfloat16 else "f16x2"
    return tl.inline_asm_elementwise(f"fma.rn.{TYPE} $0, $1, $2, $3;", "=r,r,r,r", [x, y, z],
                                     dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip


@triton.jit
def truncated(x, y, z, DTYPE: tl.constexpr):
    """Words that hold x * y + z of float32 in both halves, rounded towards zero."""
    TYPE: tl.constexpr = "bf16x2" if DTYPE == tl.bfloat16 else "f16x2"
    return tl.inline_asm_elementwise(
        f"{{ .reg .f32 t; fma.rz.f32 t, $1, $2, $3; cvt.rz.{TYPE}.f32 $0, t, t; }}",
        "=r,f,f,f", [x, y, z], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def low_bytes(a, b):
    """The low bytes of the four halves of two words."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [a, b],
                                     dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip


@triton.jit
def high_bytes(a, b):
    """The high bytes of the four halves of two words."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [a, b],
                                     dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip
