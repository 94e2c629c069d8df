"""Rules about what config.json declares."""

from collections.abc import Iterator
from typing import Any

from kvq.checks.context import Context, kv_cache_scheme, rule
from kvq.checks.findings import Finding


@rule
def config_declares_scales(context: Context) -> Iterator[Finding]:
    """The configuration declares a static symmetric FP8 cache exactly when scales exist."""
    config, scheme = context.view.quantization_config, kv_cache_scheme(context)
    if context.scales and config is None:
        yield Finding(
            "config.missing", "error",
            "scales exist, but config.json has no `quantization_config`: vLLM fails to load",
            file="config.json", expected="quantization_config", found="none",
        )  # fmt: skip
        return
    if context.scales and not scheme:
        yield Finding(
            "config.no_scheme", "error",
            "scales exist, but no `kv_cache_scheme` declares them: the cache stays unquantized",
            file="config.json", expected="kv_cache_scheme", found="none",
        )  # fmt: skip
    if scheme and not context.scales:
        yield Finding(
            "config.no_scales", "error",
            "`kv_cache_scheme` declares a quantized cache, but no scale exists: all layers use 1.0",
            file="config.json", expected="scale tensors", found="none",
        )  # fmt: skip
    if scheme:
        yield from _scheme_findings(config or {}, scheme)


def _scheme_findings(config: Any, scheme: dict[str, Any]) -> Iterator[Finding]:
    wanted = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    for key, expected in wanted.items():
        if scheme.get(key) != expected:
            yield Finding(
                "config.scheme", "error", f"`kv_cache_scheme.{key}` is not what engines accept",
                file="config.json", expected=repr(expected), found=repr(scheme.get(key)),
            )  # fmt: skip
    if scheme.get("strategy") not in ("tensor", "attn_head"):
        yield Finding(
            "config.strategy", "error", "`kv_cache_scheme.strategy` is not what engines accept",
            file="config.json", expected="`tensor` or `attn_head`",
            found=repr(scheme.get("strategy")),
        )  # fmt: skip
    if config.get("quant_method") != "compressed-tensors":
        yield Finding(
            "config.quant_method", "error", "the scales' names belong to compressed-tensors",
            file="config.json", expected="compressed-tensors",
            found=repr(config.get("quant_method")),
        )  # fmt: skip
    if "config_groups" not in config:
        yield Finding(
            "config.groups", "error", "vLLM and transformers need `config_groups`, even if empty",
            file="config.json", expected="{}", found="none",
        )  # fmt: skip
