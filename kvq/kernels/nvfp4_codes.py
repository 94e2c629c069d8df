"""The bytes of NVFP4 pages, whose bits `kvq.kernels.pages` gives, from numbers of both halves."""

import triton
import triton.language as tl

from kvq.kernels.numerics import (
    E2M1_MAX,
    larger,
    largest,
    magnitude,
    nvfp4_block_scale,
    quotient,
    reciprocal_terms,
    round_e2m1,
    short_quotient,
    sign_bits,
    with_sign,
)


@triton.jit
def block_scales(parts, scale):
    """E4M3 scales [ITEMS] of blocks in two parts [ITEMS, 8], and effective scales [ITEMS, 1]."""
    amax = largest(larger(magnitude(parts[0]), magnitude(parts[1])), 1)
    block_scale = nvfp4_block_scale(amax, scale, parts[0].dtype != tl.float32)
    return block_scale, (block_scale.to(tl.float32) * scale)[:, None]


@triton.jit
def _words(x):
    """Each four bytes of [ITEMS, N], the first lowest, as one int32 of [ITEMS, N // 4]."""
    N: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x.to(tl.int32), [x.shape[0], N // 2, 2]))
    even, odd = tl.split(tl.reshape(even | (odd << 8), [x.shape[0], N // 4, 2]))
    return even | (odd << 16)


@triton.jit
def _bytes(x):
    """Undo `_words`."""
    shifts = (tl.arange(0, 4) * 8)[None, None, :]
    return tl.reshape((x[:, :, None] >> shifts).to(tl.uint8), [x.shape[0], 4 * x.shape[1]])


@triton.jit
def _codes(x, effective, unit):
    """E2M1 codes `s e e m` of x / effective, as words of bytes `s 0 0 0 e e m 0`.

    These are the E5M2 codes of 2**-14 of their numbers: one instruction makes two of them.
    """
    if x.dtype == tl.float32:
        y = quotient(x, effective, E2M1_MAX)
    else:
        reciprocal, rest = reciprocal_terms(effective * unit)
        y = short_quotient(x.to(tl.float32) * unit, reciprocal, rest, E2M1_MAX)
    y = with_sign(round_e2m1(y, 2**-14), sign_bits(x, effective))
    return _words(y.to(tl.float8e5).to(tl.uint8, bitcast=True))


@triton.jit
def _interleave(low, high):
    """Bytes `S e e m E E M s` of words of `s 0 0 0 e e m 0` and `S 0 0 0 E E M 0`."""
    word = (high & ~0x70707070) | ((low << 3) & 0x70707070)
    return _bytes((word & ~0x01010101) | ((low >> 7) & 0x01010101))


@triton.jit
def page_bytes(low, high, low_effective, high_effective, unit):
    """Bytes [ITEMS, N] of N numbers of each half, which have the effective scales [ITEMS, 1].

    16-bit numbers and the scales are multiplied by unit, a power of two, before they are divided.
    """
    return _interleave(_codes(low, low_effective, unit), _codes(high, high_effective, unit))
