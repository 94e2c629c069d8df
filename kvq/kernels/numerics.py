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


@triton.jit
def round_e4m3(x):
    """E4M3, saturating; NaN stays."""
    inside = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return inside.to(tl.float8e4nv)


@triton.jit
def round_int8(x):
    """Integers within ±127 as float32, never -0.0; NaN stays."""
    inside = tl.clamp(x, -INT8_MAX, INT8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return (inside + MAGIC) - MAGIC


@triton.jit
def e2m1_magic(magnitude):
    """What rounds a magnitude to its spacing: 0.5 below 2, 1 below 4, 2 above."""
    return tl.where(magnitude < 2.0, MAGIC * 0.5, tl.where(magnitude < 4.0, MAGIC, MAGIC * 2.0))


@triton.jit
def round_e2m1(x):
    """E2M1 values as float32, saturating, the sign kept; NaN becomes ±max."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & MAGNITUDE_BITS).to(tl.float32, bitcast=True), E2M1_MAX)
    magic = e2m1_magic(magnitude)
    rounded = (magnitude + magic) - magic
    return ((bits & SIGN_BITS) | rounded.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(x):
    """E2M1 codes in the low four bits of int32, saturating, the sign kept."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & MAGNITUDE_BITS).to(tl.float32, bitcast=True), E2M1_MAX)
    steps = (magnitude + e2m1_magic(magnitude)).to(tl.int32, bitcast=True) & 0x7
    code = steps + tl.where(magnitude < 2.0, 0, tl.where(magnitude < 4.0, 2, 4))
    return code | ((bits >> 28) & 0x8)


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
def nvfp4_scaled(x, effective):
    """Divide x by its block's effective scale; zero where that is zero."""
    return tl.where(effective == 0.0, 0.0, tl.div_rn(x, tl.zeros_like(x) + effective))


@triton.jit
def power_of_two_code(amax_bits, MAX_EXPONENT: tl.constexpr):
    """E8M0 code of `2 ** (floor(log2(amax)) - MAX_EXPONENT)`; the smallest for zero."""
    # a float32 subnormal has exponent field 0 and is below the smallest scale anyway
    return tl.maximum((amax_bits >> 23) - MAX_EXPONENT, 0)


@triton.jit
def power_of_two(code):
    """Value of an E8M0 code below 255, and its reciprocal; both exact in float32."""
    half_of_smallest = 1 << 22
    value = tl.where(code == 0, half_of_smallest, code << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(code == 254, half_of_smallest, (254 - code) << 23)
    return value, inverse.to(tl.float32, bitcast=True)
