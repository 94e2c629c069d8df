"""Shrink the configuration of any transformers architecture to one that runs in milliseconds."""

from copy import deepcopy
from dataclasses import fields
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from tests.zoo.causal import EXCEPTIONS

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB = 4, 4, 2, 8, 32, 64, 128
POSITIONS, WINDOW = 128, 8

# What each attribute becomes when the default is larger.
SIZES: dict[str, int] = {
    name: size
    for size, names in (
        (HIDDEN, "hidden_size d_model n_embd dim embed_dim hidden_dim emb_dim embedding_dim"),
        (HIDDEN, "embedding_size input_embedding_size output_embedding_size word_embed_proj_dim"),
        (HIDDEN, "lru_width out_hidden_size backbone_hidden_size"),
        (HIDDEN, "hidden_size_global cross_attention_hidden_size projection_dim input_size"),
        (INTERMEDIATE, "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size dim_ff dff d_inner"),
        (INTERMEDIATE, "encoder_ffn_dim decoder_ffn_dim moe_intermediate_size mlp_dim"),
        (INTERMEDIATE, "shared_expert_intermediate_size shared_intermediate_size"),
        (INTERMEDIATE, "expert_ffn_hidden_size feed_forward_size intermediate_size_mlp"),
        (INTERMEDIATE, "moe_shared_expert_intermediate_size dense_intermediate_size"),
        (INTERMEDIATE, "prefix_dense_intermediate_size"),
        (LAYERS, "num_hidden_layers n_layer n_layers num_layers num_blocks"),
        # a plain cache counts the encoder's layers, so a decoder has as many
        (2, "encoder_layers num_encoder_layers decoder_layers num_decoder_layers"),
        (2, "depth conf_num_hidden_layers num_global_layers"),
        (HEADS, "num_attention_heads n_head n_heads num_heads attention_heads encoder_num_heads"),
        (HEADS, "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads"),
        (HEADS, "num_decoder_attention_heads swa_num_attention_heads conf_num_attention_heads"),
        (KV_HEADS, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads"),
        (HEAD_DIM, "head_dim d_head d_kv attention_head_size kv_channels"),
        (HEAD_DIM, "dim_head swa_head_dim query_pre_attn_scalar"),
        # multi-head latent attention and sparse-attention indexers
        (16, "kv_lora_rank q_lora_rank qk_nope_head_dim o_lora_rank index_head_dim index_topk"),
        (HEAD_DIM, "qk_rope_head_dim"),
        (4, "rotary_dim"),
        (12, "v_head_dim"),
        (2, "index_n_heads n_group o_groups first_k_dense_replace index_topk_blocks"),
        (1, "topk_group"),
        # experts
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok moe_topk moe_top_k moe_k top_k_experts zero_expert_num"),
        # state-space and linear-attention layers
        (16, "mamba_d_head mamba_head_dim"),
        (4, "mamba_n_heads mamba_num_heads"),
        (8, "mamba_d_state state_size ssm_state_size time_step_rank mamba_dt_rank"),
        (2, "mamba_n_groups n_groups linear_num_key_heads n_mamba_heads"),
        (4, "linear_num_value_heads linear_num_heads"),
        (8, "linear_key_head_dim linear_head_dim mamba_chunk_size chunk_size laurel_rank"),
        (16, "linear_value_head_dim"),
        # positions and windows
        (POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
        (POSITIONS, "max_source_positions context_length original_max_position_embeddings"),
        (WINDOW, "sliding_window window_size attention_window_size sliding_window_size"),
        (WINDOW, "local_attention attention_chunk_size"),
        (16, "num_position_embeddings"),
        # vocabularies and other modalities
        (VOCAB, "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size"),
        (VOCAB, "audio_vocab_size"),
        (8, "hidden_size_per_layer_input"),
        (32, "image_size"),
        (8, "patch_size"),
    )
    for name in names.split()
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def shrink(config_class: type[PreTrainedConfig], **exceptions: Any) -> PreTrainedConfig:
    """Return a configuration of `config_class` with tiny sizes, nested configurations included.

    Args:
        config_class: the architecture.
        exceptions: attributes that this architecture needs otherwise; a dict under the name of a
            nested configuration holds the exceptions there, on top of those that `EXCEPTIONS` has
            for its model type.
    """
    exceptions = deepcopy(exceptions)  # configurations edit what they are given
    try:
        defaults = vars(config_class())
    except Exception:  # a class without usable defaults: only its nested configurations are shrunk
        defaults = {}
    changes = _sizes(config_class, defaults) | _special_ids(config_class, defaults)
    for name, nested in config_class.sub_configs.items():
        own = exceptions.pop(name, {})
        if isinstance(own, dict):
            own = _nested(nested, defaults.get(name), own)
        changes[name] = own
    return config_class(**changes | exceptions)


def _sizes(config_class: type[PreTrainedConfig], defaults: dict[str, Any]) -> dict[str, int]:
    stored = {f.name: config_class.attribute_map.get(f.name, f.name) for f in fields(config_class)}
    found = {name: defaults.get(key) for name, key in stored.items() if name in SIZES}
    changes = {
        name: min(value, SIZES[name])
        for name, value in found.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    for name in ("num_key_value_heads", "head_dim"):
        if name in found and found[name] is None:
            changes[name] = SIZES[name]
    if changes.get("kv_lora_rank") and "num_key_value_heads" in changes:
        changes["num_key_value_heads"] = HEADS  # latent attention expands to all heads
    return changes


def _special_ids(config_class: type[PreTrainedConfig], defaults: dict[str, Any]) -> dict[str, int]:
    names = [f.name for f in fields(config_class) if f.name.endswith(("_token_id", "_token_index"))]
    large = [name for name in names if isinstance(defaults.get(name), int | list)]
    return {name: SPECIAL.get(name, VOCAB - 1 - k) for k, name in enumerate(large)}


def _nested(
    config_class: type[PreTrainedConfig], default: Any, exceptions: dict[str, Any]
) -> PreTrainedConfig | None:
    if config_class is AutoConfig:
        if "model_type" in exceptions:
            config_class = type(AutoConfig.for_model(exceptions.pop("model_type")))
        elif default is None:
            return None
        else:
            config_class = type(default)
    known = EXCEPTIONS.get(config_class.model_type, {})
    return shrink(config_class, **{**known, **exceptions})
