"""Geometry of config.json files as published: spellings, and values that are left to defaults.

Numbers are those of the published configs; tensor names are written as in their checkpoints.
"""

from contextlib import suppress

import pytest

from kvq.errors import UnsupportedModelError
from kvq.geometry import read_geometry

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def names(layers, projections=QKV, prefix="model.layers."):
    return [f"{prefix}{i}.{p}.weight" for i in range(layers) for p in projections]


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
PUBLISHED = {  # name: (config, tensor names, heads, KV heads, head sizes of K and V)
    "TinyLlama": (
        LLAMA | {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
                 "num_key_value_heads": 4},
        names(22), (32, 4, 64, 64),
    ),
    "Llama-13B": (
        LLAMA | {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40},
        names(40), (40, 40, 128, 128),
    ),
    "SmolLM2-135M": (
        LLAMA | {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
                 "num_key_value_heads": 3},
        names(30), (9, 3, 64, 64),
    ),
    "Gemma-3-4b": (
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
         "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34,
                         "sliding_window": 1024}, "vision_config": {}},
        names(34, prefix="language_model.model.layers."), (8, 4, 256, 256),
    ),
    "DBRX": (
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
         "attn_config": {"kv_n_heads": 8}},
        names(40, ("norm_attn_norm.attn.Wqkv",), "transformer.blocks."), (48, 8, 128, 128),
    ),
    "BLOOM-7b1": (
        {"model_type": "bloom", "n_embed": 4096, "n_layer": 30, "num_attention_heads": 32},
        names(30, ("self_attention.query_key_value",), "h."), (32, 32, 128, 128),
    ),
    "Falcon-7b": (
        {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
         "num_attention_heads": 71, "multi_query": True, "new_decoder_architecture": False},
        names(32, ("self_attention.query_key_value",), "transformer.h."), (71, 1, 64, 64),
    ),
    "Falcon-40b": (
        {"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60,
         "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True},
        names(60, ("self_attention.query_key_value",), "transformer.h."), (128, 8, 64, 64),
    ),
    "ChatGLM3": (
        {"model_type": "chatglm", "hidden_size": 4096, "num_layers": 28, "num_attention_heads": 32,
         "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2},
        names(28, ("self_attention.query_key_value",), "transformer.encoder.layers."),
        (32, 2, 128, 128),
    ),
    "MPT multi-query": (
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32,
         "attn_config": {"attn_type": "multiquery_attention"}},
        names(32, ("attn.Wqkv",), "transformer.blocks."), (32, 1, 128, 128),
    ),
    "Step3": (
        {"model_type": "step3_text", "hidden_size": 7168, "num_hidden_layers": 4,
         "num_attention_heads": 64, "num_attention_groups": 1, "head_dim": 256},
        names(4), (64, 1, 256, 256),
    ),
    "DeepSeek-VL2 without MLA": (
        {"model_type": "deepseek_v2", "hidden_size": 1280, "num_hidden_layers": 12,
         "num_attention_heads": 10, "num_key_value_heads": 10, "kv_lora_rank": None,
         "v_head_dim": 0, "use_mla": False},
        names(12), (10, 10, 128, 128),
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
         "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "num_nextn_predict_layers": 1},
        names(62, ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj")), (128, 1, 64, 512),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_heads_and_head_sizes(model):
    config, tensors, expected = PUBLISHED[model]
    layers = read_geometry(config, tensors).layers
    found = {
        (x.num_attention_heads, x.num_key_value_heads, x.head_dim, x.v_head_dim) for x in layers
    }
    assert found == {expected}


def test_drafts_are_the_layers_that_config_json_counts_apart():
    config, tensors, _ = PUBLISHED["DeepSeek-V3"]
    assert read_geometry(config, tensors).drafts == ("model.layers.61.self_attn",)
    with pytest.raises(UnsupportedModelError, match=r"says that `.*` has 61") as caught:
        read_geometry(config | {"num_nextn_predict_layers": 0}, tensors)
    assert caught.value.code == "geometry.surplus"
    mtp = [*names(4), *names(1, prefix="mtp.layers.")]
    config = LLAMA | {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    assert read_geometry(config, mtp).drafts == ("mtp.layers.0.self_attn",)


def test_layers_of_a_deeper_encoder_are_no_drafts():
    config = {"model_type": "whisper", "is_encoder_decoder": True, "encoder_layers": 32,
              "decoder_layers": 4, "d_model": 1280, "decoder_attention_heads": 20,
              "encoder_attention_heads": 20}  # fmt: skip
    tensors = names(32, QKV, "model.encoder.layers.") + names(
        4, (*QKV, "encoder_attn.k_proj"), "model.decoder.layers."
    )
    geometry = read_geometry(config, tensors)
    assert geometry.drafts == ()
    assert [layer.kind for layer in geometry.layers[:2]] == ["full_attention", "cross_attention"]
    assert len(geometry.layers) == 8


def test_lightning_layers_keep_no_cache():
    config = {"model_type": "minimax", "hidden_size": 6144, "num_hidden_layers": 8,
              "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
              "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1]}  # fmt: skip
    tensors = names(7, ("self_attn.qkv_proj",)) + names(8)[-3:]
    geometry = read_geometry(config, tensors)
    assert [layer.layer_idx for layer in geometry.layers] == [7]
    assert geometry.uncached == tuple(range(7))


def test_nemotron_patterns_name_the_attention_layers():
    config = {"model_type": "nemotron_h", "hidden_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 5,
              "hybrid_override_pattern": "M-M*E"}  # fmt: skip
    geometry = read_geometry(config, ["backbone.layers.3.mixer.k_proj.weight"])
    assert [layer.attention for layer in geometry.layers] == ["backbone.layers.3.mixer"]


def test_per_layer_sizes_are_read_whatever_the_width_of_their_keys():
    config = {"model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 12,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
              "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
              "num_kv_shared_layers": 0,
              "per_layer_config": {"05": {"head_dim": 32}, "11": {"head_dim": 32}}}  # fmt: skip
    layers = read_geometry(config, names(12)).layers
    assert [layer.head_dim for layer in layers] == ([16] * 5 + [32]) * 2


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_shared_layers": "x"},
        {"num_kv_shared_layers": 9},
        {"layer_types": [{}, {}, {}, {}]},
        {"block_types": [[1]]},
        {"per_layer_config": []},
        {"layer_types": [None] * 4},
    ],
)
def test_nonsense_is_a_refusal_or_nothing_but_no_crash(change):
    config = LLAMA | {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    with suppress(UnsupportedModelError):
        assert len(read_geometry(config | change, names(4)).layers) == 4
