"""Scales that are in the file, under a name that some readers drop."""

import pytest

from tests.engines.quantization import CT, FP8, GPTQ, QUARK, flat, legacy
from tests.engines.tensors import BASE, NAMES, OTHERS, scales
from tests.reports.handmade import checkpoint, layers

PLAIN = flat(ignore=["*"])  # ModelOpt's config over weights that are not quantized
SPELLED = {
    "fused": scales(*NAMES["qkv-proj"]),
    "projection": scales(*NAMES["modelopt"]),
    "single": OTHERS["legacy-kv-scale"],
}


def test_vllm_25047_fused_qkv_scales_of_qwen3_moe_are_dropped(verify, variant, reading):
    """K02, vllm-project/vllm#25047, vllm-project/llm-compressor#2176: one name for K and V of the
    fused projection is skipped by a loader before it is renamed, and the server runs at 1.0."""
    folder = variant(SPELLED["fused"], CT, architecture="qwen3_moe")
    finding = verify(folder).one("scale.spelling")
    assert finding["tensor"] == "model.layers.0.self_attn.qkv_proj.k_scale"
    assert finding["expected"] == "model.layers.0.self_attn.k_scale"
    assert "renames it" in finding["fix"]
    assert verify(folder, "sglang").errors == {"engine.default"}
    assert verify(folder, "vllm").code == 0  # since it renames first
    assert reading(folder, "vllm")["layers"][0]["k"]["tensor"].endswith("qkv_proj.k_scale")
    own = variant(scales(), CT, architecture="qwen3_moe")
    assert verify(own, None, "--strict").code == 0


@pytest.mark.parametrize("spelling", SPELLED)
@pytest.mark.parametrize("architecture", ["qwen2", "mixtral", "qwen3_moe"])
def test_sglang_39942_three_spellings_fall_back_to_1(verify, variant, architecture, spelling):
    """K03, sgl-project/sglang#39942: classes with a loader of their own lose calibrated scales
    under every common name, nothing raises, and answers stay finite."""
    config = CT if spelling == "fused" else PLAIN
    found = verify(variant(SPELLED[spelling], config, architecture=architecture), "sglang")
    assert found.code == 1
    lost = [f for f in found.findings if f["code"] == "engine.default"]
    assert len(lost) == 4
    assert all("reads no scales of attention" in finding["message"] for finding in lost)


def test_sglang_39942_llama_reads_the_name_of_attention_and_not_the_fused_one(verify, variant):
    """K03, sgl-project/sglang#39942: the twin. Llama's loader renames scales, but not fused ones,
    so that the same class passes or fails by the name alone."""
    assert verify(variant(scales(), CT), "sglang", "--strict").code == 0
    assert verify(variant(SPELLED["projection"], PLAIN), "sglang", "--strict").code == 0
    assert verify(variant(SPELLED["fused"], CT), "sglang").errors == {"engine.default"}


@pytest.mark.parametrize(
    ("spelling", "method"),
    [("attention", CT), ("modelopt", PLAIN), ("qkv-proj", CT), ("attn", CT),
     ("output-scale", QUARK), ("cache-scale", CT)],
)  # fmt: skip
def test_vllm_11787_every_spelling_is_shown(kvq, variant, spelling, method):
    """K23, vllm-project/vllm#11787: a loader knew one spelling only, and read nothing of a
    checkpoint that another tool had written."""
    folder = variant(scales(*NAMES[spelling]), method)
    shown = kvq("inspect", folder, "--json").json
    assert "2 of 2 layers" in shown["summary"]
    assert [set(row["scale"]) for row in shown["layers"]] == [{"k", "v"}] * 2
    assert shown["layers"][1]["scale"] == {"k": [pytest.approx(0.021)], "v": [pytest.approx(0.026)]}


def test_sglang_35455_scheme_of_one_tool_and_names_of_another(verify, variant):
    """K15, sgl-project/sglang#35455: a compressed-tensors scheme was not forwarded, and the loader
    knew ModelOpt's names only, so that the cache ran unscaled with one line in the log."""
    mixed = verify(variant(scales(*NAMES["modelopt"]), CT))
    assert (mixed.code, mixed.codes) == (1, {"scale.spelling"})
    assert "ModelOpt" in mixed.one("scale.spelling")["message"]
    mixed = verify(variant(scales(*NAMES["modelopt"]), CT), "transformers")
    assert mixed.errors == {"engine.unknown"}
    for matching in (variant(scales(), CT), variant(scales(*NAMES["modelopt"]), PLAIN)):
        assert verify(matching).code == 0
        assert verify(matching, "sglang").code == 0


def test_llm_compressor_967_a_class_without_renaming_ends_with_a_key_error(verify, variant):
    """K18, vllm-project/llm-compressor#967, vllm-project/vllm#11148: StarCoder's class did not
    rename scales, and loading ended with a KeyError for one of them."""
    known = variant(scales(), CT, architecture="starcoder2")
    assert verify(known, "vllm", "--strict").code == 0
    invented = {"architectures": ["InventedForCausalLM"], "model_type": "invented"}
    unknown = variant(scales(), CT, config=invented)
    found = verify(unknown, "vllm")
    assert (found.code, found.codes) == (0, {"engine.unchecked"})
    finding = found.one("engine.unchecked")
    assert "`InventedForCausalLM`" in finding["message"]
    assert "cannot be promised" in finding["message"]
    assert verify(unknown, "vllm", "--strict").code == 1
    assert verify(unknown, "sglang").codes == {"engine.unknown"}


def test_vllm_34293_stacking_rule_runs_before_the_scale_is_renamed(verify, reading, tmp_path):
    """K19, vllm-project/vllm#34293, sgl-project/sglang#20870: `k_proj.k_scale` became a scale of
    the fused projection, which one engine ended with and another lost."""
    config = {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 2,
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "dtype": "float32", "quantization_config": PLAIN,
    }  # fmt: skip
    folder = checkpoint(tmp_path, config, layers(2), SPELLED["projection"])
    assert verify(folder).code == 0
    used = reading(folder, "vllm")
    assert used["error"] is None
    assert used["layers"][0]["k"]["tensor"] == "model.layers.0.self_attn.k_proj.k_scale"
    assert verify(folder, "sglang").codes == {"engine.unknown"}  # its loader was not read


def test_sglang_5095_the_vendors_own_fp8_llama(kvq, verify, variant):
    """K20, sgl-project/sglang#5095: an official FP8 checkpoint with KV scales ended loading with
    a KeyError."""
    folder = variant(SPELLED["projection"], None, "fp8-static", hf_quant=legacy())
    assert verify(folder).errors == set()
    assert verify(folder, "sglang", "--strict").code == 0
    assert verify(folder, "vllm").codes == {"engine.value"}  # rounded to bfloat16, as it warns
    assert verify(folder, "vllm").code == 0
    assert "KV scales: fp8, 2 of 2 layers" in kvq("inspect", folder).out


def test_vllm_10063_one_kv_scale_for_both(kvq, verify, variant):
    """K21, vllm-project/vllm#10063, sgl-project/sglang#1559: old checkpoints with one number for
    K and V end loading, or are used by readers that differ in what V then is."""
    folder = variant(SPELLED["single"], CT)
    assert verify(folder).codes == {"scale.spelling"}
    assert "AutoFP8" in verify(folder).one("scale.spelling")["message"]
    found = verify(folder, "vllm")
    assert {(f["code"], f["message"][:18]) for f in found.findings} == {
        ("engine.default", "vllm 0.32.0 uses v")
    }
    copied = variant(SPELLED["single"], FP8)
    options = ["--kv-cache-dtype", "fp8"]
    assert verify(copied, "vllm", *options).code == 0  # V is copied from K
    shown = kvq("inspect", folder, "--json").json["layers"][0]
    assert shown["scale"]["k"] == shown["scale"]["v"] == [pytest.approx(0.011)]


def test_compressed_tensors_133_output_scales_of_the_projections(kvq, verify, variant, reading):
    """K22, vllm-project/compressed-tensors#133, sgl-project/sglang#10042, vllm-project/vllm#10765:
    scales moved from the projections to attention; a scalar and a tensor of one number were
    treated differently."""
    names = NAMES["output-scale"]
    mixed = scales(*names, layers=[0], shape=()) | scales(*names, layers=[1], shape=(1,))
    same = scales(*names)
    options = ["--kv-cache-dtype", "fp8"]
    one, other = variant(mixed, QUARK), variant(same, QUARK)
    assert verify(one, "vllm", *options).code == 0
    assert reading(one, "vllm", *options)["layers"] == reading(other, "vllm", *options)["layers"]
    shown = [kvq("inspect", folder, "--json").json for folder in (one, other)]
    assert shown[0]["layers"] == shown[1]["layers"]
    assert "spelt as `model.layers.0.self_attn.k_proj.output_scale`" in shown[0]["summary"]
    # a method that has no place for them loses them whatever their name
    found = verify(variant(scales(), GPTQ, "gptq", config={"dtype": "float16"}), "vllm", *options)
    assert found.errors == {"engine.default"}
    assert f"{BASE.format(0)}.k_scale" in found.one("engine.default")["message"]
