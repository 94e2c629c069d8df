"""Rules for scales of unknown origin: what does not look like amax divided by 448.

Where kvq recorded the amax of a scale, that is compared instead, and nothing here is asked of it.
"""

from collections.abc import Iterator

import numpy as np

from kvq.checks.context import Context, file_of, rule
from kvq.checks.findings import Finding
from kvq.checks.recorded import vouched
from kvq.checks.scales import LARGEST
from kvq.dialects.spellings import FoundScale
from kvq.formats import E4M3

# amax of keys and values is some 0.1 to 1000: beyond, most layers of no known model are.
INVERTED, LARGE, SMALL = 20.0, 1.0, 1e-4
_TINY = float(np.finfo(np.float16).smallest_normal)


@rule()
def most_layers_are_plausible(context: Context) -> Iterator[Finding]:
    """Most layers' scales are neither so large nor so small that they must be something else."""
    for side in ("k", "v"):
        arrays = [context.values.get(scale.tensor, _NONE).astype(np.float64)
                  for scale in _unrecorded(context) if scale.side == side]  # fmt: skip
        found = np.array([np.abs(array).max() for array in arrays if array.size])
        if not len(found) or not np.isfinite(found).all():
            continue
        middle = float(np.median(found))
        for severity, wrong, words in (
            ("error", found > INVERTED, "it looks inverted, or like amax itself, not divided"),
            ("warning", found > LARGE, "it may be amax itself, not divided"),
            ("warning", (found < SMALL) & (found > 0),
             "it may be divided by the largest number of another format, e.g. E5M2"),
        ):  # fmt: skip
            if wrong.mean() > 0.5:
                yield Finding(
                    "scale.implausible", severity,
                    f"{int(wrong.sum())} of {len(found)} {side} scales stand for an amax of about "
                    f"{middle * E4M3.max:.3g}: {words}",
                    expected=f"{SMALL:g} to {LARGE:g}", found=f"{middle:g} in the middle",
                    fix="`kvq verify --against` a calibration says which; then `kvq export` it",
                )  # fmt: skip
                break


_NONE = np.zeros(0)


def _unrecorded(context: Context) -> list[FoundScale]:
    return [scale for scale in context.scales if not vouched(context, scale)]


@rule()
def few_layers_are_outliers(context: Context) -> Iterator[Finding]:
    """A scale above 1 stands for an amax above 448, which few layers of few models have."""
    for side in ("k", "v"):
        above = []
        scales = [scale for scale in _unrecorded(context) if scale.side == side]
        for scale in scales:
            values = context.values.get(scale.tensor, _NONE).astype(np.float64)
            if values.size and LARGE < values.max() <= LARGEST:
                above.append((scale, float(values.max())))
        for scale, value in above if len(above) * 2 <= len(scales) else ():
            yield Finding(
                "scale.outlier", "warning",
                f"`{scale.tensor}` stands for an amax of {value * E4M3.max:.4g}",
                scale.layer_idx, scale.tensor, file_of(context, scale.tensor),
                f"up to {LARGE:g}", repr(value),
                fix=f"serve with --kv-cache-dtype-skip-layers {scale.layer_idx} if it is one",
            )  # fmt: skip


@rule()
def precision_is_kept(context: Context) -> Iterator[Finding]:
    """A scale in 16 bits is one that was rounded, and in subnormals of F16 coarsely.

    Where an engine holds scales in the model's dtype anyway, only the latter counts.
    """
    exact = context.dialect.name == "compressed-tensors"
    for scale in _unrecorded(context):
        info = context.view.tensors[scale.tensor]
        values = context.values.get(scale.tensor, _NONE).astype(np.float64)
        subnormal = info.dtype == "F16" and bool(((values > 0) & (values < _TINY)).any())
        if subnormal or (exact and info.dtype in ("F16", "BF16")):
            words = "below the normal numbers of F16: few digits are left" if subnormal else (
                "rounded to 16 bits")  # fmt: skip
            yield Finding(
                "scale.precision", "warning", f"`{scale.tensor}` is {info.dtype}, {words}",
                scale.layer_idx, scale.tensor, info.path.name, "F32", info.dtype,
                fix="`kvq export` with the model's calibration writes F32",
            )  # fmt: skip


@rule(spelling=True)
def stored_as_read(context: Context) -> Iterator[Finding]:
    """A value is one that the dialect's reader holds: vLLM rounds ModelOpt's to the model dtype."""
    for scale in context.scales:
        values = context.values.get(scale.tensor, _NONE).ravel()
        if not values.size or not all(0 < value < LARGEST for value in values.tolist()):
            continue
        exact = values.astype(np.float32)
        stored = context.dialect.stored(exact, context.view)
        if not np.array_equal(exact, stored):
            yield Finding(
                "scale.rounded", "warning",
                f"`{scale.tensor}` is no number of the model's dtype, in which vLLM holds it",
                scale.layer_idx, scale.tensor, file_of(context, scale.tensor),
                str(stored.tolist()), str(exact.tolist()),
                fix="`kvq export` rounds up to one that it has; --dialect compressed-tensors "
                "keeps float32",
            )  # fmt: skip
