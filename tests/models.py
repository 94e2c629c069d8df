"""Tiny models of each supported family: random weights, CPU, well under a second each."""

from pathlib import Path

import torch
import transformers

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "num_hidden_layers": 4,
                                    "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", {"moe_intermediate_size": 64, "num_experts": 4,
                                     "num_experts_per_tok": 2}),
}  # fmt: skip
SERVABLE = {"hidden_size": 128, "head_dim": 32}  # head sizes that vLLM's CPU attention takes


def build(family: str, **changes: object) -> transformers.PreTrainedModel:
    name, own = FAMILIES[family]
    config = getattr(transformers, name)(**{**SIZES, **own, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the default, so that heads differ
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model.eval()


def save(family: str, path: Path, **changes: object) -> None:
    build(family, **changes).save_pretrained(path)
