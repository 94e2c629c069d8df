"""Kernels of one function of the kernels each."""

import triton
import triton.language as tl

from kvq.kernels.numerics import reciprocal
from kvq.kernels.nvfp4_codes import code_limits, unsigned_bytes


@triton.jit
def reciprocals(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, reciprocal(tl.load(x_ptr + at)))


@triton.jit
def e2m1_codes(x_ptr, divisor_ptr, out_ptr, BLOCK: tl.constexpr):
    """A word of four bytes of which each holds the code of |x / divisor| twice."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    bits = (x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF) * 0x10001
    words = tl.broadcast_to(bits[:, None], [BLOCK, 2])
    limits = code_limits(tl.load(divisor_ptr + at)[:, None], x.dtype)
    out = unsigned_bytes(words, words, limits, limits, x.dtype)
    tl.store(out_ptr + at, tl.reshape(out, [BLOCK]))
