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
# of a number below 8, bits that leave 4.0, 2.0 or next to nothing
BINADE_BITS = tl.constexpr(0x40800000)
# magic plus slope times these is 18, 12 or 6 times 2**20: there float32 has spacings 2, 1 and 0.5
E2M1_MAGIC = tl.constexpr(1.5 * 2.0**22)
E2M1_MAGIC_SLOPE = tl.constexpr(0.75 * 2.0**22)


@triton.jit
def round_e4m3(x):
    """E4M3, saturating; NaN stays."""
    inside = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return inside.to(tl.float8e4nv)


@triton.jit
def round_e2m1(y, UNIT: tl.constexpr = 1.0):
    """E2M1 magnitudes times a power of two, as float32, of magnitudes below 7; NaN stays."""
    binade = (y.to(tl.int32, bitcast=True) & BINADE_BITS).to(tl.float32, bitcast=True)
    # adding and taking away a number whose neighbours are the spacing apart
    magic = tl.fma(binade, -E2M1_MAGIC_SLOPE * UNIT, -E2M1_MAGIC * UNIT)
    return tl.fma(tl.fma(magic, -1.0 / UNIT, y), UNIT, magic)


@triton.jit
def float_bits(x):
    """Bits of x as float32."""
    return x.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def magnitude_bits(x):
    """Bits that order as magnitudes do; NaN above infinity."""
    return float_bits(x) & MAGNITUDE_BITS


@triton.jit
def magnitude(x):
    """Take the sign of x away, as float32."""
    return tl.abs(x.to(tl.float32))


@triton.jit
def sign_bits(x, divisor):
    """Sign bits of x; positive where the divisor is zero, as all codes are then."""
    return float_bits(x) & tl.where(divisor == 0.0, 0, SIGN_BITS)


@triton.jit
def with_sign(y, sign):
    """Give a magnitude sign bits."""
    return (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def larger(a, b):
    """Maximum, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, axis: tl.constexpr):
    """Maximum along an axis; NaN if there is one."""
    return tl.reduce(x, axis, larger)


@triton.jit
def nvfp4_block_scale(amax, scale, SHORT: tl.constexpr = False):
    """E4M3 block scale of a block's largest magnitude; NaN if that is.

    SHORT: the block is of 16-bit numbers. A sixth of one is never halfway between two of float32,
    subnormal ones included, so that one correction rounds it.
    """
    amax = tl.minimum(amax, FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)
    if SHORT:
        sixth = amax * (1.0 / E2M1_MAX)
        sixth = tl.fma(tl.fma(sixth, -E2M1_MAX, amax), 1.0 / E2M1_MAX, sixth)
    else:
        sixth = tl.div_rn(amax, tl.zeros_like(amax) + E2M1_MAX)
    return quotient(sixth, scale, E4M3_MAX).to(tl.float8e4nv)


@triton.jit
def reciprocal(m):
    """1 / m, correctly rounded, of normal m whose reciprocal is; tests try all significands."""
    # exact for powers of two, an eighth too large at most; each step leaves the error's cube
    r = ((254 << 23) - m.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    e = tl.fma(r, -m, 1.0)
    r = tl.fma(r, tl.fma(e, e, e), r)
    e = tl.fma(r, -m, 1.0)
    r = tl.fma(r, tl.fma(e, e, e), r)
    return tl.fma(r, tl.fma(r, -m, 1.0), r)


@triton.jit
def inverse_power(x):
    """The power of two that brings positive x to [1, 2), or below one where it is subnormal."""
    return ((254 - (x.to(tl.int32, bitcast=True) >> 23)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quotient(x, divisor, LIMIT: tl.constexpr):
    """Magnitude of x / divisor that rounds to E4M3, E2M1 or INT8 as the correctly rounded one.

    Zero where the divisor is; above LIMIT, the format's largest number, that or a number next to
    it. The divisor is float32, not negative and below 2**127, of a shape that broadcasts to x. It
    is divided by once, however many x share it: with r the correctly rounded reciprocal of m, a
    quotient q of a and m within one unit in the last place is corrected by `q + (a - q m) r` to the
    rounded one (Markstein, IA-64 and Elementary Functions, 2000).

    The first correction brings q that near, and within 2**-46 of the quotient. For a 16-bit x, of
    at most 11 bits, it is the last. Codes change half a unit from numbers of at most 8 bits, and x
    over a float32 is 2**-40 from there; but for a power of two over one less a unit, whose q is
    within one unit at first.
    """
    inverse = inverse_power(divisor)
    m = divisor * inverse
    r = tl.where(divisor == 0.0, 0.0, reciprocal(m))
    a = magnitude(x) * inverse
    a = tl.minimum(a, m * LIMIT, propagate_nan=tl.PropagateNan.ALL)
    q = a * r
    q = tl.fma(tl.fma(q, -m, a), r, q)
    if x.dtype == tl.float32:
        q = tl.fma(tl.fma(q, -m, a), r, q)
    return q


@triton.jit
def quantize_e4m3(x, scale):
    """E4M3 of x / scale, a scale that several x share."""
    return with_sign(quotient(x, scale, E4M3_MAX), float_bits(x) & SIGN_BITS).to(tl.float8e4nv)


@triton.jit
def quantize_int8(x, scale):
    """Integers of x / scale as float32, never -0.0; NaN stays."""
    y = with_sign(quotient(x, scale, INT8_MAX), float_bits(x) & SIGN_BITS)
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
