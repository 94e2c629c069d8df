"""What differs from the general shrink in the architectures of the image-text-to-text mapping."""

from typing import Any

from transformers import GPT2Config, ViTConfig

from tests.zoo.causal import FULL, LINEAR, SLIDING
from tests.zoo.seq2seq import DECODER, NUM_LAYERS, QWEN3_AUDIO, T5GEMMA2, Part


def _rope(*section: int, **others: Any) -> dict[str, Any]:
    """Rotary parameters whose multimodal sections fill half a head of 8."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section), **others}


MROPE = {"text_config": {"rope_parameters": _rope(2, 1, 1)}}  # time, height, width
MROPE_MOE = {"text_config": {**MROPE["text_config"], "mlp_only_layers": [0]}}
HEIGHT_FIRST = _rope(1, 1, 2)  # height, width, time
DEEPSTACK = {"deepstack_visual_indexes": [0]}
MM_TOKENS = {"mm_tokens_per_image": 4}
QUERIES = {"num_query_tokens": 4}
SAM = {"output_channels": 16, "window_size": 2, "global_attn_indexes": [1]}
VQ = {  # its group norms have 32 groups
    "base_channels": 32, "latent_channels": 32, "embed_dim": 8, "num_embeddings": 16,
    "channel_multiplier": [1], "num_res_blocks": 1,
}  # fmt: skip

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "blip-2": {**QUERIES, "image_token_index": 127},
    "chameleon": {
        "vq_config": {**VQ, "resolution": 32},
        "vocabulary_map": {"<image>": 100, "IMGIMGAZ": 101, "IMGIMGBZ": 102},
    },
    "cohere2_vision": {"alignment_intermediate_size": 64},
    "cohere_compass": {
        "text_config": {"rope_parameters": {SLIDING: HEIGHT_FIRST, FULL: None}},
        "vision_config": DEEPSTACK,
    },
    "cosmos3_edge": {**MROPE, "vision_config": {"num_patches": 16}, "projector_hidden_size": 64},
    "cosmos3_omni": {**MROPE, "vision_config": DEEPSTACK},
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2,
        },
        "vision_config": {"sam_config": {**SAM, "downsample_channels": [16, 32]}},
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": SAM},
    "diffusion_gemma": {
        "text_config": {
            "global_head_dim": 16, "num_global_key_value_heads": 1, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 64,
        },
        "vision_config": {"model_type": "gemma4_vision", "position_embedding_size": 16},
        "canvas_length": 8,
    },
    "emu3": {
        "vq_config": {
            "codebook_size": 16, "base_channels": 32, "channel_multiplier": [1, 1],
            "num_res_blocks": 1, "attn_resolutions": [], "temporal_downsample_factor": 2,
        },
        "vocabulary_map": {
            "<image>": 100, "<|extra_200|>": 101,
            **{f"<|visual token {k:06d}|>": 102 + k for k in range(16)},
        },
    },
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": HEIGHT_FIRST, "moe_intermediate_size": [64, 32]},
    },
    "evolla": {
        "aligner_num_add_layers": 2, "resampler_depth": 1, "resampler_dim_head": 8,
        "resampler_heads": 4, "resampler_num_latents": 4,
    },
    "fast_vlm": {
        "vision_config": {
            "architecture": "fastvit_t8", "global_pool": "avg", "hidden_size": 768,
            "model_args": {"inference_mode": True},
        },
    },
    "florence2": {
        "vision_config": {
            "depths": [1], "patch_size": [7], "patch_stride": [4], "patch_padding": [3],
            "patch_prenorm": [False], "embed_dim": [32], "num_heads": [4], "num_groups": [4],
            "max_temporal_embeddings": 4, "max_position_embeddings": 8,
        },
    },
    "gemma3": MM_TOKENS,
    "gemma3n": {
        "vision_config": {"vocab_offset": 116, "vocab_size": 4},
        "audio_config": {
            "sscp_conv_channel_size": [8, 8], "input_feat_size": 16, "vocab_offset": 120,
            "vocab_size": 4,
        },
    },
    "gemma4": {
        "text_config": {
            "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
        "vision_config": {"position_embedding_size": 16},
        "audio_config": {"subsampling_conv_channels": [8, 8], "output_proj_dims": 32},
    },
    "gemma4_unified": {
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
        "audio_config": {"audio_embed_dim": 32},
    },
    "glm4v_moe": {  # rotates half of a head
        "text_config": {
            "head_dim": 16, "rope_parameters": _rope(2, 1, 1, partial_rotary_factor=0.5),
        },
    },
    "glm5_next": {
        "text_config": {
            "layer_types": [
                LINEAR, "deepseek_sparse_attention", "deepseek_sparse_attention", LINEAR,
            ],
            "indexer_types": ["full", "full", "shared", "full"],
            "index_kpool": 4,
        },
        "vision_config": {"projection_intermediate_size": 64},
    },
    "got_ocr2": {"vision_config": SAM},
    "granite4_vision": {
        "text_config": {"model_type": "granite4_vision_text"},
        "qformer_config": {
            "num_hidden_layers": 1, "cross_attention_frequency": 1, "encoder_hidden_size": 32,
        },
        "downsample_rate": "2/4", "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1],
    },
    "hunyuan_vl": {
        "text_config": {"rope_parameters": _rope(1, 1, 1, 1)},
        "vision_config": {
            "img_max_token_num": 16, "max_vit_seq_len": 64, "max_image_size": 64,
            "min_image_size": 16,
        },
        "im_start_id": 120, "im_end_id": 121, "im_newline_id": 122,
    },
    "idefics": {"cross_layer_interval": 2},
    "idefics2": {
        "perceiver_config": {
            "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4,
            "resampler_head_dim": 8,
        },
    },
    "inkling_mm_model": {"audio_config": {"n_mel_bins": 16, "mel_vocab_size": 16}},
    "instructblip": {**QUERIES, "image_token_index": 127},
    "instructblipvideo": {**QUERIES, "video_token_index": 127},
    "janus": {
        "vision_config": {"num_image_tokens": 16, "mlp_ratio": 2},
        "vq_config": {**VQ, "image_token_embed_dim": 32},
    },
    "kimi_k25": {
        "vision_config": {"pos_emb_height": 4, "pos_emb_width": 4}, "projection_hidden_size": 32,
    },
    "kosmos-2": {"text_config": {"layers": 4}, "latent_query_num": 4},
    "kosmos-2.5": {
        "text_config": {"layers": 4},
        "vision_config": {"max_num_patches": 64, "patch_embed_hidden_size": 48},
        "latent_query_num": 4,
    },
    "lfm2_vl": {"vision_config": {"num_patches": 16}, "projector_hidden_size": 32},
    "llama4": {
        "vision_config": {
            "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32,
        },
    },
    "minimax_m3_vl": {"projector_hidden_size": 32},
    "mistral4": {"first_k_dense_replace": 1},
    "mllama": {"vision_config": {"intermediate_layers_indices": [0], "vision_output_dim": 64}},
    "muse_glimmer": {"projector_hidden_size": 32},
    "ovis2": {"visual_indicator_token_ids": [120, 121, 122, 123, 124]},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {
                "embed_dim": 192, "img_size": [32, 32], "use_post_transformer_norm": False,
            },
        },
    },
    "pix2struct": {"vision_config": {"seq_len": 64, "patch_embed_hidden_size": 48}},
    "pp_chart2table": {"vision_config": SAM},
    "pp_formulanet": {
        "vision_config": {
            **SAM, "post_conv_in_channels": 16, "post_conv_mid_channels": 16,
            "post_conv_out_channels": 16, "decoder_hidden_size": 32,
        },
    },
    "qwen2_5_omni_thinker": {**MROPE, "audio_config": {"num_mel_bins": 16, "output_dim": 32}},
    "qwen3_omni_moe_thinker": {
        **MROPE_MOE, "vision_config": DEEPSTACK, "audio_config": QWEN3_AUDIO,
    },
    "qwen3_vl": {**MROPE, "vision_config": DEEPSTACK},
    "qwen3_vl_moe": {**MROPE_MOE, "vision_config": DEEPSTACK},
    "shieldgemma2": MM_TOKENS,
    "step3p7": {
        "text_config": {
            "layer_types": [FULL, SLIDING, FULL, SLIDING], "sliding_window": 8,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "num_sliding_attention_heads": 8, "share_expert_dim": 64,
        },
    },
    "t5gemma2": T5GEMMA2,
    "udop": NUM_LAYERS,
    "vision-encoder-decoder": {"encoder": Part(ViTConfig), "decoder": Part(GPT2Config, **DECODER)},
    **dict.fromkeys(
        (
            "glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl",
            "qwen4_exp",
        ),
        MROPE,
    ),
}  # fmt: skip

# Architectures that cannot be built or run without more packages, with the reason.
CANNOT: dict[str, str] = {
    **dict.fromkeys(
        ("fast_vlm", "gemma3n", "perception_lm"),
        "ImportError: TimmWrapperModel requires the PIL library but it was not found; timm as well",
    ),
    "inkling_mm_model": "ModuleNotFoundError: No module named 'scipy'",
}

# Architectures that take more than `input_ids`, with what they need.
SEQ2SEQ = "`decoder_input_ids` and an EncoderDecoderCache"
NEEDS: dict[str, str] = {
    "blip": "`pixel_values`",
    "blip-2": "`pixel_values`, and `num_query_tokens` image tokens in `input_ids`",
    "florence2": f"{SEQ2SEQ}; from `input_ids` alone its decoder sees one token",
    "idefics": "`pixel_values` [batch, images, ...] and `image_attention_mask` "
    "[batch, seq_len, images]",
    "instructblip": "`pixel_values`, `qformer_input_ids`, and `num_query_tokens` image tokens",
    "instructblipvideo": "`pixel_values` [batch, frames, ...], `qformer_input_ids`, and "
    "`num_query_tokens` video tokens per frame",
    "kosmos-2": "`pixel_values`, and `image_embeds_position_mask` with `latent_query_num` ones",
    "pi0": "`state`, `noise`, `timestep`, `pixel_values`, `pixel_attention_mask`, "
    "`attention_mask`, image tokens, and no `past_key_values`: it makes the cache of its prefix",
    "pix2struct": f"`flattened_patches` instead of `input_ids`, {SEQ2SEQ}",
    "pp_formulanet": f"`pixel_values` instead of `input_ids`, {SEQ2SEQ}",
    "t5gemma2": SEQ2SEQ,
    "udop": f"`bbox` [batch, seq_len, 4], {SEQ2SEQ}",
    "vision-encoder-decoder": f"`pixel_values` instead of `input_ids`, {SEQ2SEQ}",
}

# Architectures whose saved form the Auto class does not read back, with the reason.
UNREADABLE: dict[str, str] = {
    "evolla": "ValueError: Unrecognized configuration class EvollaConfig: two model types have it, "
    "and the Auto classes look for the other one; EvollaForProteinText2Text reads it",
    "shieldgemma2": "tensor names are saved with a prefix that loading does not expect, unless "
    "`save_pretrained(..., save_original_format=False)`",
}
