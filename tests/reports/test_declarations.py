"""What configuration, index and options say, and what the tensors are."""

import json

import pytest

from tests.engines.layouts import shards
from tests.engines.quantization import CT, FLAT, FP8, flat, legacy, scheme
from tests.engines.tensors import NAMES, scales

MODELOPT = scales(*NAMES["modelopt"])


def test_sgl_cookbook_237_fp8_weights_are_not_fp8_scales(kvq, verify, variant):
    """K11, sgl-project/sgl-cookbook#237, noonghunna/club-3090#594: a checkpoint with FP8 weights
    was served with an FP8 cache in the belief that it has scales; it has none."""
    folder = variant({}, {**FP8, "kv_cache_scheme": None}, "fp8-static")
    summary = kvq("inspect", folder, "--json").json["summary"]
    assert summary == "KV scales: none; an fp8 cache would run at scale 1.0; weights fp8"
    found = verify(folder, None, "--require", "kv-scales")
    assert found.code == 1
    finding = found.findings[0]
    assert finding["code"] == "require.kv_scales"
    assert "scale 1.0 in all 2 layers" in finding["message"]
    assert verify(folder, "sglang", "--kv-cache-dtype", "fp8_e4m3").errors == {"engine.default"}
    scaled = variant(scales(), FP8)
    assert verify(scaled, None, "--require", "kv-scales").code == 0
    refused = kvq("verify", scaled, "--require", "scales", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "option.require")
    assert "kv-scales, provenance" in refused.json["error"]["message"]


def test_vllm_29980_one_file_declares_the_cache_and_the_engine_reads_the_other(verify, variant):
    """K24, vllm-project/vllm#29980, NVIDIA/Model-Optimizer#557: hf_quant_config.json says FP8, and
    the engine keeps an unquantized cache; elsewhere the file names the wrong format."""
    silent = variant(MODELOPT, flat(kv_cache_scheme=None), "fp8-static", hf_quant=legacy())
    assert "engine.unquantized" in verify(silent, "vllm").errors
    both = ["--engine", "tensorrt-llm"]
    nvfp4 = legacy(kv_cache_quant_algo="NVFP4")
    disagree = variant(MODELOPT, FLAT, "fp8-static", hf_quant=nvfp4)
    found = verify(disagree, "vllm", *both)
    assert "engine.disagree" in found.errors
    assert "vllm 0.32.0 to fp8_e4m3" in found.one("engine.disagree")["message"]
    agreed = variant(MODELOPT, FLAT, "fp8-static", hf_quant=legacy())
    assert verify(agreed, "vllm").code == 0
    assert "engine.disagree" not in verify(agreed, "vllm", *both).codes


SCHEMES = {  # what is changed → vLLM's own words, None where it loads
    "bits": ({"num_bits": 4}, "num_bits=8"),
    "int8": ({"type": "int"}, "type=float"),
    "channel": ({"strategy": "channel"}, "Expected strategies"),
    "group": ({"strategy": "group"}, "Expected strategies"),
    "asymmetric": ({"symmetric": False}, "Only support symmetric"),
    "dynamic": ({"dynamic": True}, None),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_vllm_45312_a_scheme_that_is_not_supported_is_found_before_warm_up(verify, variant, name):
    """K25, vllm-project/vllm#45312, vllm-project/llm-compressor#1779: a 4-bit scheme passed until
    the model was warmed up, and strategies that a class lists ended a calibration."""
    change, words = SCHEMES[name]
    folder = variant(scales(), scheme(**change))
    found = verify(folder)
    assert found.errors in ({"config.scheme"}, {"config.strategy"})
    finding = found.findings[0]
    assert finding["expected"] in ("8", "'float'", "`tensor` or `attn_head`", "True", "False")
    vllm = verify(folder, "vllm")
    if words is None:
        assert vllm.code == 0  # it is taken for static
    else:
        assert words in vllm.one("engine.load")["message"]
    assert verify(folder, "sglang").errors == {"engine.unquantized"}
    assert verify(folder, "tensorrt-llm").errors == {"engine.load"}


def test_model_optimizer_2332_a_family_exported_without_its_cache(verify, variant):
    """K33, NVIDIA/Model-Optimizer#2332: one rule was missing, and a calibrated model came out with
    no algorithm for the cache; nothing warned."""
    silent = variant(MODELOPT, flat(kv_cache_scheme=None), "fp8-static")
    assert "engine.unquantized" in verify(silent, "vllm").errors
    assert "engine.unquantized" in verify(silent, "sglang").errors
    assert verify(variant(MODELOPT, FLAT, "fp8-static"), "vllm").code == 0


def test_vllm_8409_e5m2_over_a_checkpoint_with_scales(verify, variant):
    """K46, vllm-project/vllm#8409, vllm-project/vllm#45040: engines refuse an E5M2 cache where a
    checkpoint declares scales, and older GPUs have no other."""
    folder = variant(scales(), CT)
    finding = verify(folder, "vllm", "--kv-cache-dtype", "fp8_e5m2").one("engine.load")
    assert "fp8_e5m2 kv-cache is not supported with fp8 checkpoints" in finding["message"]
    assert "--kv-cache-dtype" in finding["fix"]
    assert "fp8_e4m3" in finding["fix"]
    sglang = verify(folder, "sglang", "--kv-cache-dtype", "fp8_e5m2")
    assert sglang.errors == {"engine.e5m2"}
    assert "E4M3" in sglang.one("engine.e5m2")["message"]
    assert verify(folder, "vllm", "--kv-cache-dtype", "fp8", "--strict").code == 0


def test_tensorrt_llm_17334_two_keys_that_contradict_each_other(verify, variant):
    """K53, NVIDIA/TensorRT-LLM#17334: `kv_cache_scheme` and `kv_cache_quant_algo` differ, and
    loading raises."""
    found = verify(variant(MODELOPT, {**FLAT, "kv_cache_quant_algo": "NVFP4"}, "fp8-static"))
    assert found.errors == {"config.disagree"}
    words = found.one("config.disagree")["message"]
    assert "`kv_cache_scheme`" in words
    assert "`kv_cache_quant_algo`" in words
    same = variant(MODELOPT, {**FLAT, "kv_cache_quant_algo": "FP8"}, "fp8-static")
    assert verify(same).errors == set()


def test_model_optimizer_2427_a_shard_that_the_index_does_not_name(verify, variant, exported):
    """K65, NVIDIA/Model-Optimizer#2427: tensors in a shard that is not in the index are lost, and
    loaders skip such files whole."""
    folder = variant(scales(), CT, layout=shards(hide="file"))
    assert "index.unindexed" in verify(folder).errors
    lost = verify(folder, "vllm").one("engine.default")["message"]
    assert "lies in `model-00002-of-00002.safetensors`, which is not read" in lost
    folder = exported()
    assert verify(folder, "vllm", "--strict").code == 0
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = "model-00001-of-00002.safetensors"
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f == first}
    path.write_text(json.dumps(index))
    assert {"index.unindexed", "engine.default"} <= verify(folder, "vllm").errors


def test_sglang_18396_scales_over_a_cache_that_is_not_quantized(verify, variant, reading):
    """K73, sgl-project/sglang#18396: a calibrated checkpoint is served with a bf16 cache, which is
    allowed, and scales were applied to keys that were never divided."""
    folder = variant(scales(), CT)
    option = ["--kv-cache-dtype", "bfloat16"]
    for engine in ("vllm", "sglang"):
        assert verify(folder, engine, *option).errors == {"engine.unquantized"}
        used = reading(folder, engine, *option)["layers"][0]["k"]
        assert used["value"] == [pytest.approx(0.011)]
        assert "although the cache is not quantized" in used["reason"]
        assert verify(folder, engine, "--strict").code == 0
