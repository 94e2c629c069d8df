"""Checkpoints of models other than Llama."""

from typing import Any

from tests.engines.architectures import ARCHITECTURES
from tests.engines.layouts import resaved
from tests.engines.quantization import CT, HEADS, ct, flat, legacy
from tests.engines.tensors import BASE, Tensors, scales
from tests.engines.variant import Variant


def text_config_variants() -> dict[str, Variant]:
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
        "gemma3-ct-resaved": gemma3(renamed, CT, layout=resaved),
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


def architecture_variants() -> dict[str, Variant]:
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
