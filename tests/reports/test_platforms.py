"""The same checkpoint on GPUs that differ, and layers that are left unquantized."""

import pytest

from tests.engines.quantization import CT, FLAT, FLAT_FP4, FP8
from tests.engines.tensors import NAMES, scales

MODELOPT = scales(*NAMES["modelopt"])
NVFP4 = {**FLAT_FP4, "kv_cache_scheme": "NVFP4"}


def test_vllm_33695_sliding_layers_are_skipped_by_an_option(verify, variant, reading):
    """K36, vllm-project/vllm#33695: quantizing layers with a short window saves little and costs
    accuracy, and leaving them out is an option of the server, not of the file."""
    folder = variant(scales(), CT, architecture="gemma3_text")  # a sliding layer and a full one
    assert verify(folder, "vllm", "--strict").code == 0
    option = ["--kv-cache-dtype-skip-layers", "sliding_window"]
    layers = reading(folder, "vllm", *option)["layers"]
    assert [layer["cache_dtype"] for layer in layers] == ["auto", "fp8"]
    found = verify(folder, "vllm", *option)
    assert [(f["code"], f["layer_idx"]) for f in found.findings] == [("engine.unquantized", 0)]
    plain = variant(scales(), CT)
    assert verify(plain, "vllm", *option, "--strict").code == 0


@pytest.mark.parametrize(
    ("method", "tensors", "weights"),
    [(FLAT, MODELOPT, "fp8-static"), (FP8, scales(), "bf16")],
    ids=["modelopt", "fp8"],
)
def test_vllm_45562_a_scale_is_doubled_where_codes_mean_half(
    verify, variant, reading, method, tensors, weights
):
    """K45, vllm-project/vllm#45562, vllm-project/vllm#45720, vllm-project/vllm#15734: older AMD
    GPUs have an FP8 whose codes end at 240; engines double the scales of a file there."""
    folder = variant(tensors, method, weights)
    options = ["--kv-cache-dtype", "fp8", "--platform", "gfx942"]
    assert verify(folder, "vllm", *options).errors == set()
    used = [
        reading(folder, "vllm", "--kv-cache-dtype", "fp8", "--platform", platform)
        for platform in ("gfx942", "gfx950")
    ]
    doubled, plain = ([layer["k"]["value"][0] for layer in found["layers"]] for found in used)
    assert doubled == [2 * value for value in plain]


def test_vllm_45562_a_scale_that_one_path_forgets_to_double(verify, variant):
    """K45, vllm-project/vllm#45562: the path of compressed-tensors does not double, so that values
    above 240 scales clip on such a GPU, and on no other."""
    folder = variant(scales(), CT)
    found = verify(folder, "vllm", "--platform", "gfx942")
    assert found.errors == {"engine.fnuz"}
    assert "codes end at 240" in found.one("engine.fnuz")["message"]
    assert verify(folder, "vllm", "--platform", "gfx950", "--strict").code == 0
    assert verify(folder, "sglang", "--platform", "gfx942", "--strict").code == 0


@pytest.mark.parametrize(
    ("platform", "head_dim", "severity"),
    [
        ("sm75", 128, "error"),  # no backend
        ("sm80", 128, "warning"),  # FlashInfer alone
        ("sm86", 128, "warning"),
        ("sm86", 96, "error"),  # not even FlashInfer
        ("sm89", 96, None),
        ("sm90", 96, None),
        ("sm100", 96, None),
        ("sm120", 128, None),
    ],
)
def test_vllm_26431_a_declared_cache_without_kernels(verify, variant, platform, head_dim, severity):
    """K48, vllm-project/vllm#26431, vllm-project/vllm#45038: a declaration turns `auto` into FP8
    on GPUs that have no kernels for it, and the server ends or reads beyond its memory."""
    folder = variant(scales(), CT, config={"head_dim": head_dim})
    found = verify(folder, "vllm", "--platform", platform)
    severities = {f["code"]: f["severity"] for f in found.findings}
    assert severities == ({"engine.kernel": severity} if severity else {})
    assert found.code == (severity == "error")
    if severity:
        assert platform in found.one("engine.kernel")["message"]
        assert "serve it on sm89, sm90, sm100" in found.one("engine.kernel")["fix"]


def test_vllm_26431_no_declaration_no_kernel_needed(verify, variant):
    """K48, vllm-project/vllm#26431: the way out. With `--kv-cache-dtype bfloat16` the same file
    needs no such kernel, and verify says that its scales are then not used."""
    folder = variant(scales(), CT, config={"head_dim": 96})
    option = ["--platform", "sm86", "--kv-cache-dtype", "bfloat16"]
    assert verify(folder, "vllm", *option).errors == {"engine.unquantized"}


def test_tensorrt_llm_12938_scales_are_used_behind_a_switch(verify, variant, reading):
    """K52, NVIDIA/TensorRT-LLM#12938, NVIDIA/TensorRT-LLM#10745: calibrated scales were ignored
    unless a variable of the environment was set, for fear of overflow."""
    folder = variant(MODELOPT, NVFP4, config={"head_dim": 128})
    used = reading(folder, "tensorrt-llm")
    assert "TRTLLM_LOAD_KV_SCALES=0 turns loading off" in " ".join(used["notes"])
    assert verify(folder, "tensorrt-llm", "--strict").code == 0
    fp8 = verify(variant(MODELOPT, FLAT, "fp8-static"), "tensorrt-llm")
    assert fp8.errors == {"engine.default"}
    assert "are ignored for FP8 caches" in fp8.one("engine.default")["message"]


@pytest.mark.parametrize("head_dim", [24, 64, 80, 96, 112, 128, 192, 256, 512])
def test_llama_cpp_4425_head_sizes_that_kernels_do_not_take(verify, variant, head_dim):
    """K74, ggml-org/llama.cpp#4425, flashinfer-ai/flashinfer#2207, flashinfer-ai/flashinfer#3576:
    block formats need heads of whole blocks, and kernels exist for some sizes only."""
    config = {"head_dim": head_dim}
    blocks = variant(MODELOPT, NVFP4, config=config)
    assert verify(blocks).errors == ({"format.head_size"} if head_dim % 16 else set())
    kernels = {f"sm{n}": "engine.kernel" not in verify(
        blocks, "vllm", "--platform", f"sm{n}").errors for n in (90, 100)}  # fmt: skip
    assert kernels == {
        "sm90": head_dim in (128, 256, 512),
        "sm100": head_dim in (64, 128, 256, 512),
    }
    plain = variant(scales(), CT, config=config)
    assert verify(plain, None, "--strict").code == 0
    assert verify(plain, "vllm", "--strict").code == 0  # Hopper, where FP8 has kernels for all
