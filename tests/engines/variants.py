"""Checkpoint folders for engines to load: tiny models, random weights, scales of every kind."""

import json
from pathlib import Path
from typing import Any

from tests.engines.architectures import ARCHITECTURES
from tests.engines.layouts import LAYOUTS, consolidated, shards, spellings_apart
from tests.engines.models import architecture_variants, text_config_variants
from tests.engines.quantization import (
    AWQ,
    CACHE_DTYPES,
    CT,
    CT_CONFIGS,
    FLAT,
    FLAT_BF16,
    FLAT_CONFIGS,
    FLAT_FP4,
    FP8,
    GPTQ,
    HEADS,
    INT8,
    LEGACY_CONFIGS,
    QUARK,
    SCHEME,
    SCHEMES,
    W8A8,
    ct,
    flat,
    legacy,
    scheme,
)
from tests.engines.tensors import (
    BASE,
    FORMS,
    NAMES,
    OTHERS,
    constant,
    plus,
    scales,
    weights_of,
)
from tests.engines.variant import Variant


def write(name: str, folder: Path) -> None:
    """Write the files of a variant into a new folder."""
    write_variant(VARIANTS[name], folder)


def write_variant(variant: Variant, folder: Path) -> None:
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
MODELOPT_SCALES = scales(*NAMES["modelopt"])


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
        **text_config_variants(),
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


VARIANTS: dict[str, Variant] = {
    **_method_variants(), **_config_variants(), **_head_variants(), **_other_variants(),
    **architecture_variants(),
}  # fmt: skip
