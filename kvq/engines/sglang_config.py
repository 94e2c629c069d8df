"""Which quantization SGLang finds, whether attention gets scales from it, and the cache dtype.

Sources, in SGLang 0.5.23: `configs/model_config.py` (_parse_quant_hf_config),
`layers/quantization/*.py` (from_config), `mem_cache/kv_cache_dtype.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvq.checkpoint import CheckpointView
from kvq.engines.vllm_config import CT, LEGACY_NAME, LoadError, NotModelledError
from kvq.errors import KvqError
from kvq.files import read_json

CACHE_DTYPES = ("auto", "fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4",
                "fp4_mx_block16")  # fmt: skip
_NO_KV_METHOD = ("awq", "gptq", "mxfp4")
_FP4_ALGOS = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4")
_NO_ALGO = (
    "ValueError: Cannot find 'quant_algo' in the model's quantization config. Expected either flat "
    "format (config.json) or nested format (hf_quant_config.json)."
)


@dataclass(frozen=True)
class Quantization:
    """What SGLang takes from the config; `has_kv_method` says whether attention has scales.

    `kv_algo` is what `--kv-cache-dtype auto` looks at; `why` says why there is no method.
    """

    method: str | None
    kv_algo: Any = None
    has_kv_method: bool = False
    why: str = ""


def read_quantization(view: CheckpointView) -> Quantization:
    """Return the quantization that SGLang finds.

    Raises:
        LoadError: SGLang refuses the config.
        NotModelledError: what it does with this one is not known.
    """
    place = view.quantization_config_place
    if place is None:
        return _legacy(view)
    config = view.config.get(place)
    if config is None:
        raise NotModelledError(f"`{place}` under SGLang is not modelled")
    if not isinstance(config, dict):
        raise NotModelledError(f"`{place}` in config.json is not an object")
    declared = config.get("quant_method", "")
    if not isinstance(declared, str):
        found = type(declared).__name__
        raise LoadError(f"AttributeError: '{found}' object has no attribute 'lower'")
    method = declared.lower()
    if method == "compressed_tensors" or (
        not method and not ({"quantization", "quant_algo"} & set(config))
    ):
        raise LoadError(f"ValueError: Unknown quantization method: {method}.")
    if method == CT:
        return _compressed_tensors(config)
    if method in ("modelopt", ""):
        return _modelopt(config)
    if method == "fp8":
        if "activation_scheme" not in config:
            raise LoadError(
                "ValueError: Cannot find any of ['activation_scheme'] in the model's quantization "
                "config."
            )
        if config["activation_scheme"] not in ("static", "dynamic"):
            raise LoadError(
                f"ValueError: Unsupported activation scheme {config['activation_scheme']}"
            )
        return Quantization(method, config.get("kv_cache_quant_algo"), True)
    if method in _NO_KV_METHOD:
        return Quantization(method, why=f"`{method}` reads no scales of attention")
    raise NotModelledError(f"quantization method `{method}` is not modelled")


def _legacy(view: CheckpointView) -> Quantization:
    if not (view.root / LEGACY_NAME).is_file():
        return Quantization(None, why="there is no quantization config")
    try:
        config = read_json(view.root / LEGACY_NAME)
    except KvqError as error:
        raise NotModelledError(str(error)) from error
    inner = config.get("quantization")
    if not isinstance(inner, dict):
        raise NotModelledError(f"{LEGACY_NAME} without an object `quantization` is not modelled")
    if inner.get("quant_algo") is None:
        why = f"`quant_algo` in {LEGACY_NAME} is null, which stands for no quantization"
        return Quantization(None, why=why)
    return _of_algo(inner, inner.get("kv_cache_quant_algo"), nested=True)


def _modelopt(config: Mapping[str, Any]) -> Quantization:
    if "quantization" in config:
        inner = config["quantization"]
        if not isinstance(inner, dict):
            found = type(inner).__name__
            raise LoadError(f"AttributeError: '{found}' object has no attribute 'get'")
        if inner.get("quant_algo") not in ("FP8", "MIXED_PRECISION"):
            raise NotModelledError("this nested ModelOpt config in config.json is not modelled")
        taken = ("quant_algo", "quantized_layers")  # the cache is looked for outside only
        config = {**config, **{key: inner.get(key) for key in taken}}
    if "quant_algo" not in config:
        raise LoadError(_NO_ALGO)
    if config["quant_algo"] is None:
        raise LoadError("AttributeError: 'NoneType' object has no attribute 'upper'")
    return _of_algo(config, config.get("kv_cache_quant_algo"), nested=False)


def _of_algo(config: Mapping[str, Any], kv_algo: Any, *, nested: bool) -> Quantization:
    algo, scheme = config["quant_algo"], config.get("kv_cache_scheme")
    if not nested and isinstance(scheme, dict):
        is_fp8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
        kv_algo = "FP8" if is_fp8 else None
    if algo == "FP8":
        return _with_kv_algo("modelopt_fp8", kv_algo)
    if algo in _FP4_ALGOS:
        if nested and config.get("group_size") is None:
            raise NotModelledError("an NVFP4 config without `group_size` is not modelled")
        if not nested and isinstance(scheme, str):
            name = scheme.strip().upper()
            kv_algo = "FP8" if name in ("FP8", "FLOAT8") else "auto"
            kv_algo = "NVFP4" if name in ("FP4", "FLOAT4", "NVFP4") else kv_algo
        return _with_kv_algo("modelopt_fp4", kv_algo or "auto")
    if algo == "MIXED_PRECISION":
        layers = config.get("quantized_layers")
        layers = layers.values() if isinstance(layers, dict) else ()
        found = {str(x.get("quant_algo", "")).upper() for x in layers if isinstance(x, dict)}
        if not found & {"NVFP4", "W4A16_NVFP4"}:
            why = "MIXED_PRECISION without NVFP4 layers becomes `w4afp8`, which reads no scales"
            return Quantization("w4afp8", why=why)
        if "quantization" in config:
            raise NotModelledError("a nested MIXED_PRECISION config is not modelled")
        if not nested and isinstance(scheme, dict) and kv_algo is None:
            is_fp4 = scheme.get("type") == "float" and scheme.get("num_bits") == 4
            kv_algo = "NVFP4" if is_fp4 else "auto"
        return _with_kv_algo("modelopt_mixed", kv_algo)
    if not isinstance(algo, str) or "FP4" in algo or algo == "MXFP8":
        raise NotModelledError(f"ModelOpt's `quant_algo` {algo!r} is not modelled")
    if nested:
        return Quantization(None, why=f"SGLang does not know the `quant_algo` {algo!r}")
    raise LoadError(
        f"ValueError: ModelOptFp8Config only supports regular FP8 quantization, but found {algo!r}."
    )


def _with_kv_algo(method: str, kv_algo: Any) -> Quantization:
    if kv_algo:
        return Quantization(method, kv_algo, True)
    return Quantization(method, why=f"`{method}` finds no cache algorithm in the config")


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    groups = config.get("config_groups", {})
    well_formed = isinstance(groups, dict) and all(
        isinstance(group, dict)
        and isinstance(group.get("targets"), list)
        and isinstance(group.get("weights"), dict)
        for group in groups.values()
    )
    if not well_formed:
        raise NotModelledError("`config_groups` other than of weights are not modelled")
    scheme = config.get("kv_cache_scheme")
    if scheme is None:
        return Quantization(CT, why="there is no `kv_cache_scheme`")
    if not isinstance(scheme, dict):
        raise NotModelledError("a `kv_cache_scheme` that is not an object is not modelled")
    accepted = (
        scheme.get("type") == "float"
        and scheme.get("num_bits") == 8
        and scheme.get("strategy") == "tensor"
        and scheme.get("symmetric", True)
        and not scheme.get("dynamic", False)
    )
    if not accepted:
        return Quantization(CT, why="SGLang ignores this `kv_cache_scheme`, with a warning")
    return Quantization(CT, "FP8", True)


def resolve_cache_dtype(quantization: Quantization, requested: str, platform: str) -> str:
    """Return the cache's dtype; `auto` is that of the model.

    Raises:
        LoadError: SGLang does not take this option here.
    """
    if requested not in CACHE_DTYPES:
        raise LoadError(
            f"argument --kv-cache-dtype: invalid choice: '{requested}' (choose from "
            f"{', '.join(CACHE_DTYPES)})"
        )
    if requested == "nvfp4" and not platform.startswith(("sm100", "sm120")):
        raise LoadError(f"--kv-cache-dtype nvfp4 needs SM100 or SM120, not `{platform}`")
    algo = quantization.kv_algo
    if requested == "auto" and isinstance(algo, str) and algo.upper() == "FP8":
        return "fp8_e4m3"
    return requested
