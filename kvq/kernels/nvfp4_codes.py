"""The bytes of NVFP4 pages, whose bits `kvq.kernels.pages` gives, from numbers of both halves.

16-bit numbers are neither widened nor divided. A code is how many limits a magnitude is beyond: the
largest numbers of its dtype that round to less than a code, found once for a block. Halfway between
E2M1's numbers lie 1/4, 3/4, 5/4, 7/4, 5/2, 7/2 and 5. What is below 7/2 counts twice, and below 7/4
twice again, which is exact. Then 1, 3 and 5 are halfway for all, and with 7/4 and 7/2 five
comparisons tell the code, each of two numbers. float32 numbers are divided.
"""

import triton
import triton.language as tl

from kvq.kernels.numerics import (
    E2M1_MAX,
    larger,
    largest,
    magnitude,
    nvfp4_block_scale,
    quotient,
    round_e2m1,
    sign_bits,
    with_sign,
)
from kvq.kernels.pairs import (
    beyond,
    halves,
    high_bytes,
    larger_bfloat16,
    larger_float16,
    low_bytes,
    magnitudes,
    pair_fma,
    truncated,
    twice,
    within,
)


@triton.jit
def has_limits(scale, DTYPE: tl.constexpr):
    """Whether limits tell the codes of a dtype under a scale, whatever the block scale.

    They must lose no bits, and four times a number below 7/4 must be finite.
    """
    MOST: tl.constexpr = 2.0**80 if DTYPE == tl.bfloat16 else 16.0
    return (DTYPE != tl.float32) & (scale >= 2.0**-80) & (scale <= MOST)


@triton.jit
def code_limits(divisor, DTYPE: tl.constexpr):
    """Words with the limits 7/4, 7/2, 1, 3 and 5 of quotients, times a divisor [ITEMS, 1].

    The reference rounds a quotient to float32 before it rounds it to a code. So what is less than
    half a unit of float32 below 7/4, 7/2 or 3, where ties go up, is not below; nor is what is less
    than half a unit above 1 or 5 beyond. No number of 11 bits over a float32 is at half a unit.
    That point times the divisor is the product with float32's next number and half a unit back, in
    one rounding; for 1, whose limit is the same, the divisor does.
    """
    half = divisor * 2.0**-24
    return (
        truncated(divisor, 1.75 - 2.0**-23, half, DTYPE),
        truncated(divisor, 3.5 - 2.0**-22, 2 * half, DTYPE),
        truncated(divisor, 1.0, 0.0, DTYPE),
        truncated(divisor, 3.0 - 2.0**-22, 2 * half, DTYPE),
        truncated(divisor, 5.0 + 2.0**-21, -4 * half, DTYPE),
    )


@triton.jit
def _add_codes(x, limits, total, WEIGHT: tl.constexpr, DTYPE: tl.constexpr):
    """Add WEIGHT times the codes of words of magnitudes, less 4."""
    below_two, below_four = within(x, limits[0], DTYPE), within(x, limits[1], DTYPE)
    total = pair_fma(below_two, twice(-2 * WEIGHT, DTYPE), total, DTYPE)
    total = pair_fma(below_four, twice(-2 * WEIGHT, DTYPE), total, DTYPE)
    # infinity is below neither and becomes NaN, which is beyond all
    x = pair_fma(x, below_four, x, DTYPE)
    x = pair_fma(x, below_two, x, DTYPE)
    for i in tl.static_range(2, 5):
        total = pair_fma(beyond(x, limits[i], DTYPE), twice(WEIGHT, DTYPE), total, DTYPE)
    return total


@triton.jit
def _pairs(x):
    """Even and odd columns of [ITEMS, N]."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def unsigned_bytes(low, high, low_limits, high_limits, DTYPE: tl.constexpr):
    """Bytes `0 e e m E E M 0` of words [ITEMS, N] of magnitudes, as words [ITEMS, N // 2]."""
    # a power of two, up to whose double there are 128 integers or more, all exact; and 4 of both
    BEGIN: tl.constexpr = (128 if DTYPE == tl.bfloat16 else 1024) + 4 * (16 + 2)
    total = _add_codes(low, low_limits, twice(BEGIN, DTYPE), 16, DTYPE)
    total = _add_codes(high, high_limits, total, 2, DTYPE)
    first, second = _pairs(total)
    return low_bytes(first, second)


@triton.jit
def _sign_bytes(low, high):
    """Bytes `S 0 0 0 0 0 0 s` of words [ITEMS, N], as words [ITEMS, N // 2]."""
    first, second = _pairs(low)
    low = high_bytes(first, second)
    first, second = _pairs(high)
    high = high_bytes(first, second)
    return (high & ~0x7F7F7F7F) | ((low >> 7) & 0x01010101)


@triton.jit
def _short_scale(first, second, scale, DTYPE: tl.constexpr):
    """Block scale of two parts of a block, words of magnitudes [ITEMS, N]."""
    if DTYPE == tl.bfloat16:
        word = tl.reduce(larger_bfloat16(first, second), 1, larger_bfloat16)
    else:
        word = tl.reduce(larger_float16(first, second), 1, larger_float16)
    a, b = halves(word, DTYPE)
    return nvfp4_block_scale(larger(a.to(tl.float32), b.to(tl.float32)), scale, True)


@triton.jit
def _bytes(x):
    """Bytes [ITEMS, 4 * N], the lowest first, of words [ITEMS, N]."""
    shifts = (tl.arange(0, 4) * 8)[None, None, :]
    return tl.reshape((x[:, :, None] >> shifts).to(tl.uint8), [x.shape[0], 4 * x.shape[1]])


@triton.jit
def short_page_bytes(low, high, scale, DTYPE: tl.constexpr):
    """As `page_bytes`, of words of 16-bit numbers and a scale that `has_limits`."""
    first_signs, second_signs = _sign_bytes(low[0], high[0]), _sign_bytes(low[1], high[1])
    low = magnitudes(low[0], DTYPE), magnitudes(low[1], DTYPE)
    high = magnitudes(high[0], DTYPE), magnitudes(high[1], DTYPE)
    low_scales = _short_scale(low[0], low[1], scale, DTYPE)
    high_scales = _short_scale(high[0], high[1], scale, DTYPE)
    low_factors = low_scales.to(tl.float32)[:, None]
    high_factors = high_scales.to(tl.float32)[:, None]
    # in a block whose scale rounds to zero all numbers would with one of 1, too; zeros are positive
    signs = tl.where(low_factors == 0.0, 0, 0x01010101)
    signs |= tl.where(high_factors == 0.0, 0, ~0x7F7F7F7F)
    low_limits = code_limits(tl.where(low_factors == 0.0, scale, low_factors * scale), DTYPE)
    high_limits = code_limits(tl.where(high_factors == 0.0, scale, high_factors * scale), DTYPE)
    first = unsigned_bytes(low[0], high[0], low_limits, high_limits, DTYPE)
    second = unsigned_bytes(low[1], high[1], low_limits, high_limits, DTYPE)
    first, second = first | (first_signs & signs), second | (second_signs & signs)
    return low_scales, high_scales, _bytes(first), _bytes(second)


@triton.jit
def _words(x):
    """Undo `_bytes`."""
    even, odd = _pairs(x.to(tl.int32))
    even, odd = _pairs(even | (odd << 8))
    return even | (odd << 16)


@triton.jit
def _codes(x, effective):
    """E2M1 codes `s e e m` of x / effective, as words of bytes `s 0 0 0 e e m 0`.

    These are the E5M2 codes of 2**-14 of their numbers: one instruction makes two of them.
    """
    y = round_e2m1(quotient(x, effective, E2M1_MAX), 2**-14)
    y = with_sign(y, sign_bits(x, effective))
    return _words(y.to(tl.float8e5).to(tl.uint8, bitcast=True))


@triton.jit
def _interleave(low, high):
    """Bytes `S e e m E E M s` of words of `s 0 0 0 e e m 0` and `S 0 0 0 E E M 0`."""
    word = (high & ~0x70707070) | ((low << 3) & 0x70707070)
    return _bytes((word & ~0x01010101) | ((low >> 7) & 0x01010101))


@triton.jit
def _scale(parts, scale, SHORT: tl.constexpr):
    """Block scales [ITEMS], and effective scales [ITEMS, 1], of two parts [ITEMS, N] of blocks."""
    amax = largest(larger(magnitude(parts[0]), magnitude(parts[1])), 1)
    block_scale = nvfp4_block_scale(amax, scale, SHORT)
    return block_scale, (block_scale.to(tl.float32) * scale)[:, None]


@triton.jit
def page_bytes(low, high, scale, SHORT: tl.constexpr):
    """E4M3 block scales [ITEMS] of a block of each half, and the bytes [ITEMS, N] of both parts.

    A block is given in two parts [ITEMS, N] of float32; SHORT if they were 16-bit numbers.
    """
    low_scales, low_effective = _scale(low, scale, SHORT)
    high_scales, high_effective = _scale(high, scale, SHORT)
    first = _interleave(_codes(low[0], low_effective), _codes(high[0], high_effective))
    second = _interleave(_codes(low[1], low_effective), _codes(high[1], high_effective))
    return low_scales, high_scales, first, second
