"""Every number format once, without torch.

Element and block-scale layouts follow the OCP 8-bit floating point specification and the OCP
microscaling (MX) formats v1.0. A scale is always the dequantization multiplier, `x ≈ code * scale`.

The one rule from amax to scale (`KVFormat.scale`): `scale = float32(amax) / float32(divisor)`, one
float32 division. NaN and infinite amax, also one above the float32 range, are refused
(`format.amax_nonfinite`), zero and negative amax too (`format.amax_nonpositive`), and an amax whose
scale would be zero or a float32 subnormal (`format.amax_tiny`). Nothing is replaced by an epsilon:
whether such a tensor is an error is for the caller to say.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np

from kvq.errors import FormatError


@dataclass(frozen=True)
class Minifloat:
    """Signed float code of at most 8 bits: sign, exponent, mantissa, most significant first.

    `reserved` counts the largest magnitudes that are NaN or, where they fill the top exponent,
    infinity (mantissa zero) and NaN.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    reserved: int = 0

    @property
    def bits(self) -> int:
        """Width of a code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        """The code's sign bit, which is also the number of magnitudes with the reserved ones."""
        return 1 << (self.bits - 1)

    @property
    def count(self) -> int:
        """Finite magnitudes, zero included."""
        return self.sign_bit - self.reserved

    @property
    def nan_code(self) -> int | None:
        """The positive NaN that is written, or None if the format has none."""
        return self.sign_bit - 1 if self.reserved else None

    @cached_property
    def magnitudes(self) -> tuple[float, ...]:
        """Value of every finite magnitude; the index is the code."""
        return tuple(self.decode(code) for code in range(self.count))

    @property
    def max(self) -> float:
        """Largest finite value."""
        return self.magnitudes[-1]

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest power of two."""
        return math.frexp(self.max)[1] - 1

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value."""
        return self.magnitudes[1]

    def decode(self, code: int) -> float:
        """Return the value of a code."""
        negative, magnitude = divmod(code, self.sign_bit)
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        if magnitude >= self.count:
            has_infinity = self.reserved == 1 << self.mantissa_bits
            value = math.inf if has_infinity and mantissa == 0 else math.nan
        else:
            lead = exponent > 0  # subnormals have no implicit one
            significand = lead + mantissa / (1 << self.mantissa_bits)
            value = math.ldexp(significand, max(exponent, 1) - self.bias)
        return -value if negative else value

    def encode(self, value: float) -> int:
        """Return the nearest code: ties to the even code, saturating, -0.0 keeps its sign.

        Raises:
            FormatError: NaN in a format that has none (`format.nan`).
        """
        sign = self.sign_bit if math.copysign(1.0, value) < 0 else 0
        if math.isnan(value):
            if self.nan_code is None:
                raise FormatError("NaN has no code in this format", code="format.nan")
            return sign | self.nan_code
        magnitude = min(abs(value), self.max)
        upper = max(bisect_left(self.magnitudes, magnitude), 1)
        middle = (self.magnitudes[upper - 1] + self.magnitudes[upper]) / 2
        goes_up = magnitude > middle or (magnitude == middle and upper % 2 == 0)
        return sign | (upper if goes_up else upper - 1)


@dataclass(frozen=True)
class IntCode:
    """Symmetric two's complement integer; the most negative code is read but never written."""

    bits: int

    @property
    def max(self) -> float:
        """Largest value."""
        return float((1 << (self.bits - 1)) - 1)

    def decode(self, code: int) -> float:
        """Return the value of a signed code."""
        return float(code)

    def encode(self, value: float) -> int:
        """Return the nearest signed code: ties to even, saturating at ±max.

        Raises:
            FormatError: NaN (`format.nan`).
        """
        if math.isnan(value):
            raise FormatError("NaN has no code in an integer format", code="format.nan")
        return round(min(max(value, -self.max), self.max))


@dataclass(frozen=True)
class PowerOfTwo:
    """Unsigned power of two, `2 ** (code - bias)`; the last code is NaN and there is no zero."""

    bits: int

    @property
    def bias(self) -> int:
        """Code of one."""
        return (1 << (self.bits - 1)) - 1

    @property
    def nan_code(self) -> int:
        """The NaN code."""
        return (1 << self.bits) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of code zero."""
        return -self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite code."""
        return self.nan_code - 1 - self.bias

    def decode(self, code: int) -> float:
        """Return the value of a code."""
        return math.nan if code == self.nan_code else math.ldexp(1.0, code - self.bias)


E4M3 = Minifloat(4, 3, bias=7, reserved=1)
E5M2 = Minifloat(5, 2, bias=15, reserved=4)
E2M1 = Minifloat(2, 1, bias=1)
E2M3 = Minifloat(2, 3, bias=1)
E3M2 = Minifloat(3, 2, bias=3)
INT8_CODE = IntCode(8)
E8M0 = PowerOfTwo(8)

_NVFP4_BLOCK, _MX_BLOCK = 16, 32
_SMALLEST_SCALE = float(np.finfo(np.float32).smallest_normal)


@dataclass(frozen=True)
class KVFormat:
    """A quantization format: the element code and the scales above it.

    Attributes:
        scale_divisor: `scale = amax / scale_divisor` per tensor or per head; None if the format
            has block scales only.
        scale_rounding: from block amax to a power-of-two scale. `floor` as the MX specification
            has it, `2 ** (floor(log2(amax)) - element.max_exponent)`, which saturates the top of
            some blocks; `ceil` as ModelOpt has it, `2 ** ceil(log2(amax / element.max))`.
    """

    name: str
    element: Minifloat | IntCode
    scale_divisor: float | None
    block_size: int | None = None
    block_scale: Minifloat | PowerOfTwo | None = None
    scale_rounding: Literal["floor", "ceil"] | None = None

    def __post_init__(self) -> None:
        assert (self.block_size is None) == (self.block_scale is None)
        assert (self.scale_rounding is None) != isinstance(self.block_scale, PowerOfTwo)

    @property
    def code_bits(self) -> int:
        """Width of one element code."""
        return self.element.bits

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value with the block scales; a tensor's own scale is not counted."""
        if self.block_size is None or self.block_scale is None:
            return float(self.code_bits)
        return self.code_bits + self.block_scale.bits / self.block_size

    @property
    def num_bits(self) -> int | tuple[int, int]:
        """The element as ModelOpt prints it: a width, or (exponent bits, mantissa bits)."""
        if isinstance(self.element, IntCode):
            return self.element.bits
        return (self.element.exponent_bits, self.element.mantissa_bits)

    @property
    def scale_bits(self) -> tuple[int, int] | None:
        """The block scale as ModelOpt prints it; None without blocks."""
        if isinstance(self.block_scale, Minifloat):
            return (self.block_scale.exponent_bits, self.block_scale.mantissa_bits)
        return None if self.block_scale is None else (self.block_scale.bits, 0)

    def scale(self, amax: float) -> float:
        """Return the float32 scale of an amax, by the rule in this module's docstring.

        Raises:
            FormatError: amax has no valid scale, or the format has block scales only
                (`format.no_tensor_scale`).
        """
        divisor = self._divisor()
        if not math.isfinite(amax) or not np.isfinite(_float32(amax)):
            raise FormatError(f"amax is {amax}", code="format.amax_nonfinite")
        if amax <= 0:
            raise FormatError(f"amax is {amax}, not above 0", code="format.amax_nonpositive")
        scale = float(_float32(amax) / divisor)
        if scale < _SMALLEST_SCALE:
            message = f"amax {amax} gives no normal float32 scale in `{self.name}`"
            raise FormatError(message, code="format.amax_tiny")
        return scale

    def amax(self, scale: float) -> float:
        """Return `scale * scale_divisor` in float32: the inverse of `scale` within 1 ulp."""
        with np.errstate(over="ignore"):
            return float(_float32(scale) * self._divisor())

    def _divisor(self) -> np.float32:
        if self.scale_divisor is None:
            text = f"`{self.name}` has block scales only, no tensor scale"
            raise FormatError(text, code="format.no_tensor_scale")
        return _float32(self.scale_divisor)


def _float32(value: float) -> np.float32:
    with np.errstate(over="ignore"):
        return np.float32(value)


def _mx(name: str, element: Minifloat) -> KVFormat:
    return KVFormat(name, element, None, _MX_BLOCK, E8M0, "floor")


FP8_E4M3 = KVFormat("fp8_e4m3", E4M3, E4M3.max)
FP8_E5M2 = KVFormat("fp8_e5m2", E5M2, E5M2.max)
INT8 = KVFormat("int8", INT8_CODE, INT8_CODE.max)
# KV scales on disk: engines expect the FP8 divisor, so block scales stay below E4M3.max / E2M1.max
NVFP4_KV = KVFormat("nvfp4", E2M1, E4M3.max, _NVFP4_BLOCK, E4M3)
# weights and ModelOpt's simulation: the whole range of the block scale is used
NVFP4 = KVFormat("nvfp4_weight", E2M1, E2M1.max * E4M3.max, _NVFP4_BLOCK, E4M3)
MXFP8 = _mx("mxfp8", E4M3)
MXFP6_E2M3 = _mx("mxfp6_e2m3", E2M3)
MXFP6_E3M2 = _mx("mxfp6_e3m2", E3M2)
MXFP4 = _mx("mxfp4", E2M1)

E4M3_FNUZ_MAX = 240.0  # AMD gfx942
_ALL = (FP8_E4M3, FP8_E5M2, INT8, NVFP4_KV, NVFP4, MXFP8, MXFP6_E2M3, MXFP6_E3M2, MXFP4)
FORMATS: Mapping[str, KVFormat] = MappingProxyType({fmt.name: fmt for fmt in _ALL})


def get_format(name: str) -> KVFormat:
    """Return a format by name.

    Raises:
        FormatError: unknown name (`format.unknown`); the message lists all names.
    """
    if name not in FORMATS:
        wanted = name.lower()
        begin = [known for known in FORMATS if wanted and known.startswith(wanted)]
        near = begin or get_close_matches(wanted, FORMATS, n=1)
        raise FormatError(
            f"unknown format `{name}`; known: {', '.join(FORMATS)}",
            code="format.unknown",
            hint=f"did you mean `{near[0]}`?" if near else None,
        )
    return FORMATS[name]
