"""What transformers 5.17 and compressed-tensors 0.20 take from a config, and from model types.

Sources: transformers `quantizers/auto.py` (get_hf_quantizer), `utils/quantization_config.py`
(CompressedTensorsConfig, FineGrainedFP8Config); compressed-tensors `quantization/quant_args.py`
(QuantizationArgs), `quantization/lifecycle/apply.py` (_apply_kv_cache_scheme); for the model types
transformers `conversion_mapping.py` and `integrations/compressed_tensors.py` (get_experts_scheme).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvq.checkpoint import CheckpointView
from kvq.files import shorten

COMPRESSED_TENSORS, FP8 = "compressed-tensors", "fp8"
# Methods that transformers knows beside these two, each with a package of its own. It ignores all
# others with a warning.
PACKAGED = frozenset(
    (
        "aqlm", "auto-round", "awq", "bitnet", "bitsandbytes", "bitsandbytes_4bit",
        "bitsandbytes_8bit", "eetq", "fbgemm_fp8", "fouroversix", "fp_quant", "gemma", "gguf",
        "gptq", "higgs", "hqq", "metal", "mxfp4", "mxfp8", "nvfp4", "quanto", "quark", "sinq",
        "spqr", "torchao", "vptq",
    )
)  # fmt: skip
_STATUSES = ("initialized", "calibration", "frozen", "compressed", "decompressed")
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
_FIELDS = (
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic",
    "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip
_DYNAMIC = ("token", "tensor", "tensor_group", "group")
_OF_ACTIVATIONS = ("token", "tensor", "group", "tensor_group", "attn_head")


# What compressed-tensors takes an attention module with a cache by: a layer of one of these names,
# and a `forward` that has `past_key_values`, which that of these model types has not.
PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")
LAYER_PAST = ("codegen", "gpt_neo", "gptj")
# Model types whose experts' weights are put together while loading: under compressed-tensors
# transformers looks for the group of the experts, whether or not there are groups.
MERGED_EXPERTS = frozenset(
    (
        "afmoe", "axk1", "axk2", "cohere2_moe", "deepseek_ocr2", "deepseek_v2", "deepseek_v3",
        "deepseek_v32", "deepseek_v4", "dots1", "ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe",
        "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm_moe_dsa",
        "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_k25", "kimi_linear", "laguna", "lfm2_moe",
        "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl",
        "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe",
        "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen4_exp_text", "solar_open",
    )
)  # fmt: skip
# Model types whose `language_model.model.` is `model.language_model.` in the module tree.
LLAVA = frozenset(
    (
        "aria", "aya_vision", "gemma3", "got_ocr2", "internvl", "llava", "llava_next",
        "llava_next_video", "llava_onevision", "mistral3", "paligemma", "pp_chart2table",
        "vipllava",
    )
)  # fmt: skip
CHECKED = frozenset(
    (
        "deepseek_v2", "falcon", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text",
        "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "opt", "phi3", "qwen2", "qwen3",
        "qwen3_moe", "starcoder2",
    )
)  # fmt: skip


class LoadError(Exception):
    """transformers refuses the checkpoint; its own text with the type in front.

    `note` says what it means, where the text does not.
    """

    def __init__(self, text: str, note: str = "") -> None:
        super().__init__(text)
        self.notes = (note,) if note else ()


class NotModelledError(Exception):
    """What transformers does is not known here; the text says what is not known."""


@dataclass(frozen=True)
class Scheme:
    """How compressed-tensors rounds K and V before they are cached."""

    num_bits: int
    type: str
    symmetric: bool
    strategy: str
    dynamic: bool

    @property
    def cache_dtype(self) -> str:
        """What K and V are rounded to; the cache itself keeps the model's dtype."""
        return f"{'fp' if self.type == 'float' else self.type}{self.num_bits}"


@dataclass(frozen=True)
class Quantization:
    """The method in use, None for none; the scheme of the cache; whether there are any groups.

    `late` is an error that comes only once the checkpoint's files have been found.
    """

    method: str | None
    scheme: Scheme | None = None
    has_groups: bool = False
    late: LoadError | None = None


def model_types(view: CheckpointView) -> tuple[str, str]:
    """Return the model type, and that of the text model, which mostly is the same one."""
    text = view.config.get("text_config")
    found = str(view.config.get("model_type") or "")
    return found, str(text.get("model_type") or "") if isinstance(text, dict) else found


def read_quantization(view: CheckpointView) -> Quantization:
    """Return what the quantization config means.

    Raises:
        LoadError: transformers refuses it.
        NotModelledError: it depends on packages, or on what is not modelled.
    """
    text = view.config.get("text_config")
    nested = text if isinstance(text, dict) else view.config
    config = view.config.get("quantization_config") or nested.get("quantization_config")
    if config is None:
        return Quantization(None)
    if not isinstance(config, dict):
        raise NotModelledError(f"a quantization config that is a {type(config).__name__}")
    if config.get("load_in_8bit") or config.get("load_in_4bit"):
        raise NotModelledError("a quantization config of bitsandbytes")
    method = config.get("quant_method")
    if method is None:
        raise LoadError(
            "ValueError: The model's quantization config from the arguments has no `quant_method` "
            "attribute. Make sure that the model has been correctly quantized"
        )
    if not isinstance(method, str):
        raise NotModelledError(f"a `quant_method` that is a {type(method).__name__}")
    if method in PACKAGED:
        raise NotModelledError(
            f"`{method}` needs a package of its own, and that decides what becomes of the cache"
        )
    if method == FP8:
        activations = config.get("activation_scheme", "dynamic")
        if str(activations).lower() not in ("dynamic", "static"):
            raise LoadError(f"ValueError: Activation scheme {activations} not supported")
    return _compressed_tensors(config) if method == COMPRESSED_TENSORS else Quantization(method)


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    groups, raw = config.get("config_groups"), config.get("kv_cache_scheme")
    if not groups and not raw:  # compressed-tensors is asked for nothing, and then relied upon
        error = LoadError(
            "AttributeError: 'NoneType' object has no attribute 'config_groups'",
            "the quantization config has neither `kv_cache_scheme` nor a group in `config_groups`",
        )
        return Quantization(COMPRESSED_TENSORS, late=error)
    if not isinstance(groups, dict):
        raise LoadError("ValidationError: config_groups: Input should be a valid dictionary")
    if not isinstance(config.get("ignore", []), list | None):
        raise NotModelledError("an `ignore` that is no list")
    if not isinstance(config.get("format", ""), str):
        raise NotModelledError("a `format` that is no text")
    attention = [found for item in groups.items() if (found := _of_attention(*item)) is not None]
    scheme = None if raw is None else read_scheme(raw)
    status = config.get("quantization_status", "initialized")
    if status not in _STATUSES:
        names = ", ".join(f"'{name}'" for name in _STATUSES[:-1])
        allowed = f"Input should be {names} or '{_STATUSES[-1]}'"
        raise LoadError(f"ValidationError: quantization_status: {allowed}")
    late = None
    if scheme is not None and scheme.strategy not in _OF_ACTIVATIONS:
        is_named = isinstance(raw, dict) and raw.get("strategy")
        name = scheme.strategy if is_named else _spelled(scheme.strategy)
        late = LoadError(
            f"NotImplementedError: Using {name} strategy is not supported for activation "
            "quantization"
        )
    elif any(found != scheme for found in attention):
        raise NotModelledError("a group quantizes activations otherwise than the cache")
    elif attention and _STATUSES.index(status) < _STATUSES.index("compressed"):
        raise NotModelledError("a group gives attention zero points that no tensor may fill")
    return Quantization(COMPRESSED_TENSORS, scheme, bool(groups), late)


def _of_attention(name: str, group: Any) -> Scheme | None:
    """Return the scheme of a group that may be one of attention: it quantizes no weights.

    Raises:
        LoadError: no targets.
        NotModelledError: another malformed group, or a preset.
    """
    if isinstance(group, dict) and "targets" not in group:
        place = f"config_groups.{name}.function-after[validate_model_after(), QuantizationScheme]"
        raise LoadError(f"ValidationError: {place}.targets: Field required")
    targets = group["targets"] if isinstance(group, dict) else None
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise NotModelledError(f"the group `{name}`, which is a preset or malformed")
    parts = (group.get("weights"), group.get("input_activations"))
    try:
        weights, activations = (None if part is None else read_scheme(part) for part in parts)
    except LoadError as error:
        raise NotModelledError(f"the group `{name}`, which is malformed") from error
    if weights is None and activations is None and targets:
        raise NotModelledError(f"the group `{name}`, which quantizes nothing of its targets' input")
    return activations if weights is None and targets else None


def read_scheme(raw: Any) -> Scheme:
    """Return a scheme as QuantizationArgs understands it.

    Raises:
        LoadError: it does not.
        NotModelledError: a value whose reading is not modelled.
    """
    if not isinstance(raw, dict):
        raise _invalid("", "Input should be a valid dictionary or instance of QuantizationArgs")
    bits, kind, named = raw.get("num_bits", 8), raw.get("type", "int"), raw.get("strategy")
    if not (type(bits) is int or (isinstance(bits, str) and len(bits) < 9 and bits.isdecimal())):
        raise NotModelledError(f"`num_bits` of {shorten(bits)} in a scheme")
    if not isinstance(kind, str) or not isinstance(named, str | None):
        raise NotModelledError(f"`type` of {kind!r}, `strategy` of {named!r}")
    if raw.get("actorder") not in (None, False, "weight", "static"):
        raise NotModelledError(f"`actorder` of {raw['actorder']!r}")
    kind, named = kind.lower(), named and named.lower()
    if kind not in ("int", "float"):
        raise _invalid(".type", f"Value error, {kind!r} is not a valid QuantizationType")
    symmetric = raw.get("symmetric", True)
    if symmetric is None:
        raise _invalid(".symmetric", "Input should be a valid boolean")
    if named is not None and named not in _STRATEGIES:
        raise _invalid(".strategy", f"Value error, {named!r} is not a valid QuantizationStrategy")
    dynamic = raw.get("dynamic", False)
    if isinstance(dynamic, str) and dynamic.lower() == "local":
        dynamic = "local"
    elif not isinstance(dynamic, bool) or not isinstance(symmetric, bool):
        raise NotModelledError(f"`dynamic` of {dynamic!r}, `symmetric` of {symmetric!r}")
    for key in raw:
        if key not in _FIELDS:
            raise _invalid(f".{key}", "Extra inputs are not permitted")
    strategy = _strategy(raw, named, dynamic)
    if kind == "float" and int(bits) not in (4, 6, 8):
        raise LoadError("NotImplementedError: Only num_bits in (8) are supported")
    return Scheme(int(bits), kind, symmetric, strategy, bool(dynamic))


def _strategy(raw: Mapping[str, Any], strategy: str | None, dynamic: bool | str) -> str:
    """Return the strategy once it is checked against the other fields."""
    group_size, block = raw.get("group_size"), raw.get("block_structure")
    if group_size is not None and type(group_size) is not int:
        raise NotModelledError(f"`group_size` of {group_size!r} in a scheme")
    if strategy is None:
        chosen = {None: "tensor", -1: "channel"}
        strategy = chosen.get(group_size, "group")
    is_grouped = strategy in ("group", "tensor_group")
    if strategy == "token" and not dynamic:
        text = "Cannot perform static token quantization, please use `dynamic=True`"
    elif is_grouped and (group_size is None or group_size <= 0):
        text = f"strategy {strategy} requires group_size to be set to a positive value"
    elif group_size is not None and group_size > 0 and not is_grouped:
        text = "group_size requires strategy to be set to 'group'"
    elif strategy == "block" and block is None:
        text = "Block strategy requires block structure"
    elif block is not None and strategy != "block":
        text = "Block structure requires block strategy"
    elif dynamic and strategy not in _DYNAMIC:
        allowed = ", ".join(f"<{_spelled(name)}: '{name}'>" for name in _DYNAMIC)
        text = f"One of ({allowed}) must be used for dynamic quant."
    elif dynamic == "local" and strategy != "tensor_group":
        text = "local is only supported for strategy tensor_group"
    else:
        return strategy
    raise _invalid("", f"Value error, {text}")


def _spelled(strategy: str) -> str:
    return f"QuantizationStrategy.{strategy.upper()}"


def _invalid(field: str, text: str) -> LoadError:
    return LoadError(f"ValidationError: kv_cache_scheme{field}: {text}")
