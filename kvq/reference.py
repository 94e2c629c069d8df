"""Quantize and dequantize every format in plain torch: the truth other code is compared with.

The rules, for every format:

- Arithmetic is float32; `x / scale` is a division, `code * scale` one multiplication. A float64 `x`
  is rounded to float32 first.
- Rounding is to nearest, ties to the even code. Beyond ±max saturates, infinities included; every
  float8 cast is clamped first, since not every torch saturates.
- -0.0 keeps its sign in float codes. NaN stays NaN where the element has one (E4M3, E5M2); E2M1,
  E2M3, E3M2 and integers have none, and raise `format.nan`.
- A scale is finite, above zero and broadcasts to `x` without growing it (`format.scale`).
- Blocks lie along the last dimension, the last one may be short. NVFP4: the block scale is
  E4M3(block amax / E2M1.max / scale), saturating, and its effective scale `block_scale * scale`;
  where that is zero all codes are zero. MX: the block scale is the power of two that the format's
  `scale_rounding` names, clamped to the E8M0 range; a block of zeros gets the smallest. For a
  block's amax, NaN counts as zero and infinity as the largest float32.
"""

import math
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvq.errors import FormatError
from kvq.formats import E4M3, E5M2, FP8_E4M3, INT8, IntCode, KVFormat, Minifloat, PowerOfTwo

_FLOAT8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
_BYTE_BITS = torch.iinfo(torch.uint8).bits
_MODELOPT_EPSILON = 2.0**-24  # ModelOpt treats an amax up to this as absent


class Parity(Enum):
    """Whose arithmetic `quantize_dequantize` follows; all but EXACT know FP8 E4M3 and INT8 only.

    EXACT: this module's rules, the result in x's dtype.
    MODELOPT: its eager path. `x * multiplier` in float32, where FP8's multiplier is
        `(1 / amax) * divisor` and is undone by its reciprocal, and INT8's is `divisor / amax` and
        is divided out. INT8 clamps to -max - 1. An amax up to 2**-24 counts as 1 in FP8, and
        makes INT8 zero. The result has x's dtype.
    COMPRESSED_TENSORS: division in the promoted dtype of x and scale, multiplication in the
        scale's dtype, which the result has; INT8 clamps to -max - 1. A scalar scale counts as
        one of shape (1,), as that library stores it.
    """

    EXACT = "exact"
    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(frozen=True)
class Quantized:
    """Unpacked codes of x's shape and what dequantizes them.

    Attributes:
        codes: int8 for integers, else uint8 with the code in the low bits.
        block_scales: uint8 codes, one per block of the last dimension; None without blocks.
        scale: float32; None for formats with block scales only.
    """

    codes: Tensor
    block_scales: Tensor | None
    scale: Tensor | None


def quantize(x: Tensor, fmt: KVFormat, *, scale: Tensor | float | None) -> Quantized:
    """Return the codes of `x`; `scale` is None exactly for formats with block scales only.

    Raises:
        FormatError: `format.nan`, `format.scale`.
    """
    tensor_scale = _checked_scale(x, fmt, scale)
    if tensor_scale is not None:
        tensor_scale = tensor_scale.float()
    x = x.detach().float()
    _refuse_nan(x, fmt)
    if fmt.block_scale is None:
        return Quantized(_encode(x / tensor_scale, fmt.element), None, tensor_scale)
    block_scales = _block_scales(x, fmt, tensor_scale)
    effective = _effective(block_scales, fmt, tensor_scale, x.shape[-1])
    scaled = torch.where(effective == 0, 0.0, x / effective)
    return Quantized(_encode(scaled, fmt.element), block_scales, tensor_scale)


def dequantize(q: Quantized, fmt: KVFormat, dtype: torch.dtype) -> Tensor:
    """Return `codes * scale`, computed in float32 and cast to `dtype`."""
    values = _decode(q.codes, fmt.element)
    if q.block_scales is None:
        return (values * q.scale).to(dtype)
    return (values * _effective(q.block_scales, fmt, q.scale, q.codes.shape[-1])).to(dtype)


def quantize_dequantize(
    x: Tensor,
    fmt: KVFormat,
    *,
    scale: Tensor | float | None,
    parity: Parity = Parity.EXACT,
    amax: Tensor | float | None = None,
) -> Tensor:
    """Return what an engine would read back.

    Args:
        x: any floating dtype and shape.
        fmt: the format.
        scale: as in `quantize`.
        parity: whose arithmetic to follow.
        amax: for MODELOPT, the amax the scale was computed from. `scale * divisor` takes its
            place, and can be 1 ulp off, which moves values at rounding boundaries.

    Raises:
        FormatError: `format.nan`, `format.scale`, or `format.parity` if the other library has no
            such format.
    """
    if parity is Parity.EXACT:
        return dequantize(quantize(x, fmt, scale=scale), fmt, x.dtype)
    if fmt not in (FP8_E4M3, INT8):
        raise FormatError(f"`{fmt.name}` has no {parity.value} parity", code="format.parity")
    tensor_scale = _checked_scale(x, fmt, scale)
    assert tensor_scale is not None
    x = x.detach()
    _refuse_nan(x, fmt)
    if parity is Parity.COMPRESSED_TENSORS:
        tensor_scale = torch.atleast_1d(tensor_scale)  # a 0-dim one would not promote x
        rounded = _round_wide(x / tensor_scale, fmt.element)
        return (rounded.to(tensor_scale.dtype) * tensor_scale).reshape(x.shape)
    if amax is None:
        amax = tensor_scale.float() * fmt.scale_divisor
    amax = torch.as_tensor(amax, dtype=torch.float32, device=x.device)
    return _modelopt(x.float(), fmt, amax).to(x.dtype)


def pack(codes: Tensor, fmt: KVFormat) -> Tensor:
    """Pack codes along the last dimension into uint8, the first code in the lowest bits.

    4-bit codes go two to a byte, 6-bit codes four to three bytes; a ragged end is filled with
    zero codes.
    """
    per_group, group_bytes = _group(fmt)
    codes = codes.view(torch.uint8) if codes.dtype == torch.int8 else codes
    codes = F.pad(codes, (0, -codes.shape[-1] % per_group))
    groups = codes.unflatten(-1, (codes.shape[-1] // per_group, per_group)).int()
    words = (groups << _shifts(per_group, fmt.code_bits, codes)).sum(-1, dtype=torch.int32)
    parts = words.unsqueeze(-1) >> _shifts(group_bytes, _BYTE_BITS, codes)
    return (parts & _mask(_BYTE_BITS)).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, fmt: KVFormat, size: int) -> Tensor:
    """Return the first `size` codes of the last dimension; the inverse of `pack`.

    Raises:
        FormatError: `size` codes do not pack into this many bytes (`format.packed_size`).
    """
    per_group, group_bytes = _group(fmt)
    groups = math.ceil(size / per_group)
    if packed.shape[-1] != groups * group_bytes:
        raise FormatError(
            f"{size} codes of `{fmt.name}` pack into {groups * group_bytes} bytes, "
            f"found {packed.shape[-1]}",
            code="format.packed_size",
        )
    parts = packed.unflatten(-1, (groups, group_bytes)).int()
    words = (parts << _shifts(group_bytes, _BYTE_BITS, packed)).sum(-1, dtype=torch.int32)
    codes = words.unsqueeze(-1) >> _shifts(per_group, fmt.code_bits, packed)
    codes = (codes & _mask(fmt.code_bits)).to(torch.uint8).flatten(-2)[..., :size].contiguous()
    return codes.view(torch.int8) if isinstance(fmt.element, IntCode) else codes


def _checked_scale(x: Tensor, fmt: KVFormat, scale: Tensor | float | None) -> Tensor | None:
    if scale is None and fmt.scale_divisor is None:
        return None
    if scale is None or fmt.scale_divisor is None:
        raise FormatError(
            f"`{fmt.name}` takes {'no' if scale is not None else 'a'} tensor scale",
            code="format.scale",
        )
    tensor = (
        scale.detach() if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float32)
    )
    pairs = zip(reversed(tensor.shape), reversed(x.shape), strict=False)
    grows = tensor.dim() > x.dim() or any(size not in (1, wanted) for size, wanted in pairs)
    splits_blocks = fmt.block_size is not None and tensor.dim() > 0 and tensor.shape[-1] != 1
    if grows or splits_blocks:
        raise FormatError(
            f"a scale of shape {tuple(tensor.shape)} does not fit {tuple(x.shape)}",
            code="format.scale",
        )
    if not bool((tensor.isfinite() & (tensor > 0)).all()):
        raise FormatError("a scale is zero, negative or not finite", code="format.scale")
    return tensor.to(x.device)


def _refuse_nan(x: Tensor, fmt: KVFormat) -> None:
    has_nan = isinstance(fmt.element, Minifloat) and fmt.element.nan_code is not None
    if not has_nan and bool(x.isnan().any()):
        raise FormatError(f"NaN has no code in `{fmt.name}`", code="format.nan")


def _encode(values: Tensor, element: Minifloat | IntCode) -> Tensor:
    clamped = values.clamp(-element.max, element.max)
    if isinstance(element, IntCode):
        return clamped.round().to(torch.int8)
    if element in _FLOAT8:
        return clamped.to(_FLOAT8[element]).view(torch.uint8)
    boundaries = _boundaries(element).to(values.device)
    magnitudes = torch.bucketize(clamped.abs().contiguous(), boundaries, out_int32=True)
    return (magnitudes + clamped.signbit() * element.sign_bit).to(torch.uint8)


def _boundaries(element: Minifloat) -> Tensor:
    """Largest float32 that rounds to each code but the last."""
    values = torch.tensor(element.magnitudes, dtype=torch.float32)
    middles = (values[:-1] + values[1:]) / 2
    tie_goes_up = torch.arange(len(middles)) % 2 == 1
    return torch.where(tie_goes_up, middles.nextafter(torch.zeros_like(middles)), middles)


def _decode(codes: Tensor, element: Minifloat | IntCode | PowerOfTwo) -> Tensor:
    if isinstance(element, IntCode):
        return codes.float()
    values = [element.decode(code) for code in range(1 << element.bits)]
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.int()]


def _block_scales(x: Tensor, fmt: KVFormat, scale: Tensor | None) -> Tensor:
    assert fmt.block_size is not None
    magnitudes = F.pad(x.abs().nan_to_num(nan=0.0), (0, -x.shape[-1] % fmt.block_size))
    blocks = magnitudes.unflatten(-1, (magnitudes.shape[-1] // fmt.block_size, fmt.block_size))
    amax = blocks.amax(-1)
    if isinstance(fmt.block_scale, PowerOfTwo):
        return _power_of_two(amax, fmt, fmt.block_scale)
    assert isinstance(fmt.block_scale, Minifloat)
    # a tensor divisor: CUDA replaces division by a number with its reciprocal
    return _encode(amax / torch.full_like(amax, fmt.element.max) / scale, fmt.block_scale)


def _power_of_two(amax: Tensor, fmt: KVFormat, code: PowerOfTwo) -> Tensor:
    assert isinstance(fmt.element, Minifloat)
    # compared by mantissa: a quotient amax / max could underflow or round
    mantissa, exponent = amax.frexp()  # mantissa in [0.5, 1)
    exponent = exponent - 1 - fmt.element.max_exponent
    if fmt.scale_rounding == "ceil":
        exponent = exponent + (mantissa > math.frexp(fmt.element.max)[0]).int()
    exponent = torch.where(amax == 0, code.min_exponent, exponent)
    return (exponent.clamp(code.min_exponent, code.max_exponent) + code.bias).to(torch.uint8)


def _effective(block_scales: Tensor, fmt: KVFormat, scale: Tensor | None, size: int) -> Tensor:
    assert fmt.block_size is not None
    assert fmt.block_scale is not None
    effective = _decode(block_scales, fmt.block_scale)
    if scale is not None:
        effective = effective * scale
    return effective.repeat_interleave(fmt.block_size, -1)[..., :size]


def _round_wide(values: Tensor, element: Minifloat | IntCode) -> Tensor:
    """Round to element values in the dtype of `values`; integers down to -max - 1."""
    if isinstance(element, IntCode):
        return values.clamp(-element.max - 1, element.max).round()
    return values.clamp(-element.max, element.max).to(_FLOAT8[element]).to(values.dtype)


def _modelopt(x: Tensor, fmt: KVFormat, amax: Tensor) -> Tensor:
    absent = amax <= _MODELOPT_EPSILON
    amax = torch.where(absent, 1.0, amax)
    if isinstance(fmt.element, IntCode):
        multiplier = torch.full_like(amax, fmt.element.max) / amax
        return torch.where(absent, 0.0, _round_wide(x * multiplier, fmt.element) / multiplier)
    multiplier = amax.reciprocal() * fmt.element.max  # what torch makes of `number / amax`
    return _round_wide(x * multiplier, fmt.element) * multiplier.reciprocal()


def _group(fmt: KVFormat) -> tuple[int, int]:
    """Codes and bytes of the smallest group that fills whole bytes."""
    bits = math.lcm(fmt.code_bits, _BYTE_BITS)
    return bits // fmt.code_bits, bits // _BYTE_BITS


def _shifts(count: int, bits: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device) * bits


def _mask(bits: int) -> int:
    return (1 << bits) - 1
