"""Tiny checkpoints to export onto: one dense Llama, stored as each quantization method stores it.

The weights are really quantized, so that an engine which loads the base gets the same model.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors import safe_open

from tests.engines.layouts import save, write_index
from tests.engines.tensors import Tensors

# 128-wide blocks, groups of 128 and all three fused projections divide these
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
NUM_LAYERS, NUM_KV_HEADS = 2, 2
ATTENTION = tuple(f"model.layers.{i}.self_attn" for i in range(NUM_LAYERS))
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
E4M3_MAX, E2M1_MAX = 448.0, 6.0
_LINEAR = re.compile(r"(model\.layers\.\d+\.\w+\.\w+_proj)\.weight$")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PRODUCER = {"name": "modelopt", "version": "0.47.0"}

Pack = Callable[[np.ndarray], Tensors]  # a dense matrix → what is stored instead, by leaf


def _scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def _e4m3(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -E4M3_MAX, E4M3_MAX).astype(E4M3)


def _e2m1_codes(values: np.ndarray) -> np.ndarray:
    """Return the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with its sign, as 4-bit codes."""
    bounds = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    codes = np.searchsorted(bounds, np.abs(values)).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << 3)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Return two codes per byte, the first one in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _words(codes: np.ndarray, axis: int, order: Iterable[int] = range(8)) -> np.ndarray:
    """Return eight 4-bit codes per int32 along an axis, the first one in the lowest bits."""
    moved = np.moveaxis(codes.astype(np.uint32), axis, -1)
    groups = moved.reshape(*moved.shape[:-1], -1, 8)[..., list(order)]
    words = (groups << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    return np.ascontiguousarray(np.moveaxis(words.view(np.int32), -1, axis))


def int4_groups(weight: np.ndarray, group: int = 128) -> Tensors:
    """Return compressed-tensors' pack-quantized form: codes + 8, eight per word."""
    rows, columns = weight.shape
    grouped = weight.reshape(rows, -1, group)
    scale = (np.abs(grouped).max(-1, keepdims=True) / 7.5).astype(BF16)
    codes = np.clip(np.rint(grouped / scale.astype(np.float32)), -8, 7).reshape(rows, columns)
    return {"weight_packed": _words(codes + 8, 1), "weight_scale": scale[..., 0],
            "weight_shape": np.array([rows, columns], np.int64)}  # fmt: skip


def fp8_tensor(weight: np.ndarray, *, shape: tuple[int, ...] = ()) -> Tensors:
    """Return codes, and scales of the shape given.

    All layers have one scale: those that an engine fuses (Q, K, V; gate, up) must have the same.
    """
    scale = 2.0**-9
    assert np.abs(weight).max() <= E4M3_MAX * scale
    return {"weight": _e4m3(weight / scale), "weight_scale": np.full(shape, scale, np.float32),
            "input_scale": np.full(shape, 0.03125, np.float32)}  # fmt: skip


def fp8_channels(weight: np.ndarray, *, shape: tuple[int, ...] = (-1, 1)) -> Tensors:
    """Return codes, and one scale for each row; inputs are quantized at run time."""
    scale = np.abs(weight).max(1, keepdims=True) / E4M3_MAX
    return {"weight": _e4m3(weight / scale), "weight_scale": scale.reshape(shape)}


def fp8_blocks(weight: np.ndarray, size: int = 128) -> Tensors:
    """Return DeepSeek's form: one scale for each block."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows // size, size, columns // size, size)
    scale = np.abs(blocks).max((1, 3), keepdims=True) / E4M3_MAX
    return {"weight": _e4m3(blocks / scale).reshape(rows, columns),
            "weight_scale_inv": scale[:, 0, :, 0].astype(np.float32)}  # fmt: skip


def _nvfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Return packed codes, block scales, and the scale of the tensor."""
    rows, columns = weight.shape
    outer = np.float32(np.abs(weight).max() / (E4M3_MAX * E2M1_MAX))
    blocks = weight.reshape(rows, -1, 16)
    scale = _e4m3(np.abs(blocks).max(-1, keepdims=True) / (E2M1_MAX * outer))
    step = scale.astype(np.float32) * outer
    codes = _e2m1_codes(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
    return _nibbles(codes.reshape(rows, columns)), scale[..., 0], outer


def nvfp4_compressed(weight: np.ndarray) -> Tensors:
    """Return compressed-tensors' form, whose global scales are reciprocals."""
    packed, scale, outer = _nvfp4(weight)
    return {"weight_packed": packed, "weight_scale": scale,
            "weight_global_scale": np.full(1, 1 / outer, np.float32),
            "input_global_scale": np.full(1, 84.0, np.float32)}  # fmt: skip


def nvfp4_modelopt(weight: np.ndarray) -> Tensors:
    packed, scale, outer = _nvfp4(weight)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": _scalar(outer),
            "input_scale": _scalar(1 / 84)}  # fmt: skip


def mxfp4(weight: np.ndarray) -> Tensors:
    """Return blocks of 32 with a power of two each."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // 32, 32)
    exponent = np.ceil(np.log2(np.abs(blocks).max(-1, keepdims=True) / E2M1_MAX))
    codes = _e2m1_codes(blocks / np.exp2(exponent))
    return {
        "weight_blocks": _nibbles(codes),
        "weight_scales": (exponent + 127)[..., 0].astype("u1"),
    }


def _asymmetric(weight: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 4-bit codes [in, out], zero points and scales [groups, out]."""
    turned = weight.T.reshape(-1, group, weight.shape[0])
    low, high = np.minimum(turned.min(1), 0), np.maximum(turned.max(1), 0)
    scale = ((high - low) / 15).astype(np.float16)
    zero = np.clip(np.rint(-low / scale.astype(np.float32)), 0, 15)
    codes = np.rint(turned / scale[:, None].astype(np.float32)) + zero[:, None]
    return np.clip(codes, 0, 15).reshape(-1, weight.shape[0]), zero, scale


def awq(weight: np.ndarray, group: int = 128) -> Tensors:
    codes, zero, scale = _asymmetric(weight, group)
    return {"qweight": _words(codes, 1, _AWQ_ORDER), "qzeros": _words(zero, 1, _AWQ_ORDER),
            "scales": scale}  # fmt: skip


def gptq(weight: np.ndarray, group: int = 128) -> Tensors:
    """Return the v1 form, in which zero points are stored less one."""
    rows, columns = weight.shape
    turned = weight.T.reshape(-1, group, rows)
    scale = (np.abs(turned).max(1) / 7.5).astype(np.float16)
    codes = np.clip(np.rint(turned / scale[:, None].astype(np.float32)) + 8, 0, 15)
    zeros = np.full((columns // group, rows), 7)
    return {"qweight": _words(codes.reshape(columns, rows), 0), "qzeros": _words(zeros, 1),
            "scales": scale, "g_idx": np.arange(columns, dtype=np.int32) // group}  # fmt: skip


def _args(bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True,
            "dynamic": False, **others}  # fmt: skip


def _compressed(form: str, weights: Any, inputs: Any = None) -> dict[str, Any]:
    group = {"format": form, "targets": ["Linear"], "weights": weights,
             "input_activations": inputs, "output_activations": None}  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
        "global_compression_ratio": None, "kv_cache_scheme": None, "sparsity_config": {},
        "transform_config": {}, "version": "0.20.0",
    }  # fmt: skip


_FP4 = _args(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
CT_W4A16 = _compressed("pack-quantized", _args(4, "group", type="int", group_size=128))
CT_FP8_DYNAMIC = _compressed(
    "float-quantized", _args(8, "channel"), {**_args(8, "token"), "dynamic": True}
)
CT_FP8 = _compressed("float-quantized", _args(8, "tensor"), _args(8, "tensor"))
CT_NVFP4 = _compressed("nvfp4-pack-quantized", _FP4, {**_FP4, "dynamic": "local"})


def _flat(algorithm: str, **others: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"],
            "producer": PRODUCER, **others}  # fmt: skip


def _groups(bits: int, **others: Any) -> dict[str, Any]:
    args = {"dynamic": False, "num_bits": bits, "type": "float", **others}
    return {"group_0": {"input_activations": args, "weights": args, "targets": ["Linear"]}}


def _legacy(algorithm: str, **others: Any) -> dict[str, Any]:
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": None, **others}
    return {"producer": PRODUCER, "quantization": inner}


FLAT_FP8 = _flat("FP8", config_groups=_groups(8))
FLAT_NVFP4 = _flat("NVFP4", config_groups=_groups(4, group_size=16))
_EXCLUDED = {"exclude_modules": ["lm_head"]}
_LAYERS = {
    f"model.layers.{i}.{part}_proj": {"quant_algo": "FP8"} if "attn" in part
    else {"quant_algo": "NVFP4", "group_size": 16}
    for i in range(NUM_LAYERS)
    for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up",
                 "mlp.down")
}  # fmt: skip
_FP8_LAYERS = {name: algorithm for name, algorithm in _LAYERS.items() if "self_attn" in name}


@dataclass(frozen=True)
class Base:
    """How one checkpoint stores and declares its weights.

    `attention` and `mlp` pack matrices (None: they stay dense); `config` is added to config.json,
    `legacy` is hf_quant_config.json; `old` are scales that it already holds.
    """

    attention: Pack | None = None
    mlp: Pack | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    legacy: Mapping[str, Any] | None = None
    shards: int = 1
    tied: bool = False
    old: Tensors = field(default_factory=dict)


def _quantized(pack: Pack, config: Any = None, **others: Any) -> Base:
    config = {"quantization_config": config} if config else {}
    return Base(pack, pack, config, **others)


UNQUANTIZED = {"single": Base(), "sharded": Base(shards=3), "tied": Base(tied=True)}
COMPRESSED = {
    "ct-w4a16": _quantized(int4_groups, CT_W4A16),
    "ct-fp8": _quantized(partial(fp8_tensor, shape=(1,)), CT_FP8),
    "ct-fp8-dynamic": _quantized(fp8_channels, CT_FP8_DYNAMIC),
    "ct-nvfp4": _quantized(nvfp4_compressed, CT_NVFP4),
    "ct-w4a16-sharded": _quantized(int4_groups, CT_W4A16, shards=3),
}
MODELOPT = {
    "modelopt-fp8-flat": _quantized(fp8_tensor, FLAT_FP8),
    "modelopt-fp8-legacy": _quantized(fp8_tensor, legacy=_legacy("FP8", **_EXCLUDED)),
    "modelopt-fp8-both": _quantized(fp8_tensor, FLAT_FP8, legacy=_legacy("FP8", **_EXCLUDED)),
    "modelopt-fp8-channels": _quantized(
        partial(fp8_channels, shape=(-1,)), _flat("FP8_PER_CHANNEL_PER_TOKEN"),
        legacy=_legacy("FP8_PER_CHANNEL_PER_TOKEN", **_EXCLUDED),
    ),
    "modelopt-nvfp4-both": _quantized(
        nvfp4_modelopt, FLAT_NVFP4, legacy=_legacy("NVFP4", group_size=16, **_EXCLUDED)
    ),
    "modelopt-mixed": Base(
        fp8_tensor, nvfp4_modelopt,
        {"quantization_config": _flat("MIXED_PRECISION", quantized_layers=_LAYERS)},
        legacy=_legacy("MIXED_PRECISION", quantized_layers=_LAYERS),
    ),
    "modelopt-mixed-dense-mlp": Base(  # one that vLLM has kernels for on the CPU
        fp8_tensor, None,
        {"quantization_config": _flat("MIXED_PRECISION", quantized_layers=_FP8_LAYERS)},
    ),
}  # fmt: skip
FP8 = {
    "fp8-blocks": _quantized(fp8_blocks, {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
        "weight_block_size": [128, 128]}),
    "fp8-tensor": _quantized(fp8_tensor, {
        "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}),
}  # fmt: skip
WITHOUT_SCALES = {
    "awq": _quantized(awq, {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
        "version": "gemm"}),
    "gptq": _quantized(gptq, {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
        "lm_head": False}),
    "mxfp4": Base(None, mxfp4, {"quantization_config": {
        "quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "lm_head"]}}),
}  # fmt: skip
BASES: dict[str, Base] = {**UNQUANTIZED, **COMPRESSED, **MODELOPT, **FP8, **WITHOUT_SCALES}

SIDE_FILES = {  # what an engine needs beside weights, and what it must not lose
    "tokenizer.json": '{"version": "1.0"}', "tokenizer_config.json": '{"model_max_length": 64}',
    "special_tokens_map.json": "{}", "chat_template.jinja": "{{ messages }}\n",
    "generation_config.json": '{"temperature": 0.6}', "preprocessor_config.json": '{"size": 8}',
    "vocab.txt": "a\r\nb\n", "README.md": "# café\n", "modeling_own.py": "raise SystemExit(9)\n",
}  # fmt: skip


def dense(model: Path) -> tuple[dict[str, Any], Tensors]:
    """Return configuration and bfloat16 tensors of a folder that transformers wrote."""
    with safe_open(model / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    config = json.loads((model / "config.json").read_text())
    return config, {name: t.view(torch.uint16).numpy().view(BF16) for name, t in tensors.items()}


def store(base: Base, tensors: Mapping[str, np.ndarray]) -> Tensors:
    """Return the tensors that a base holds instead of dense ones, its old scales included."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        match = _LINEAR.match(name)
        pack = None if match is None else base.attention if "self_attn" in name else base.mlp
        if match is None or pack is None:
            found[name] = tensor
        else:
            packed = pack(tensor.astype(np.float32))
            found |= {f"{match[1]}.{leaf}": array for leaf, array in packed.items()}
    if base.tied:
        found.pop("lm_head.weight", None)
    return found | base.old


def write(
    base: Base, model: Path, folder: Path, spread: Callable[[Tensors, Path], None] | None = None
) -> Path:
    """Write a base made from the dense checkpoint `model`, with every side file.

    `spread` writes the tensors, where they are not to be spread as the base says.
    """
    config, tensors = dense(model)
    folder.mkdir()
    config |= {"tie_word_embeddings": base.tied, **base.config}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if base.legacy is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(base.legacy, indent=4))
    for name, text in SIDE_FILES.items():
        (folder / name).write_bytes(text.encode())
    (spread or partial(evenly, shards=base.shards))(store(base, tensors), folder)
    return folder


def evenly(tensors: Tensors, folder: Path, shards: int) -> None:
    """Write one file, or several with an index; the tensors in name order."""
    names = sorted(tensors)
    if shards == 1:
        save(folder / "model.safetensors", {name: tensors[name] for name in names})
        return
    files = {}
    for i in range(shards):
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        files[f"model-{i + 1:05}-of-{shards:05}.safetensors"] = {n: tensors[n] for n in part}
    for file, held in files.items():
        save(folder / file, held)
    write_index(folder, files)
