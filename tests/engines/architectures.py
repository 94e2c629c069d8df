"""Tiny models that engines load: config.json, and the shapes of their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# models: 4 heads of 32 on a hidden size of 128, 2 of them for K and V, 64 wide MLPs

ATTENTION = "q_proj.weight 128x128, k_proj.weight 64x128, v_proj.weight 64x128"
MLP = "mlp.gate_proj.weight 64x128, mlp.up_proj.weight 64x128, mlp.down_proj.weight 128x64"
NORMS = "input_layernorm.weight 128, post_attention_layernorm.weight 128"
FEEDFORWARD_NORMS = "pre_feedforward_layernorm.weight 128, post_feedforward_layernorm.weight 128"
QK_NORM = "self_attn.q_norm.weight 32, self_attn.k_norm.weight 32"
SELF_ATTENTION = ", ".join(
    f"self_attn.{part}" for part in [*ATTENTION.split(", "), "o_proj.weight 128x128"]
)
LLAMA = f"{SELF_ATTENTION}, {MLP}, {NORMS}"
GEMMA = f"{LLAMA}, {FEEDFORWARD_NORMS}"
PER_LAYER = (
    "per_layer_input_gate.weight 8x128, per_layer_projection.weight 128x8, "
    "post_per_layer_input_norm.weight 128"
)
PER_LAYER_MODEL = (
    "model.embed_tokens_per_layer.weight 128x32, model.per_layer_model_projection.weight 32x128, "
    "model.per_layer_projection_norm.weight 8"
)
MATRICES = "model.embed_tokens.weight 128x128, model.norm.weight 128"
LLAMA_MODEL = f"{MATRICES}, lm_head.weight 128x128"
BIASED = "attention.query_key_value 384x128, attention.dense 128x128, mlp.dense_h_to_4h 64x128"
SIZES = {
    "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
TWO_ROPES = {"sliding_attention": ROPE, "full_attention": ROPE}
GEMMA_SIZES = {
    **SIZES, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32,
    "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
GEMMA3_TEXT = {**GEMMA_SIZES, "model_type": "gemma3_text", "rope_parameters": TWO_ROPES}
SHARED = {
    **GEMMA_SIZES, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "rope_parameters": TWO_ROPES,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
}  # fmt: skip


def biased(table: str, **norms: int) -> str:
    """Return the table with a bias for each weight, and layer norms with both."""
    rows = [row.split() for row in table.split(", ")] + [[k, str(v)] for k, v in norms.items()]
    return ", ".join(f"{n}.weight {s}, {n}.bias {s.split('x')[0]}" for n, s in rows)


@dataclass(frozen=True)
class Architecture:
    """config.json, and shapes: of one layer, and of what is outside the layers."""

    name: str
    config: Mapping[str, Any]
    layer: str = LLAMA
    rest: str = LLAMA_MODEL
    layers: str = "model.layers"
    attention: str = "self_attn"
    num_layers: int = 2
    unshared: int = 99  # layers from here on have no K and V of their own


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", {"model_type": "llama", **SIZES}),
    "mistral": Architecture("MistralForCausalLM",
                            {"model_type": "mistral", **SIZES, "sliding_window": 8}),
    "qwen2": Architecture(
        "Qwen2ForCausalLM", {"model_type": "qwen2", **SIZES},
        f"{LLAMA}, self_attn.q_proj.bias 128, self_attn.k_proj.bias 64, self_attn.v_proj.bias 64",
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", {"model_type": "qwen3", **SIZES},
                          f"{LLAMA}, {QK_NORM}"),
    "phi3": Architecture(
        "Phi3ForCausalLM", {"model_type": "phi3", **SIZES, "pad_token_id": 0},
        f"self_attn.qkv_proj.weight 256x128, self_attn.o_proj.weight 128x128, {NORMS}, "
        "mlp.gate_up_proj.weight 128x128, mlp.down_proj.weight 128x64",
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        {"model_type": "mixtral", **SIZES, "num_local_experts": 2, "num_experts_per_tok": 1},
        f"{SELF_ATTENTION}, {NORMS}, block_sparse_moe.gate.weight 2x128, " + ", ".join(
            f"block_sparse_moe.experts.{i}.w1.weight 64x128, block_sparse_moe.experts.{i}.w2.weight"
            f" 128x64, block_sparse_moe.experts.{i}.w3.weight 64x128" for i in range(2)),
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        {"model_type": "qwen3_moe", **SIZES, "num_experts": 2, "num_experts_per_tok": 1,
         "moe_intermediate_size": 64, "decoder_sparse_step": 1, "norm_topk_prob": True,
         "mlp_only_layers": []},
        f"{SELF_ATTENTION}, {QK_NORM}, {NORMS}, mlp.gate.weight 2x128, " + ", ".join(
            f"mlp.experts.{i}.{row.removeprefix('mlp.')}"
            for i in range(2) for row in MLP.split(", ")),
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        {"model_type": "starcoder2", **SIZES, "hidden_act": "gelu", "norm_epsilon": 1e-5,
         "use_bias": False, "tie_word_embeddings": True},
        f"{SELF_ATTENTION}, {biased(NORMS.replace('.weight', ''))}, mlp.c_fc.weight 64x128, "
        "mlp.c_proj.weight 128x64",
        f"{MATRICES}, model.norm.bias 128",
    ),
    "gemma2": Architecture("Gemma2ForCausalLM", {"model_type": "gemma2", **GEMMA_SIZES},
                           GEMMA, MATRICES),
    "gemma3_text": Architecture("Gemma3ForCausalLM", GEMMA3_TEXT, f"{GEMMA}, {QK_NORM}", MATRICES),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM",
        {"model_type": "gemma3n_text", **SHARED, "altup_num_inputs": 4, "laurel_rank": 8,
         "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4},
        f"{GEMMA}, {QK_NORM}, {PER_LAYER}, altup.correct_output_scale 128, "
        "altup.correction_coefs.weight 4x4, altup.prediction_coefs.weight 16x4, "
        "altup.modality_router.weight 4x128, altup.router_norm.weight 128, "
        "laurel.linear_left.weight 8x128, laurel.linear_right.weight 128x8, "
        "laurel.post_laurel_norm.weight 128",
        f"{MATRICES}, {PER_LAYER_MODEL}, " + ", ".join(
            f"model.altup_{kind}projections.{i}.weight 128x128"
            for kind in ("", "unembed_") for i in range(3)),
        num_layers=4, unshared=2,
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        {"model_type": "gemma4_text", **SHARED, "global_head_dim": 32},
        f"{GEMMA}, {QK_NORM}, {PER_LAYER}, layer_scalar 1",
        f"{MATRICES}, {PER_LAYER_MODEL}", num_layers=4, unshared=2,
    ),
    "gpt_neox": Architecture(
        "GPTNeoXForCausalLM",
        {"model_type": "gpt_neox", **SIZES, "hidden_act": "gelu", "rotary_pct": 0.25},
        biased(f"{BIASED}, mlp.dense_4h_to_h 128x64", input_layernorm=128,
               post_attention_layernorm=128),
        "gpt_neox.embed_in.weight 128x128, embed_out.weight 128x128, "
        "gpt_neox.final_layer_norm.weight 128, gpt_neox.final_layer_norm.bias 128",
        "gpt_neox.layers", "attention",
    ),
    "falcon": Architecture(
        "FalconForCausalLM",
        {"model_type": "falcon", **{k: v for k, v in SIZES.items() if k != "head_dim"},
         "ffn_hidden_size": 512, "num_kv_heads": 2, "alibi": False,
         "bias": False, "multi_query": True, "parallel_attn": True,
         "new_decoder_architecture": False, "tie_word_embeddings": True},
        "self_attention.query_key_value.weight 192x128, self_attention.dense.weight 128x128, "
        "mlp.dense_h_to_4h.weight 512x128, mlp.dense_4h_to_h.weight 128x512, "
        "input_layernorm.weight 128, input_layernorm.bias 128",
        "transformer.word_embeddings.weight 128x128, transformer.ln_f.weight 128, "
        "transformer.ln_f.bias 128",
        "transformer.h", "self_attention",
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        {"model_type": "gpt2", "vocab_size": 128, "n_positions": 128, "n_embd": 128, "n_layer": 2,
         "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        "attn.c_attn.weight 128x384, attn.c_attn.bias 384, attn.c_proj.weight 128x128, "
        "attn.c_proj.bias 128, mlp.c_fc.weight 128x512, mlp.c_fc.bias 512, "
        "mlp.c_proj.weight 512x128, mlp.c_proj.bias 128, ln_1.weight 128, ln_1.bias 128, "
        "ln_2.weight 128, ln_2.bias 128",
        "transformer.wte.weight 128x128, transformer.wpe.weight 128x128, "
        "transformer.ln_f.weight 128, transformer.ln_f.bias 128",
        "transformer.h", "attn",
    ),
    "opt": Architecture(
        "OPTForCausalLM",
        {"model_type": "opt", **SIZES, "ffn_dim": 64, "word_embed_proj_dim": 128,
         "activation_function": "relu", "tie_word_embeddings": True, "pad_token_id": 0},
        biased(
            "self_attn.q_proj 128x128, self_attn.k_proj 128x128, self_attn.v_proj 128x128, "
            "self_attn.out_proj 128x128, fc1 64x128, fc2 128x64, self_attn_layer_norm 128, "
            "final_layer_norm 128"),
        "model.decoder.embed_tokens.weight 128x128, model.decoder.embed_positions.weight 130x128, "
        "model.decoder.final_layer_norm.weight 128, model.decoder.final_layer_norm.bias 128",
        "model.decoder.layers",
    ),
    "deepseek_v2": Architecture(
        "DeepseekV2ForCausalLM",
        {"model_type": "deepseek_v2", **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 64,
         "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
         "first_k_dense_replace": 2, "n_routed_experts": 4, "n_shared_experts": 1,
         "num_experts_per_tok": 2, "moe_intermediate_size": 64, "moe_layer_freq": 1,
         "topk_method": "greedy", "norm_topk_prob": False},
        "self_attn.q_a_proj.weight 32x128, self_attn.q_a_layernorm.weight 32, "
        "self_attn.q_b_proj.weight 256x32, self_attn.kv_a_proj_with_mqa.weight 96x128, "
        "self_attn.kv_a_layernorm.weight 64, self_attn.kv_b_proj.weight 256x64, "
        f"self_attn.o_proj.weight 128x128, {MLP}, {NORMS}",
    ),
    "gemma3": Architecture(
        "Gemma3ForConditionalGeneration",
        {"model_type": "gemma3", "text_config": GEMMA3_TEXT, "mm_tokens_per_image": 4,
         "boi_token_index": 127, "eoi_token_index": 126, "image_token_index": 125,
         "tie_word_embeddings": True,
         "vision_config": {
             "model_type": "siglip_vision_model", "hidden_size": 128, "intermediate_size": 64,
             "num_hidden_layers": 1, "num_attention_heads": 4, "num_channels": 3,
             "image_size": 32, "patch_size": 8, "vision_use_head": False}},
        f"{GEMMA}, {QK_NORM}",
        "language_model.model.embed_tokens.weight 128x128, language_model.model.norm.weight 128, "
        "multi_modal_projector.mm_input_projection_weight 128x128, "
        "multi_modal_projector.mm_soft_emb_norm.weight 128, " + ", ".join(
            f"vision_tower.vision_model.{row}" for row in [
                "embeddings.patch_embedding.weight 128x3x8x8",
                "embeddings.patch_embedding.bias 128",
                "embeddings.position_embedding.weight 16x128",
                *biased("post_layernorm 128").split(", "),
                *biased(", ".join(f"encoder.layers.0.{row}" for row in [
                    "self_attn.q_proj 128x128", "self_attn.k_proj 128x128",
                    "self_attn.v_proj 128x128", "self_attn.out_proj 128x128", "layer_norm1 128",
                    "layer_norm2 128", "mlp.fc1 64x128", "mlp.fc2 128x64"])).split(", ")]),
        "language_model.model.layers",
    ),
}  # fmt: skip


def rows(table: str) -> list[tuple[str, tuple[int, ...]]]:
    rows = [row.split() for row in table.split(", ")]
    return [(name, tuple(int(n) for n in shape.split("x"))) for name, shape in rows]
