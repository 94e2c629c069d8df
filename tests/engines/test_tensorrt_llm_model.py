"""The model of TensorRT-LLM's PyTorch backend, statement by statement."""

import numpy as np
import pytest

from kvq.engines import get_engine
from tests.engines.quantization import (
    CT,
    FLAT,
    FP8,
    HEADS,
    INT8,
    NULL,
    NVFP4_SCHEME,
    W8A8,
    ct,
    flat,
    legacy,
    scheme,
)
from tests.engines.tensors import BASE, NAMES, constant, scales
from tests.engines.test_sglang_model import Row, asked, check, own, read, refused
from tests.engines.variant import Variant
from tests.engines.variants import VARIANTS

K, V = own("k"), own("v")
MODELOPT = scales(*NAMES["modelopt"])
MODELOPT_K, MODELOPT_V = (name.format(0) for name in NAMES["modelopt"])
GROUPS = {"config_groups": {"group_0": W8A8}}
IGNORED = "ignored for FP8"
UNQUANTIZED = "not quantized"


def modelopt(**changes):
    return Variant(MODELOPT, flat(**changes))


def nvfp4(tensors, **options):
    return Variant(tensors, flat(kv_cache_scheme="NVFP4"), **options)


ROWS = {
    # compressed-tensors
    "empty config_groups": refused(Variant(scales(), CT), "config_groups is empty"),
    "no config_groups": refused(
        Variant(scales(), ct(config_groups=None)), "config_groups is not set"),
    "FP8 with groups: scales ignored": Row(
        Variant(scales(), ct(**GROUPS)), "fp8", 1.0, 1.0, reason=IGNORED),
    "attn_head is not checked": Row(
        Variant(scales(shape=(2, 1, 1)), {**HEADS, **GROUPS}), "fp8", 1.0, 1.0, reason=IGNORED),
    "int8 scheme": refused(
        Variant(scales(), {**scheme(type="int"), **GROUPS}), "Unsupported kv_cache_scheme"),
    "four bits": refused(
        Variant(scales(), {**scheme(num_bits=4), **GROUPS}), "Unsupported kv_cache_scheme"),
    "no scheme": Row(
        Variant(scales(), ct(kv_cache_scheme=None, **GROUPS)), "auto", 1.0, 1.0,
        reason=UNQUANTIZED),
    "int8 weights are not looked at": Row(
        Variant(scales(), ct(config_groups={"group_0": INT8})), "fp8", 1.0, 1.0, reason=IGNORED),
    # ModelOpt: the cache's algorithm
    "FP8: scales ignored": Row(modelopt(), "fp8", 1.0, 1.0, reason=IGNORED),
    "quant_algo may be null": Row(modelopt(quant_algo=NULL), "fp8", 1.0, 1.0, reason=IGNORED),
    "quant_algo may be null in the legacy form": Row(
        Variant(MODELOPT, hf_quant=legacy(quant_algo=None, kv_cache_quant_algo="NVFP4")),
        "nvfp4", K, V, MODELOPT_K),
    "the string FP8": Row(modelopt(kv_cache_scheme="FP8"), "fp8", 1.0, 1.0, reason=IGNORED),
    "the string NVFP4": Row(modelopt(kv_cache_scheme="NVFP4"), "nvfp4", K, V, MODELOPT_K),
    "a dict of 4 bits": Row(modelopt(kv_cache_scheme=NVFP4_SCHEME), "nvfp4", K, V, MODELOPT_K),
    "a dict of int8": Row(
        modelopt(kv_cache_scheme={"num_bits": 8, "type": "int"}), "int8", reason="INT8"),
    "the string INT8": Row(modelopt(kv_cache_scheme="INT8"), "int8", reason="INT8"),
    "another string turns it off": Row(
        modelopt(kv_cache_scheme="NVFP4_AFFINE"), "auto", 1.0, 1.0, reason=UNQUANTIZED),
    "another dict turns it off": Row(
        modelopt(kv_cache_scheme={"num_bits": 5, "type": "float"}), "auto", 1.0, 1.0,
        reason=UNQUANTIZED),
    "none declared": Row(modelopt(kv_cache_scheme=None), "auto", 1.0, 1.0, reason=UNQUANTIZED),
    "hf_quant_config.json goes before config.json": Row(
        Variant(MODELOPT, FLAT, hf_quant=legacy(kv_cache_quant_algo="NVFP4")),
        "nvfp4", K, V, MODELOPT_K),
    "hf_quant_config.json that says none": Row(
        Variant(MODELOPT, FLAT, hf_quant=legacy(kv_cache_quant_algo=None)), "auto", 1.0, 1.0,
        reason=UNQUANTIZED),
    "hf_quant_config.json beside compressed-tensors": Row(
        Variant(MODELOPT, CT, hf_quant=legacy()), "fp8", 1.0, 1.0, reason=IGNORED),
    # NVFP4: names and values
    "attention's names are never seen": Row(
        nvfp4(scales()), "nvfp4", reason=f"neither `{MODELOPT_K}`"),
    "none": Row(nvfp4({}), "nvfp4", reason="not known"),
    "only k": refused(nvfp4(scales(NAMES["modelopt"][0], sides="k")), "loaded together"),
    "only v": refused(
        nvfp4(scales(MODELOPT_V, MODELOPT_V, sides="v", layers=1)), "loaded together"),
    "F64 becomes float32": Row(
        nvfp4(scales(*NAMES["modelopt"], dtype="F64")), "nvfp4", K, V, MODELOPT_K),
    "as it is, without 6": Row(
        nvfp4(MODELOPT), "nvfp4", K, V, MODELOPT_K, platform="sm100"),
    "two numbers": Row(
        nvfp4(scales(*NAMES["modelopt"], shape=(2,))), "nvfp4", reason="not one number"),
    "crossed names": Row(
        nvfp4(MODELOPT | scales(*NAMES["crossed"])), "nvfp4", reason="also counts, perhaps"),
    "fused projections": Row(
        nvfp4(scales(*NAMES["modelopt"]), architecture="phi3"), "nvfp4", reason="fused"),
    "latent attention": Row(
        nvfp4(MODELOPT, architecture="deepseek_v2"), "nvfp4", reason="MLA"),
    # what is asked for
    "fp8 over no config": Row(
        asked(Variant(scales()), "fp8"), "fp8", 1.0, 1.0, reason=IGNORED),
    "no config: ignored": Row(Variant(scales()), "auto", 1.0, 1.0, reason=UNQUANTIZED),
    "nvfp4 over FP8 is not modelled": Row(
        asked(modelopt(), "nvfp4"), None, reason="KvCacheConfig.dtype nvfp4"),
    "fp8_e4m3 is no dtype of it": Row(
        asked(modelopt(), "fp8_e4m3"), None, reason="auto, fp8, nvfp4"),
    "fp8 weights are not modelled": Row(Variant(scales(), FP8), None, reason="`fp8`"),
    "gptq is not modelled": Row(VARIANTS["gptq"], None, reason="`gptq`"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_tensorrt_llm(name, tmp_path, monkeypatch):
    check(ROWS[name], read("tensorrt-llm", ROWS[name], tmp_path, monkeypatch))


@pytest.mark.parametrize("fill", [0.0, -0.5, np.inf, np.nan])
def test_what_becomes_of_odd_numbers_is_unknown(fill, tmp_path, monkeypatch):
    tensors = constant(fill, k=NAMES["modelopt"][0], v=NAMES["modelopt"][1])
    row = Row(nvfp4(tensors), "nvfp4", reason="not above zero and finite")
    check(row, read("tensorrt-llm", row, tmp_path, monkeypatch))


def test_v_comes_from_its_own_projection(tmp_path, monkeypatch):
    row = Row(nvfp4(MODELOPT), "nvfp4")
    layers = read("tensorrt-llm", row, tmp_path, monkeypatch).layers
    assert [layer.v.tensor for layer in layers] == [
        f"{BASE.format(i)}.v_proj.v_scale" for i in range(2)
    ]


def test_what_was_only_read_in_source_is_said(tmp_path, monkeypatch):
    reading = read("tensorrt-llm", Row(nvfp4(MODELOPT), "nvfp4"), tmp_path, monkeypatch)
    assert "none of it was run" in reading.notes[0]
    assert any("TRTLLM_LOAD_KV_SCALES=0" in note for note in reading.notes)
    assert get_engine("tensorrt-llm").version == reading.version == "main, autumn 2026"
