"""Quantization configs, right and wrong in many ways."""

from collections.abc import Mapping
from typing import Any

from tests.engines.architectures import LLAMA, rows

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True,
          "dynamic": False}  # fmt: skip
CT = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": [],
      "quantization_status": "compressed", "kv_cache_scheme": SCHEME}  # fmt: skip
NVFP4_SCHEME = {"num_bits": 4, "type": "float", "dynamic": True, "group_size": 16}
FLAT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        "producer": {"name": "modelopt", "version": "0.47.0"}}  # fmt: skip
FLAT_FP4 = {**FLAT, "quant_algo": "NVFP4", "kv_cache_scheme": NVFP4_SCHEME, "group_size": 16,
            "ignore": ["*"]}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": [
    f"model.layers.{layer}.{name.removesuffix('.weight')}"
    for layer in range(2) for name, shape in rows(LLAMA) if len(shape) == 2]}  # fmt: skip
QUARK = {"quant_method": "quark", "global_quant_config": {
    "weight": None, "input_tensors": None, "output_tensors": None, "bias": None,
    "target_device": None}, "layer_type_quant_config": {}, "layer_quant_config": {
        name: {"weight": None, "input_tensors": None, "bias": None, "output_tensors": {
            "dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}}
        for name in ("*q_proj", "*k_proj", "*v_proj")},
    "kv_cache_quant_config": {}, "exclude": FP8["modules_to_not_convert"], "export": {
        "kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder",
        "weight_format": "real_quantized"}}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
        "lm_head": False}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FLOAT8_ARGS = {"num_bits": 8, "type": "float", "symmetric": True}
W8A8 = {"targets": ["Linear"], "weights": {**FLOAT8_ARGS, "strategy": "channel", "dynamic": False},
        "input_activations": {**FLOAT8_ARGS, "strategy": "token", "dynamic": True}}  # fmt: skip
INT8 = {"targets": ["Linear"],
        "weights": {**W8A8["weights"], "type": "int"},
        "input_activations": {**W8A8["input_activations"], "type": "int"}}  # fmt: skip
ATTENTION_ARGS = {**FLOAT8_ARGS, "strategy": "tensor", "dynamic": False}


def ct(**changes: Any) -> dict[str, Any]:
    """Compressed-tensors config; None drops the key."""
    return merged(CT, changes)


def scheme(**changes: Any) -> dict[str, Any]:
    return ct(kv_cache_scheme=merged(SCHEME, changes))


def flat(**changes: Any) -> dict[str, Any]:
    """ModelOpt config as it stands in config.json."""
    return merged(FLAT, changes)


def legacy(**changes: Any) -> dict[str, Any]:
    """ModelOpt config as it stands in hf_quant_config.json."""
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": inner | changes}  # fmt: skip


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **changes}
    return {key: merged[key] for key in merged if merged[key] is not None or key not in changes}


NULL: Any = type("Null", (), {})()  # a JSON null that `_merged` keeps


HEADS = scheme(strategy="attn_head")
SCHEMES: dict[str, Any] = {  # kv_cache_scheme of a compressed-tensors config
    "int4": {"num_bits": 4, "type": "int"}, "num-bits-4": {"num_bits": 4},
    "type-int": {"type": "int"}, "strategy-channel": {"strategy": "channel"},
    "strategy-block": {"strategy": "block"}, "strategy-tensor-group": {"strategy": "tensor_group"},
    "channel-and-asymmetric": {"strategy": "channel", "symmetric": False},
    "strategy-token": {"strategy": "token"}, "strategy-group": {"strategy": "group"},
    "strategy-unknown": {"strategy": "per-tensor"}, "strategy-null": {"strategy": NULL},
    "strategy-absent": {"strategy": None}, "strategy-upper": {"strategy": "TENSOR"},
    "symmetric-false": {"symmetric": False}, "symmetric-absent": {"symmetric": None},
    "symmetric-null": {"symmetric": NULL}, "dynamic-true": {"dynamic": True},
    "dynamic-local": {"dynamic": "local"}, "dynamic-absent": {"dynamic": None},
    "num-bits-string": {"num_bits": "8"}, "type-absent": {"type": None},
    "unknown-key": {"granularity": "tensor"},
}  # fmt: skip
CT_CONFIGS: dict[str, Any] = {
    "no-config-groups": ct(config_groups=None),
    "minimal": {"quant_method": "compressed-tensors", "kv_cache_scheme": merged(
        SCHEME, {"dynamic": None})},
    "underscore": ct(quant_method="compressed_tensors"),
    "upper": ct(quant_method="Compressed-Tensors"),
    "no-method": ct(quant_method=None),
    "null-method": ct(quant_method=NULL),
    "empty-method": ct(quant_method=""),
    "unknown-method": ct(quant_method="kvq"),
    "null-scheme": ct(kv_cache_scheme=NULL),
    "no-scheme": ct(kv_cache_scheme=None),
    "empty-scheme": ct(kv_cache_scheme={}),
    "scheme-string": ct(kv_cache_scheme="FP8"),
    "kv-cache-quant-algo": ct(kv_cache_scheme=None, kv_cache_quant_algo="FP8"),
    "frozen": ct(quantization_status="frozen"),
    "no-ignore": ct(ignore=None),
    "null-groups": ct(config_groups=NULL),
    "attention-group": ct(config_groups={"group_0": {
        "targets": ["LlamaAttention"], "weights": None, "input_activations": ATTENTION_ARGS}}),
    "attention-group-regex": ct(config_groups={"group_0": {
        "targets": ["re:.*self_attn$"], "weights": None, "input_activations": ATTENTION_ARGS}}),
    "attention-group-two-targets": ct(config_groups={"group_0": {
        "targets": ["LlamaAttention", "QwenAttention"], "weights": None,
        "input_activations": ATTENTION_ARGS}}),
    "group-without-targets": ct(config_groups={"group_0": {"weights": W8A8["weights"]}}),
    "group-empty-targets": ct(config_groups={"group_0": {**W8A8, "targets": []}}),
}  # fmt: skip
FLAT_CONFIGS: dict[str, Any] = {  # ModelOpt, in config.json
    "algo-null": flat(quant_algo=NULL),
    "algo-absent": flat(quant_algo=None),
    "algo-empty": flat(quant_algo=""),
    "algo-no-quant": flat(quant_algo="NO_QUANT"),
    "algo-lower": flat(quant_algo="fp8"),
    "algo-unknown": flat(quant_algo="W4A8_AWQ"),
    "method-modelopt-fp4": flat(quant_method="modelopt_fp4"),
    "method-upper": flat(quant_method="ModelOpt"),
    "algo-mixed-no-layers": flat(quant_algo="MIXED_PRECISION"),
    "scheme-int8": flat(kv_cache_scheme={"num_bits": 8, "type": "int", "dynamic": False}),
    "scheme-no-dynamic": flat(kv_cache_scheme={"num_bits": 8, "type": "float"}),
    "scheme-dynamic": flat(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": True}),
    "scheme-nvfp4": flat(kv_cache_scheme=NVFP4_SCHEME),
    "scheme-string-nvfp4": flat(kv_cache_scheme="NVFP4"),
    "scheme-string-fp8": flat(kv_cache_scheme="FP8"),
    "scheme-string-int8": flat(kv_cache_scheme="INT8"),
    "scheme-string-nvfp4-affine": flat(kv_cache_scheme="NVFP4_AFFINE"),
    "scheme-absent": flat(kv_cache_scheme=None),
    "kv-algo": flat(kv_cache_scheme=None, kv_cache_quant_algo="FP8"),
    "scheme-over-kv-algo": flat(kv_cache_quant_algo="NVFP4"),
    "ignore-absent": flat(ignore=None),
    "ignore-string": flat(ignore="lm_head"),
    "ct-fields": flat(kv_cache_scheme=SCHEME, config_groups={}),
    "nested-scheme-outside": {
        "quant_method": "modelopt", "quantization": {"quant_algo": "FP8"},
        "kv_cache_scheme": FLAT["kv_cache_scheme"]},
    "nested-scheme-inside": {"quant_method": "modelopt", "quantization": {
        "quant_algo": "FP8", "kv_cache_scheme": FLAT["kv_cache_scheme"]}},
    "nested-kv-algo-outside": {
        "quant_method": "modelopt", "quantization": {"quant_algo": "FP8"},
        "kv_cache_quant_algo": "FP8"},
    "nested-kv-algo-dict": {"quant_method": "modelopt", "quantization": {
        "quant_algo": "FP8", "kv_cache_quant_algo": FLAT["kv_cache_scheme"]}},
    "nested-not-a-dict": {"quant_method": "modelopt", "quantization": "FP8"},
    "scheme-empty": flat(kv_cache_scheme={}),
    "scheme-empty-and-kv-algo": flat(kv_cache_scheme={}, kv_cache_quant_algo="FP8"),
    "scheme-list": flat(kv_cache_scheme=["FP8"]),
}  # fmt: skip
FLAT_BF16: dict[str, Any] = {  # ModelOpt whose weights stay as they are
    "ignore-all": flat(ignore=["*"]),
    "mixed": flat(quant_algo="MIXED_PRECISION", quantized_layers={"none": {"quant_algo": "FP8"}}),
    "mixed-nvfp4-kv": flat(quant_algo="MIXED_PRECISION", kv_cache_scheme="NVFP4",
                           quantized_layers={"none": {"quant_algo": "FP8"}}),
    "mixed-nvfp4-dict-kv": flat(quant_algo="MIXED_PRECISION", kv_cache_scheme=NVFP4_SCHEME,
                                quantized_layers={"none": {"quant_algo": "FP8"}}),
    "mixed-string-fp8-kv": flat(quant_algo="MIXED_PRECISION", kv_cache_scheme="FP8",
                                quantized_layers={"none": {"quant_algo": "FP8"}}),
    "mixed-kv-algo": flat(quant_algo="MIXED_PRECISION", kv_cache_scheme=None,
                          kv_cache_quant_algo="FP8",
                          quantized_layers={"none": {"quant_algo": "FP8"}}),
    "mixed-nested": {"quant_method": "modelopt", "quantization": {
        "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "NVFP4",
        "quantized_layers": {"none": {"quant_algo": "FP8"}}}},
    "mixed-no-kv": flat(quant_algo="MIXED_PRECISION", kv_cache_scheme=None,
                        quantized_layers={"none": {"quant_algo": "FP8"}}),
}  # fmt: skip
LEGACY_CONFIGS: dict[str, Any] = {  # hf_quant_config.json
    "fp8": legacy(),
    "kv-null": legacy(kv_cache_quant_algo=None),
    "kv-nvfp4": legacy(kv_cache_quant_algo="NVFP4"),
    "kv-lower": legacy(kv_cache_quant_algo="fp8"),
    "kv-int8": legacy(kv_cache_quant_algo="INT8"),
    "algo-unknown": legacy(quant_algo="W4A8_AWQ"),
    "algo-no-quant": legacy(quant_algo="NO_QUANT"),
    "algo-mixed": legacy(quant_algo="MIXED_PRECISION", quantized_layers={"a": {}}),
}
CACHE_DTYPES = [
    "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "nvfp4", "fp8_per_token_head",
    "int8_per_token_head",
]  # fmt: skip
