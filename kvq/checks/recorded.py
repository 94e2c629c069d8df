"""Which scales have a record of what they were made from."""

from kvq.checks.context import Context
from kvq.dialects.spellings import FoundScale
from kvq.formats import FP8_E4M3


def status_of(context: Context, scale: FoundScale) -> str | None:
    """Return where a scale comes from in the provenance's word, None if nothing says."""
    if context.provenance is None:
        return None
    return context.provenance.status.get(scale.attention, {}).get(scale.side)


def recorded_amax(context: Context, scale: FoundScale, count: int) -> list[float] | None:
    """Return the amax that a scale of `count` values covers, margin included; None if unknown.

    A constant by request needs no observation.
    """
    provenance, status = context.provenance, status_of(context, scale)
    if provenance is None or status is None:
        return None
    if status == "constant":
        return [FP8_E4M3.element.max] * count
    amax = provenance.observed(scale.attention, scale.side)
    if not amax:
        return None
    values = amax if provenance.granularity == "head" else [max(amax)]
    return [value * provenance.margin for value in values]


def vouched(context: Context, scale: FoundScale) -> bool:
    """Whether an amax is recorded for this scale, so that the number itself can be compared."""
    return recorded_amax(context, scale, 1) is not None
