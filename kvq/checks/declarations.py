"""Rules about one config that says two things."""

from collections.abc import Iterator
from typing import Any

from kvq.checks.context import Context, rule
from kvq.checks.findings import Finding

_KINDS = {("float", 8): "FP8", ("float", 4): "NVFP4", ("int", 8): "INT8"}


@rule()
def one_cache_is_declared(context: Context) -> Iterator[Finding]:
    """`kv_cache_scheme` and `kv_cache_quant_algo` name the same number format, if both are there.

    TensorRT-LLM refuses two that differ, and other readers each follow one of them.
    """
    config = context.view.quantization_config or {}
    inner = config.get("quantization")
    places = {"": config, "quantization.": inner if isinstance(inner, dict) else {}}
    named = {
        f"{prefix}{key}": algorithm
        for prefix, place in places.items()
        for key in ("kv_cache_scheme", "kv_cache_quant_algo")
        if (algorithm := _algorithm(place.get(key))) is not None
    }
    if len(set(named.values())) > 1:
        words = " and ".join(f"`{key}` says {algorithm}" for key, algorithm in named.items())
        yield Finding(
            "config.disagree", "error", f"{words}: readers refuse it, or follow one of them",
            file="config.json", expected="one number format",
            found=", ".join(named.values()), fix="keep the one that the scales were made for",
        )  # fmt: skip


def _algorithm(declared: Any) -> str | None:
    if isinstance(declared, str):
        return declared.upper()
    if isinstance(declared, dict):
        kind, bits = str(declared.get("type")), declared.get("num_bits")
        return next((x for known, x in _KINDS.items() if known == (kind, bits)), f"{kind}{bits}")
    return None
