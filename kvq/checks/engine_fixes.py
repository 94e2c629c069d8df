"""The smallest change after which an engine would use a checkpoint's scales."""

from kvq.engines import LIVE
from kvq.engines.base import EngineReading, LayerReading, SideReading

EXPORT = "`kvq export` with the model's calibration"
_COMPRESSED = "`kvq export --dialect compressed-tensors` onto unquantized weights"
_RENAMED = f"`kvq export --strip`, then {EXPORT}, which writes names that this class reads"
# what is in the text of an error → what to change
_LOAD = (
    ("invalid choice", "one of the cache dtypes that the engine names"),
    ("fp8_e5m2", "serve with --kv-cache-dtype auto or fp8_e4m3"),
    ("scales per head", "`kvq export --granularity tensor`, or an sm90 GPU"),
    ("missing", "fetch the files that are missing, or take them out of the index"),
    ("config_groups is", "`kvq export --dialect modelopt`, which TensorRT-LLM takes"),
    ("config_groups", "`config_groups`: {} in the quantization config"),
    ("num_bits", "`num_bits`: 8 and `type`: float in `kv_cache_scheme`"),
    ("kv_cache_scheme", "`kvq export` writes a `kv_cache_scheme` that engines accept"),
    ("Strategy", "`strategy`: tensor in `kv_cache_scheme`"),
    ("strategy", "`strategy`: tensor in `kv_cache_scheme`"),
    ("symmetric", "`symmetric`: true in `kv_cache_scheme`"),
    ("quantization method", "`quant_method`: compressed-tensors, spelled so"),
    ("quant_method", "`quant_method`: compressed-tensors"),
    ("config file for modelopt_mixed", "`quantized_layers` as ModelOpt wrote it"),
    ("quantized_layers", "`quantized_layers` as ModelOpt wrote it"),
    ("requires the following fields", "add the fields to hf_quant_config.json"),
    ("quant_algo", _COMPRESSED),
    ("quant algo", "the flat form of this algorithm, in config.json"),
    ("ModelOpt currently only", "ModelOpt's name for what the weights are"),
    ("scalar weight", "`kvq export --granularity tensor`"),
    ("torch.Size", "`kvq export --granularity tensor`, or `strategy`: attn_head"),
    ("loaded together", f"both scales: {EXPORT}"),
    ("needs SM100", "--platform sm100, or --kv-cache-dtype fp8_e4m3"),
    ("GPUs", "--tp with a number that divides the heads"),
    ("tensor parallel size", "--tp with a number that divides the heads"),
    ("vision_tower.", "the original checkpoint's files: transformers 5 renamed this save's"),
    ("no module or parameter", _RENAMED),
    ("has no attribute 'data'", _RENAMED),
    ("has no attribute `", _RENAMED),
    ("KeyError", _RENAMED),
    ("has no attribute 'lower'", "`quant_method`: compressed-tensors"),
    ("has no attribute 'items'", "objects for `kv_cache_scheme` and `config_groups`, {} for none"),
    ("has no attribute 'upper'", _COMPRESSED),
    ("has no attribute 'get'", "an object where the quantization config has something else"),
    ("QuantizationArgs", "take out the group without weights: `kv_cache_scheme` is enough"),
    ("ModelOptFp8Config", "`quant_algo`: FP8, if the weights are FP8; else " + _COMPRESSED),
    ("must be a list", "put the excluded modules into a list"),
    ("size of tensor", "one number for each KV head: " + EXPORT),
    ("for input of size", "one number for each query head: " + EXPORT),
    ("ctivation", "`activation_scheme`: dynamic or static, in the quantization config"),
    ("no file named", "an index that names the shards, model.safetensors.index.json"),
    ("No such file", "fetch the files that are missing, or take them out of the index"),
    ("IndexError", "another engine: transformers looks for a group of this model's experts"),
    ("AssertionError", "both scales, each above zero: " + EXPORT),
)


def load_fix(reading: EngineReading) -> str:
    """Return what lets the engine load the checkpoint."""
    error = reading.error or ""
    for text, fix in _LOAD:
        if text in error:
            return fix
    return "`kvq verify` without --engine says what is not as engines expect"


def default_fix(reading: EngineReading, layer: LayerReading, side: str, used: SideReading) -> str:
    """Return what makes a layer use a scale instead of the default."""
    if reading.engine == "tensorrt-llm":
        return "NVFP4, whose scales it reads: `kvq export --kv-cfg NVFP4_KV_CFG --dialect modelopt`"
    if "which is not read" in used.reason:
        return "list the file in the index: " + EXPORT
    if "reads no scales" in used.reason:
        plain = f"serve with --kv-cache-dtype {_plain(reading)}"
        return plain if "SGLang" in used.reason else f"{plain}, or {_COMPRESSED}"
    if layer.engine_name.endswith("mla_attn"):
        return f"serve with --kv-cache-dtype {_plain(reading)}: no name is read under MLA"
    name = f"{layer.attention}.{side}_scale"
    if "finds no cache algorithm" in used.reason:
        return "declare FP8 as an object in `kv_cache_scheme`"
    if "`" in used.reason:
        return f"the name that is read is `{name}`: {_RENAMED}"
    return f"write `{name}`: {EXPORT}"


def _plain(reading: EngineReading) -> str:
    return "bf16" if reading.engine == "sglang" else "bfloat16"


def unquantized_fix(reading: EngineReading, layer: LayerReading) -> str:
    """Return what makes the cache a quantized one."""
    options = reading.options
    if layer.engine_name.endswith("mla_attn"):
        return "`kvq export --strip`: under MLA this class reads no scale of any name"
    if options.kv_cache_dtype != "auto":
        return "leave --kv-cache-dtype out"
    if options.skip_layers and reading.cache_dtype != "auto":
        return "leave --kv-cache-dtype-skip-layers out; `kvq calibrate --skip-layers` records it"
    if reading.engine == "transformers":
        return f"{_COMPRESSED}: the only cache that transformers quantizes with scales"
    if reading.engine == "vllm" and (layer.k.tensor or layer.v.tensor):
        return "serve with --kv-cache-dtype fp8, or declare the cache: " + EXPORT
    if reading.engine == "sglang" and (layer.k.tensor or layer.v.tensor):
        return "serve with --kv-cache-dtype fp8_e4m3"
    return f"declare a cache that this engine quantizes: {EXPORT} and --for {reading.engine}"


def unknown_fix(reading: EngineReading, *, garbage: bool) -> str:
    """Return how to learn what is not known, or to fill what is not filled."""
    if garbage:
        return f"names, and files, that transformers reads: {EXPORT}"
    if reading.engine in LIVE:
        return f"`kvq verify --live {reading.engine}` asks the engine itself"
    return "an engine whose reading is known: vllm or transformers"


def value_fix(reading: EngineReading, used: SideReading, *, copied: bool, rounded: bool) -> str:
    """Return what makes the engine use the number of the file."""
    if copied or "not above zero" in used.reason:
        return f"a scale for each side, above zero: {EXPORT}"
    if rounded and reading.engine == "transformers":
        return "load the model in float32, if the last digits of a scale matter"
    if rounded:
        return "`kvq export` rounds up to what is held; --dialect compressed-tensors keeps float32"
    if "times 6" in used.reason:
        return "serve with --kv-cache-dtype fp8_e4m3, or another platform"
    return f"one number, or one per KV head as declared: {EXPORT}"
