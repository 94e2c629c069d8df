"""What a wrong scale looks like: the other ways in which tools have turned amax into a number."""

from collections.abc import Sequence

import numpy as np

from kvq.formats import E2M1, E4M3, E4M3_FNUZ_MAX, FP8_E5M2, INT8, NVFP4

_NEAR = 0.02  # 16-bit rounding of a scale is far below, and no two ratios are that near

# found = amax / divisor; divisor → whose convention that is
_DIVISORS = {
    1.0: "amax itself, not divided",
    E2M1.max: f"amax / {E2M1.max:g}, a convention of FP4 blocks",
    INT8.scale_divisor: f"amax / {INT8.scale_divisor:g}, for INT8",
    E4M3_FNUZ_MAX: f"amax / {E4M3_FNUZ_MAX:g}, for E4M3 fnuz",
    E4M3.max: f"amax / {E4M3.max:g}, for FP8 E4M3",
    NVFP4.scale_divisor: f"amax / {NVFP4.scale_divisor:g}, for NVFP4 weights",
    FP8_E5M2.scale_divisor: f"amax / {FP8_E5M2.scale_divisor:g}, for E5M2",
}


def explain(found: Sequence[float], amax: Sequence[float], divisor: float) -> str | None:
    """Return in words which convention gives `found` from `amax` instead of `amax / divisor`.

    None where it is no known one, or the numbers disagree among themselves.
    """
    values, maxima = np.array(found, np.float64), np.array(amax, np.float64)
    if len(values) != len(maxima) or not (values > 0).all() or not (maxima > 0).all():
        return None
    for other, words in _DIVISORS.items():
        if other is None or other == divisor:
            continue
        if _all_near(values * other, maxima):
            return f"it is {words}"
    for other, words in _DIVISORS.items():
        if other is not None and _all_near(values * maxima, np.full(len(values), other)):
            return f"it is inverted: 1 / ({words.partition(',')[0]})"
    return None


def _all_near(first: np.ndarray, second: np.ndarray) -> bool:
    return bool((np.abs(first - second) <= _NEAR * second).all())
