"""Triton's interpreter with the arithmetic of the hardware where its own differs.

The interpreter runs kernels on the CPU in NumPy. As of Triton 3.7 it truncates and carries wrongly
when it narrows floats, rounds twice in `fma`, and multiplies the bits of bfloat16 as integers.
`faithful` replaces these three; what kernels compute from them is then bit-equal to the GPU's.
"""

from contextlib import contextmanager
from unittest.mock import patch

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

DTYPES = {
    tl.float32: np.float32,
    tl.float16: np.float16,
    tl.bfloat16: ml_dtypes.bfloat16,
    tl.float8e4nv: ml_dtypes.float8_e4m3fn,
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


@contextmanager
def faithful():
    """Correct the interpreter."""
    handle = interpreter.TensorHandle

    def create_fma(_, x, y, z):
        return handle(fma(x.data, y.data, z.data), z.dtype.scalar)

    def create_dot(_, a, b, acc, _precision, _imprecise):
        return handle(values(a) @ values(b) + acc.data, acc.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    with (
        patch.object(interpreter, "_convert_float", convert),
        patch.object(builder, "create_fma", create_fma),
        patch.object(builder, "create_dot", create_dot),
        np.errstate(all="ignore"),
    ):
        yield
