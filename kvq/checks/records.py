"""Rules about what kvq recorded beside the scales, and what stands beside the checkpoint."""

from collections.abc import Iterator

import numpy as np

from kvq.checkpoint import weight_fingerprint
from kvq.checks.context import Context, file_of, rule
from kvq.checks.conventions import explain
from kvq.checks.findings import Finding, shortened
from kvq.checks.recorded import recorded_amax, status_of
from kvq.dialects.sglang_json import FILE_NAME, is_sglang_json, read_sglang_json
from kvq.errors import KvqError
from kvq.files import read_json
from kvq.formats import get_format

_NONE = np.zeros(0)


@rule()
def recorded_scales_are_there(context: Context) -> Iterator[Finding]:
    """A scale of the query that was written is still there: without one, engines use 1.0."""
    provenance = context.provenance
    layers = {layer.attention: layer.layer_idx for layer in context.geometry.layers}
    for attention, sides in sorted((provenance.status if provenance else {}).items()):
        if "q" in sides and (attention, "q") not in context.by_side and attention in layers:
            yield Finding(
                "provenance.lost", "error",
                "there was a q scale when this was exported: attention that quantizes queries uses "
                "1.0 now",
                layers[attention], context.name(attention, "q"), expected="a scale tensor",
                found="none", fix="`kvq export` again, from the calibration",
            )  # fmt: skip


@rule()
def scales_json_is_valid(context: Context) -> Iterator[Finding]:
    """A file for SGLang's option that SGLang refuses leaves every scale at 1.0, and it serves on.

    Source: SGLang 0.5.23 `model_executor/model_runner.py`, load_kv_cache_scales.
    """
    path = context.view.root / FILE_NAME
    if not path.is_file():
        return
    try:
        if not is_sglang_json(read_json(path)):
            words = f"`{FILE_NAME}` has no `kv_cache.scaling_factor`"
        else:
            read_sglang_json(path, context.view.config, context.geometry)
            return
    except KvqError as error:
        words = str(error)
    yield Finding(
        "files.scales_json", "error", f"{words}: SGLang says so and uses 1.0 everywhere",
        file=FILE_NAME, expected="every layer, this model's type", found="another",
        fix="`kvq export --dialect sglang-json` writes it anew",
    )  # fmt: skip


@rule()
def follows_from_recorded_amax(context: Context) -> Iterator[Finding]:
    """Each scale is the one that the recorded amax gives: not inverted, swapped, lost or moved."""
    if context.provenance is None:
        return
    for scale in context.scales:
        found = [float(v) for v in context.values.get(scale.tensor, _NONE).ravel()]
        amax = recorded_amax(context, scale, len(found))
        if amax is None and status_of(context, scale) in ("unknown", "user"):
            continue  # from a file without a record: rules of plausibility are asked instead
        expected = None if amax is None else _stored(context, amax)
        if expected != found:
            yield Finding(
                "provenance.scale", "error",
                f"`{scale.tensor}` does not follow from its amax{_why(context, found, amax)}",
                scale.layer_idx, scale.tensor, file_of(context, scale.tensor),
                shortened(expected), shortened(found),
                fix="`kvq export` again, from the calibration",
            )  # fmt: skip


def _stored(context: Context, amax: list[float]) -> list[float]:
    assert context.provenance is not None
    number_format = get_format(context.provenance.format)
    exact = np.array([number_format.scale(value) for value in amax], np.float32)
    return [float(value) for value in context.dialect.stored(exact, context.view)]


def _why(context: Context, found: list[float], amax: list[float] | None) -> str:
    assert context.provenance is not None
    divisor = get_format(context.provenance.format).scale_divisor
    words = explain(found, amax, divisor) if amax and divisor else None
    return f": {words}" if words else ""


@rule()
def weights_unchanged(context: Context) -> Iterator[Finding]:
    """The weights are those that were calibrated, if the provenance says which."""
    expected = None if context.provenance is None else context.provenance.weights
    if context.provenance is None or expected is None:
        return
    provenance = context.provenance
    found = weight_fingerprint(context.view)
    if found != expected:
        yield Finding(
            "provenance.weights", "error", "the scales were calibrated on other weights",
            expected=expected, found=found, fix="calibrate this checkpoint, then `kvq export`",
        )  # fmt: skip
    elif provenance.exported_onto:
        yield Finding(
            "provenance.other_weights", "warning",
            "the scales were observed on other weights, and written here by request",
            expected=found, found=provenance.weight_fingerprint,
            fix="calibrate this checkpoint itself, where transformers runs it",
        )  # fmt: skip
