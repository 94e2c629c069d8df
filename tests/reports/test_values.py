"""Scales that are there and read, and are the wrong numbers."""

import json

import numpy as np
import pytest

from kvq.formats import E2M1, E4M3, NVFP4
from kvq.pipeline.verify import verify as verify_from_python
from tests.commands.test_verify import rewrite
from tests.engines.quantization import CT, FLAT, FLAT_FP4
from tests.engines.tensors import NAMES, constant, scales

K0 = "model.layers.0.self_attn.k_scale"


def test_llm_compressor_1928_a_scale_that_is_zero(verify, variant):
    """K08, vllm-project/llm-compressor#1928: calibration ends without an error, and scales are
    zero."""
    found = verify(variant(scales() | {K0: np.zeros(1, np.float32)}, CT))
    assert (found.code, found.codes) == (1, {"scale.nonpositive"})
    finding = found.one("scale.nonpositive")
    assert (finding["layer_idx"], finding["tensor"], finding["found"]) == (0, K0, "0.0")
    assert verify(variant(scales(), CT), None, "--strict").code == 0


def test_llm_compressor_2117_a_file_that_changed_after_it_was_written(verify, exported):
    """K09, vllm-project/llm-compressor#2117: the documented example wrote zeros, and nothing
    compared the file with what had been measured."""
    folder = exported()
    assert verify(folder, "vllm", "--strict").code == 0
    rewrite(folder, lambda tensors, _: tensors.update({K0: np.zeros(1, np.float32)}))
    assert verify(folder).errors == {"scale.nonpositive", "provenance.scale"}


def test_llm_compressor_1949_each_engine_takes_zero_and_the_sentinel_otherwise(verify, variant):
    """K10, vllm-project/llm-compressor#1949: a server asserts that scales are above zero, where
    another takes 1.0 without a word; -1 in a file is what a loader calls no scale."""
    k, v = NAMES["modelopt"]

    def written(k_value, v_value):
        tensors = constant(k_value, k=k, v=v, sides="k") | constant(v_value, k=k, v=v, sides="v")
        return variant(tensors, FLAT, "fp8-static")

    zero = written(0.0, 0.0)
    assert "AssertionError" in verify(zero, "vllm").one("engine.load")["message"]
    assert "which stands for no scale" in verify(zero, "sglang").one("engine.value")["message"]
    assert verify(zero, "sglang").one("engine.value")["found"] == "1"
    sentinel = written(-1.0, -1.0)
    for engine in ("vllm", "sglang"):
        found = verify(sentinel, engine)
        assert "stands for no scale" in found.one("engine.value")["message"]
        assert "is -1.0" in found.one("scale.nonpositive")["message"]
    not_a_number = written(np.nan, 0.02)
    for engine in ("vllm", "sglang"):
        found = verify(not_a_number, engine)
        assert {"engine.load", "scale.nonfinite"} <= found.errors
        assert "is nan" in found.one("scale.nonfinite")["message"]
    good = variant(scales(k, v), FLAT, "fp8-static")
    assert verify(good, "sglang", "--strict").code == 0


def test_vllm_12076_what_the_defaults_give_is_loaded_and_explained(kvq, verify, exported):
    """K12, vllm-project/vllm#5493, vllm-project/vllm#12076: no tool wrote the scales that the
    manual speaks of, and nothing said which granularity, number format and default they have."""
    folder = exported()
    found = verify(folder, "vllm", "--strict")
    assert (found.code, found.findings) == (0, [])
    shown = kvq("inspect", folder).out
    assert "(k_bmm_quantizer): TensorQuantizer((4, 3) bit fake per-tensor amax=" in shown
    assert "KV scales: fp8, 2 of 2 layers; weights bf16" in shown


def test_model_optimizer_20_every_scale_is_1(kvq, verify, variant, exported):
    """K13, NVIDIA/Model-Optimizer#20; K75, NVIDIA/Model-Optimizer#2298, NVIDIA/Megatron-LM#7024:
    an export clamped scales to at least 1.0, which threw the learned ones away."""
    found = verify(variant(constant(1.0), CT))
    assert found.errors == {"scale.all_one"}
    assert "looks uncalibrated" in found.one("scale.all_one")["message"]
    folder = exported()
    written = kvq("inspect", folder, "--scales", "--json").json["scales"]
    amax = {
        row["attention"]: row["amax"] for row in kvq("inspect", folder, "--json").json["layers"]
    }
    assert len(written) == 4
    for name, value in written.items():
        attention, _, leaf = name.rpartition(".")
        assert value == np.float32(amax[attention][leaf[0]]) / np.float32(E4M3.max) != 1.0
    assert verify(folder, None, "--strict").code == 0


def test_model_optimizer_1012_a_constant_by_request_and_a_lost_scale(verify, exported):
    """K14, NVIDIA/Model-Optimizer#1012: a new release changed the default from measured scales to
    a constant, and files of both kinds looked alike."""
    folder = exported(kv_cfg="FP8_CAST_KV_CFG")
    required = ["--require", "provenance"]
    assert verify(folder, "vllm", "--strict", *required).code == 0
    rewrite(folder, lambda _, metadata: metadata.pop("kvq"))
    assert verify(folder).errors == {"scale.all_one"}
    assert verify(folder, "vllm").errors == {"scale.all_one", "engine.all_one"}
    assert "require.provenance" in verify(folder, None, *required).errors


CONVENTIONS = {  # amax → what each tool writes
    "amax / 448": (lambda amax: amax / E4M3.max, None),
    "amax / 2688": (lambda amax: amax / NVFP4.scale_divisor, "amax / 2688, for NVFP4 weights"),
    "amax / 6": (lambda amax: amax / E2M1.max, "amax / 6, a convention of FP4 blocks"),
    "448 / amax": (lambda amax: E4M3.max / amax, "inverted"),
}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_model_optimizer_790_four_conventions_for_one_scale_of_nvfp4(
    verify, variant, tmp_path, convention
):
    """K27, NVIDIA/Model-Optimizer#790, NVIDIA/TensorRT-LLM#10745, intel/auto-round#2366,
    vllm-project/vllm#46329: the same amax becomes 4 numbers, and nothing says which one it is."""
    amax = {name: 3.5 * (i + 1) for i, name in enumerate(scales(*NAMES["modelopt"]))}
    write, words = CONVENTIONS[convention]
    tensors = {name: np.array(write(value), np.float32) for name, value in amax.items()}
    folder = variant(tensors, {**FLAT_FP4, "kv_cache_scheme": "NVFP4"}, config={"head_dim": 128})
    expected = {name: value / E4M3.max for name, value in amax.items()}
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps({"schema": 1, "scales": expected}))
    for engine in (None, "vllm", "tensorrt-llm"):
        found = verify(folder, engine, "--against", reference)
        assert found.code == (words is not None)
        if words:
            assert words in found.one("reference.differs")["message"]


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, None], ids=str)
def test_mobius_447_one_check_for_both_ways_in(verify, variant, value):
    """K54, onnxruntime/mobius#447: the command checked that scales are positive and finite, the
    library did not, and layers that a map left out became 1.0."""
    tensors = scales()
    if value is None:
        del tensors[K0]
    else:
        tensors[K0] = np.array([value], np.float32)
    folder = variant(tensors, CT)
    report = verify_from_python(folder)
    found = verify(folder)
    assert not report.ok()
    assert found.code == 1
    assert [finding.to_json() for finding in report.findings] == found.findings
    assert {finding["tensor"] for finding in found.findings} == {K0}


def test_verl_4435_scales_of_weights_that_have_changed_since(verify, exported):
    """K70, verl-project/verl#4435, ai-dynamo/modelexpress#783: weights are updated in a loop, and
    scales that were measured once go stale."""
    from safetensors.numpy import load_file, save_file

    folder = exported()
    assert verify(folder).code == 0
    shard = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 2
    save_file(tensors, shard, {"format": "pt"})
    found = verify(folder)
    assert found.errors == {"provenance.weights"}
    assert "other weights" in found.one("provenance.weights")["message"]
