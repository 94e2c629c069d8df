"""Tiny models of many architectures, of sizes that vLLM's CPU kernels take."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvq import calibrate, write_calibration
from kvq.cli import run
from tests.zoo import KINDS, exceptions, tiny_model
from tests.zoo.causal import K_EQ_V
from tests.zoo.inputs import INPUTS
from tests.zoo.shrink import SIZES, shrink

CHANGED_SIZES = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "embed_dim", "word_embed_proj_dim"], 128),
    **dict.fromkeys(["out_hidden_size", "projection_dim", "embedding_size", "dim"], 128),
    **dict.fromkeys(
        ["head_dim", "d_kv", "swa_head_dim", "kv_channels", "query_pre_attn_scalar"], 32
    ),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank"], 32),
    "kv_lora_rank": 64,
    "rotary_dim": 16,
}
MROPE = {
    "text_config": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4],
        },
    },
}  # fmt: skip
GEMMA4 = {"global_head_dim": 64}
FALCON = {"ffn_hidden_size": 512}  # vLLM takes 4 times the hidden size
LFM2 = {
    "conv_dim": 128, "block_dim": 128, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip
NO_HEAD = {"vision_config": {"vision_use_head": False}}  # of SigLIP, as in published checkpoints
CAUSAL = (
    "apertus arcee bitnet bloom biogpt cohere cohere2 cwm dots1 ernie4_5 ernie4_5_moe exaone4 "
    "exaone_moe flex_olmo gemma gpt_neox gpt_oss glm glm4 granite granitemoe granitemoeshared "
    "gpt2 gpt_bigcode gptj helium hunyuan_v1_dense laguna llama4_text ministral ministral3 mixtral "
    "nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phimoe qwen2_moe qwen3_moe qwen3_next "
    "seed_oss smollm3 stablelm starcoder2"
)
IMAGE_TEXT = "aria blip-2 idefics3 internvl llama4 llava llava_next mistral3 qwen3_5 smolvlm"
ZAMBA2 = {"attention_head_dim": 64, "num_key_value_heads": 4, "mamba_d_state": 32}
NO_EXPERTS = {"layers_block_type": ["mamba", "attention", "mlp", "attention"]}


@dataclass(frozen=True)
class Family:
    """What to build and how to export it."""

    kind: str
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    granularity: str = "head"
    options: tuple[str, ...] = ()


def _unread(model_type: str, **changes: Any) -> Family:
    return Family("causal", model_type, changes, "tensor", ("--allow-unread",))


LOADED: dict[str, Family] = {  # vLLM holds every scale as kvq wrote it
    **{name: Family("causal", name) for name in CAUSAL.split()},
    **{name: Family("image-text", name) for name in IMAGE_TEXT.split()},
    **{name: Family("image-text", name, MROPE) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
    **{name: Family("image-text", name, NO_HEAD) for name in ("gemma3", "paligemma")},
    "falcon": Family("causal", "falcon", FALCON),
    "falcon-new": Family("causal", "falcon", {**FALCON, "new_decoder_architecture": True}),
    "falcon_h1": Family("causal", "falcon_h1",
                        {"mamba_d_state": 32, "mamba_d_head": 32, "mamba_d_ssm": 128}),
    "gemma3n_text": Family("causal", "gemma3n_text"),
    "gemma4_text": Family("causal", "gemma4_text", GEMMA4),
    "gemma4_text-k=v": Family("causal", "gemma4_text",
                              {**GEMMA4, **K_EQ_V, "num_global_key_value_heads": 2}),
    "gemma4_text-k=v-fewer-heads": Family("causal", "gemma4_text", {**GEMMA4, **K_EQ_V}, "tensor"),
    "gemma4": Family("image-text", "gemma4", {"text_config": GEMMA4}),
    "glm4_moe": Family("causal", "glm4_moe", {"head_dim": 32}),
    "granitemoehybrid": Family("causal", "granitemoehybrid",
                               {"mamba_d_head": 64, "mamba_d_state": 32}),
    "nemotron_h": Family("causal", "nemotron_h", NO_EXPERTS),
    "whisper": Family("speech", "whisper"),
}  # fmt: skip

MLA = {  # vLLM leaves the cache in bfloat16
    "deepseek_v2": _unread("deepseek_v2"),
    "deepseek_v3": _unread("deepseek_v3", topk_method="noaux_tc"),
    "glm4_moe_lite": _unread("glm4_moe_lite", first_k_dense_replace=1, topk_method="noaux_tc"),
}
EXPANDED = {"minicpm3": _unread("minicpm3")}  # vLLM caches the expanded heads of this MLA model

NO_MODULE = "ValueError: There is no module or parameter named "
REFUSED = {  # vLLM loads the model, but not with these scales
    # these build their attention without the quantization config: it has no scales at all
    "jamba": (_unread("jamba"), f"{NO_MODULE}'model.layers.2.k_scale'"),
    "lfm2": (
        _unread("lfm2", **LFM2), f"{NO_MODULE}'layers.2.self_attn.attn.k_scale'",
    ),
    "zamba2": (
        _unread("zamba2", **ZAMBA2),
        f"{NO_MODULE}'model.layers.2.shared_transformer.self_attn.k_scale'",
    ),
}  # fmt: skip

UNSUPPORTED = "are not supported for now"
NO_DISPATCH = "does not dispatch through the Transformers attention interface"
NO_POSITIONS = "Argument position_ids not found in the forward method"
UNBUILT = {  # vLLM does not load these at all, whatever the scales
    "bamba": (Family("causal", "bamba", {"mamba_d_head": 64}), NO_DISPATCH),
    "bart": (Family("seq2seq", "bart"), NO_POSITIONS),
    "codegen": (Family("causal", "codegen"), UNSUPPORTED),
    "cohere2_vision": (
        Family("image-text", "cohere2_vision"), f"{NO_MODULE}'vision_tower.head'",
    ),
    "dbrx": (Family("causal", "dbrx"), "KeyError: 'blocks.0.ffn.experts.w13_weight'"),
    "gpt_neo": (Family("causal", "gpt_neo"), UNSUPPORTED),
    "kimi_linear": (_unread("kimi_linear"), "No module named 'cutlass'"),
    "llava_onevision": (
        Family("image-text", "llava_onevision"), f"{NO_MODULE}'vision_tower.head'",
    ),
    "minimax": (Family("causal", "minimax"), NO_DISPATCH),
    "mpt": (Family("causal", "mpt"), "MptForCausalLM was supported in vLLM until v0.28.0"),
    "nemotron_h-experts": (
        Family("causal", "nemotron_h"), "is_act_and_mul=False is supported only for CUDA",
    ),
    "qwen3_vl_moe": (
        Family("image-text", "qwen3_vl_moe",
               {"text_config": {**MROPE["text_config"], "norm_topk_prob": True}}),
        "The size of tensor a (64) must match the size of tensor b (128)",
    ),
    "recurrent_gemma": (Family("causal", "recurrent_gemma"), NO_DISPATCH),
    "t5": (Family("seq2seq", "t5"), NO_POSITIONS),
}  # fmt: skip


def build(family: Family) -> transformers.PreTrainedModel:
    kind, model_type, changes = family.kind, family.model_type, family.changes
    with patch.dict(SIZES, CHANGED_SIZES):
        if kind == "speech":
            config = shrink(transformers.WhisperConfig, **changes)
            torch.manual_seed(0)
            return transformers.WhisperForConditionalGeneration(config).to(torch.bfloat16).eval()
        table = import_module(f"tests.zoo.{KINDS[kind][2]}").EXCEPTIONS
        merged = {model_type: _merge(exceptions(kind, model_type), changes)}
        with patch.dict(table, merged):
            return tiny_model(kind, model_type)


def _merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        key: _merge(base[key], value)
        for key, value in changes.items()
        if key.endswith("_config") and isinstance(base.get(key), dict)
    }
    return {**base, **changes, **nested}


def export(family: Family, folder: Path, *, unread: bool = False) -> Path:
    """Make, calibrate and export a tiny model, which is `source` beside the result.

    With `unread`, also what kvq knows that vLLM would not load.
    """
    source, calibration, target = (folder / part for part in ("source", "calibration", "target"))
    model = build(family)
    model.save_pretrained(source)
    vision = getattr(model.config, "vision_config", None)
    if getattr(vision, "model_type", None) in ("clip_vision_model", "siglip_vision_model"):
        _spell_as_published(source / "model.safetensors")
    if family.kind == "speech":
        make = INPUTS[family.model_type]
        batches = [make(model.config, n) for n in (5, 17, 40)]
        write_calibration(
            calibrate(model, batches, checkpoint=source), calibration, overwrite=False
        )
    else:
        rows = folder / "rows.jsonl"
        generator = np.random.default_rng(0)
        ids = [generator.integers(5, 90, n).tolist() for n in [5, 17, 40] * 5]
        rows.write_text("".join(json.dumps({"input_ids": i, "labels": i}) + "\n" for i in ids))
        argv = ["--dataset", rows, "--seq-len", 64, "--num-samples", len(ids), "-o", calibration]
        if family.kind == "seq2seq":
            argv += ["--target-column", "labels"]
        _kvq("calibrate", source, *argv)
    argv = ["--scales", calibration, "--granularity", family.granularity, "-o", target]
    options = {*family.options, *(["--allow-unread"] if unread else [])}
    _kvq("export", source, *argv, *options)
    return target


def _kvq(*argv: object) -> None:
    assert run([str(argument) for argument in argv]) == 0


def _spell_as_published(path: Path) -> None:
    """Give a CLIP or SigLIP tower the tensor names of the hub, which transformers 5 shortens."""
    tower = re.compile(r"(?<=vision_tower\.)(?=embeddings|encoder|pre_layrnorm|post_layernorm)")
    tensors = {tower.sub("vision_model.", name): t for name, t in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
