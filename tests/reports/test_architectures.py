"""Models whose layers are not all alike, or not where a reader looks for them."""

import numpy as np
import pytest

from kvq.tensorfile import write_float32
from tests.engines.quantization import CT, HEADS, flat
from tests.engines.tensors import NAMES, scales
from tests.reports.handmade import checkpoint, layers, weights

HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 8,
    "full_attention_interval": 4, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "dtype": "bfloat16", "quantization_config": CT,
}  # fmt: skip
DRAFTED = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "dtype": "bfloat16", "quantization_config": CT,
}  # fmt: skip

WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 32,
    "is_encoder_decoder": True, "decoder_layers": 2, "encoder_layers": 1, "num_hidden_layers": 1,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "dtype": "bfloat16",
    "quantization_config": CT,
}  # fmt: skip


def hybrid(folder, found):
    linear = weights(f"model.layers.{i}.linear_attn.in_proj_qkvz" for i in range(8) if i % 4 != 3)
    return checkpoint(folder, HYBRID, layers([3, 7]), linear, found)


def test_vllm_54623_a_hybrids_scales_are_counted_by_the_layers_that_have_a_cache(
    kvq, verify, reading, tmp_path
):
    """K01, vllm-project/vllm#54623: a hybrid ships a pair for each layer with a cache and runs
    uncalibrated; the log line about 1.0 also stands there when all is well."""
    folder = hybrid(tmp_path, scales(layers=[3, 7]))
    shown = kvq("inspect", folder, "--json").json
    assert "KV scales: fp8, 2 of 2 layers" in shown["summary"]
    assert "6 layers keep no KV cache" in shown["summary"]
    assert shown["layers_without_cache"] == [0, 1, 2, 4, 5, 6]
    assert verify(folder, None, "--strict").code == 0
    assert verify(folder, "vllm", "--strict").code == 0
    used = reading(folder, "vllm")["layers"]
    assert [layer["k"]["tensor"] for layer in used] == [
        f"model.layers.{i}.self_attn.k_scale" for i in (3, 7)
    ]
    half = hybrid(tmp_path, scales(layers=[3]))
    assert "1 of 2 layers" in kvq("inspect", half).out
    lost = verify(half, "vllm").one("engine.default")
    assert lost["layer_idx"] == 7
    assert "no tensor is read into this layer" in lost["message"]


def test_onnxruntime_genai_2348_layers_keep_their_own_numbers(kvq, verify, tmp_path):
    """K55, microsoft/onnxruntime-genai#2348: scales of a hybrid were numbered 0 to N-1, and went
    to layers that have no cache."""
    folder = hybrid(tmp_path, scales(layers=[3, 7]))
    shown = kvq("inspect", folder, "--json").json["layers"]
    assert [row["layer_idx"] for row in shown] == [3, 7]
    renumbered = hybrid(tmp_path, scales(layers=[0, 1]))
    found = verify(renumbered)
    assert {f["tensor"] for f in found.findings if f["code"] == "scale.stray"} == set(
        scales(layers=[0, 1])
    )
    assert {f["layer_idx"] for f in found.findings if f["code"] == "scale.missing"} == {3, 7}


@pytest.mark.parametrize("architecture", ["gemma3n", "gemma4"])
def test_vllm_55559_sharing_layers_read_a_cache_with_their_own_scale(verify, variant, architecture):
    """K29, vllm-project/vllm#55559: layers that read another's cache have no projections and got
    no scales, so that they read at 1.0 what was written with the donor's scale."""
    own = scales(layers=2)
    folder = variant(own, CT, architecture=architecture)
    found = verify(folder, "vllm")
    assert {(f["code"], f["layer_idx"]) for f in found.findings} == {
        ("engine.default", 2), ("engine.default", 3),
    }  # fmt: skip
    donors = {
        name.replace(f"layers.{donor}.", f"layers.{donor + 2}."): array
        for donor in (0, 1)
        for name, array in scales(layers=[donor]).items()
    }
    assert verify(variant(own | donors, CT, architecture=architecture), "vllm").code == 0
    others = verify(variant(scales(layers=4), CT, architecture=architecture))
    assert {(f["code"], f["layer_idx"]) for f in others.findings} == {
        ("scale.shared", 2), ("scale.shared", 3),
    }  # fmt: skip


def test_compressed_tensors_780_scales_in_a_vision_tower(verify, variant):
    """K31, vllm-project/compressed-tensors#780: attention of a tower matched the pattern for
    attention and got scales, which the engine has no place for."""
    text = scales("language_model.model.layers.{}.self_attn.k_scale")
    assert verify(variant(text, CT, architecture="gemma3"), "vllm", "--strict").code == 0
    tower = "vision_tower.vision_model.encoder.layers.{}.self_attn.k_scale"
    folder = variant(text | scales(tower, layers=1), CT, architecture="gemma3")
    assert {f["tensor"] for f in verify(folder).findings if f["code"] == "scale.stray"} == {
        tower.format(0), tower.format(0).replace("k_scale", "v_scale"),
    }  # fmt: skip
    refused = verify(folder, "vllm").one("engine.load")["message"]
    assert "SiglipVisionTransformer" in refused


def test_model_optimizer_2076_names_by_the_module_and_not_by_the_file(verify, variant):
    """K66, NVIDIA/Model-Optimizer#2076: a sub-model's prefix was lost when names were mapped back,
    so that scales did not stand beside the weights of their layer."""
    beside = scales("language_model.model.layers.{}.self_attn.k_scale")
    assert verify(variant(beside, CT, architecture="gemma3"), None, "--strict").code == 0
    by_module = scales("model.language_model.layers.{}.self_attn.k_scale")
    folder = variant(by_module, CT, architecture="gemma3")
    assert verify(folder).errors == {"config.no_scales", "scale.missing", "scale.stray"}
    assert verify(folder, "vllm", "--strict").code == 0  # it maps this prefix, as it does weights'
    lost = verify(variant(scales(), CT, architecture="gemma3"), "vllm").one("engine.load")
    assert "no module or parameter named 'model'" in lost["message"]


def test_sglang_34765_one_latent_row_has_one_scale(verify, variant):
    """K49, sgl-project/sglang#34765, vllm-project/vllm#25968, vllm-project/vllm#11947: under MLA
    one row is both K and V, and was written with one scale and read with another."""
    differing = verify(variant(scales(), CT, architecture="deepseek_v2"))
    assert differing.errors == {"scale.mla"}
    finding = differing.one("scale.mla")
    assert "its k and v scale differ" in finding["message"]
    assert finding["layer_idx"] == 0
    k_only = scales(sides="k")
    same = k_only | {name.replace("k_scale", "v_scale"): x for name, x in k_only.items()}
    folder = variant(same, CT, architecture="deepseek_v2")
    assert verify(folder, None, "--strict").code == 0
    assert verify(folder, "vllm").errors == {"engine.unquantized"}  # it reads none into MLA layers
    rounded = variant(same, flat(ignore=["*"]), architecture="deepseek_v2")
    assert verify(rounded, "vllm").errors == {"engine.default"}
    heads = {name: np.repeat(x, 4) for name, x in same.items()}
    assert verify(variant(heads, HEADS, architecture="deepseek_v2")).errors == {"scale.shape"}


def test_fms_model_optimizer_208_a_model_without_keys_and_values(kvq, tmp_path):
    """K69, foundation-model-stack/fms-model-optimizer#208: nothing was found to quantize, and an
    info line said so; that is an error."""
    config = {"architectures": ["MLPForCausalLM"], "model_type": "mlp", "num_hidden_layers": 1}
    config |= {"hidden_size": 32, "num_attention_heads": 4}
    folder = checkpoint(tmp_path, config, weights(["model.layers.0.mlp.up_proj"]))
    for command in ("verify", "inspect"):
        result = kvq(command, folder, "--json")
        assert (result.code, result.json["error"]["code"]) == (2, "geometry.no_attention")
        assert "keeps no keys and values" in result.json["error"]["message"]
    recurrent = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16}
    config |= recurrent
    folder = checkpoint(tmp_path, config, weights(["backbone.layers.0.mixer.in_proj"]))
    result = kvq("verify", folder, "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "geometry.unsupported")
    assert "recurrent state" in result.json["error"]["message"]


def test_tensorrt_llm_2748_attention_to_the_encoder_has_a_cache_of_its_own(kvq, verify, tmp_path):
    """K71, NVIDIA/TensorRT-LLM#2748: no quantized cache worked for Whisper, whose decoder caches
    its own keys and those of the encoder."""
    own, cross = (f"model.decoder.layers.{{}}.{name}" for name in ("self_attn", "encoder_attn"))
    paths = [path.format(i) for i in (0, 1) for path in (own, cross)]
    projections = weights(
        f"{path}.{leaf}"
        for path in [*paths, "model.encoder.layers.0.self_attn"]
        for leaf in ("q_proj", "k_proj", "v_proj", "out_proj")
    )
    half = scales(f"{own}.k_scale")
    whole = half | scales(f"{cross}.k_scale", scale=2)
    folder = checkpoint(tmp_path, WHISPER, projections, whole)
    assert verify(folder, None, "--strict").code == 0
    assert verify(folder, "vllm", "--strict").code == 0
    folder = checkpoint(tmp_path, WHISPER, projections, half)
    assert "KV scales: fp8, 2 of 4 layers" in kvq("inspect", folder).out
    missing = {f["tensor"] for f in verify(folder).findings if f["code"] == "scale.missing"}
    assert missing == whole.keys() - half.keys()
    assert verify(folder, "vllm").errors == {"engine.default"}


def test_vllm_49262_draft_layers_and_where_their_scales_come_from(kvq, verify, tmp_path):
    """K72, vllm-project/vllm#49262: draft layers read the target's cache at 1.0, answers stay the
    same, and far fewer drafts are accepted."""
    folder = checkpoint(tmp_path, DRAFTED, layers(3), scales())
    shown = kvq("inspect", folder, "--json").json
    draft = "model.layers.2.self_attn"
    assert shown["draft_layers"] == {draft: {}}
    assert "1 draft layers without scales" in shown["summary"]
    found = verify(folder)
    assert (found.code, found.codes) == (0, {"layer.draft"})
    assert draft in found.one("layer.draft")["message"]
    folder = checkpoint(tmp_path, DRAFTED, layers(3), scales(layers=3))
    shown = kvq("inspect", folder, "--json").json
    assert shown["draft_layers"] == {draft: {s: f"{draft}.{s}_scale" for s in "kv"}}
    assert "1 draft layers with scales" in shown["summary"]
    assert verify(folder, None, "--strict").code == 0


def test_llm_compressor_937_a_file_of_scales_alone_is_no_checkpoint(kvq, tmp_path):
    """K39, vllm-project/llm-compressor#937, vllm-project/vllm#11688: a user looked for the file of
    scales that an option takes; they are inside of the checkpoint."""
    path = tmp_path / "scales.safetensors"
    tensors = {name: array.astype(np.float32) for name, array in scales(*NAMES["modelopt"]).items()}
    write_float32(path, tensors, {"format": "pt"})
    assert "4 KV scales (no config.json beside it)" in kvq("inspect", path).out
    refused = kvq("verify", path, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "verify.not_folder")
    assert "the folder with its config.json" in refused.json["error"]["message"]
