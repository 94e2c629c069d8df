"""Where vLLM finds its quantization config, what it accepts of it, and the cache dtype it implies.

Sources, in vLLM 0.32: `transformers_utils/config.py` (get_config), `transformers_utils/
model_arch_config_convertor.py` (normalization), `config/model.py` (_verify_quantization),
`model_executor/model_loader/weight_utils.py` (get_quant_config), `utils/torch_utils.py`
(resolve_kv_cache_dtype_string), `model_executor/layers/quantization/*.py` (from_config).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvq.checkpoint import CheckpointView
from kvq.errors import KvqError
from kvq.files import read_json

LEGACY_NAME = "hf_quant_config.json"
CT = "compressed-tensors"
MIXED = "modelopt_mixed"

METHODS = (
    "awq", "auto_awq", "fp8", "fbgemm_fp8", "fp_quant", "modelopt", "modelopt_fp4",
    "modelopt_mxfp8", MIXED, "auto_gptq", "gptq", "gptq_marlin", "awq_marlin", "humming", CT,
    "experts_int8", "quark", "moe_wna16", "torchao", "inc", "mxfp4", "gpt_oss_mxfp4",
    "deepseek_v4_fp8", "online", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel",
    "int8_per_channel_weight_only", "nvfp4_per_token", "mxfp8",
)  # fmt: skip
# Methods whose handling of caches was compared with vLLM itself, or is plain in its source.
AWQ = ("awq", "auto_awq", "awq_marlin")
GPTQ = ("gptq", "auto_gptq", "gptq_marlin")
MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_mxfp8", MIXED)
MODELLED = (*AWQ, *GPTQ, *MODELOPT, CT, "fp8", "quark", "mxfp4", "gpt_oss_mxfp4", "torchao",
            "experts_int8", "inc")  # fmt: skip

CACHE_DTYPES = (
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
    "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc",
    "turboquant_3bit_nc", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head",
    "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
)  # fmt: skip
_MODELOPT_CACHE = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
_MODELOPT_ALGOS = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4",
                   "MXFP8", "MIXED_PRECISION"]  # fmt: skip
_LEGACY_METHODS = {"FP8": "modelopt", "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
                   "FP8_PB_WO": "modelopt", "NVFP4": "modelopt_fp4"}  # fmt: skip
# The fields that a nested config must have, by part of its `quant_algo`.
_REQUIRED = {"NVFP4": ("group_size", "kv_cache_quant_algo", "exclude_modules"),
             "MXFP8": ("kv_cache_quant_algo", "exclude_modules")}  # fmt: skip


class LoadError(Exception):
    """vLLM refuses the checkpoint; the text is vLLM's own, with the type in front."""


class NotModelledError(Exception):
    """What vLLM does is not known here; the text says what is not known."""


@dataclass(frozen=True)
class Quantization:
    """What vLLM takes from the quantization config.

    `cache_dtype` is what the engine config says before any layer is built; `kv_algo` is the cache
    algorithm that the ModelOpt classes parse.
    """

    method: str | None
    config: Mapping[str, Any]
    cache_dtype: str
    kv_algo: str | None = None

    @property
    def kv_method(self) -> str | None:
        """How attention layers take scales: `ct`, `base` (BaseKVCacheMethod) or not at all."""
        if self.method == CT:
            return "ct"
        if self.method == MIXED:
            return "base" if self.kv_algo else None
        return "base" if self.method in (*MODELOPT, "fp8", "quark") else None

    @property
    def scheme(self) -> Any:
        """The cache scheme of a compressed-tensors config; None if there is none."""
        return self.config.get("kv_cache_scheme") if self.method == CT else None

    @property
    def per_head(self) -> bool:
        """Whether layers hold one scale per KV head."""
        return self.scheme is not None and self.scheme.get("strategy") == "attn_head"


def read_quantization(view: CheckpointView, kv_cache_dtype: str) -> Quantization:
    """Return the quantization that vLLM finds.

    Raises:
        LoadError: vLLM refuses the config.
        NotModelledError: a quantization method that is not modelled, or a damaged legacy file.
    """
    if kv_cache_dtype not in CACHE_DTYPES:
        raise NotModelledError(f"vLLM has no cache dtype `{kv_cache_dtype}`")
    config = copy.deepcopy(dict(view.config))
    legacy = _legacy(view)
    if config.get("quantization_config") is None and legacy is not None:
        config["quantization_config"] = copy.deepcopy(legacy)
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else {}
    found = _normalized(config)
    if found is None:
        found = _normalized(text)
    method = _method(found) if found is not None else None
    cache_dtype = kv_cache_dtype
    if kv_cache_dtype == "auto" and config.get("quantization_config") is not None:
        cache_dtype = _modelopt_cache_dtype(config["quantization_config"])
    if method is None:
        return Quantization(None, {}, cache_dtype)
    if method not in MODELLED:
        raise NotModelledError(f"quantization method `{method}` is not modelled")
    places = (
        config.get("quantization_config"),
        text.get("quantization_config"),
        config.get("compression_config"),
    )
    parsed = next((place for place in places if place is not None), None)
    if method == MIXED and (parsed is None or "quantized_layers" not in parsed):
        if legacy is None:
            raise _invalid(f"Cannot find the config file for {MIXED}")
        parsed = legacy
    if not isinstance(parsed, dict):
        raise NotModelledError("a quantization config that is not at one of the usual places")
    kv_algo = _check(method, parsed)
    return Quantization(method, parsed, cache_dtype, kv_algo)


def _legacy(view: CheckpointView) -> dict[str, Any] | None:
    if not (view.root / LEGACY_NAME).is_file():
        return None
    try:
        return read_json(view.root / LEGACY_NAME)
    except KvqError as error:
        raise NotModelledError(str(error)) from error


def _invalid(text: str) -> LoadError:
    """A ValueError inside of one of vLLM's pydantic configs."""
    return LoadError(f"ValidationError: Value error, {text}")


def no_attribute(value: Any, name: str) -> LoadError:
    """What Python says where a JSON value of another type was expected."""
    return LoadError(f"AttributeError: '{type(value).__name__}' object has no attribute '{name}'")


def _get(config: Any, key: str, default: Any = None) -> Any:
    if not isinstance(config, dict):
        raise no_attribute(config, "get")
    return config.get(key, default)


def _normalized(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config with its method spelled as vLLM does; it is changed in place."""
    found = config.get("quantization_config")
    if found is None:
        found = config.get("compression_config")
        if found is None:
            return None
    else:
        producer = _get(_get(found, "producer", {}), "name")
        inner = _get(found, "quantization", {})
        old = isinstance(inner, dict) and "modelopt_quant_config" in inner
        algo = _get(inner, "quant_algo") if producer == "modelopt" or old else None
        if algo is not None:
            if str(algo).upper() not in _LEGACY_METHODS:
                raise _invalid(f"Unknown ModelOpt quant algo: {algo}")
            found["quant_method"] = _LEGACY_METHODS[str(algo).upper()]
    method = _get(found, "quant_method", "")
    if not isinstance(method, str):
        raise no_attribute(method, "lower")
    found["quant_method"] = method.lower().replace("compressed_tensors", CT)
    normalized: dict[str, Any] = found
    return normalized


def _method(config: Mapping[str, Any]) -> str | None:
    method = str(config["quant_method"])
    if method.startswith("modelopt"):
        inner = config.get("quantization", config)
        algo = str(inner.get("quant_algo", "")).upper() if isinstance(inner, dict) else ""
        if algo == "FP8":
            method = "modelopt"
        elif "FP4" in algo:
            method = "modelopt_fp4"
        elif "MXFP8" in algo:
            method = "modelopt_mxfp8"
        elif algo == "MIXED_PRECISION":
            method = MIXED
    if not method:
        return None
    if method not in METHODS:
        raise _invalid(f"Unknown quantization method: {method}. Must be one of {list(METHODS)}.")
    return method


def _modelopt_cache_dtype(config: dict[str, Any]) -> str:
    if not config.get("quant_method", "").startswith("modelopt"):
        return "auto"
    inner = config.get("quantization", config)
    algo = (
        _get(inner, "kv_cache_scheme")
        or config.get("kv_cache_scheme")
        or _get(inner, "kv_cache_quant_algo")
        or config.get("kv_cache_quant_algo")
    )
    if isinstance(algo, dict) and algo.get("type") == "float":
        if algo.get("dynamic") is False and algo.get("num_bits") == 8:
            return _MODELOPT_CACHE["fp8"]
        return _MODELOPT_CACHE["nvfp4"] if algo.get("num_bits") == 4 else "auto"
    return _MODELOPT_CACHE.get(algo.lower(), "auto") if isinstance(algo, str) else "auto"


def _check(method: str, config: dict[str, Any]) -> str | None:
    """Check what the method's config class checks; return the cache algorithm of ModelOpt."""
    if method in MODELOPT:
        return _check_modelopt(method, config)
    if method == CT:
        _check_groups(config)
    if method == "fp8":
        if "activation_scheme" not in config:
            raise _invalid(
                "Cannot find any of ['activation_scheme'] in the model's quantization config."
            )
        if config["activation_scheme"] not in ("static", "dynamic"):
            raise _invalid(f"Unsupported activation scheme {config['activation_scheme']}")
    return None


def _check_modelopt(method: str, config: dict[str, Any]) -> str | None:
    nested = "quantization" in config
    inner = config.get("quantization", config)
    if not isinstance(inner, dict):
        raise _invalid("Expected 'quantization' to be a dictionary in config")
    kv_algo = inner.get("kv_cache_quant_algo") if nested else None
    excluded = inner.get("exclude_modules" if nested else "ignore", [])
    scheme = config.get("kv_cache_scheme")
    if not nested and isinstance(scheme, dict):
        is_fp8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
        kv_algo = "FP8" if is_fp8 else None
    algo = inner.get("quant_algo")
    if not algo:
        raise _invalid("Missing 'quant_algo' in quantization config")
    if kv_algo is not None and not isinstance(kv_algo, str):
        raise _invalid(f"kv_cache_quant_algo must be a string, got {type(kv_algo)}")
    if not isinstance(excluded, list):
        raise _invalid(f"exclude_modules must be a list, got {type(excluded)}")
    algo = str(algo).upper()
    if algo not in _MODELOPT_ALGOS:
        raise _invalid(
            f"ModelOpt currently only supports: {_MODELOPT_ALGOS} quantizations in vLLM. Please "
            "check the `hf_quant_config.json` file for your model's quant configuration."
        )
    for part, required in _REQUIRED.items():
        missing = [name for name in required if name not in inner]
        if nested and part in algo and missing and method != MIXED:
            raise _invalid(
                f"{part} quantization requires the following fields in {LEGACY_NAME}: {missing}"
            )
    if method == MIXED and not inner.get("quantized_layers"):
        raise _invalid(
            "MIXED_PRECISION quant_algo requires a non-empty 'quantized_layers' mapping in the "
            "quantization config."
        )
    return kv_algo.upper() if kv_algo else None


def _check_groups(config: dict[str, Any]) -> None:
    groups = config.get("config_groups", {})
    if not isinstance(groups, dict):
        raise no_attribute(groups, "items")
    kept = []
    for group in groups.values():
        if not isinstance(group, dict) or not isinstance(group.get("targets", []), list):
            raise NotModelledError("`config_groups` is not an object of objects with targets")
        if "targets" not in group:
            raise LoadError("KeyError: 'targets'")
        targets = [str(target) for target in group["targets"]]
        if len(targets) != 1 or not targets[0].endswith("Attention"):
            kept.append(group)
    for group in kept:
        if group["targets"] and not isinstance(group.get("weights"), dict):
            raise LoadError(
                "ValidationError: Input should be a valid dictionary or instance of "
                "QuantizationArgs"
            )
