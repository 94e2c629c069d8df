"""Kernels of one function of `kvq.kernels.numerics` each."""

import triton
import triton.language as tl

from kvq.kernels.numerics import (
    E2M1_MAX,
    reciprocal,
    reciprocal_terms,
    round_e2m1,
    short_quotient,
)


@triton.jit
def reciprocals(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, reciprocal(tl.load(x_ptr + at)))


@triton.jit
def e2m1_quotients(x_ptr, divisor_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    near, rest = reciprocal_terms(tl.load(divisor_ptr + at))
    y = short_quotient(tl.load(x_ptr + at).to(tl.float32), near, rest, E2M1_MAX)
    tl.store(out_ptr + at, round_e2m1(y))
