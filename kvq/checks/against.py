"""The rule of --against: the same scales as a reference, value by value."""

import math
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from kvq.checks.context import Context, file_of, rule
from kvq.checks.conventions import explain
from kvq.checks.findings import Finding, shortened
from kvq.errors import DialectError
from kvq.formats import get_format


@rule()
def matches_reference(context: Context) -> Iterator[Finding]:
    """With --against: the same scales, value by value, within rtol."""
    if context.reference is None:
        return
    for name in context.strangers:
        yield Finding(
            "reference.differs", "error", f"`{name}` of the reference is no scale of this model",
            tensor=name, expected="a scale of one of its layers", found="none",
            fix="compare with a reference of this model, or take the name out of it",
        )  # fmt: skip
    layers = {layer.attention: layer.layer_idx for layer in context.geometry.layers}
    for attention, side in sorted(context.reference.keys() | context.by_side.keys()):
        expected = context.reference.get((attention, side))
        scale = context.by_side.get((attention, side))
        found = None if scale is None else context.values.get(scale.tensor)
        have = None if found is None else [float(v) for v in found.ravel()]
        if expected is None or have is None or not _agrees(context, have, expected):
            tensor = context.name(attention, side) if scale is None else scale.tensor
            words = _against(context, have, expected)
            yield Finding(
                "reference.differs", "error",
                f"`{tensor}` differs from the reference{words}", layers.get(attention), tensor,
                None if scale is None else file_of(context, tensor),
                shortened(expected), shortened(have),
                fix="`kvq export` with the reference as --scales",
            )  # fmt: skip


def _against(context: Context, found: list[float] | None, expected: list[float] | None) -> str:
    divisor = get_format(context.dialect.declared(context.view).format or "fp8_e4m3").scale_divisor
    if not found or not expected or not divisor:
        return ""
    words = explain(found, [value * divisor for value in expected], divisor)
    return f": {words}" if words else ""


def _agrees(context: Context, found: list[float], expected: list[float]) -> bool:
    """Whether scales are the expected ones, as float32, or as the dialect stores them.

    ModelOpt itself stores float32; kvq rounds up to what a reader of its dialect holds.
    """
    single = np.array(expected, np.float32)
    forms = [expected, single.astype(np.float64).tolist()]
    if all(0 < value < math.inf for value in single.tolist()):
        with suppress(DialectError):  # above the largest that the dialect holds
            forms.append(context.dialect.stored(single, context.view).astype(np.float64).tolist())
    return any(_close(found, form, context.rtol) for form in forms)


def _close(found: list[float], expected: list[float], rtol: float) -> bool:
    pairs = zip(found, expected, strict=False)
    return len(found) == len(expected) and all(abs(a - b) <= rtol * abs(b) for a, b in pairs)
