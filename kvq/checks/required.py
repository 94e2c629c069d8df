"""What `verify --require` asks to be there at all."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvq.checks.context import Context
from kvq.checks.findings import Finding
from kvq.checks.recorded import status_of, vouched


def _kv_scales(context: Context) -> Iterator[Finding]:
    if not any(scale.side in ("k", "v") for scale in context.scales):
        yield Finding(
            "require.kv_scales", "error",
            "the checkpoint has no KV scales: a quantized cache would run at scale 1.0 in all "
            f"{len(context.geometry.layers)} layers{context.elsewhere}",
            expected="scales of keys and values", found="none",
            fix="`kvq calibrate` the model, then `kvq export`",
        )  # fmt: skip


def _provenance(context: Context) -> Iterator[Finding]:
    fix = "`kvq export` with the model's calibration"
    if context.provenance is None:
        yield Finding(
            "require.provenance", "error",
            "nothing says where the scales come from: a deliberate 1.0 looks like a lost one, and "
            "scales of other weights like its own",
            expected="the metadata of `kvq export`", found="none", fix=fix,
        )  # fmt: skip
        return
    bare = [scale for scale in context.scales if not vouched(context, scale)]
    if bare:
        yield Finding(
            "require.provenance", "error",
            f"of {len(bare)} of {len(context.scales)} scales, e.g. `{bare[0].tensor}`, no amax is "
            "recorded: kvq wrote them, but did not make them from a calibration",
            expected="an amax for every scale, or a constant by request",
            found=status_of(context, bare[0]) or "none", fix=fix,
        )  # fmt: skip


REQUIREMENTS: Mapping[str, Callable[[Context], Iterator[Finding]]] = {
    "kv-scales": _kv_scales,
    "provenance": _provenance,
}


def required_findings(names: Sequence[str], context: Context) -> list[Finding]:
    """Return what is not there of what is asked for."""
    return [finding for name in dict.fromkeys(names) for finding in REQUIREMENTS[name](context)]
