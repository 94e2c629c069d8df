"""Rules about what config.json declares."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvq.checks.context import Context, rule
from kvq.checks.findings import Finding

_FIX = (
    '`kv_cache_scheme`: {"dynamic": false, "num_bits": 8, "strategy": "tensor", '
    '"symmetric": true, "type": "float"}'
)


@rule(spelling=True)
def method_reads_scales(context: Context) -> Iterator[Finding]:
    """The method that quantized the weights has a place for scales of attention, and is told."""
    config = context.view.quantization_config or {}
    method = config.get("quant_method")
    if method is None or context.dialect.name == "modelopt" or not context.scales:
        return
    if method == "fp8" and "kv_cache_scheme" not in config:
        yield Finding(
            "config.undeclared", "warning",
            "the method fp8 cannot declare a quantized cache: without its option an engine keeps "
            "bf16",
            file="config.json", expected="a declared cache", found="none",
            fix="serve with --kv-cache-dtype fp8",
        )  # fmt: skip
    elif method not in ("compressed-tensors", "compressed_tensors"):
        yield Finding(
            "config.quant_method", "error",
            f"no engine reads scales and a cache scheme beside the method `{method}`",
            file="config.json", expected="compressed-tensors, or one of ModelOpt's",
            found=repr(method),
            fix="`kvq export` onto the unquantized model, or one of compressed-tensors or ModelOpt",
        )  # fmt: skip
    elif method != "compressed-tensors":
        yield Finding(
            "config.quant_method", "error",
            f"vLLM takes the method `{method}`; SGLang refuses it, and transformers ignores it",
            file="config.json", expected="compressed-tensors", found=repr(method),
            fix="spell it `compressed-tensors`",
        )  # fmt: skip


@rule(dialect="compressed-tensors", spelling=True)
def config_declares_scales(context: Context) -> Iterator[Finding]:
    """The configuration declares a static symmetric FP8 cache exactly when scales exist."""
    config, scheme = context.view.quantization_config, context.view.kv_cache_scheme
    if context.scales and config is None:
        yield Finding(
            "config.missing", "error",
            "scales exist, but config.json has no `quantization_config`: vLLM fails to load",
            file="config.json", expected="quantization_config", found="none",
            fix="`kvq export` again, or restore the `quantization_config` that it wrote",
        )  # fmt: skip
        return
    if context.scales and not scheme:
        yield Finding(
            "config.no_scheme", "error",
            "scales exist, but no `kv_cache_scheme` declares them: the cache stays unquantized",
            file="config.json", expected="kv_cache_scheme", found="none", fix=_FIX,
        )  # fmt: skip
    if scheme and not context.scales:
        yield Finding(
            "config.no_scales", "error",
            "`kv_cache_scheme` declares a quantized cache, but no scale exists: all layers use 1.0",
            file="config.json", expected="scale tensors", found="none",
            fix="`kvq export` with the model's calibration",
        )  # fmt: skip
    if scheme:
        int8 = context.provenance is not None and context.provenance.format == "int8"
        yield from _scheme_findings(config or {}, scheme, int8=int8)


def _scheme_findings(
    config: Mapping[str, Any], scheme: Mapping[str, Any], *, int8: bool
) -> Iterator[Finding]:
    wanted = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    if int8 and (scheme.get("type"), scheme.get("num_bits")) == ("int", 8):
        yield Finding(
            "config.int8", "warning", "the cache is INT8: transformers alone runs it so",
            file="config.json", expected="float", found="int",
            fix="serve with transformers, or `kvq export --kv-cfg FP8_KV_CFG` for other engines",
        )  # fmt: skip
        del wanted["type"]
    for key, expected in wanted.items():
        absent = False if key == "dynamic" else None  # its default is what engines want
        if scheme.get(key, absent) != expected:
            yield Finding(
                "config.scheme", "error", f"`kv_cache_scheme.{key}` is not what engines accept",
                file="config.json", expected=repr(expected), found=repr(scheme.get(key)),
                fix=f"`{key}`: {json.dumps(expected)} in `kv_cache_scheme`",
            )  # fmt: skip
    if scheme.get("strategy") not in ("tensor", "attn_head"):
        yield Finding(
            "config.strategy", "error", "`kv_cache_scheme.strategy` is not what engines accept",
            file="config.json", expected="`tensor` or `attn_head`",
            found=repr(scheme.get("strategy")), fix="`strategy`: tensor, for one scale per layer",
        )  # fmt: skip
    if config.get("quant_method") is None:
        yield Finding(
            "config.quant_method", "error", "`quant_method` is missing: engines fail to load",
            file="config.json", expected="compressed-tensors", found="none",
            fix="`quant_method`: compressed-tensors",
        )  # fmt: skip
    groups = config.get("config_groups")
    if "config_groups" not in config:
        per_head = scheme.get("strategy") == "attn_head"
        yield Finding(
            "config.groups", "error" if per_head else "warning",
            "`config_groups` is absent: transformers, and vLLM for per-head scales, need it",
            file="config.json", expected="{}", found="none", fix="`config_groups`: {}",
        )  # fmt: skip
    elif not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        yield Finding(
            "config.groups", "error", "`config_groups` is not an object of objects",
            file="config.json", expected="{}", found=repr(groups), fix="`config_groups`: {}",
        )  # fmt: skip
    else:
        yield from _group_findings(groups)


def _group_findings(groups: dict[str, Any]) -> Iterator[Finding]:
    """A group for an attention class is skipped by vLLM; any other needs targets and weights."""
    for name, group in sorted(groups.items()):
        targets = group.get("targets")
        targets = [str(target) for target in targets] if isinstance(targets, list) else []
        attention = len(targets) == 1 and targets[0].endswith("Attention")
        if not attention and not (targets and group.get("weights")):
            yield Finding(
                "config.group", "error",
                f"group `{name}` has no weights and does not target one attention class: vLLM "
                "fails to parse it",
                file="config.json", expected="`targets` and `weights`", found=repr(group),
                fix="take the group out: `kv_cache_scheme` alone declares the cache",
            )  # fmt: skip


@rule()
def groups_of_attention_say_the_same(context: Context) -> Iterator[Finding]:
    """A group for attention is no scheme of its own: vLLM skips it, with a warning.

    Source: vLLM 0.32 `compressed_tensors.py`, from_config.
    """
    scheme = context.view.kv_cache_scheme
    for name, group in sorted(context.view.config_groups.items()):
        own = group.get("input_activations")
        if group.get("weights") or not isinstance(own, dict):
            continue
        wanted = {key: scheme.get(key) for key in ("num_bits", "type", "strategy", "symmetric")}
        if wanted != {key: own.get(key) for key in wanted}:
            yield Finding(
                "config.attention_group", "error",
                f"the group `{name}` quantizes attention otherwise than `kv_cache_scheme`, which "
                "alone vLLM follows",
                file="config.json", expected=repr(wanted), found=repr(own),
                fix="declare the same in both: no engine has a scheme for some layers alone",
            )  # fmt: skip


@rule(spelling=True)
def declared_in_one_place(context: Context) -> Iterator[Finding]:
    """What stands both at the top of config.json and in `text_config` is the same."""
    text = context.view.config.get("text_config")
    places = [(context.view.config, "quantization_config"),
              (text if isinstance(text, dict) else {}, "quantization_config"),
              (context.view.config, "compression_config")]  # fmt: skip
    found = [place[key] for place, key in places if isinstance(place.get(key), dict)]
    caches = [[one.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo")] for one in found]
    if any(cache != caches[0] for cache in caches):
        yield Finding(
            "config.two_places", "error",
            "config.json declares the cache in several places, and not alike: most engines follow "
            "the first",
            file="config.json", expected=repr(caches[0]), found=repr(caches[-1]),
            fix="keep the `quantization_config` at the top alone",
        )  # fmt: skip
