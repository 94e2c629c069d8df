"""Rounding to number formats in Triton, bit-equal to `kvq.reference`."""

import triton
import triton.language as tl

from kvq.formats import E2M1, E4M3, INT8_CODE

E4M3_MAX = tl.constexpr(E4M3.max)
E2M1_MAX = tl.constexpr(E2M1.max)
INT8_MAX = tl.constexpr(INT8_CODE.max)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
# adding and taking away 1.5 * 2**23 rounds to integers, ties to even
MAGIC = tl.constexpr(1.5 * 2**23)
INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
SIGN_BITS = tl.constexpr(-0x80000000)
ONE_BITS = tl.constexpr(0x3F800000)
# from the bits of a power of two to those of 1.5 * 2**22 times it
MAGIC_OVER_ONE = tl.constexpr((22 << 23) + (1 << 22))


@triton.jit
def round_e4m3(x):
    """E4M3, saturating; NaN stays."""
    inside = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return inside.to(tl.float8e4nv)


@triton.jit
def e2m1_magic(y):
    """What rounds a magnitude to its spacing: 0.5 below 2, 1 below 4, 2 above."""
    exponent = tl.maximum(y.to(tl.int32, bitcast=True) & INFINITY_BITS, ONE_BITS)
    return (exponent + MAGIC_OVER_ONE).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """Take the sign of float32 x away."""
    return (x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS).to(tl.float32, bitcast=True)


@triton.jit
def round_e2m1(y):
    """E2M1 magnitudes as float32, of magnitudes within range; NaN stays."""
    magic = e2m1_magic(y)
    return (y + magic) - magic


@triton.jit
def encode_e2m1(y, sign):
    """E2M1 codes in the low four bits of int32, of magnitudes within range and sign bits."""
    magic = e2m1_magic(y)
    steps = (y + magic).to(tl.int32, bitcast=True) & 0x7
    # spacings below begin at code 0, 2 (from 2) and 4 (from 4)
    code = steps + ((magic.to(tl.int32, bitcast=True) - MAGIC_OVER_ONE - ONE_BITS) >> 22)
    return code | ((sign >> 28) & 0x8)


@triton.jit
def sign_bits(x, effective):
    """Sign bits of x; positive where the effective scale is zero, as all codes are then."""
    return x.to(tl.int32, bitcast=True) & tl.where(effective == 0.0, 0, SIGN_BITS)


@triton.jit
def with_sign(y, sign):
    """Give a magnitude sign bits."""
    return (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x):
    """Bits that order as magnitudes do; NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS


@triton.jit
def nvfp4_block_scale(amax_bits, scale):
    """E4M3 block scale of a block's largest `magnitude_bits`; NaN if the block holds a NaN."""
    amax = tl.minimum(amax_bits, INFINITY_BITS).to(tl.float32, bitcast=True)
    amax = tl.minimum(amax, FLOAT32_MAX)
    ratio = tl.div_rn(tl.div_rn(amax, tl.zeros_like(amax) + E2M1_MAX), tl.zeros_like(amax) + scale)
    ratio = tl.where(amax_bits > INFINITY_BITS, float("nan"), ratio)
    return round_e4m3(ratio)


@triton.jit
def quotient(x, divisor, LIMIT: tl.constexpr):
    """Magnitude of the correctly rounded x / divisor, at most LIMIT; zero where that is zero.

    The divisor is not negative and below 2**127, of a shape that broadcasts to x. It is divided by
    once, however many x share it: with r the correctly rounded reciprocal of m, a quotient q of a
    and m within one unit in the last place is corrected by `q + (a - q m) r` to the rounded one
    (Markstein, IA-64 and Elementary Functions, 2000). The first correction brings it that near.
    """
    # the divisor times a power of two: in [1, 2), or below one where it is subnormal
    inverse = (254 - (divisor.to(tl.int32, bitcast=True) >> 23)) << 23
    inverse = inverse.to(tl.float32, bitcast=True)
    m = divisor * inverse
    r = tl.where(divisor == 0.0, 0.0, tl.div_rn(m * 0.0 + 1.0, m))
    a = tl.minimum(magnitude(x) * inverse, 4.0 * LIMIT, propagate_nan=tl.PropagateNan.ALL)
    q = a * r
    q = tl.fma(tl.fma(q, -m, a), r, q)
    q = tl.fma(tl.fma(q, -m, a), r, q)
    return tl.minimum(q, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize_e4m3(x, scale, SHARED: tl.constexpr):
    """E4M3 of x / scale; SHARED if one scale serves all x, so that dividing once pays."""
    if SHARED:
        y = quotient(x, scale, E4M3_MAX)
        y = with_sign(y, x.to(tl.int32, bitcast=True) & SIGN_BITS).to(tl.float8e4nv)
    else:
        y = round_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale))
    return y


@triton.jit
def quantize_int8(x, scale, SHARED: tl.constexpr):
    """Integers of x / scale as float32, never -0.0; NaN stays."""
    if SHARED:
        y = with_sign(quotient(x, scale, INT8_MAX), x.to(tl.int32, bitcast=True) & SIGN_BITS)
    else:
        y = tl.div_rn(x, tl.zeros_like(x) + scale)
        y = tl.clamp(y, -INT8_MAX, INT8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return (y + MAGIC) - MAGIC


@triton.jit
def power_of_two(amax_bits, MAX_EXPONENT: tl.constexpr):
    """E8M0 scale `2 ** (floor(log2(amax)) - MAX_EXPONENT)`, and its reciprocal, exactly.

    Zero gets the smallest scale, infinity that of the largest number.
    """
    # a float32 subnormal has exponent field 0 and is below the smallest scale anyway
    code = tl.minimum(amax_bits, INFINITY_BITS - 1) >> 23
    code = tl.maximum(code - MAX_EXPONENT, 0)
    value = tl.where(code == 0, 1 << 22, code << 23)  # code 0 is 2**-127, a subnormal
    return value.to(tl.float32, bitcast=True), ((254 - code) << 23).to(tl.float32, bitcast=True)
