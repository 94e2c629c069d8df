"""What differs between vLLM's model classes, as far as scale tensors are concerned.

Sources, in vLLM 0.32: `model_executor/models/<model>.py`, there `hf_to_vllm_mapper` and
`load_weights`, and `model_executor/models/registry.py`.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from kvq.checkpoint import CheckpointView
from kvq.geometry import Geometry, text_config

VERSIONS = ("0.29.0", "0.30.0", "0.31.0", "0.32.0")


class Loader(StrEnum):
    """How the decoder takes its tensors.

    AUTO: `AutoWeightsLoader`, which walks the modules. DICT: a table of the parameters by name.
    REMAP: the same after `maybe_remap_kv_scale_name`, which drops scales that it does not find.
    """

    AUTO = "auto"
    DICT = "dict"
    REMAP = "remap"


@dataclass(frozen=True)
class Inner:
    """A module with a `load_weights` of its own, whose errors name paths from there.

    `quantized` says whether it knows the quantization config, and so renames and ignores scales.
    """

    path: str
    name: str
    quantized: bool = True


@dataclass(frozen=True)
class ModelClass:
    """A model class of vLLM; what is None follows from the architecture's name.

    `parts` of names and `prefixes` are renamed in order; `base` is put before names that do not
    start with one of `bases`. `stacked` says whether the names of the layers that make Q, K and V
    become that of one, `fused` whether the model has such a one. `quantized` says of the outermost
    loader what it says of an `Inner`, `attention_in_tree` that scales find their layer by its path,
    `expands_latent` that MLA caches heads, not its latent row.
    """

    name: str | None = None
    inner: tuple[Inner, ...] | None = None
    parts: tuple[tuple[str, str], ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    base: str = ""
    bases: tuple[str, ...] = ()
    loader: Loader = Loader.AUTO
    stacked: bool = True
    fused: bool = True
    quantized: bool = True
    attention_is_quantized: bool = True
    has_cache_config: bool = True
    attention_in_tree: bool = True
    expands_latent: bool = False


_LANGUAGE_MODEL = ("model.language_model.", "language_model.model.")
_TRANSFORMERS = ModelClass("TransformersForCausalLM", (), stacked=False, fused=False)
_TRANSFORMERS_TYPES = (
    "arcee", "bitnet", "cwm", "glm", "helium", "hunyuan_v1_dense", "ministral", "olmo", "olmo2",
    "olmo3", "persimmon", "phi", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
_TRANSFORMERS_MOE = replace(_TRANSFORMERS, name="TransformersMoEForCausalLM")
_TEXT_BELOW = ModelClass(prefixes=(_LANGUAGE_MODEL, ("lm_head.", "language_model.lm_head.")))
_QWEN_VL = ModelClass(
    inner=(Inner("language_model.model", "Qwen2Model"),),
    prefixes=(
        _LANGUAGE_MODEL,
        ("model.visual.", "visual."),
        ("lm_head.", "language_model.lm_head."),
        ("model.", "language_model.model."),
    ),
)
_NO_QUANTIZATION = ModelClass(inner=(), quantized=False, attention_is_quantized=False)

CLASSES = {
    **dict.fromkeys(
        _TRANSFORMERS_TYPES,
        _TRANSFORMERS,
    ),
    **dict.fromkeys(("dots1", "flex_olmo", "phimoe"), _TRANSFORMERS_MOE),
    **dict.fromkeys(
        (
            "apertus",
            "cohere",
            "exaone4",
            "falcon_h1",
            "gemma",
            "gptj",
            "nemotron",
            "olmoe",
            "qwen2_moe",
            "whisper",
        ),
        ModelClass(inner=()),
    ),
    "aria": ModelClass(
        inner=(Inner("language_model", "AriaTextModel"),),
        prefixes=(
            *_TEXT_BELOW.prefixes,
            ("language_model.model", "language_model"),
            ("language_model.lm_head", "lm_head"),
        ),
    ),
    "biogpt": replace(_TRANSFORMERS, prefixes=(("biogpt.", "model."),)),
    "blip-2": ModelClass(inner=(Inner("language_model", "OPTForCausalLM"),)),
    "bloom": ModelClass(stacked=False),
    "cohere2": ModelClass("CohereForCausalLM", ()),
    "deepseek_v2": ModelClass(loader=Loader.REMAP),
    "deepseek_v3": ModelClass(loader=Loader.REMAP),
    "ernie4_5": ModelClass(inner=(Inner("model", "LlamaModel"),)),
    "exaone_moe": ModelClass(loader=Loader.REMAP),
    "falcon": ModelClass(loader=Loader.DICT, has_cache_config=False),
    "gemma3": ModelClass(
        inner=(
            Inner("language_model.model", "Gemma3Model"),
            Inner("vision_tower.vision_model", "SiglipVisionTransformer", quantized=False),
        ),
        prefixes=(
            _LANGUAGE_MODEL,
            ("model.vision_tower.", "vision_tower."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
            ("lm_head.", "language_model.lm_head."),
        ),
    ),
    "gemma3n": ModelClass(prefixes=(*_TEXT_BELOW.prefixes, ("model", "language_model.model"))),
    "gemma3n_text": ModelClass(inner=(Inner("model", "Gemma3nTextModel"),)),
    "gemma4": _TEXT_BELOW,
    "gemma4_text": ModelClass(prefixes=(("model.language_model.", "model."),)),
    "glm4_moe_lite": ModelClass(loader=Loader.REMAP),
    "gpt2": ModelClass(
        inner=(Inner("transformer", "GPT2Model", quantized=False),),
        base="transformer.",
        bases=("transformer.", "lm_head.", "score."),
        stacked=False,
    ),
    "gpt_bigcode": replace(_TRANSFORMERS, prefixes=(("transformer.", "model."),)),
    "gpt_neox": replace(_TRANSFORMERS, prefixes=(("gpt_neox.", "model."),)),
    "gpt_oss": ModelClass(loader=Loader.REMAP, parts=((".self_attn.", ".attn."),)),
    "granitemoehybrid": ModelClass(loader=Loader.DICT),
    "jamba": replace(_NO_QUANTIZATION, parts=((".self_attn.", "."),)),
    "lfm2": ModelClass(
        inner=(Inner("model", "Lfm2Model", quantized=False),), attention_is_quantized=False
    ),
    "laguna": ModelClass(loader=Loader.REMAP),
    **dict.fromkeys(("llama4", "llama4_text"), ModelClass(loader=Loader.DICT)),
    "llava": _TEXT_BELOW,
    "llava_next": _TEXT_BELOW,
    "ministral3": ModelClass(inner=(Inner("model", "MistralModel"),)),
    "mistral3": ModelClass(
        prefixes=(*_TEXT_BELOW.prefixes, ("model.", "language_model.model.")),
    ),
    "minicpm3": ModelClass(loader=Loader.DICT, expands_latent=True),
    "nemotron_h": ModelClass(inner=(), prefixes=(("backbone", "model"),)),
    "opt": ModelClass(inner=(), prefixes=(("decoder.", "model.decoder."),)),
    "paligemma": _TEXT_BELOW,
    "phi3": ModelClass(inner=(Inner("model", "LlamaModel"),)),
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_vl": _QWEN_VL,
    "qwen3_5": ModelClass(prefixes=_QWEN_VL.prefixes[:3]),
    "qwen3_5_text": ModelClass(prefixes=(("model.language_model.", "model."),)),
    "qwen3_vl": ModelClass(
        inner=(Inner("language_model.model", "Qwen3LLMModel"),), prefixes=_QWEN_VL.prefixes[:3]
    ),
    "stablelm": ModelClass("StablelmForCausalLM", ()),
    "zamba2": _NO_QUANTIZATION,
}

# Model type → the last version in which another class than that of `CLASSES` held, and that class;
# earlier versions first.
_HIDDEN = replace(_TRANSFORMERS, attention_in_tree=False)
EARLIER = {
    "starcoder2": (("0.29.0", _HIDDEN),),
    "gpt_neox": (("0.31.0", ModelClass(stacked=False)),),
}

_NO_DISPATCH = (
    "ValueError: Layer {} (linear_attention) does not dispatch through the Transformers attention "
    "interface and vLLM has no other way to handle it."
)
_NO_POSITIONS = (
    "ValueError: Argument position_ids not found in the forward method of <class "
    "'transformers.models.{}'>"
)
_NO_CLASS = "ValidationError: Value error, Model architectures ['{}'] are not supported for now."
# Model types that vLLM does not load, whatever their scales are.
UNSUPPORTED = {
    "bamba": _NO_DISPATCH.format(0),
    "bart": _NO_POSITIONS.format("bart.modeling_bart.BartDecoder"),
    "codegen": _NO_CLASS.format("CodeGenForCausalLM"),
    "gpt_neo": _NO_CLASS.format("GPTNeoForCausalLM"),
    "minimax": _NO_DISPATCH.format(1),
    "recurrent_gemma": _NO_DISPATCH.format(0).replace(" (linear_attention)", ""),
    "t5": _NO_POSITIONS.format("t5.modeling_t5.T5Stack"),
    "mpt": (
        "ValidationError: Value error, Model architecture MptForCausalLM was supported in vLLM "
        "until v0.28.0, and is not supported anymore. Please use an older version of vLLM if you "
        "want to use this model architecture."
    ),
}

# Model types of which vLLM itself loaded, or refused, a checkpoint with scales.
CHECKED = frozenset(
    (
        "apertus", "arcee", "aria", "biogpt", "bitnet", "blip-2", "bloom", "cohere", "cohere2",
        "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
        "exaone_moe", "falcon", "falcon_h1", "flex_olmo", "gemma", "gemma2", "gemma3",
        "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "glm", "glm4",
        "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj",
        "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "helium",
        "hunyuan_v1_dense", "idefics3", "internvl", "jamba", "laguna", "lfm2", "llama",
        "llama4", "llama4_text", "llava", "llava_next", "minicpm3", "ministral", "ministral3",
        "mistral", "mistral3", "mixtral", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3",
        "olmoe", "opt", "paligemma", "persimmon", "phi", "phi3", "phimoe", "qwen2",
        "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_next",
        "qwen3_vl", "seed_oss", "smollm3", "smolvlm", "stablelm", "starcoder2", "whisper",
        "zamba2",
        *UNSUPPORTED,
    )
)  # fmt: skip

_LAYER = re.compile(r"^(?P<above>.*?)\.?[A-Za-z_]+\.\d+\.")
_HEAD = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")


def model_type(view: CheckpointView) -> str:
    """Return the checkpoint's model type, empty if it names none."""
    return str(view.config.get("model_type") or "")


def class_of(view: CheckpointView, version: str) -> ModelClass:
    """Return the model class of a checkpoint, the usual one if it is not in the table."""
    kind = model_type(view)
    for last, cls in EARLIER.get(kind, ()):
        if VERSIONS.index(version) <= VERSIONS.index(last):
            return cls
    return CLASSES.get(kind, ModelClass())


def inner_of(
    view: CheckpointView, cls: ModelClass, geometry: Geometry, attention: str
) -> tuple[Inner, ...]:
    """Return the modules with a loader of their own, longest path first.

    Args:
        view: the checkpoint.
        cls: its model class.
        geometry: of the checkpoint.
        attention: the engine's path of some attention module of the decoder.
    """
    if cls.inner is not None:
        return cls.inner
    match = _LAYER.match(attention)
    above = match["above"] if match else ""
    stem = _HEAD.sub("", geometry.architecture)
    text_type = str(text_config(view.config).get("model_type") or "")
    if text_type != model_type(view) and not text_type.startswith(model_type(view)):
        stem = "".join(part.capitalize() for part in text_type.split("_"))
        if CLASSES.get(text_type, ModelClass()).inner == ():
            return (Inner(above.rpartition(".")[0], f"{stem}ForCausalLM"),)
    return (Inner(above, f"{stem}Model"),) if above else ()


def renamed_tower(view: CheckpointView) -> str | None:
    """Return a tensor of Gemma 3's vision tower under the name of transformers 5, if there is one.

    Its save_pretrained leaves `vision_model.` out, which this class of vLLM looks for.
    """
    if model_type(view) != "gemma3":
        return None
    towers = ("vision_tower.", "model.vision_tower.")
    for name in sorted(view.tensors):
        if name.startswith(towers) and "vision_tower.vision_model." not in name:
            return name
    return None
