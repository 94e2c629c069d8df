"""Checkpoint folders for engines to load: tiny models, random weights, scales of every kind.

Each scale has its own value, `value(layer, side)`, so that a mix-up of layers or sides shows.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvq.tensorfile import header_bytes

Tensors = dict[str, np.ndarray]
Layout = Callable[[Path, Tensors, Tensors], None]
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip
NUMPY = {spelled: np.dtype(getattr(ml_dtypes, name, name)) for name, spelled in DTYPES.items()}
NUMPY["FP16"] = NUMPY["F16"]

# models: 4 heads of 32 on a hidden size of 128, 2 of them for K and V, 64 wide MLPs

ATTENTION = "q_proj.weight 128x128, k_proj.weight 64x128, v_proj.weight 64x128"
MLP = "mlp.gate_proj.weight 64x128, mlp.up_proj.weight 64x128, mlp.down_proj.weight 128x64"
NORMS = "input_layernorm.weight 128, post_attention_layernorm.weight 128"
FEEDFORWARD_NORMS = "pre_feedforward_layernorm.weight 128, post_feedforward_layernorm.weight 128"
QK_NORM = "self_attn.q_norm.weight 32, self_attn.k_norm.weight 32"
SELF_ATTENTION = ", ".join(
    f"self_attn.{part}" for part in [*ATTENTION.split(", "), "o_proj.weight 128x128"]
)
LLAMA = f"{SELF_ATTENTION}, {MLP}, {NORMS}"
GEMMA = f"{LLAMA}, {FEEDFORWARD_NORMS}"
PER_LAYER = (
    "per_layer_input_gate.weight 8x128, per_layer_projection.weight 128x8, "
    "post_per_layer_input_norm.weight 128"
)
PER_LAYER_MODEL = (
    "model.embed_tokens_per_layer.weight 128x32, model.per_layer_model_projection.weight 32x128, "
    "model.per_layer_projection_norm.weight 8"
)
MATRICES = "model.embed_tokens.weight 128x128, model.norm.weight 128"
LLAMA_MODEL = f"{MATRICES}, lm_head.weight 128x128"
BIASED = "attention.query_key_value 384x128, attention.dense 128x128, mlp.dense_h_to_4h 64x128"
SIZES = {
    "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
TWO_ROPES = {"sliding_attention": ROPE, "full_attention": ROPE}
GEMMA_SIZES = {
    **SIZES, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32,
    "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
GEMMA3_TEXT = {**GEMMA_SIZES, "model_type": "gemma3_text", "rope_parameters": TWO_ROPES}
SHARED = {
    **GEMMA_SIZES, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "rope_parameters": TWO_ROPES,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
}  # fmt: skip


def biased(table: str, **norms: int) -> str:
    """Return the table with a bias for each weight, and layer norms with both."""
    rows = [row.split() for row in table.split(", ")] + [[k, str(v)] for k, v in norms.items()]
    return ", ".join(f"{n}.weight {s}, {n}.bias {s.split('x')[0]}" for n, s in rows)


@dataclass(frozen=True)
class Architecture:
    """config.json, and shapes: of one layer, and of what is outside the layers."""

    name: str
    config: Mapping[str, Any]
    layer: str = LLAMA
    rest: str = LLAMA_MODEL
    layers: str = "model.layers"
    attention: str = "self_attn"
    num_layers: int = 2
    unshared: int = 99  # layers from here on have no K and V of their own


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", {"model_type": "llama", **SIZES}),
    "mistral": Architecture("MistralForCausalLM",
                            {"model_type": "mistral", **SIZES, "sliding_window": 8}),
    "qwen2": Architecture(
        "Qwen2ForCausalLM", {"model_type": "qwen2", **SIZES},
        f"{LLAMA}, self_attn.q_proj.bias 128, self_attn.k_proj.bias 64, self_attn.v_proj.bias 64",
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", {"model_type": "qwen3", **SIZES},
                          f"{LLAMA}, {QK_NORM}"),
    "phi3": Architecture(
        "Phi3ForCausalLM", {"model_type": "phi3", **SIZES, "pad_token_id": 0},
        f"self_attn.qkv_proj.weight 256x128, self_attn.o_proj.weight 128x128, {NORMS}, "
        "mlp.gate_up_proj.weight 128x128, mlp.down_proj.weight 128x64",
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        {"model_type": "mixtral", **SIZES, "num_local_experts": 2, "num_experts_per_tok": 1},
        f"{SELF_ATTENTION}, {NORMS}, block_sparse_moe.gate.weight 2x128, " + ", ".join(
            f"block_sparse_moe.experts.{i}.w1.weight 64x128, block_sparse_moe.experts.{i}.w2.weight"
            f" 128x64, block_sparse_moe.experts.{i}.w3.weight 64x128" for i in range(2)),
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        {"model_type": "qwen3_moe", **SIZES, "num_experts": 2, "num_experts_per_tok": 1,
         "moe_intermediate_size": 64, "decoder_sparse_step": 1, "norm_topk_prob": True,
         "mlp_only_layers": []},
        f"{SELF_ATTENTION}, {QK_NORM}, {NORMS}, mlp.gate.weight 2x128, " + ", ".join(
            f"mlp.experts.{i}.{row.removeprefix('mlp.')}"
            for i in range(2) for row in MLP.split(", ")),
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        {"model_type": "starcoder2", **SIZES, "hidden_act": "gelu", "norm_epsilon": 1e-5,
         "use_bias": False, "tie_word_embeddings": True},
        f"{SELF_ATTENTION}, {biased(NORMS.replace('.weight', ''))}, mlp.c_fc.weight 64x128, "
        "mlp.c_proj.weight 128x64",
        f"{MATRICES}, model.norm.bias 128",
    ),
    "gemma2": Architecture("Gemma2ForCausalLM", {"model_type": "gemma2", **GEMMA_SIZES},
                           GEMMA, MATRICES),
    "gemma3_text": Architecture("Gemma3ForCausalLM", GEMMA3_TEXT, f"{GEMMA}, {QK_NORM}", MATRICES),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM",
        {"model_type": "gemma3n_text", **SHARED, "altup_num_inputs": 4, "laurel_rank": 8,
         "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4},
        f"{GEMMA}, {QK_NORM}, {PER_LAYER}, altup.correct_output_scale 128, "
        "altup.correction_coefs.weight 4x4, altup.prediction_coefs.weight 16x4, "
        "altup.modality_router.weight 4x128, altup.router_norm.weight 128, "
        "laurel.linear_left.weight 8x128, laurel.linear_right.weight 128x8, "
        "laurel.post_laurel_norm.weight 128",
        f"{MATRICES}, {PER_LAYER_MODEL}, " + ", ".join(
            f"model.altup_{kind}projections.{i}.weight 128x128"
            for kind in ("", "unembed_") for i in range(3)),
        num_layers=4, unshared=2,
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        {"model_type": "gemma4_text", **SHARED, "global_head_dim": 32},
        f"{GEMMA}, {QK_NORM}, {PER_LAYER}, layer_scalar 1",
        f"{MATRICES}, {PER_LAYER_MODEL}", num_layers=4, unshared=2,
    ),
    "gpt_neox": Architecture(
        "GPTNeoXForCausalLM",
        {"model_type": "gpt_neox", **SIZES, "hidden_act": "gelu", "rotary_pct": 0.25},
        biased(f"{BIASED}, mlp.dense_4h_to_h 128x64", input_layernorm=128,
               post_attention_layernorm=128),
        "gpt_neox.embed_in.weight 128x128, embed_out.weight 128x128, "
        "gpt_neox.final_layer_norm.weight 128, gpt_neox.final_layer_norm.bias 128",
        "gpt_neox.layers", "attention",
    ),
    "falcon": Architecture(
        "FalconForCausalLM",
        {"model_type": "falcon", **{k: v for k, v in SIZES.items() if k != "head_dim"},
         "ffn_hidden_size": 512, "num_kv_heads": 2, "alibi": False,
         "bias": False, "multi_query": True, "parallel_attn": True,
         "new_decoder_architecture": False, "tie_word_embeddings": True},
        "self_attention.query_key_value.weight 192x128, self_attention.dense.weight 128x128, "
        "mlp.dense_h_to_4h.weight 512x128, mlp.dense_4h_to_h.weight 128x512, "
        "input_layernorm.weight 128, input_layernorm.bias 128",
        "transformer.word_embeddings.weight 128x128, transformer.ln_f.weight 128, "
        "transformer.ln_f.bias 128",
        "transformer.h", "self_attention",
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        {"model_type": "gpt2", "vocab_size": 128, "n_positions": 128, "n_embd": 128, "n_layer": 2,
         "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        "attn.c_attn.weight 128x384, attn.c_attn.bias 384, attn.c_proj.weight 128x128, "
        "attn.c_proj.bias 128, mlp.c_fc.weight 128x512, mlp.c_fc.bias 512, "
        "mlp.c_proj.weight 512x128, mlp.c_proj.bias 128, ln_1.weight 128, ln_1.bias 128, "
        "ln_2.weight 128, ln_2.bias 128",
        "transformer.wte.weight 128x128, transformer.wpe.weight 128x128, "
        "transformer.ln_f.weight 128, transformer.ln_f.bias 128",
        "transformer.h", "attn",
    ),
    "opt": Architecture(
        "OPTForCausalLM",
        {"model_type": "opt", **SIZES, "ffn_dim": 64, "word_embed_proj_dim": 128,
         "activation_function": "relu", "tie_word_embeddings": True, "pad_token_id": 0},
        biased(
            "self_attn.q_proj 128x128, self_attn.k_proj 128x128, self_attn.v_proj 128x128, "
            "self_attn.out_proj 128x128, fc1 64x128, fc2 128x64, self_attn_layer_norm 128, "
            "final_layer_norm 128"),
        "model.decoder.embed_tokens.weight 128x128, model.decoder.embed_positions.weight 130x128, "
        "model.decoder.final_layer_norm.weight 128, model.decoder.final_layer_norm.bias 128",
        "model.decoder.layers",
    ),
    "deepseek_v2": Architecture(
        "DeepseekV2ForCausalLM",
        {"model_type": "deepseek_v2", **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 64,
         "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
         "first_k_dense_replace": 2, "n_routed_experts": 4, "n_shared_experts": 1,
         "num_experts_per_tok": 2, "moe_intermediate_size": 64, "moe_layer_freq": 1,
         "topk_method": "greedy", "norm_topk_prob": False},
        "self_attn.q_a_proj.weight 32x128, self_attn.q_a_layernorm.weight 32, "
        "self_attn.q_b_proj.weight 256x32, self_attn.kv_a_proj_with_mqa.weight 96x128, "
        "self_attn.kv_a_layernorm.weight 64, self_attn.kv_b_proj.weight 256x64, "
        f"self_attn.o_proj.weight 128x128, {MLP}, {NORMS}",
    ),
    "gemma3": Architecture(
        "Gemma3ForConditionalGeneration",
        {"model_type": "gemma3", "text_config": GEMMA3_TEXT, "mm_tokens_per_image": 4,
         "boi_token_index": 127, "eoi_token_index": 126, "image_token_index": 125,
         "tie_word_embeddings": True,
         "vision_config": {
             "model_type": "siglip_vision_model", "hidden_size": 128, "intermediate_size": 64,
             "num_hidden_layers": 1, "num_attention_heads": 4, "num_channels": 3,
             "image_size": 32, "patch_size": 8, "vision_use_head": False}},
        f"{GEMMA}, {QK_NORM}",
        "language_model.model.embed_tokens.weight 128x128, language_model.model.norm.weight 128, "
        "multi_modal_projector.mm_input_projection_weight 128x128, "
        "multi_modal_projector.mm_soft_emb_norm.weight 128, " + ", ".join(
            f"vision_tower.vision_model.{row}" for row in [
                "embeddings.patch_embedding.weight 128x3x8x8",
                "embeddings.patch_embedding.bias 128",
                "embeddings.position_embedding.weight 16x128",
                *biased("post_layernorm 128").split(", "),
                *biased(", ".join(f"encoder.layers.0.{row}" for row in [
                    "self_attn.q_proj 128x128", "self_attn.k_proj 128x128",
                    "self_attn.v_proj 128x128", "self_attn.out_proj 128x128", "layer_norm1 128",
                    "layer_norm2 128", "mlp.fc1 64x128", "mlp.fc2 128x64"])).split(", ")]),
        "language_model.model.layers",
    ),
}  # fmt: skip


def weights_of(architecture: Architecture, method: str) -> Tensors:
    """Return the weights, linear ones inside layers stored as `method` says."""
    generator = np.random.default_rng(0)
    tensors = {}
    for name, shape in _rows(architecture.rest):
        tensors[name] = _random(generator, shape)
    for layer in range(architecture.num_layers):
        for name, shape in _rows(architecture.layer):
            if layer < architecture.unshared or not re.match(r"self_attn\.[kv]_", name):
                tensors[f"{architecture.layers}.{layer}.{name}"] = _random(generator, shape)
    return {k: v for name, w in tensors.items() for k, v in _stored(name, w, method).items()}


def _rows(table: str) -> list[tuple[str, tuple[int, ...]]]:
    rows = [row.split() for row in table.split(", ")]
    return [(name, tuple(int(n) for n in shape.split("x"))) for name, shape in rows]


def _random(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (generator.standard_normal(shape) * 0.05).astype(ml_dtypes.bfloat16)


def _stored(name: str, weight: np.ndarray, method: str) -> Tensors:
    if method in ("bf16", "fp16"):
        return {name: weight.astype(NUMPY[method.upper()])}
    if not re.search(r"\.layers\.\d+\..*_proj\.weight$", name):
        return {name: weight}
    stem, (rows, columns) = name.removesuffix(".weight"), weight.shape
    one, full = np.array(0.01, np.float32), np.ones
    if method == "fp8-static":
        return {name: weight.astype(ml_dtypes.float8_e4m3fn),
                f"{stem}.weight_scale": one, f"{stem}.input_scale": one}  # fmt: skip
    if method == "fp8-channel":
        return {name: weight.astype(ml_dtypes.float8_e4m3fn),
                f"{stem}.weight_scale": full((rows, 1), np.float32) / 128}  # fmt: skip
    if method == "int8-channel":
        return {name: np.rint(weight.astype(np.float32) * 100).astype(np.int8),
                f"{stem}.weight_scale": full((rows, 1), np.float32) / 100}  # fmt: skip
    groups = columns // 32
    zeros = np.full((groups, rows // 8), 0x77777777, np.int32)
    scales = full((groups, rows)).astype(np.float16) / np.float16(100)
    if method == "gptq":
        return {f"{stem}.qweight": np.full((columns // 8, rows), 0x5678, np.int32),
                f"{stem}.qzeros": zeros, f"{stem}.scales": scales,
                f"{stem}.g_idx": np.arange(columns, dtype=np.int32) // 32}  # fmt: skip
    assert method == "awq"
    return {f"{stem}.qweight": np.full((columns, rows // 8), 0x5678, np.int32),
            f"{stem}.qzeros": zeros, f"{stem}.scales": scales}  # fmt: skip


# scales


def value(layer: int, side: str) -> float:
    """Return a scale that no other layer or side has, and that bfloat16 cannot hold."""
    return round(0.011 + 0.01 * layer + 0.005 * (side == "v"), 3)


def filled(fill: float, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> np.ndarray:
    """Return `fill`, `fill + 0.001`, … in the given form."""
    steps = fill + 0.001 * np.arange(np.prod(shape, dtype=int))
    return steps.reshape(shape).astype(NUMPY[dtype])


def scales(
    k: str = "model.layers.{}.self_attn.k_scale", v: str | None = None,
    layers: int | list[int] = 2, dtype: str = "F32", shape: tuple[int, ...] = (1,),
    sides: str = "kv", scale: float = 1.0,
) -> Tensors:  # fmt: skip
    """Return scales by name; `v` defaults to `k` with each `k_` made `v_`."""
    names = {"k": k, "v": v or k.replace("k_", "v_")}
    return {
        names[side].format(layer): filled(value(layer, side) * scale, dtype, shape)
        for layer in (range(layers) if isinstance(layers, int) else layers)
        for side in sides
    }


def constant(fill: float, **options: Any) -> Tensors:
    """Return the same value for every layer and side."""
    return {name: np.full_like(array, fill) for name, array in scales(**options).items()}


def plus(tensors: Tensors, **others: float) -> Tensors:
    """Add one tensor by name, given with `__` for the dots after `layers.0.self_attn`."""
    named = {f"model.layers.0.self_attn.{k.replace('__', '.')}": v for k, v in others.items()}
    return tensors | {name: filled(fill) for name, fill in named.items()}


# layouts: how the weights and the scales are spread over files

INDEX = "model.safetensors.index.json"


def save(path: Path, tensors: Tensors) -> None:
    """Write tensors in the order given."""
    entries, position = {}, 0
    for name, array in tensors.items():
        offsets = [position, position + array.nbytes]
        position = offsets[1]
        entries[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape),
                         "data_offsets": offsets}  # fmt: skip
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(header_bytes(entries, {"format": "pt"}) + data)


def write_index(folder: Path, files: Mapping[str, Any]) -> None:
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def shards(*, hide: str = "", missing: bool = False, order: int = 1) -> Layout:
    """Two shards and an index that lacks the scale `file`, or their `names`, or names a third."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        first, second = (f"model-{i:05}-of-00002.safetensors" for i in (1, 2)[::order])
        save(folder / first, weights)
        save(folder / second, extra)
        files = {first: weights, second: extra}
        if hide == "file":
            del files[second]
        if hide == "names":
            files[second] = {"placeholder": None}
        if missing:
            files["model-00003-of-00003.safetensors"] = {"placeholder": None}
        write_index(folder, files)

    return layout


def single(folder: Path, weights: Tensors, extra: Tensors) -> None:
    """One file."""
    save(folder / "model.safetensors", weights | extra)


def scales_first(folder: Path, weights: Tensors, extra: Tensors) -> None:
    """One file with the scales before the weights."""
    save(folder / "model.safetensors", extra | weights)


def beside(name: str, *, index: tuple[str, ...] = ()) -> Layout:
    """model.safetensors, and the scales in a file of this name; an index may list either."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        files = {"model.safetensors": weights, name: extra}
        for file, tensors in files.items():
            save(folder / file, tensors)
        if index:
            write_index(folder, {file: files[file] for file in index})

    return layout


def twice(*, order: int, index: bool = True) -> Layout:
    """The scales in two shards, with other values in the one that the index does not name."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        first, second = (f"model-{i:05}-of-00002.safetensors" for i in (1, 2))
        other = {name: (array * 10).astype(array.dtype) for name, array in extra.items()}
        one, two = (extra, other)[::order]
        save(folder / first, weights | one)
        save(folder / second, two)
        if index:
            named = first if order == 1 else second
            files: dict[str, Any] = {first: weights, second: {"placeholder": None}}
            files[named] = {**files[named], **extra}
            write_index(folder, files)

    return layout


def consolidated(*, whole: bool) -> Layout:
    """model.safetensors with everything, next to a Mistral-style file with or without scales."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        save(folder / "model.safetensors", weights | extra)
        save(folder / "consolidated.safetensors", weights | (extra if whole else {}))

    return layout


# quantization configs

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
    for layer in range(2) for name, shape in _rows(LLAMA) if len(shape) == 2]}  # fmt: skip
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
    return _merged(CT, changes)


def scheme(**changes: Any) -> dict[str, Any]:
    return ct(kv_cache_scheme=_merged(SCHEME, changes))


def flat(**changes: Any) -> dict[str, Any]:
    """ModelOpt config as it stands in config.json."""
    return _merged(FLAT, changes)


def legacy(**changes: Any) -> dict[str, Any]:
    """ModelOpt config as it stands in hf_quant_config.json."""
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": inner | changes}  # fmt: skip


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **changes}
    return {key: merged[key] for key in merged if merged[key] is not None or key not in changes}


NULL: Any = type("Null", (), {})()  # a JSON null that `_merged` keeps


@dataclass(frozen=True)
class Variant:
    """One folder, and the options with which the engine is to load it."""

    scales: Tensors
    quantization: Mapping[str, Any] | None = None
    weights: str = "bf16"
    architecture: str = "llama"
    config: Mapping[str, Any] = field(default_factory=dict)
    text_config: Mapping[str, Any] = field(default_factory=dict)
    hf_quant: Mapping[str, Any] | None = None
    layout: Layout = single
    kv_cache_dtype: str = "auto"
    skip_layers: tuple[str, ...] = ()


def write(name: str, folder: Path) -> None:
    """Write the files of a variant into a new folder."""
    variant = VARIANTS[name]
    architecture = ARCHITECTURES[variant.architecture]
    folder.mkdir(parents=True)
    config = {"architectures": [architecture.name], "dtype": "bfloat16", **architecture.config}
    config |= variant.config
    if config["dtype"] is None:
        del config["dtype"]
    if variant.text_config:
        config["text_config"] = {**config.get("text_config", {}), **variant.text_config}
    if variant.quantization is not None:
        config["quantization_config"] = variant.quantization
    _write_json(folder / "config.json", config)
    if variant.hf_quant is not None:
        _write_json(folder / "hf_quant_config.json", variant.hf_quant)
    variant.layout(folder, weights_of(architecture, variant.weights), variant.scales)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, default=lambda _: None))


# the variants

BASE = "model.layers.{}.self_attn"
NAMES = {  # spelling → (K, V)
    "attention": (f"{BASE}.k_scale", None),
    "modelopt": (f"{BASE}.k_proj.k_scale", f"{BASE}.v_proj.v_scale"),
    "qkv-proj": (f"{BASE}.qkv_proj.k_scale", None),
    "qkqkv-proj": (f"{BASE}.qkqkv_proj.k_scale", None),
    "attn": (f"{BASE}.attn.k_scale", None),
    "output-scale": (f"{BASE}.k_proj.output_scale", f"{BASE}.v_proj.output_scale"),
    "cache-scale": (f"{BASE}.k_cache.scale", f"{BASE}.v_cache.scale"),
    "k-scales": (f"{BASE}.k_scales", f"{BASE}.v_scales"),
    "key-scale": (f"{BASE}.key_scale", f"{BASE}.value_scale"),
    "proj-scale": (f"{BASE}.k_proj.scale", f"{BASE}.v_proj.scale"),
    "proj-scales": (f"{BASE}.k_proj.k_scales", f"{BASE}.v_proj.v_scales"),
    "crossed": (f"{BASE}.k_proj.v_scale", f"{BASE}.v_proj.k_scale"),
    "inverse": (f"{BASE}.k_scale_inv", f"{BASE}.v_scale_inv"),
    "proj-inverse": (f"{BASE}.k_proj.k_scale_inv", f"{BASE}.v_proj.v_scale_inv"),
    "o-proj": (f"{BASE}.o_proj.k_scale", f"{BASE}.o_proj.v_scale"),
    "affine-bias": (f"{BASE}.k_proj.k_bias", f"{BASE}.v_proj.v_bias"),
    "zero-point": (f"{BASE}.k_zero_point", None),
    "proj-zero-point": (f"{BASE}.k_proj.k_zero_point", f"{BASE}.v_proj.v_zero_point"),
    "underscore": (f"{BASE}._k_scale", None),
    "attn-underscore": (f"{BASE}.attn._k_scale", None),
    "k-cache": (f"{BASE}.k_cache.k_scale", f"{BASE}.v_cache.v_scale"),
    "attn-attn": (f"{BASE}.attn.attn.k_scale", None),
    "no-model-prefix": ("layers.{}.self_attn.k_scale", None),
    "language-model-prefix": ("language_model.model.layers.{}.self_attn.k_scale", None),
    "model-model-prefix": ("model.model.layers.{}.self_attn.k_scale", None),
    "transformer-prefix": ("transformer.h.{}.self_attn.k_scale", None),
    "no-attention-module": ("model.layers.{}.k_scale", None),
    "mlp": ("model.layers.{}.mlp.k_scale", None),
    "cross-attention": ("model.layers.{}.cross_attn.k_scale", None),
}
METHODS: dict[str, dict[str, Any]] = {
    "ct": {"quantization": CT},
    "modelopt": {"quantization": FLAT, "weights": "fp8-static"},
    "fp8": {"quantization": FP8, "kv_cache_dtype": "fp8"},
    "none": {},
}
SPELLED = {  # the names that each method is tried with
    "ct": list(NAMES),
    "modelopt": list(NAMES),
    "fp8": ["attention", "modelopt", "qkv-proj", "output-scale", "k-scales", "proj-scale"],
    "none": ["attention", "modelopt", "qkv-proj", "attn", "attn-underscore", "zero-point"],
}
OTHERS: dict[str, Tensors] = {  # not one name each for K and V
    "legacy-kv-scale": scales(f"{BASE}.kv_scale", sides="k"),
    "legacy-kv-scale-and-v": scales(f"{BASE}.kv_scale", f"{BASE}.v_scale"),
    "both-spellings": scales() | scales(*NAMES["modelopt"], scale=2),
    "both-spellings-other-order": scales(*NAMES["modelopt"], scale=2) | scales(),
    "attention-and-attn": scales() | scales(*NAMES["attn"], scale=2),
    "q-scale": plus(scales(), q_scale=0.3),
    "hyv3-q-scale": plus(scales(*NAMES["cache-scale"]), q__scale=0.3),
    "prob-scale": plus(scales(), prob_scale=0.2),
    "attn-prob-scale": plus(scales(), attn__prob_scale=0.2),
    "prob-output-scale": plus(scales(), prob_output_scale=0.2),
    "zero-points": scales() | scales(f"{BASE}.k_zero_point", scale=0),
    "zero-points-nonzero": scales() | scales(f"{BASE}.k_zero_point", scale=100),
    "modelopt-biases": scales(*NAMES["modelopt"]) | scales(*NAMES["affine-bias"]),
    "extra-layer": scales(layers=3),
    "far-layer": scales(layers=[0, 1, 17]),
    "vision-tower": scales() | scales("vision_tower.layers.{}.self_attn.k_scale"),
    "mtp-layer": scales() | scales("mtp.layers.{}.self_attn.k_scale", layers=1),
    "only-k": scales(sides="k"),
    "only-v": scales(sides="v"),
    "one-layer": scales(layers=[0]),
    "last-layer-only-k": scales(layers=[0]) | scales(layers=[1], sides="k"),
    "no-scales": {},
    "q-proj-q-scale": scales() | scales(f"{BASE}.q_proj.q_scale", sides="k"),
    "root": scales() | {"k_scale": filled(0.5)},
    "model": scales() | {"model.k_scale": filled(0.5)},
    "lm-head": scales() | {"lm_head.k_scale": filled(0.5)},
    "stray-weight-scale": plus(scales(), o_proj__weight_scale=0.5),
    "zero-points-shape-2": scales() | scales(f"{BASE}.k_zero_point", shape=(2,)),
    "q-scale-shape-4": scales() | scales(f"{BASE}.q_scale", sides="k", shape=(4,)),
    "proj-kv-scale": scales(f"{BASE}.k_proj.kv_scale", sides="k"),
    "attn-kv-scale": scales(f"{BASE}.attn.kv_scale", sides="k"),
}
FORMS: dict[str, Tensors] = {  # shapes, dtypes and values
    "shape-scalar": scales(shape=()),
    "shape-1x1x1": scales(shape=(1, 1, 1)),
    "shape-2": scales(shape=(2,)),
    "shape-4": scales(shape=(4,)),
    "shape-2x1x1": scales(shape=(2, 1, 1)),
    "shape-0": scales(shape=(0,)),
    **{f"dtype-{d.lower()}": scales(dtype=d)
       for d in ("F64", "F16", "BF16", "F8_E4M3")},
    **{f"dtype-{d.lower()}": constant(3, dtype=d) for d in ("I32", "I64")},
    **{f"value-{name}": constant(fill)
       for name, fill in [("1", 1.0), ("0", 0.0), ("negative", -0.5), ("minus-1", -1.0),
                          ("nan", np.nan), ("inf", np.inf), ("1e-9", 1e-9), ("1e-41", 1e-41),
                          ("5e4", 5e4), ("bf16-exact", 0.0107421875)]},
    "dtype-u8": constant(3, dtype="U8"),
    "value-tie-to-even": constant(1.00390625),  # between two of bfloat16
    "value-tie-to-odd": constant(1.01171875),
    "value-f64-above-tie": constant(1.00390625 + 1e-12, dtype="F64"),
    "value-f64-underflow": constant(1e-60, dtype="F64"),
    "value-k-0": constant(0.0, sides="k") | scales(sides="v"),
    "value-v-0": scales(sides="k") | constant(0.0, sides="v"),
    "value-k-negative": constant(-0.5, sides="k") | scales(sides="v"),
    "value-v-negative": scales(sides="k") | constant(-0.5, sides="v"),
    "value-k-nan": constant(np.nan, sides="k") | scales(sides="v"),
    "value-v-nan": scales(sides="k") | constant(np.nan, sides="v"),
}  # fmt: skip
HEADS = scheme(strategy="attn_head")
MODELOPT_SCALES = scales(*NAMES["modelopt"])
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
    "minimal": {"quant_method": "compressed-tensors", "kv_cache_scheme": _merged(
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


def _method_variants() -> dict[str, Variant]:
    found = {}
    for method, options in METHODS.items():
        for name in SPELLED[method]:
            found[f"{method}-name-{name}"] = Variant(scales(*NAMES[name]), **options)
        for name, tensors in OTHERS.items():
            if method != "none" or name in ("no-scales", "legacy-kv-scale"):
                found[f"{method}-{name}"] = Variant(tensors, **options)
        for name, tensors in FORMS.items():
            if method in ("ct", "modelopt"):
                found[f"{method}-{name}"] = Variant(tensors, **options)
        for dtype in CACHE_DTYPES:
            chosen = options | {"kv_cache_dtype": dtype}
            found[f"{method}-cache-{dtype}"] = Variant(
                scales() if method != "none" else {}, **chosen
            )
        if method in ("ct", "modelopt"):
            for skip in (("0",), ("sliding_window",), ("1", "0"), ("7",)):
                chosen = options | {"skip_layers": skip}
                found[f"{method}-skip-{'-'.join(skip)}"] = Variant(scales(), **chosen)
    return found


def _config_variants() -> dict[str, Variant]:
    modelopt = MODELOPT_SCALES
    found = {f"ct-scheme-{name}": Variant(scales(), scheme(**changes))
             for name, changes in SCHEMES.items()}  # fmt: skip
    found |= {f"ct-config-{name}": Variant(scales(), c) for name, c in CT_CONFIGS.items()}
    found |= {f"modelopt-flat-{name}": Variant(modelopt, c, "fp8-static")
              for name, c in FLAT_CONFIGS.items()}  # fmt: skip
    found |= {f"modelopt-flat-{name}": Variant(modelopt, c) for name, c in FLAT_BF16.items()}
    found |= {f"modelopt-legacy-{name}": Variant(modelopt, None, "fp8-static", hf_quant=c)
              for name, c in LEGACY_CONFIGS.items()}  # fmt: skip
    return found


def _head_variants() -> dict[str, Variant]:
    by_shape = {"2x1x1": (2, 1, 1), "2": (2,), "1": (1,), "4": (4,), "3x1x1": (3, 1, 1),
                "scalar": (), "1x2": (1, 2), "0": (0,)}  # fmt: skip
    found = {f"ct-heads-{name}": Variant(scales(shape=shape), HEADS)
             for name, shape in by_shape.items()}  # fmt: skip
    heads = scales(shape=(2, 1, 1))
    no_groups = scheme(strategy="attn_head")
    del no_groups["config_groups"]

    def with_q(*shape: int) -> Variant:
        return Variant(heads | scales(f"{BASE}.q_scale", sides="k", shape=shape), HEADS)

    return found | {
        "ct-heads-no-config-groups": Variant(heads, no_groups),
        "ct-heads-bf16": Variant(scales(shape=(2, 1, 1), dtype="BF16"), HEADS),
        "ct-heads-int": Variant(constant(3, shape=(2, 1, 1), dtype="I32"), HEADS),
        "ct-heads-q-scale": with_q(4, 1, 1),
        "ct-heads-q-scale-1": with_q(1),
        "ct-heads-q-scale-2": with_q(2),
        "ct-heads-q-scale-3": with_q(3),
        "ct-heads-q-scale-8": with_q(8),
        "ct-heads-underscore": Variant(
            heads, scheme(strategy="attn_head") | {"quant_method": "compressed_tensors"}),
        "ct-heads-compression-config": Variant(heads, config={"compression_config": HEADS}),
        "ct-heads-skip-0": Variant(heads, HEADS, skip_layers=("0",)),
        "ct-heads-modelopt-names": Variant(scales(*NAMES["modelopt"], shape=(2, 1, 1)), HEADS),
        "ct-heads-zero-points": Variant(
            heads | scales(f"{BASE}.k_zero_point", shape=(2, 1, 1)), HEADS
        ),
        "ct-heads-only-k": Variant(scales(shape=(2, 1, 1), sides="k"), HEADS),
        "ct-heads-missing": Variant({}, HEADS),
        "ct-heads-legacy-kv-scale": Variant(
            scales(f"{BASE}.kv_scale", shape=(2, 1, 1), sides="k"), HEADS
        ),
        "ct-heads-cache-bfloat16": Variant(heads, HEADS, kv_cache_dtype="bfloat16"),
        "ct-heads-gpt2": Variant(
            scales("transformer.h.{}.attn.attn.k_scale", shape=(4, 1, 1)), HEADS,
            architecture="gpt2",
        ),
        "ct-heads-mistral": Variant(heads, HEADS, architecture="mistral"),
    }  # fmt: skip


def _other_variants() -> dict[str, Variant]:
    modelopt, weights = MODELOPT_SCALES, {"weights": "fp8-static"}
    fp16 = {"config": {"dtype": "float16"}}
    legacy_fp4 = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["*"]}
    group = {"config_groups": {"group_0": W8A8}, "ignore": ["lm_head"]}
    return {
        "ct-fp16-model": Variant(scales(), CT, "fp16", **fp16),
        "ct-fp32-model": Variant(scales(), CT, config={"dtype": "float32"}),
        "modelopt-fp16-model": Variant(modelopt, flat(ignore=["*"]), "fp16", **fp16),
        "modelopt-fp16-model-1e-9": Variant(
            constant(1e-9), flat(ignore=["*"]), "fp16", **fp16),
        "modelopt-fp16-model-5e5": Variant(constant(5e5), flat(ignore=["*"]), "fp16", **fp16),
        "ct-no-scheme-cache-fp8": Variant(
            scales(), ct(kv_cache_scheme=None), kv_cache_dtype="fp8"),
        "ct-no-scheme-cache-fp8_e5m2": Variant(
            scales(), ct(kv_cache_scheme=None), kv_cache_dtype="fp8_e5m2"),
        "ct-no-scheme-shape-2": Variant(scales(shape=(2,)), ct(kv_cache_scheme=None)),
        "ct-no-scheme-no-scales": Variant({}, ct(kv_cache_scheme=None)),
        "ct-scheme-int4-cache-fp8": Variant(
            scales(), scheme(num_bits=4, type="int"), kv_cache_dtype="fp8"),
        "ct-scheme-int4-no-scales": Variant({}, scheme(num_bits=4, type="int")),
        "modelopt-no-scheme-cache-fp8": Variant(
            modelopt, flat(kv_cache_scheme=None), "fp8-static", kv_cache_dtype="fp8"),
        "modelopt-mixed-cache-fp8": Variant(
            modelopt, FLAT_BF16["mixed"], kv_cache_dtype="fp8"),
        "modelopt-mixed-nvfp4-kv-cache-fp8": Variant(
            modelopt, FLAT_BF16["mixed-nvfp4-kv"], kv_cache_dtype="fp8"),
        "modelopt-mixed-empty-layers": Variant(
            modelopt, flat(quant_algo="MIXED_PRECISION", quantized_layers={})),
        "modelopt-mixed-layers-in-legacy": Variant(
            modelopt, flat(quant_algo="MIXED_PRECISION"), hf_quant=legacy(
                quant_algo="MIXED_PRECISION", quantized_layers={"none": {"quant_algo": "FP8"}})),
        "modelopt-no-dtype": Variant(modelopt, flat(ignore=["*"]), config={"dtype": None}),
        "modelopt-no-dtype-fp16-weights": Variant(
            modelopt, flat(ignore=["*"]), "fp16", config={"dtype": None}),
        "modelopt-no-dtype-fp8-weights": Variant(
            modelopt, FLAT, "fp8-static", config={"dtype": None}),
        "modelopt-torch-dtype": Variant(
            modelopt, flat(ignore=["*"]), "fp16",
            config={"dtype": None, "torch_dtype": "float16"}),
        "modelopt-gemma-fp16": Variant(
            scales(), flat(ignore=["*"]), "fp16", "gemma2", **fp16),
        "modelopt-fp32-model": Variant(modelopt, flat(ignore=["*"]), config={"dtype": "float32"}),
        "ct-stray-proj-weight-scale": Variant(plus(scales(), k_proj__weight_scale=0.5), CT),
        "ct-w8a8": Variant(scales(), ct(format="float-quantized", **group), "fp8-channel"),
        "ct-w8a8-no-scheme": Variant(
            scales(), ct(format="float-quantized", kv_cache_scheme=None, **group), "fp8-channel"),
        "ct-int8": Variant(
            scales(), ct(format="int-quantized", config_groups={"group_0": INT8},
                         ignore=["lm_head"]), "int8-channel"),
        "ct-weight-group-bf16-weights": Variant(scales(), ct(format="float-quantized", **group)),
        "ct-w8a8-ignore-all": Variant(
            scales(), ct(format="float-quantized", config_groups={"group_0": W8A8},
                         ignore=["re:.*"])),
        "modelopt-fp4": Variant(modelopt, FLAT_FP4),
        "modelopt-fp4-fp8-kv": Variant(
            modelopt, {**FLAT_FP4, "kv_cache_scheme": FLAT["kv_cache_scheme"]}),
        "modelopt-fp4-string-kv": Variant(
            modelopt, {**FLAT_FP4, "kv_cache_scheme": "NVFP4"}),
        "modelopt-legacy-fp4": Variant(modelopt, hf_quant=legacy(**legacy_fp4)),
        "modelopt-legacy-fp4-nvfp4-kv": Variant(
            modelopt, hf_quant=legacy(**legacy_fp4, kv_cache_quant_algo="NVFP4")),
        "modelopt-legacy-fp4-no-group-size": Variant(
            modelopt, hf_quant=legacy(quant_algo="NVFP4")),
        "modelopt-legacy-fp4-no-kv-algo": Variant(
            modelopt, hf_quant={"producer": {"name": "modelopt"}, "quantization": legacy_fp4}),
        "modelopt-legacy-algo-null": Variant(modelopt, hf_quant=legacy(quant_algo=None)),
        "modelopt-legacy-algo-null-attention-names": Variant(
            scales(), hf_quant=legacy(quant_algo=None)),
        "modelopt-legacy-algo-null-no-scales": Variant({}, hf_quant=legacy(quant_algo=None)),
        "modelopt-legacy-no-producer": Variant(
            modelopt, None, "fp8-static", hf_quant={
                "quantization": legacy()["quantization"]}),
        "modelopt-legacy-in-config": Variant(
            modelopt, {"quant_method": "modelopt", **legacy()}, "fp8-static"),
        "modelopt-legacy-in-config-no-method": Variant(modelopt, legacy(), "fp8-static"),
        "modelopt-both-same": Variant(modelopt, FLAT, "fp8-static", hf_quant=legacy()),
        "modelopt-both-config-says-none": Variant(
            modelopt, flat(kv_cache_scheme=None), "fp8-static", hf_quant=legacy()),
        "modelopt-both-legacy-says-none": Variant(
            modelopt, FLAT, "fp8-static", hf_quant=legacy(kv_cache_quant_algo=None)),
        "modelopt-both-fp8-nvfp4": Variant(
            modelopt, FLAT, "fp8-static", hf_quant=legacy(kv_cache_quant_algo="NVFP4")),
        "modelopt-both-nvfp4-fp8": Variant(
            modelopt, flat(kv_cache_scheme="NVFP4"), "fp8-static", hf_quant=legacy()),
        "both-ct-and-legacy": Variant(scales(), CT, hf_quant=legacy()),
        "both-null-config-and-legacy": Variant(
            modelopt, None, "fp8-static", config={"quantization_config": None},
            hf_quant=legacy()),
        "modelopt-ct-names-head-shape": Variant(scales(shape=(2, 1, 1)), FLAT, **weights),
        "fp8-static": Variant(
            scales(), {**FP8, "activation_scheme": "static"}, kv_cache_dtype="fp8"),
        "fp8-auto": Variant(scales(), FP8),
        "fp8-kv-scheme": Variant(scales(), {**FP8, "kv_cache_scheme": FLAT["kv_cache_scheme"]}),
        "fp8-ct-kv-scheme": Variant(scales(), {**FP8, "kv_cache_scheme": SCHEME}),
        "fp8-kv-algo": Variant(scales(), {**FP8, "kv_cache_quant_algo": "FP8"}),
        "fp8-no-activation-scheme": Variant(scales(), {"quant_method": "fp8"}),
        "fp8-unknown-activation-scheme": Variant(scales(), {**FP8, "activation_scheme": "token"}),
        "fp8-value-0": Variant(constant(0.0), FP8, kv_cache_dtype="fp8"),
        "fp8-shape-2": Variant(scales(shape=(2,)), FP8, kv_cache_dtype="fp8"),
        "quark": Variant(scales(*NAMES["output-scale"]), QUARK, kv_cache_dtype="fp8"),
        "quark-auto": Variant(scales(*NAMES["output-scale"]), QUARK),
        "quark-names-attention": Variant(scales(), QUARK, kv_cache_dtype="fp8"),
        "gptq": Variant(scales(), GPTQ, "gptq", **fp16),
        "gptq-fp8-cache": Variant(scales(), GPTQ, "gptq", **fp16, kv_cache_dtype="fp8"),
        "gptq-modelopt-names": Variant(modelopt, GPTQ, "gptq", **fp16),
        "gptq-proj-scale": Variant(scales(*NAMES["proj-scale"]), GPTQ, "gptq", **fp16),
        "awq": Variant(scales(), AWQ, "awq", **fp16),
        "awq-modelopt-names": Variant(modelopt, AWQ, "awq", **fp16),
        "awq-attn-names": Variant(scales(*NAMES["attn"]), AWQ, "awq", **fp16),
        "awq-no-scales": Variant({}, AWQ, "awq", **fp16),
        "awq-modules-to-not-convert": Variant(
            scales(), {**AWQ, "modules_to_not_convert": ["lm_head"]}, "awq", **fp16),
        "awq-fp8-cache": Variant(scales(), AWQ, "awq", **fp16, kv_cache_dtype="fp8"),
        "empty-config": Variant(scales(), {}),
        "compression-config-ct": Variant(scales(), config={"compression_config": CT}),
        "compression-config-and-ct": Variant(
            scales(), ct(kv_cache_scheme=None), config={"compression_config": CT}),
        "compression-config-and-legacy": Variant(
            modelopt, None, "fp8-static", config={"compression_config": CT}, hf_quant=legacy()),
        "ct-no-method-no-scales": Variant({}, ct(quant_method=None)),
        **_text_config_variants(),
        **{f"ct-files-{name}": Variant(scales(), CT, layout=layout)
           for name, layout in LAYOUTS.items()},
        "modelopt-files-unindexed": Variant(modelopt, FLAT, layout=shards(hide="file"), **weights),
        "modelopt-files-consolidated": Variant(
            modelopt, FLAT, layout=consolidated(whole=False), **weights),
        "ct-both-spellings-two-shards": Variant(
            scales() | scales(*NAMES["modelopt"], scale=2), CT, layout=spellings_apart(1)),
        "ct-both-spellings-two-shards-other-order": Variant(
            scales() | scales(*NAMES["modelopt"], scale=2), CT, layout=spellings_apart(-1)),
    }  # fmt: skip


def spellings_apart(order: int) -> Layout:
    """Names of projections in one shard, the others in another."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        projected = {name: array for name, array in extra.items() if "_proj." in name}
        others = {name: array for name, array in extra.items() if name not in projected}
        shards(order=order)(folder, weights | projected, others)

    return layout


def natural_order(folder: Path, weights: Tensors, extra: Tensors) -> None:
    """The scales twice, in shards that sort otherwise by letter than by number."""
    for number, factor in ((2, 10), (10, 1)):
        scaled = {name: (array * factor).astype(array.dtype) for name, array in extra.items()}
        save(folder / f"model-{number}-of-10.safetensors", weights | scaled)


def with_index(content: Any) -> Layout:
    """One file with everything, and an index of this content."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        single(folder, weights, extra)
        (folder / INDEX).write_text(json.dumps(content))

    return layout


LAYOUTS: dict[str, Layout] = {
    "natural-order": natural_order,
    "index-empty": with_index({"weight_map": {}}),
    "index-without-map": with_index({"metadata": {}}),
    "index-of-single-file": with_index({"weight_map": {"placeholder": "model.safetensors"}}),
    "scales-first": scales_first,
    "two-shards": shards(),
    "scales-in-first-shard": shards(order=-1),
    "unindexed-shard": shards(hide="file"),
    "unindexed-names": shards(hide="names"),
    "missing-shard": shards(missing=True),
    "same-name-index-first": twice(order=1),
    "same-name-index-second": twice(order=-1),
    "same-name-no-index": twice(order=1, index=False),
    "same-name-no-index-other": twice(order=-1, index=False),
    "consolidated-without-scales": consolidated(whole=False),
    "consolidated-with-scales": consolidated(whole=True),
    "extra-file": beside("kv_scales.safetensors"),
    "extra-file-index-both": beside(
        "kv_scales.safetensors", index=("model.safetensors", "kv_scales.safetensors")),
    "extra-file-index-model": beside("kv_scales.safetensors", index=("model.safetensors",)),
    "extra-file-index-scales": beside("kv_scales.safetensors", index=("kv_scales.safetensors",)),
    "extra-file-other-suffix": beside("kv_scales.st"),
}  # fmt: skip


def _text_config_variants() -> dict[str, Variant]:
    """The quantization config one level down, of a multimodal model."""
    name = "language_model.model.layers.{}.self_attn.k_scale"
    ct_scales, renamed = scales(name), scales("model.language_model.layers.{}.self_attn.k_scale")
    modelopt = scales("language_model.model.layers.{}.self_attn.k_proj.k_scale",
                      "language_model.model.layers.{}.self_attn.v_proj.v_scale")  # fmt: skip
    ignored = flat(ignore=["*"])

    def gemma3(extra: Tensors, quantization: Any = None, **options: Any) -> Variant:
        return Variant(extra, quantization, architecture="gemma3", **options)

    return {
        "gemma3-ct": gemma3(ct_scales, CT),
        "gemma3-ct-new-prefix": gemma3(renamed, CT),
        "gemma3-ct-text-prefix": gemma3(scales(), CT),
        "gemma3-ct-both-prefixes": gemma3(ct_scales | scales(
            "model.language_model.layers.{}.self_attn.k_scale", scale=2), CT),
        "gemma3-ct-vision": gemma3(ct_scales | scales(
            "vision_tower.vision_model.encoder.layers.{}.self_attn.k_scale", layers=1), CT),
        "gemma3-ct-in-text-config": gemma3(ct_scales, text_config={"quantization_config": CT}),
        "gemma3-modelopt": gemma3(modelopt, ignored),
        "gemma3-modelopt-in-text-config": gemma3(
            modelopt, text_config={"quantization_config": ignored}),
        "gemma3-modelopt-in-text-config-fp8": gemma3(
            modelopt, text_config={"quantization_config": ignored}, kv_cache_dtype="fp8"),
        "gemma3-both-levels": gemma3(
            ct_scales, CT, text_config={"quantization_config": ct(kv_cache_scheme=None)}),
        "gemma3-both-levels-text": gemma3(
            ct_scales, ct(kv_cache_scheme=None), text_config={"quantization_config": CT}),
        "gemma3-legacy-over-text-config": gemma3(
            modelopt, text_config={"quantization_config": CT},
            hf_quant=legacy(exclude_modules=["*"])),
        "gemma3-compression-and-text-config": gemma3(
            ct_scales, config={"compression_config": CT},
            text_config={"quantization_config": ct(kv_cache_scheme=None)}),
        "gemma3-heads": gemma3(scales(name, shape=(2, 1, 1)), HEADS),
        "gemma3-heads-in-text-config": gemma3(
            scales(name, shape=(2, 1, 1)), text_config={"quantization_config": HEADS}),
        "gemma3-skip-sliding_window": gemma3(ct_scales, CT, skip_layers=("sliding_window",)),
        "gemma3-none": gemma3({}),
    }  # fmt: skip


def _architecture_variants() -> dict[str, Variant]:
    found = {}
    for name, architecture in ARCHITECTURES.items():
        if name in ("llama", "gemma3"):
            continue
        place = f"{architecture.layers}.{{}}.{architecture.attention}"
        layers = architecture.num_layers
        options = {"architecture": name}
        modelopt = scales(f"{place}.k_proj.k_scale", f"{place}.v_proj.v_scale", layers)
        found |= {
            f"{name}-ct": Variant(scales(f"{place}.k_scale", layers=layers), CT, **options),
            f"{name}-ct-names-modelopt": Variant(modelopt, CT, **options),
            f"{name}-ct-names-attn": Variant(
                scales(f"{place}.attn.k_scale", layers=layers), CT, **options
            ),
            f"{name}-modelopt": Variant(modelopt, flat(ignore=["*"]), **options),
            f"{name}-modelopt-names-attention": Variant(
                scales(f"{place}.k_scale", layers=layers), flat(ignore=["*"]), **options
            ),
            f"{name}-none": Variant({}, **options),
        }
        if architecture.unshared < layers:
            own = scales(f"{place}.k_scale", layers=architecture.unshared)
            found[f"{name}-ct-unshared-only"] = Variant(own, CT, **options)
        if "sliding_window" in architecture.config:
            found[f"{name}-skip-sliding_window"] = Variant(
                scales(f"{place}.k_scale", layers=layers), CT, skip_layers=("sliding_window",),
                **options,
            )  # fmt: skip
    fused = {"phi3": "model.layers.{}.self_attn.qkv_proj", "falcon": (
        "transformer.h.{}.self_attention.query_key_value"), "gpt_neox": (
        "gpt_neox.layers.{}.attention.query_key_value"), "gpt2": "transformer.h.{}.attn.c_attn",
        "deepseek_v2": "model.layers.{}.self_attn.kv_b_proj"}  # fmt: skip
    for name in ("qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3_text", "starcoder2"):
        fused[name] = "model.layers.{}.self_attn.qkv_proj"
    for name, place in fused.items():
        for method, config in [("ct", CT), ("modelopt", flat(ignore=["*"]))]:
            found[f"{name}-{method}-names-fused"] = Variant(
                scales(f"{place}.k_scale"), config, architecture=name
            )
    for name in ("mistral", "gemma2"):
        found[f"{name}-modelopt-skip-sliding_window"] = Variant(
            scales(), flat(ignore=["*"]), architecture=name, skip_layers=("sliding_window", "1")
        )
    found["falcon-ct-heads"] = Variant(
        scales("transformer.h.{}.self_attention.k_scale"), HEADS, architecture="falcon"
    )
    found["falcon-cache-fp8"] = Variant(
        scales("transformer.h.{}.self_attention.k_scale"), CT, architecture="falcon",
        kv_cache_dtype="fp8_e4m3",
    )  # fmt: skip
    found["gemma4-ct-heads"] = Variant(
        scales(layers=4, shape=(2, 1, 1)), HEADS, architecture="gemma4"
    )
    found["deepseek_v2-ct-names-mla"] = Variant(
        scales(f"{BASE}.mla_attn.k_scale"), CT, architecture="deepseek_v2")  # fmt: skip
    found["deepseek_v2-ct-fp8"] = Variant(
        scales(), CT, architecture="deepseek_v2", kv_cache_dtype="fp8"
    )
    for name in ("opt", "gpt2", "falcon"):
        short = ARCHITECTURES[name].layers.split(".", 1)[1]
        place = f"{short}.{{}}.{ARCHITECTURES[name].attention}.k_scale"
        found[f"{name}-ct-without-prefix"] = Variant(scales(place), CT, architecture=name)
    return found


VARIANTS: dict[str, Variant] = {
    **_method_variants(), **_config_variants(), **_head_variants(), **_other_variants(),
    **_architecture_variants(),
}  # fmt: skip
