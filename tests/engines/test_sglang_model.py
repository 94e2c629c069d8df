"""The model of SGLang, statement by statement; the values are those of SGLang 0.5.23."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from kvq.checkpoint import open_checkpoint
from kvq.engines import get_engine
from kvq.engines.base import EngineOptions
from kvq.geometry import read_geometry
from tests.engines.quantization import (
    CT,
    FLAT,
    FLAT_FP4,
    FP8,
    HEADS,
    NULL,
    ct,
    flat,
    legacy,
    scheme,
)
from tests.engines.tensors import BASE, NAMES, constant, plus, scales, value
from tests.engines.variant import Variant
from tests.engines.variants import VARIANTS, write


def own(side, layer=0, factor=1.0):
    return float(np.float32(np.float32(value(layer, side)) * factor))


GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "sglang.json").read_text())
ERROR_LENGTH = 60
# What SGLang does with these depends on an order that was not read, or on what is not modelled.
UNKNOWN = ("both-spellings", "config-attention-group", "config-group-without-targets",
           "config-null-groups", "config-scheme-string", "config-unknown-method",
           "flat-method-modelopt-fp4", "legacy-fp4-no-group-size", "quark")  # fmt: skip
K, V = own("k"), own("v")
K_NAME, V_NAME = (f"{BASE.format(0)}.{side}_scale" for side in "kv")
MODELOPT_K = NAMES["modelopt"][0].format(0)
MODELOPT = scales(*NAMES["modelopt"])
MIXED = flat(quant_algo="MIXED_PRECISION", ignore=["*"])
NVFP4_LAYER = {"model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}}
ASSERTION = "AssertionError: "


@dataclass(frozen=True)
class Row:
    """A checkpoint, and what SGLang makes of its first layer."""

    variant: Variant
    cache: str | None
    k: float | None = None
    v: float | None = None
    tensor: str | None = None  # of k
    reason: str = ""  # part of k's
    error: str | None = None
    platform: str = "cpu"


def asked(variant, dtype):
    return replace(variant, kv_cache_dtype=dtype)


def of(architecture, layers=2, **options):
    return Variant(scales(layers=layers), CT, architecture=architecture, **options)


def refused(variant, error, **options):
    return Row(variant, None, error=error, **options)


CT_FP8 = Variant(scales(), CT)
NAMED = "default 1.0"
NVFP4 = Variant(MODELOPT, flat(quant_algo="NVFP4", group_size=16, ignore=["*"]),
                kv_cache_dtype="nvfp4")  # fmt: skip
ROWS = {
    # what auto becomes
    "auto is fp8_e4m3 under a compressed-tensors scheme": Row(CT_FP8, "fp8_e4m3", K, V, K_NAME),
    "missing config_groups, ignore and format are fine": Row(
        Variant(scales(), {"quant_method": "compressed-tensors",
                           "kv_cache_scheme": CT["kv_cache_scheme"]}),
        "fp8_e4m3", K, V, K_NAME),
    "compressed_tensors is not known": refused(
        Variant(scales(), ct(quant_method="compressed_tensors")),
        "ValueError: Unknown quantization method: compressed_tensors."),
    "a scheme needs no symmetric and no dynamic": Row(
        Variant(scales(), scheme(symmetric=None, dynamic=None)), "fp8_e4m3", K, V, K_NAME),
    "no scheme: no method": Row(
        Variant(scales(), ct(kv_cache_scheme=None)), "auto", 1.0, 1.0, reason="kv_cache_scheme"),
    "attn_head is ignored": Row(
        Variant(scales(shape=(2, 1, 1)), HEADS), "auto", 1.0, 1.0, reason="ignores"),
    "channel is ignored": Row(
        Variant(scales(), scheme(strategy="channel")), "auto", 1.0, 1.0, reason="ignores"),
    "dynamic is ignored": Row(
        Variant(scales(), scheme(dynamic=True)), "auto", 1.0, 1.0, reason="ignores"),
    "four bits are ignored": Row(
        Variant(scales(), scheme(num_bits=4)), "auto", 1.0, 1.0, reason="ignores"),
    "int8 is ignored": Row(
        Variant(scales(), scheme(type="int")), "auto", 1.0, 1.0, reason="ignores"),
    "asymmetric is ignored": Row(
        Variant(scales(), scheme(symmetric=False)), "auto", 1.0, 1.0, reason="ignores"),
    "modelopt FP8 with a dict": Row(Variant(MODELOPT, FLAT), "fp8_e4m3", K, V, MODELOPT_K),
    "modelopt's dict needs no dynamic": Row(
        Variant(MODELOPT, flat(kv_cache_scheme={"num_bits": 8, "type": "float"})),
        "fp8_e4m3", K, V, MODELOPT_K),
    "modelopt FP8 ignores a string": Row(
        Variant(MODELOPT, flat(kv_cache_scheme="FP8")), "auto", 1.0, 1.0, reason="algorithm"),
    "modelopt FP8 takes kv_cache_quant_algo, flat": Row(
        Variant(MODELOPT, flat(kv_cache_scheme=None, kv_cache_quant_algo="FP8")),
        "fp8_e4m3", K, V, MODELOPT_K),
    "modelopt FP8 takes kv_cache_quant_algo, nested": Row(
        Variant(MODELOPT, hf_quant=legacy()), "fp8_e4m3", K, V, MODELOPT_K),
    "lower case is FP8, too": Row(
        Variant(MODELOPT, hf_quant=legacy(kv_cache_quant_algo="fp8")),
        "fp8_e4m3", K, V, MODELOPT_K),
    "config.json goes before hf_quant_config.json": Row(
        Variant(MODELOPT, flat(kv_cache_scheme=None), hf_quant=legacy()),
        "auto", 1.0, 1.0, reason="algorithm"),
    "hf_quant_config.json's form in config.json loses its cache algorithm": Row(
        Variant(MODELOPT, {"quant_method": "modelopt", **legacy()}), "auto", 1.0, 1.0,
        reason="algorithm"),
    "modelopt with quant_algo null": refused(
        Variant(MODELOPT, flat(quant_algo=NULL)), "AttributeError: 'NoneType' object"),
    "modelopt with quant_algo absent": refused(
        Variant(MODELOPT, flat(quant_algo=None)), "ValueError: Cannot find 'quant_algo'"),
    "legacy without quant_algo is unquantized": Row(
        Variant(MODELOPT, hf_quant=legacy(quant_algo=None)), "auto", 1.0, 1.0, reason="null"),
    "NVFP4 is never auto": Row(
        Variant(MODELOPT, FLAT_FP4), "auto", K, V, MODELOPT_K, "the cache is not quantized"),
    "INT8 makes a method, in an unquantized cache": Row(
        Variant(MODELOPT, hf_quant=legacy(kv_cache_quant_algo="INT8")),
        "auto", K, V, MODELOPT_K, "the cache is not quantized"),
    "MIXED_PRECISION with an NVFP4 layer": Row(
        Variant(MODELOPT, {**MIXED, "quantized_layers": NVFP4_LAYER}),
        "fp8_e4m3", K, V, MODELOPT_K),
    "MIXED_PRECISION without one": Row(
        Variant(MODELOPT, {**MIXED, "quantized_layers": {"a": {"quant_algo": "FP8"}}}),
        "auto", 1.0, 1.0, reason="w4afp8"),
    "fp8 weights have a method, and no auto": Row(
        Variant(scales(), FP8), "auto", K, V, K_NAME, "the cache is not quantized"),
    "fp8 weights with kv_cache_quant_algo": Row(
        Variant(scales(), {**FP8, "kv_cache_quant_algo": "FP8"}), "fp8_e4m3", K, V, K_NAME),
    "gptq drops": Row(VARIANTS["gptq"], "auto", 1.0, 1.0, reason="gptq"),
    "awq drops under fp8, too": Row(
        asked(VARIANTS["awq"], "fp8_e4m3"), "fp8_e4m3", 1.0, 1.0, reason="awq"),
    "no config: dropped": Row(Variant(scales()), "auto", 1.0, 1.0, reason="no quantization"),
    "another method": Row(asked(VARIANTS["quark"], "auto"), None, reason="quark"),
    # what is asked for
    "fp8 is no choice": refused(asked(CT_FP8, "fp8"), "invalid choice: 'fp8'"),
    "fp4_e2m1 is gone": refused(asked(CT_FP8, "fp4_e2m1"), "invalid choice"),
    "mxfp4 raises": refused(asked(CT_FP8, "mxfp4"), "invalid choice"),
    "bfloat16 keeps the scales": Row(
        asked(CT_FP8, "bfloat16"), "bfloat16", K, V, K_NAME, "the cache is not quantized"),
    "fp8_e5m2 takes the scales": Row(asked(CT_FP8, "fp8_e5m2"), "fp8_e5m2", K, V, K_NAME),
    "fp4_mx_block16 is not modelled": Row(
        asked(CT_FP8, "fp4_mx_block16"), "fp4_mx_block16", reason="scales of its own"),
    "nvfp4 needs SM100 or SM120": refused(NVFP4, "SM100 or SM120", platform="sm90"),
    "nvfp4 on SM100: times 6": Row(
        NVFP4, "nvfp4", own("k", factor=6), own("v", factor=6), MODELOPT_K, "times 6",
        platform="sm100"),
    "nvfp4 on SM120: as is": Row(NVFP4, "nvfp4", K, V, MODELOPT_K, platform="sm120"),
    "nvfp4 on SM100: 1.0 stays": Row(
        asked(Variant(constant(1.0), CT), "nvfp4"), "nvfp4", 1.0, 1.0, K_NAME,
        platform="sm100"),
    "nvfp4 over flat ModelOpt FP8: no method": Row(
        asked(Variant(MODELOPT, flat(kv_cache_scheme="NVFP4")), "nvfp4"),
        "nvfp4", 1.0, 1.0, reason="algorithm", platform="sm100"),
    "ROCm fnuz: doubled": Row(
        CT_FP8, "fp8_e4m3", own("k", factor=2), own("v", factor=2), K_NAME, "doubled",
        platform="gfx942"),
    # names
    "ModelOpt's names under compressed-tensors": Row(
        Variant(MODELOPT, CT), "fp8_e4m3", K, V, MODELOPT_K),
    "attention's names under ModelOpt": Row(
        Variant(scales(), FLAT), "fp8_e4m3", K, V, K_NAME),
    "output_scale": Row(
        Variant(scales(*NAMES["output-scale"]), CT), "fp8_e4m3", K, V,
        NAMES["output-scale"][0].format(0)),
    "kv_scale is k's, and copied to v": Row(
        Variant(scales(f"{BASE}.kv_scale", sides="k"), CT), "fp8_e4m3", K, K,
        f"{BASE.format(0)}.kv_scale"),
    **{f"{name} is not accepted": Row(
        Variant(scales(*NAMES[name]), CT), "fp8_e4m3", 1.0, 1.0, reason=NAMED)
       for name in ("attn", "qkv-proj", "cache-scale", "crossed", "zero-point")},
    "q_scale is not read": Row(Variant(plus(scales(), q_scale=0.5), CT), "fp8_e4m3", K, V, K_NAME),
    "two spellings with other numbers": Row(
        Variant(scales() | scales(*NAMES["modelopt"], scale=2), CT), "fp8_e4m3",
        reason="several tensors"),
    # model classes
    **{f"{name} reads": Row(of(name), "fp8_e4m3", K, V, K_NAME)
       for name in ("llama", "qwen3", "gemma2", "gemma3_text")},
    "a layer of gemma4 with a cache of its own": Row(of("gemma4", 4), "fp8_e4m3", K, V, K_NAME),
    **{f"{name} does not read": Row(of(name), "fp8_e4m3", 1.0, 1.0, reason="ForCausalLM")
       for name in ("qwen2", "qwen3_moe", "mixtral")},
    "starcoder2 is not modelled": Row(of("starcoder2"), "fp8_e4m3", reason="Starcoder2"),
    "gemma3 with images is not modelled": Row(
        VARIANTS["gemma3-ct"], "fp8_e4m3", reason="Gemma3ForConditionalGeneration"),
    "latent attention is not modelled": Row(of("deepseek_v2"), "fp8_e4m3", reason="MLA"),
    # values and shapes
    "F64 becomes float32": Row(Variant(scales(dtype="F64"), CT), "fp8_e4m3", K, V, K_NAME),
    "a scalar": Row(Variant(scales(shape=()), CT), "fp8_e4m3", K, V, K_NAME),
    "two numbers": refused(
        Variant(scales(shape=(2,)), CT), "AssertionError: Attempted to load weight"),
    "none": Row(Variant({}, CT), "fp8_e4m3", 1.0, 1.0, reason=NAMED),
    "zero on both sides": Row(Variant(constant(0.0), CT), "fp8_e4m3", 1.0, 1.0, K_NAME, NAMED),
    "negative on both sides": Row(
        Variant(constant(-0.5), CT), "fp8_e4m3", 1.0, 1.0, K_NAME, NAMED),
    "only k": Row(Variant(scales(sides="k"), CT), "fp8_e4m3", K, K, K_NAME),
    "only v": refused(Variant(scales(sides="v"), CT), ASSERTION),
    "k zero, v above": refused(
        Variant(constant(0.0, sides="k") | scales(sides="v"), CT), ASSERTION),
    "NaN": refused(Variant(constant(np.nan), CT), ASSERTION),
    "NaN of v alone: k is copied": Row(
        Variant(scales(sides="k") | constant(np.nan, sides="v"), CT), "fp8_e4m3", K, K, K_NAME),
    "infinity passes": Row(
        Variant(constant(np.inf), CT), "fp8_e4m3", float("inf"), float("inf"), K_NAME),
    # files
    "a file that the index does not name": Row(
        VARIANTS["ct-files-unindexed-shard"], "fp8_e4m3", 1.0, 1.0, reason=NAMED),
    "a shard of the index, without the names": Row(
        VARIANTS["ct-files-unindexed-names"], "fp8_e4m3", K, V, K_NAME),
    "consolidated files are not modelled": Row(
        VARIANTS["ct-files-consolidated-with-scales"], "fp8_e4m3", reason="consolidated"),
    "one layer missing": Row(Variant(scales(layers=[1]), CT), "fp8_e4m3", 1.0, 1.0, reason=NAMED),
}  # fmt: skip


def read(engine, row, folder, monkeypatch):
    monkeypatch.setitem(VARIANTS, "row", row.variant)
    write("row", folder / "row")
    view = open_checkpoint(folder / "row")
    geometry = read_geometry(view.config, view.tensors)
    options = EngineOptions(row.variant.kv_cache_dtype, platform=row.platform)
    return get_engine(engine).read(view, geometry, options)


def check(row, reading):
    if row.error is not None:
        assert row.error in (reading.error or "")
        return
    assert reading.error is None
    layer = reading.layers[0]
    assert (reading.cache_dtype, layer.cache_dtype) == (row.cache, row.cache)
    assert layer.k.value == (None if row.k is None else (row.k,))
    assert layer.v.value == (None if row.v is None else (row.v,))
    assert layer.k.tensor == row.tensor
    assert row.reason in layer.k.reason
    assert layer.k.reason or layer.k.tensor


@pytest.mark.parametrize("name", ROWS)
def test_sglang(name, tmp_path, monkeypatch):
    check(ROWS[name], read("sglang", ROWS[name], tmp_path, monkeypatch))


def test_layers_of_gemma4_that_share_a_cache_are_unknown(tmp_path, monkeypatch):
    reading = read("sglang", Row(of("gemma4", 4), None), tmp_path, monkeypatch)
    assert [layer.k.value is None for layer in reading.layers] == [False, False, True, True]


# What SGLang did on the CPU and does not do elsewhere, or what the loop around it does not have.
CPU_ONLY = {
    **{name: "SGLang leaves gptq out of its methods on the CPU" for name in GOLDEN["variants"]
       if name.startswith("gptq")},
    **{name: "recorded without the choice of files" for name in GOLDEN["variants"]
       if name.startswith(("ct-files-", "modelopt-files-"))},
}  # fmt: skip
READ = sorted(set(GOLDEN["variants"]) - set(CPU_ONLY))


def number(found):
    return None if found is None else (float(found),)


@pytest.mark.parametrize("name", READ)
def test_the_model_predicts_what_pieces_of_sglang_did(name, tmp_path, monkeypatch):
    golden = GOLDEN["variants"][name]
    row = Row(VARIANTS[name], None, platform="sm120")
    reading = read("sglang", row, tmp_path, monkeypatch)
    known = [layer for layer in reading.layers if layer.k.value is not None]
    assert bool(known) or bool(reading.error) or any(x in name for x in UNKNOWN)
    if golden["error"]:
        assert not known
        if golden["stage"] != "cache dtype" and reading.error:
            assert golden["error"].startswith(reading.error[:ERROR_LENGTH].rstrip("."))
        return
    assert reading.error is None
    for layer in known:
        assert layer.cache_dtype == golden["cache_dtype"]
        used = [number(x) or (1.0,) for x in golden["layers"][layer.engine_name]]
        np.testing.assert_equal((layer.k.value, layer.v.value or used[1]), tuple(used))


def test_every_llama_variant_was_recorded():
    llama = {name for name, variant in VARIANTS.items() if variant.architecture == "llama"}
    assert llama == set(GOLDEN["variants"])


def test_every_variant_is_read(tmp_path_factory):
    """Whatever vLLM is tried with, the model answers, and says why where it does not know."""
    for name, variant in VARIANTS.items():
        if name.startswith("ct-files-") or variant.architecture not in ("llama", "qwen3", "qwen2"):
            continue
        folder = tmp_path_factory.mktemp("sglang") / name
        write(name, folder)
        view = open_checkpoint(folder)
        geometry = read_geometry(view.config, view.tensors)
        for engine in ("sglang", "tensorrt-llm"):
            options = EngineOptions(variant.kv_cache_dtype)
            reading = get_engine(engine).read(view, geometry, options)
            assert reading.error is not None or len(reading.layers) == len(geometry.layers)
            for layer in reading.layers:
                for side in (layer.k, layer.v):
                    assert side.reason or (side.value is not None and side.tensor)
