"""What differs from the general shrink in the architectures of the causal mapping."""

from typing import Any

SLIDING, FULL, LINEAR, HYBRID = "sliding_attention", "full_attention", "linear_attention", "hybrid"
DECODER = {"is_decoder": True}
GEMMA_SHARED = {  # the last two layers read keys and values of the last earlier layer of their type
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL, SLIDING, FULL],
}
GEMMA4 = {**GEMMA_SHARED, "global_head_dim": 16}
K_EQ_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}  # in the full layers
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
ONE_FULL = {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]}
CONV = {"layer_types": ["conv", "conv", FULL, "conv"]}
MINIMAX_SPARSE = "minimax_m3_sparse"
GEMMA4_ASSISTANT = {  # a draft model: all its layers read keys and values of the target model
    "backbone_hidden_size": 32,
    "text_config": {
        "model_type": "gemma4_text",
        "global_head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    },
}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra",
            "ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm",
            "roformer", "xlm-roberta", "xlm-roberta-xl",
        ),
        DECODER,
    ),
    "bamba": {"attn_layer_indices": [2]},
    # transformers reads `num_hidden_layers` for its cache, though the configuration has none
    "blt": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 4},
    "cohere2_moe": {
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "prefix_dense_intermediate_size": 64,
    },
    "cohere_compass_text": {
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "rope_parameters": {SLIDING: MROPE, FULL: MROPE},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v4": {
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": [
            SLIDING, "heavily_compressed_attention", "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
    },
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3_text": {"num_hidden_layers": 6},  # every sixth layer attends fully
    "gemma3n_text": {
        **GEMMA_SHARED,
        "intermediate_size": 64,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": {**GEMMA4, **K_EQ_V},
    "gemma4_assistant": GEMMA4_ASSISTANT,
    "gemma4_unified": {
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
        "audio_config": {"audio_embed_dim": 32},
    },
    "gemma4_unified_assistant": {
        **GEMMA4_ASSISTANT,
        "text_config": {
            **GEMMA4_ASSISTANT["text_config"], **K_EQ_V, "model_type": "gemma4_unified_text",
        },
    },
    "glm_moe_dsa": {"indexer_types": ["full", "full", "shared", "shared"]},
    "got_ocr2": {"vision_config": {"output_channels": 16}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": ONE_FULL,
    "hrm_text": {"num_hidden_layers": 2},  # runs both of its stacks several times per token
    "inkling_text": {
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid_sliding", HYBRID],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "swa_num_key_value_heads": 4,
    },
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "kimi_linear": {"num_hidden_layers": 5},
    "laguna": {
        "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
        "num_attention_heads_per_layer": [4, 8, 8, 8],
    },
    "lfm2": CONV,
    "lfm2_moe": CONV,
    "llama4_text": {"interleave_moe_layer_step": 2},
    "mamba2": {"head_dim": 16},
    "mellum": {"layer_types": [SLIDING, SLIDING, SLIDING, FULL]},
    "minimax_m3_vl_text": {
        "layer_types": [FULL, MINIMAX_SPARSE, MINIMAX_SPARSE, MINIMAX_SPARSE],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "index_block_size": 8,
    },
    "phi4_multimodal": {
        "audio_config": {
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
        "vision_config": {"crop_size": 32},
    },
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
        "indexer_compress_ratio": 4, "hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": 32,
        "heads_per_ngram": 2, "ngram_vocab_size_base": 64, "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 8, "eos_token_id": 2,
    },
    "recurrent_gemma": {"num_key_value_heads": 1},
    "reformer": {**DECODER, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [8, 24]},
    "roc_bert": {
        **DECODER, "pronunciation_vocab_size": 128, "pronunciation_embed_dim": 16,
        "shape_vocab_size": 128, "shape_embed_dim": 16,
    },
    # query and key sizes of all heads are rounded up to a multiple of 64
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_hidden_layers": 2, "num_blocks": 2},
    "xmod": {**DECODER, "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": [LINEAR, LINEAR, HYBRID, LINEAR, LINEAR, HYBRID],
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": [LINEAR, LINEAR, HYBRID, LINEAR, LINEAR, HYBRID],
    },
    "zaya": {
        "layer_types": [HYBRID, HYBRID, "hybrid_sliding", HYBRID], "sliding_window": 8,
        "router_hidden_size": 16,
    },
}  # fmt: skip

# Model types whose mapped class takes this configuration instead of that of the model type.
CONFIGS: dict[str, str] = {
    "musicgen": "MusicgenDecoderConfig",
    "musicgen_melody": "MusicgenMelodyDecoderConfig",
}

# Architectures that transformers cannot run in bfloat16.
FLOAT32 = {"deepseek_v4", "reformer", "xlnet", "xlstm"}

# Architectures that cannot be built or run, with the reason.
CANNOT: dict[str, str] = {
    "gemma3n": "ImportError: TimmWrapperModel requires the PIL library (its vision tower is timm)",
}

# Architectures that take more than `input_ids` and a plain cache, with what they need.
NEEDS: dict[str, str] = {
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "`inputs_embeds` [batch, seq_len, 2 * backbone_hidden_size] and `shared_kv_states`, a pair "
        "of keys and values for each of full_attention and sliding_attention",
    ),
    "minimax": "a MiniMaxCache, made by the model itself when `past_key_values` is left out",
    **dict.fromkeys(
        ("musicgen", "musicgen_melody"), "`input_ids` of shape [batch * num_codebooks, seq_len]"
    ),
}
