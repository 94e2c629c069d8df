"""Which of SGLang's model classes read scales of attention, and under which names.

Sources, in SGLang 0.5.23: `model_loader/weight_utils.py` (maybe_remap_kv_scale_name), and
`load_weights` in `models/*.py`.
"""

# Classes whose `load_weights` calls the helper, and that keep the checkpoint's other names.
# The first drop what they do not know, with a warning; the others may end with a KeyError.
LENIENT = ("LlamaForCausalLM", "Phi3ForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM",
           "MistralForCausalLM")  # fmt: skip
REMAP = (
    *LENIENT, "ApertusForCausalLM", "ArceeForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM",
    "Exaone4ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3nForCausalLM",
    "Gemma4ForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM",
    "DeciLMForCausalLM", "PhiMoEForCausalLM", "Qwen3ForCausalLM", "SDARForCausalLM",
    "SDARMoeForCausalLM",
)  # fmt: skip
NO_REMAP = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM",
            "Glm4ForCausalLM", "GptOssForCausalLM")  # fmt: skip

_OUTPUT_SCALES = {
    ".q_proj.output_scale": ".attn.q_scale",
    ".k_proj.output_scale": ".attn.k_scale",
    ".v_proj.output_scale": ".attn.v_scale",
    "self_attn.prob_output_scale": ".attn.prob_scale",
}


def remap(name: str) -> str:
    """Return the name under which the helper looks for a scale; others stay as they are."""
    if name.endswith(".kv_scale"):
        return name.replace(".kv_scale", ".attn.k_scale")
    for side in "kv":
        suffix = f".{side}_scale"
        if name.endswith(suffix):
            for parent in (".self_attn", ".mixer"):
                place = f"{parent}.{side}_proj{suffix}"
                if place in name:
                    return name.replace(place, f"{parent}.attn{suffix}")
            return name.replace(suffix, f".attn{suffix}")
    for suffix, replacement in _OUTPUT_SCALES.items():
        if name.endswith(suffix):
            return name.replace(suffix, replacement)
    return name
