import json

import pytest
from safetensors import safe_open

from kvq.errors import UnsupportedModelError
from kvq.geometry import read_geometry
from tests.models import FAMILIES, SIZES


def config_and_names(path):
    with safe_open(path / "model.safetensors", "np") as file:
        return json.loads((path / "config.json").read_text()), list(file.keys())


@pytest.mark.parametrize("family", FAMILIES)
def test_geometry_equals_what_transformers_built(checkpoints, family):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoints(family))
    geometry = read_geometry(*config_and_names(checkpoints(family)))
    attentions = {name: m for name, m in model.named_modules() if name.endswith("self_attn")}
    assert [layer.attention for layer in geometry.layers] == list(attentions)
    for layer, module in zip(geometry.layers, attentions.values(), strict=True):
        assert layer.layer_idx == module.layer_idx
        assert layer.head_dim == module.head_dim == 8
        assert (layer.num_attention_heads, layer.num_key_value_heads) == (4, 2)


CONFIG = {**SIZES, "architectures": ["XForCausalLM"], "num_hidden_layers": 2}
NAMES = [f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (0, 1) for p in "qkvo"]


def test_prefixes_of_multimodal_models_are_kept_and_the_vision_tower_is_not_taken():
    names = [f"model.vision_tower.encoder.layers.{i}.self_attn.k_proj.weight" for i in (0, 1)]
    names += [f"language_model.{name}" for name in NAMES]
    found = read_geometry({"architectures": ["XForConditionalGeneration"], "text_config": CONFIG},
                          names)  # fmt: skip
    assert [layer.attention for layer in found.layers] == [
        f"language_model.model.layers.{i}.self_attn" for i in (0, 1)
    ]


def test_layers_without_a_cache_are_left_out_and_named():
    config = CONFIG | {"layer_types": ["linear_attention", "full_attention"]}
    found = read_geometry(config, NAMES)
    assert [layer.layer_idx for layer in found.layers] == [1]
    assert found.uncached == (0,)


@pytest.mark.parametrize(
    ("change", "names", "code"),
    [
        ({"use_cla": True}, NAMES, "geometry.unsupported"),
        ({"model_type": "mamba"}, NAMES, "geometry.unsupported"),
        ({"num_kv_shared_layers": 2}, NAMES, "geometry.no_donor"),
        ({"layer_types": ["full_attention"]}, NAMES, "geometry.layer_types"),
        ({"layer_types": ["warp_attention"] * 2}, NAMES, "geometry.layer_kind"),
        ({"num_hidden_layers": None}, NAMES, "geometry.number"),
        ({"num_attention_heads": 0}, NAMES, "geometry.number"),
        ({"num_key_value_heads": "2"}, NAMES, "geometry.number"),
        ({"layer_types": 5}, NAMES, "geometry.layer_types"),
        ({}, NAMES[:4], "geometry.no_attention"),
        ({}, ["model.norm.weight"], "geometry.no_attention"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, names, code):
    with pytest.raises(UnsupportedModelError) as caught:
        read_geometry(CONFIG | change, names)
    assert caught.value.code == code
    named = ("XForCausalLM", *change)
    assert any(name in str(caught.value) for name in named)
