"""Options that simulate quantized P and V in decode attention."""

from dataclasses import dataclass
from typing import Literal

from kvq.errors import InputError
from kvq.formats import FP8_E4M3, NVFP4, KVFormat

PFormat = Literal["fp8_e4m3", "nvfp4"]
VFormat = Literal["nvfp4"]
P_FORMATS: dict[str, KVFormat] = {"fp8_e4m3": FP8_E4M3, "nvfp4": NVFP4}
V_FORMATS: dict[str, KVFormat] = {"nvfp4": NVFP4}


@dataclass(frozen=True)
class Simulation:
    """Round P, V or both to a number format before they are multiplied, over 16-bit pages.

    The arithmetic is that of ModelOpt 0.47 (`torch/kernels/common/attention/decode_attention.py`).
    P is `exp(logit - maximum)`, not normalized and so from 0 to 1. It is rounded to the cache's
    dtype, then quantized and dequantized; the sum that divides the output adds P as it was before
    either. FP8 has one scale, `amax / E4M3.max`. NVFP4 has E4M3 scales of blocks of 16, over a
    scale of `amax / (E2M1.max * E4M3.max)`. Its blocks lie along tokens, for V too, since the
    product sums over tokens; they begin at positions that are multiples of 16. Tokens past the end
    or before the window count as zeros of their block. What is beyond `amax` saturates.

    Two things differ. The maximum is the row's, over all attended tokens but not the sink, where
    ModelOpt takes that of the tiles its split has seen: here neither the number of splits nor the
    tile moves a rounding. And a NaN in V makes its block NaN, where ModelOpt takes 1 as its scale.

    Attributes:
        p: format of P, `fp8_e4m3` or `nvfp4`; None to round it to the cache's dtype only.
        v: format of V, `nvfp4`; None to take it as it is.
        p_amax: what P's scale is computed from; None for 1, the largest P.
        v_amax: what V's scale is computed from; None for a scale of 1.

    Raises:
        InputError: nothing is simulated, or an option changes nothing (`kernel.simulation`).
        FormatError: an amax has no valid scale (`format.amax_*`).
    """

    p: PFormat | None = None
    v: VFormat | None = None
    p_amax: float | None = None
    v_amax: float | None = None

    def __post_init__(self) -> None:
        if self.p is None and self.v is None:
            raise InputError("neither P nor V has a format: nothing to simulate", code=_CODE)
        for name, known in (("p", P_FORMATS), ("v", V_FORMATS)):
            fmt, amax = getattr(self, name), getattr(self, f"{name}_amax")
            if fmt is not None and fmt not in known:
                raise InputError(
                    f"{name.upper()} cannot be simulated as `{fmt}`; known: {', '.join(known)}",
                    code=_CODE,
                )
            if fmt is None and amax is not None:
                raise InputError(f"{name}_amax is {amax}, but {name} has no format", code=_CODE)
        _ = self.p_scale, self.v_scale

    @property
    def p_scale(self) -> float:
        """Scale of P, float32; 1 if P has no format."""
        return (
            1.0
            if self.p is None
            else P_FORMATS[self.p].scale(1.0 if self.p_amax is None else self.p_amax)
        )

    @property
    def v_scale(self) -> float:
        """Scale of V, float32; 1 if V has no format or no amax."""
        if self.v is None or self.v_amax is None:
            return 1.0
        return V_FORMATS[self.v].scale(self.v_amax)


_CODE = "kernel.simulation"
