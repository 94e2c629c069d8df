"""The model types that vLLM itself was asked about, by version; and those that it does not load."""

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

# Types that an earlier version did not load the same way: the class or what it needs is another.
_OTHERWISE_0_31 = ("exaone_moe", "lfm2", "phi", "qwen2_5_vl", "qwen2_vl")
_OTHERWISE_0_30 = (*_OTHERWISE_0_31, "aria", "llava", "llava_next", "mistral3")


def checked(kind: str, version: str) -> bool:
    """Whether vLLM itself, in that version, was compared on a model type."""
    if version == "0.29.0":
        return kind in _CHECKED_0_29
    otherwise = {"0.31.0": _OTHERWISE_0_31, "0.30.0": _OTHERWISE_0_30}.get(version, ())
    return kind in CHECKED and kind not in otherwise


_CHECKED_0_29 = (
    "deepseek_v2", "falcon", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gpt2",
    "gpt_neox", "llama", "mistral", "mixtral", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe",
    "starcoder2",
)  # fmt: skip
