"""The model of vLLM against what vLLM itself did, for every recorded checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvq.checkpoint import open_checkpoint
from kvq.engines import get_engine
from kvq.engines.base import EngineOptions
from kvq.errors import InputError, KvqError
from kvq.geometry import read_geometry
from tests.engines.variants import VARIANTS, write

GOLDENS = Path(__file__).parents[1] / "goldens"
GOLDEN = json.loads((GOLDENS / "vllm.json").read_text())
EARLIER = json.loads((GOLDENS / "vllm_earlier.json").read_text())  # only what differs
ERROR_LENGTH = 240  # at which the golden cuts
# kvq does not open these, and vLLM does not load them; kvq's error code.
REFUSED = {
    "ct-files-index-empty": "geometry.no_attention",
    "ct-files-index-without-map": "index.no_weight_map",
}
# kvq does not open these, but vLLM loads them; the reason.
NOT_MODELLED = {
    "ct-files-extra-file-index-scales": (
        "geometry.no_attention: the index hides the model's weights, which vLLM under "
        "compressed-tensors does not miss"
    ),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


def read(name, folder, *, config=None, version=None, **options):
    """Read a variant, with some of its config.json and of its options changed."""
    variant = VARIANTS[name]
    if not (folder / name).exists():
        write(name, folder / name)
    view = open_checkpoint(folder / name)
    geometry = read_geometry({**view.config, **(config or {})}, view.tensors)
    view = replace(view, config={**view.config, **(config or {})})
    chosen = EngineOptions(variant.kv_cache_dtype, "cpu", skip_layers=variant.skip_layers)
    return get_engine("vllm", version).read(view, geometry, replace(chosen, **options))


def found(reading):
    """The reading in the golden's form."""
    if reading.error:
        kind, _, text = reading.error.partition(": ")
        return {"error": f"{kind}: {text[:ERROR_LENGTH]}"}
    layers = {layer.engine_name: {"dtype": layer.cache_dtype, "k": layer.k.value,
                                  "v": layer.v.value, "q": layer.q.value}
              for layer in reading.layers}  # fmt: skip
    return {"error": None, "cache_dtype": reading.cache_dtype, "layers": layers}


def expected(golden):
    if golden["error"]:
        return {"error": golden["error"]}
    layers = {
        name: {"dtype": layer["dtype"], **{side: numbers(layer[f"{side}_all"]) for side in "kvq"}}
        for name, layer in golden["layers"].items()
    }
    return {"error": None, "cache_dtype": golden["cache_dtype"], "layers": layers}


def numbers(values):
    return tuple(float(value) for value in values)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_the_model_predicts_what_vllm_did(name, folder):
    golden = GOLDEN["variants"][name]
    if name in REFUSED or name in NOT_MODELLED:
        assert bool(golden["error"]) == (name in REFUSED)
        with pytest.raises(KvqError) as error:
            read(name, folder)
        assert error.value.code == {**REFUSED, **NOT_MODELLED}[name].partition(":")[0]
        return
    np.testing.assert_equal(found(read(name, folder)), expected(golden))


# What earlier versions did and the model does not say, by version and variant.
UNSAID = {
    # the class reshapes whatever has that name before it is looked up: another error than predicted
    **{(version, f"gpt_neox-{method}-names-fused"): "RuntimeError: shape '[4, 3, -1]' is invalid"
       for version in ("0.29.0", "0.30.0", "0.31.0") for method in ("ct", "modelopt")},
    # without a quantization config, weights that a sharing layer does not use are missed
    **{("0.29.0", f"{name}-none"): "ValueError: Following weights were not initialized"
       for name in ("gemma3n", "gemma4")},
    ("0.29.0", "starcoder2-none"): None,  # no layer to be seen
}  # fmt: skip


@pytest.mark.parametrize("version", sorted(EARLIER))
def test_the_model_predicts_what_earlier_versions_did(version, folder):
    differing = set()
    for name in sorted(set(VARIANTS) - set(REFUSED) - set(NOT_MODELLED)):
        golden = EARLIER[version].get(name, GOLDEN["variants"][name])
        try:
            np.testing.assert_equal(found(read(name, folder, version=version)), expected(golden))
        except AssertionError:
            differing.add((version, name))
            assert (golden["error"] or "").startswith(UNSAID[version, name] or "")
    assert differing == {key for key in UNSAID if key[0] == version}


def test_a_version_may_be_shortened():
    assert get_engine("vllm").version == GOLDEN["vllm"]
    assert get_engine("vllm", "0.31").version == "0.31.0"
    assert get_engine("transformers", "5.17.0").version.startswith("5.17.0 with")
    for unknown in ("0.3", "0.28.0", "1", ""):
        with pytest.raises(InputError, match=r"kvq models 0\.29\.0, 0\.30\.0, 0\.31\.0, 0\.32\.0"):
            get_engine("vllm", unknown)


def test_every_variant_was_recorded():
    assert set(VARIANTS) == set(GOLDEN["variants"])


def test_an_unknown_engine_is_refused_with_a_near_name():
    with pytest.raises(InputError, match="unknown engine `vlm`") as error:
        get_engine("vlm")
    assert error.value.code == "engine.unknown"
    assert error.value.hint == "did you mean `vllm`?"


REASONS = {  # variant → of layer 0, the reason for K, and for V
    "ct-name-attention": ("", ""),
    "ct-no-scales": ("default 1.0: no tensor is read into this layer",) * 2,
    "ct-only-k": ("", "default 1.0: no tensor is read into this layer"),
    "modelopt-only-k": (
        "rounded to bfloat16, the model's dtype",
        "copied from k: no v scale",
    ),
    "modelopt-value-v-0": (
        "rounded to bfloat16, the model's dtype",
        "copied from k: the v scale is 0.0, not above zero",
    ),
    "gptq": (
        "default 1.0: `gptq` reads no scales of attention, not "
        "`model.layers.0.self_attn.k_scale` either",
        "default 1.0: `gptq` reads no scales of attention, not "
        "`model.layers.0.self_attn.v_scale` either",
    ),
    "deepseek_v2-ct": (
        "default 1.0: `model.layers.0.self_attn.k_scale` is not read by this model class",
        "default 1.0: `model.layers.0.self_attn.v_scale` is not read by this model class",
    ),
    "ct-files-unindexed-shard": (
        "default 1.0: `model.layers.0.self_attn.k_scale` lies in "
        "`model-00002-of-00002.safetensors`, which is not read",
        "default 1.0: `model.layers.0.self_attn.v_scale` lies in "
        "`model-00002-of-00002.safetensors`, which is not read",
    ),
    "ct-both-spellings": (
        "read after `model.layers.0.self_attn.k_proj.k_scale`, which it replaces",
        "read after `model.layers.0.self_attn.v_proj.v_scale`, which it replaces",
    ),
    "ct-files-same-name-no-index": ("read after one of another file, which it replaces",) * 2,
    "ct-cache-bfloat16": ("kept, although the cache is not quantized",) * 2,
    "ct-name-attn-underscore": (
        "default 1.0: `model.layers.0.self_attn.attn._k_scale` is overwritten after loading",
        "default 1.0: `model.layers.0.self_attn.attn._v_scale` is overwritten after loading",
    ),
    "ct-heads-1": ("one number, used for all 2 KV heads",) * 2,
    "ct-heads-4": ("the first 2 of 4 numbers",) * 2,
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reading_says_where_a_value_comes_from(name, folder):
    layer = read(name, folder).layers[0]
    assert (layer.k.reason, layer.v.reason) == REASONS[name]


def test_a_side_names_the_tensor_that_it_comes_from(folder):
    layer = read("modelopt-only-k", folder).layers[1]
    assert layer.k.tensor == layer.v.tensor == "model.layers.1.self_attn.k_scale"
    assert (layer.layer_idx, layer.attention) == (1, "model.layers.1.self_attn")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_takes_its_own_heads(tp, folder):
    """As vLLM's `_tp_aware_loader` says, which was run with one rank only."""
    one, many = (read("ct-heads-2x1x1", folder, tp=n) for n in (1, tp))
    assert [layer.k.value for layer in many.layers] == [layer.k.value for layer in one.layers]


def test_one_number_for_all_heads_ends_the_second_rank(folder):
    assert read("ct-heads-1", folder, tp=2).error.startswith("RuntimeError: ")


def test_a_gpu_with_another_fp8_doubles_only_what_modelopt_loads(folder):
    """As vLLM's `is_fp8_fnuz` branches say."""
    for name, factor in (("modelopt-name-modelopt", 2), ("ct-name-attention", 1)):
        cpu, gpu = (read(name, folder, platform=platform) for platform in ("cpu", "gfx942"))
        assert gpu.layers[0].k.value == (cpu.layers[0].k.value[0] * factor,)


@pytest.mark.parametrize(
    ("name", "config", "options", "reason"),
    [
        ("deepseek_v2-ct", {"model_type": "kimi_linear"}, {}, "latent attention"),
        ("ct-name-attention", {}, {"kv_cache_dtype": "fp4"}, "no cache dtype `fp4`"),
        (
            "ct-name-attention",
            {"quantization_config": {"quant_method": "humming"}},
            {},
            "`humming`",
        ),
    ],
)
def test_what_is_not_modelled_is_unknown(name, config, options, reason, folder):
    reading = read(name, folder, config=config, **options)
    assert reading.error is None
    assert reading.cache_dtype is None
    assert len(reading.layers) == 2
    for layer in reading.layers:
        assert layer.k.value is layer.v.value is layer.cache_dtype is None
        assert reason in layer.k.reason


def test_a_model_class_that_was_not_compared_is_noted(folder):
    assert read("ct-name-attention", folder).notes == ()
    reading = read("ct-name-attention", folder, config={"model_type": "invented"})
    assert reading.notes == ("model class not checked against real vLLM: `invented`",)
    assert reading.layers == read("ct-name-attention", folder).layers


@pytest.mark.parametrize("name", ["ct-name-attention", "modelopt-name-modelopt"])
@pytest.mark.parametrize("odd", [None, True, 0, 3.5, "FP8", [], ["a"], [{}], {"a": 1}], ids=str)
def test_no_config_breaks_the_model(name, odd, folder):
    """Whatever stands in one place of the quantization config, there is a reading."""
    base = dict(VARIANTS[name].quantization)
    for key in [*base, "quantization", "config_groups", "kv_cache_quant_algo", "producer"]:
        for change in ({**base, key: odd}, {**base, "quantization": {**base, key: odd}}):
            reading = read(name, folder, config={"quantization_config": change})
            assert reading.error or len(reading.layers) == 2
    for key in base["kv_cache_scheme"]:
        scheme = {"kv_cache_scheme": {**base["kv_cache_scheme"], key: odd}}
        reading = read(name, folder, config={"quantization_config": {**base, **scheme}})
        assert reading.error or len(reading.layers) == 2
