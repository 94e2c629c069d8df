"""The ways in which engines silently use other scales than the checkpoint's, or do not load it.

One row of the table for each: a checkpoint that has it, what `kvq verify` must say of it, and the
same checkpoint with the one thing put right.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.checkpoint import open_checkpoint, weight_fingerprint
from kvq.formats import E4M3, E4M3_FNUZ_MAX, FP8_E4M3, FP8_E5M2, INT8, NVFP4
from kvq.tensorfile import write_float32
from tests.engines.layouts import Layout, save, shards, with_index, write_index
from tests.engines.quantization import (
    ATTENTION_ARGS,
    AWQ,
    CT,
    FLAT,
    FLAT_FP4,
    HEADS,
    W8A8,
    ct,
    flat,
    legacy,
)
from tests.engines.tensors import BASE, NAMES, Tensors, constant, scales
from tests.engines.variant import Variant
from tests.engines.variants import VARIANTS, write_variant

Fixture = str | Variant | Callable[[Path], None]
GOOD = "ct-name-attention"


@dataclass(frozen=True)
class Case:
    """A checkpoint with a trap, and its twin without.

    Args:
        trap: its number.
        name: what it is.
        fails: the checkpoint; the name of one that real vLLM was asked about, or a new one.
        code: of a finding that it must have.
        holds: the twin, which must have none of this code, and hold.
        engine: who is asked; None for the rules that need no engine.
        options: further options of `verify`; `{root}` is the folder above both.
        twin_options: those of the twin, where they are the one thing put right.
        severity: of the finding; a warning must not fail without --strict.
        layer: the layer that the finding must name.
        tensor: the tensor that it must name.
        words: what its message must say.
    """

    trap: int
    name: str
    fails: Fixture
    code: str
    holds: Fixture = GOOD
    engine: str | None = "vllm"
    options: tuple[str, ...] = ()
    twin_options: tuple[str, ...] | None = None
    severity: str = "error"
    layer: int | None = None
    tensor: str | None = None
    words: str = ""

    def __str__(self) -> str:
        return f"{self.trap}-{self.name}-{self.engine or 'files'}".replace(" ", "_")


K, V = "model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale"
K0, K1, V0, V1 = K.format(0), K.format(1), V.format(0), V.format(1)
MODELOPT = scales(*NAMES["modelopt"], dtype="BF16")  # numbers that vLLM need not round


def modelopt(tensors: Tensors = MODELOPT, config: Any = FLAT, **options: Any) -> Variant:
    return Variant(tensors, config, **{"weights": "fp8-static", **options})


def unquantized(config: Any, tensors: Tensors = MODELOPT, **options: Any) -> Variant:
    """A ModelOpt config over weights that stay as they are."""
    return Variant(tensors, config, **options)


def recorded(
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    *,
    other_weights: bool = False,
    **record: Any,
) -> Layout:
    """Scales with what kvq records beside them: their amax, then changed by someone else."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        first, second = (f"model-{i:05}-of-00002.safetensors" for i in (1, 2))
        save(folder / first, weights)
        amax = {name: float(np.float32(array[0] * E4M3.max)) for name, array in extra.items()}
        sides = [(*name.removesuffix("_scale").rsplit(".", 1), value)
                 for name, value in amax.items()]  # fmt: skip
        provenance = {
            "format": "fp8_e4m3",
            "granularity": "tensor",
            "weight_fingerprint": weight_fingerprint(open_checkpoint(folder)),
            "amax": {f"{attention}.{side}_bmm_quantizer": [value]
                     for attention, side, value in sides},
            "status": {attention: {side: "calibrated" for other, side, _ in sides
                                   if other == attention} for attention, _, _ in sides},
            **record,
        }  # fmt: skip
        if other_weights:
            tuned = {name: -array if "k_proj" in name else array for name, array in weights.items()}
            save(folder / first, tuned)
        exact = {n: np.array([FP8_E4M3.scale(value)], np.float32) for n, value in amax.items()}
        stored = change(exact)
        write_float32(folder / second, stored, {"kvq": json.dumps(provenance)})
        write_index(folder, {first: weights, second: stored})

    return layout


def kvq_made(change: Any = lambda tensors: tensors, sides: str = "kv", **options: Any) -> Variant:
    tensors = scales(sides="kv")
    if "q" in sides:
        tensors |= scales(f"{BASE}.q_scale", sides="k")
    return Variant(tensors, CT, layout=recorded(change, **options))


def times(factor: float) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: (a * factor).astype(np.float32) for n, a in tensors.items()}


def inverted(tensors: Tensors) -> Tensors:
    return {name: (1 / array).astype(np.float32) for name, array in tensors.items()}


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: array for name, array in tensors.items() if name not in names}


def hybrid(*layers: int) -> Variant:
    """A model whose first layer has linear attention, and no cache; scales for some layers."""
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    return Variant(scales(layers=list(layers)), CT, config=kinds)


def ct_scales(tensors: Tensors, **options: Any) -> Variant:
    return Variant(tensors, CT, **options)


def beside(fixture: Fixture, name: str, content: Any) -> Callable[[Path], None]:
    """A checkpoint with one JSON file more."""

    def build(folder: Path) -> None:
        write_fixture(fixture, folder)
        (folder / name).write_text(json.dumps(content))

    return build


def scales_json(layers: int = 2, ranks: int = 1, model_type: str | None = "llama") -> Any:
    factors = {str(layer): 0.01 * (layer + 1) for layer in range(layers)}
    return {
        "model_type": model_type,
        "kv_cache": {
            "dtype": "float8_e4m3fn",
            "scaling_factor": {str(rank): factors for rank in range(ranks)},
        },
    }


def whisper(*attentions: str) -> Callable[[Path], None]:
    """An encoder-decoder with scales for these attention modules of its decoder."""

    def build(folder: Path) -> None:
        folder.mkdir(parents=True)
        config = {
            "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper",
            "is_encoder_decoder": True, "d_model": 128, "decoder_layers": 2, "encoder_layers": 2,
            "decoder_attention_heads": 4, "encoder_attention_heads": 4, "dtype": "bfloat16",
            "num_hidden_layers": 2, "quantization_config": CT,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        tensors, value = {}, 0.01
        for stack, modules in (("encoder", ("self_attn",)),
                               ("decoder", ("self_attn", "encoder_attn"))):  # fmt: skip
            for layer in range(2):
                for module in modules:
                    path = f"model.{stack}.layers.{layer}.{module}"
                    for projection in "qkv":
                        tensors[f"{path}.{projection}_proj.weight"] = (
                            np.ones((128, 128), np.float32) * 0.01)  # fmt: skip
                    for side in "kv" if stack == "decoder" and module in attentions else "":
                        value += 0.001
                        tensors[f"{path}.{side}_scale"] = np.full(1, value, np.float32)
        save(folder / "model.safetensors", tensors)

    return build


def write_fixture(fixture: Fixture, folder: Path) -> tuple[str, ...]:
    """Write a checkpoint; return the options with which an engine is to load it."""
    if callable(fixture):
        fixture(folder)
        return ()
    variant = VARIANTS[fixture] if isinstance(fixture, str) else fixture
    write_variant(variant, folder)
    options: tuple[str, ...] = ()
    if variant.kv_cache_dtype != "auto":
        options += ("--kv-cache-dtype", variant.kv_cache_dtype)
    if variant.skip_layers:
        options += ("--kv-cache-dtype-skip-layers", ",".join(variant.skip_layers))
    return options


def shared(tensors: Tensors) -> Tensors:
    """Give the layers of Gemma 4 that share a cache the scales of those that fill it."""
    donors = {2: 0, 3: 1}
    return {name: tensors[name.replace(f".{layer}.", f".{donors.get(layer, layer)}.")]
            for name in tensors for layer in [int(name.split(".")[2])]}  # fmt: skip


def stale_size(content: int) -> Layout:
    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        shards()(folder, weights, extra)
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        total = sum(array.nbytes for array in (weights | extra).values())
        index["metadata"] = {"total_size": total + content}
        path.write_text(json.dumps(index))

    return layout


def group(**changes: Any) -> dict[str, Any]:
    """A compressed-tensors config with a group for attention."""
    return ct(config_groups={"group_0": {
        "targets": ["LlamaAttention"], "weights": None,
        "input_activations": {**ATTENTION_ARGS, **changes}}})  # fmt: skip


def fp4_legacy(*missing: str) -> dict[str, Any]:
    inner = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8",
             "exclude_modules": ["*"]}  # fmt: skip
    return {"producer": {"name": "modelopt"},
            "quantization": {k: v for k, v in inner.items() if k not in missing}}  # fmt: skip


MIXED = flat(quant_algo="MIXED_PRECISION", quantized_layers={"none": {"quant_algo": "FP8"}})
GEMMA3_MODELOPT = scales(
    "language_model.model.layers.{}.self_attn.k_proj.k_scale",
    "language_model.model.layers.{}.self_attn.v_proj.v_scale", dtype="BF16",
)  # fmt: skip
PER_HEAD = scales(shape=(2, 1, 1))
MLA = Variant(scales(), CT, architecture="deepseek_v2")
CASES = [
    Case(1, "layer without scales", "ct-one-layer", "engine.default", layer=1),
    Case(1, "layer without scales", "ct-one-layer", "scale.missing", engine=None, tensor=K1),
    Case(1, "layer without scales", "ct-one-layer", "engine.default", engine="sglang", layer=1),
    Case(1, "layer without scales", "ct-one-layer", "engine.unknown", engine="transformers",
         layer=1, words="uninitialised"),
    Case(1, "modelopt", modelopt(scales(*NAMES["modelopt"], [0], "BF16")), "engine.default",
         modelopt(), layer=1),
    *[Case(1, "full layer of a hybrid", hybrid(0), code, hybrid(1), engine=engine, layer=1)
      for code, engine in [("engine.default", "sglang"), ("scale.missing", None)]],
    Case(2, "only k", "ct-only-k", "engine.default", layer=0),
    Case(2, "only k", "ct-only-k", "scale.missing", engine=None, tensor=V0),
    Case(2, "only k", "ct-only-k", "engine.value", engine="sglang", words="copied from k"),
    Case(2, "only k modelopt", modelopt(scales(*NAMES["modelopt"], dtype="BF16", sides="k")),
         "engine.value", modelopt(), words="copied from k"),
    Case(2, "only v modelopt", "modelopt-only-v", "engine.load", modelopt()),
    Case(2, "only v", "ct-only-v", "engine.load", engine="sglang"),
    Case(3, "kv_scale", "ct-legacy-kv-scale", "engine.default", layer=0),
    Case(3, "kv_scale", "ct-legacy-kv-scale", "scale.spelling", engine=None),
    Case(3, "kv_scale", "ct-legacy-kv-scale", "engine.unknown", engine="transformers"),
    Case(4, "sharing layers without", "gemma4-ct-unshared-only", "engine.default",
         Variant(shared(scales(layers=4)), CT, architecture="gemma4"), layer=2),
    Case(4, "sharing layers without", "gemma4-ct-unshared-only", "scale.missing",
         Variant(shared(scales(layers=4)), CT, architecture="gemma4"), engine=None, layer=3),
    Case(4, "sharing layers with others", "gemma4-ct", "scale.shared",
         Variant(shared(scales(layers=4)), CT, architecture="gemma4"), layer=2),
    Case(5, "file not in the index", "ct-files-unindexed-shard", "engine.default",
         "ct-files-two-shards"),
    Case(5, "file not in the index", "ct-files-unindexed-shard", "index.unindexed",
         "ct-files-two-shards", engine=None),
    Case(5, "index beside the single file", ct_scales(scales(), layout=with_index(
        {"metadata": {}, "weight_map": {"lm_head.weight": "model.safetensors"}})),
        "index.missing_entry", engine=None, tensor=K0),
    Case(6, "index names a missing file", "ct-files-missing-shard", "engine.load",
         "ct-files-two-shards"),
    Case(6, "index names a missing file", "ct-files-missing-shard", "index.missing_file",
         "ct-files-two-shards", engine=None),
    Case(6, "index lacks the names", "ct-files-unindexed-names", "index.missing_entry",
         "ct-files-two-shards", engine=None, tensor=K0),
    Case(7, "one name in two shards", "ct-files-same-name-index-first", "scale.duplicate",
         "ct-files-two-shards", tensor=K0),
    Case(7, "two spellings that differ", "ct-both-spellings", "scale.conflict"),
    Case(7, "two spellings that differ", "ct-both-spellings", "scale.conflict", engine=None),
    Case(7, "two spellings that differ", "ct-attention-and-attn", "scale.conflict",
         engine="sglang"),
    Case(7, "two spellings that agree", ct_scales(scales() | scales(*NAMES["modelopt"])),
         "scale.stray", engine=None),
    Case(7, "two spellings that agree", "ct-both-spellings", "scale.conflict",
         ct_scales(scales() | scales(*NAMES["modelopt"]))),
    Case(8, "consolidated file", "ct-files-consolidated-without-scales", "engine.default"),
    Case(8, "consolidated file", "ct-files-consolidated-without-scales", "files.consolidated",
         engine=None),
    Case(9, "file beside model.safetensors", "ct-files-extra-file", "engine.unknown",
         "ct-files-two-shards", engine="transformers"),
    Case(9, "file beside model.safetensors", "ct-files-extra-file", "files.single_and_shards",
         "ct-files-two-shards", engine=None),
    Case(9, "the same with an index", "ct-files-extra-file-index-both", "engine.unknown",
         "ct-files-two-shards", engine="transformers"),
    Case(10, "no quantization config", "none-name-attention", "engine.load"),
    Case(10, "no quantization config", "none-name-attention", "config.missing", engine=None),
    Case(10, "no quantization config", "none-name-modelopt", "config.missing", modelopt(),
         engine=None),
    Case(10, "no quantization config", "none-name-attention", "engine.unquantized",
         engine="sglang"),
    Case(10, "gptq", "gptq-fp8-cache", "engine.default", words="`gptq` reads no scales"),
    Case(10, "gptq", "gptq", "config.quant_method", engine=None),
    Case(10, "awq", Variant(scales(*NAMES["attn"]), AWQ, "awq", config={"dtype": "float16"},
                            kv_cache_dtype="fp8"), "engine.default"),
    Case(10, "awq", "awq-fp8-cache", "engine.load"),
    Case(10, "mxfp4", Variant(scales(), {"quant_method": "mxfp4"}), "config.quant_method",
         engine=None),
    Case(10, "torchao", Variant(scales(), {"quant_method": "torchao"}), "config.quant_method",
         engine=None),
    Case(11, "no scheme", "ct-config-no-scheme", "engine.unquantized"),
    Case(11, "no scheme", "ct-config-no-scheme", "config.no_scheme", engine=None),
    Case(11, "no scheme modelopt", "modelopt-flat-scheme-absent", "engine.unquantized", modelopt()),
    Case(11, "no scheme modelopt", "modelopt-flat-scheme-absent", "config.no_scheme", modelopt(),
         engine=None),
    Case(11, "no flag fp8", "fp8-auto", "engine.unquantized", "fp8-static"),
    Case(11, "no flag fp8", "fp8-auto", "config.undeclared", engine=None, severity="warning"),
    Case(12, "scheme without scales", "ct-no-scales", "engine.default"),
    Case(12, "scheme without scales", "ct-no-scales", "config.no_scales", engine=None),
    Case(12, "scheme without scales", "modelopt-no-scales", "config.no_scales", modelopt(),
         engine=None),
    *[Case(13, f"scheme {name}", f"ct-scheme-{name}", code, engine=engine)
      for name, rule in [("int4", "scheme"), ("num-bits-4", "scheme"), ("type-int", "scheme"),
                         ("strategy-channel", "strategy"), ("strategy-null", "strategy"),
                         ("symmetric-false", "scheme"), ("symmetric-absent", "scheme")]
      for code, engine in [("engine.load", "vllm"), (f"config.{rule}", None)]],
    Case(13, "scheme int4", "ct-scheme-int4", "engine.unquantized", engine="sglang"),
    Case(13, "dynamic", "ct-scheme-dynamic-true", "config.scheme", engine=None),
    Case(13, "dynamic", "ct-scheme-dynamic-true", "engine.unquantized", engine="sglang"),
    Case(13, "dynamic", "ct-scheme-dynamic-true", "engine.dynamic", engine="transformers"),
    Case(14, "per head without groups", "ct-heads-no-config-groups", "engine.load",
         "ct-heads-2x1x1"),
    Case(14, "per head without groups", "ct-heads-no-config-groups", "config.groups",
         "ct-heads-2x1x1", engine=None),
    Case(14, "one number for all heads", "ct-heads-1", "engine.value", "ct-heads-2x1x1",
         words="used for all 2 KV heads"),
    Case(14, "one number for all heads", "ct-heads-1", "scale.shape", "ct-heads-2x1x1",
         engine=None, tensor=K0),
    Case(14, "a number per query head", "ct-heads-4", "engine.value", "ct-heads-2x1x1",
         words="the first 2 of 4"),
    Case(14, "several numbers per tensor", "ct-shape-2", "engine.load"),
    Case(15, "per head", "ct-heads-2x1x1", "engine.unquantized", engine="sglang"),
    Case(15, "per head", "ct-heads-2x1x1", "engine.load", options=("--platform", "sm89"),
         twin_options=("--platform", "sm89")),
    Case(15, "per head elsewhere", "ct-heads-2x1x1", "engine.load", "ct-heads-2x1x1",
         options=("--platform", "sm100"), twin_options=("--platform", "sm90")),
    Case(15, "per head", Variant(PER_HEAD, {**HEADS, "config_groups": {"group_0": W8A8}},
                                 "fp8-channel"),
         "engine.default", modelopt(config=flat(kv_cache_scheme="NVFP4")), engine="tensorrt-llm"),
    *[Case(16, f"quant_algo {name}", f"modelopt-flat-algo-{name}", code, modelopt(), engine=engine,
           severity="warning" if engine is None and name in ("null", "absent") else "error")
      for name in ("null", "absent", "no-quant", "unknown")
      for code, engine in [("engine.load", "vllm"), ("engine.load", "sglang"),
                           ("config.quant_algo", None)]],
    Case(16, "legacy null", "modelopt-legacy-algo-null", "engine.load", "modelopt-legacy-fp8"),
    Case(16, "legacy null", "modelopt-legacy-algo-null", "engine.unquantized",
         "modelopt-legacy-fp8", engine="sglang"),
    Case(16, "legacy null", "modelopt-legacy-algo-null", "config.quant_algo",
         "modelopt-legacy-fp8", engine=None, severity="warning"),
    *[Case(17, f"cache {name}", f"modelopt-flat-scheme-{name}", code, modelopt(), engine=engine)
      for name in ("no-dynamic", "dynamic", "string-int8", "int8", "string-nvfp4-affine")
      for code, engine in [("engine.unquantized", "vllm"), ("config.kv_algo", None)]],
    Case(17, "cache string-fp8", "modelopt-flat-scheme-string-fp8", "engine.unquantized",
         modelopt(), engine="sglang"),
    Case(17, "cache string-fp8", "modelopt-flat-scheme-string-fp8", "config.kv_algo", modelopt(),
         engine=None),
    Case(17, "nvfp4 needs a flag", "modelopt-flat-scheme-string-nvfp4", "engine.unquantized",
         modelopt(), engine="sglang"),
    Case(18, "mixed and nvfp4", "modelopt-flat-mixed-nvfp4-kv", "engine.default",
         unquantized(MIXED)),
    Case(18, "mixed and nvfp4", "modelopt-flat-mixed-nvfp4-kv", "config.mixed",
         unquantized(MIXED), engine=None),
    Case(18, "mixed legacy", "modelopt-legacy-algo-mixed", "engine.load", unquantized(MIXED)),
    Case(18, "mixed legacy", "modelopt-legacy-algo-mixed", "config.quant_algo",
         unquantized(MIXED), engine=None),
    Case(18, "mixed without layers", "modelopt-mixed-empty-layers", "engine.load",
         unquantized(MIXED)),
    Case(18, "mixed without layers", "modelopt-mixed-empty-layers", "config.mixed",
         unquantized(MIXED), engine=None),
    *[Case(18, f"nvfp4 without {key}", unquantized(None, hf_quant=fp4_legacy(key)), code,
           unquantized(None, hf_quant=fp4_legacy()), engine=engine, words=key)
      for key in ("group_size", "kv_cache_quant_algo", "exclude_modules")
      for code, engine in [("engine.load", "vllm"), ("config.keys", None)]],
    Case(19, "config.json says none", "modelopt-both-config-says-none", "engine.unquantized",
         "modelopt-both-same"),
    Case(19, "the other file says none", "modelopt-both-legacy-says-none", "engine.unquantized",
         modelopt(config=flat(kv_cache_scheme="NVFP4"), hf_quant=legacy(
             kv_cache_quant_algo="NVFP4")), engine="tensorrt-llm"),
    *[Case(19, f"the files disagree: {name}", f"modelopt-both-{name}", "config.disagree",
           "modelopt-both-same", engine=None)
      for name in ("config-says-none", "legacy-says-none", "fp8-nvfp4", "nvfp4-fp8")],
    Case(19, "excluded layers", modelopt(hf_quant=legacy(exclude_modules=["*"])),
         "config.excludes", "modelopt-both-same", engine=None, severity="warning"),
    Case(19, "two keys", "modelopt-flat-scheme-over-kv-algo", "config.disagree",
         modelopt(config=flat(kv_cache_quant_algo="FP8")), engine=None),
    Case(20, "modelopt in text_config", "gemma3-modelopt-in-text-config", "engine.unquantized",
         Variant(GEMMA3_MODELOPT, flat(ignore=["*"]), architecture="gemma3")),
    Case(20, "modelopt in text_config with the flag", "gemma3-modelopt-in-text-config",
         "engine.unquantized", "gemma3-modelopt-in-text-config-fp8"),
    Case(20, "modelopt in text_config", "gemma3-modelopt-in-text-config", "config.place",
         Variant(GEMMA3_MODELOPT, flat(ignore=["*"]), architecture="gemma3"), engine=None),
    Case(20, "compressed-tensors in text_config", "gemma3-modelopt-in-text-config",
         "engine.unquantized", "gemma3-ct-in-text-config"),
    Case(20, "both levels", "gemma3-both-levels-text", "engine.unquantized", "gemma3-ct"),
    Case(20, "both levels", "gemma3-both-levels", "config.two_places", "gemma3-ct", engine=None),
    *[Case(21, f"prefix {name}", f"ct-name-{name}", code, engine=engine)
      for name in ("language-model-prefix", "no-model-prefix", "transformer-prefix")
      for code, engine in [("engine.load", "vllm"), ("engine.default", "sglang"),
                           ("scale.missing", None), ("scale.stray", None)]],
    Case(21, "prefix of another class", "gemma3-ct-text-prefix", "scale.missing", "gemma3-ct",
         engine=None),
    Case(22, "surplus layer", "ct-extra-layer", "engine.load", words="layers.2"),
    Case(22, "surplus layer", "ct-extra-layer", "scale.stray", engine=None, tensor=K.format(2)),
    Case(22, "linear attention", hybrid(0, 1), "scale.stray", hybrid(1), engine=None, tensor=K0),
    Case(22, "vision tower", "gemma3-ct-vision", "engine.load", "gemma3-ct"),
    Case(22, "vision tower", "gemma3-ct-vision", "scale.stray", "gemma3-ct", engine=None),
    Case(22, "no attention", "ct-name-mlp", "engine.load"),
    Case(22, "no module at all", "ct-root", "scale.stray", engine=None, tensor="k_scale"),
    *[Case(23, f"name {name}", f"ct-name-{name}", code, engine=engine)
      for name in ("k-scales", "key-scale", "proj-scale", "inverse", "affine-bias")
      for code, engine in [("engine.load", "vllm"), ("engine.default", "sglang"),
                           ("scale.stray", None)]],
    Case(23, "output_scale", "ct-name-output-scale", "engine.load"),
    Case(23, "output_scale", "ct-name-output-scale", "scale.spelling", engine=None),
    Case(23, "output_scale of fp8", "ct-name-output-scale", "engine.load",
         "fp8-name-output-scale"),
    Case(23, "crossed", "ct-name-crossed", "scale.crossed",
         tensor="model.layers.0.self_attn.k_proj.v_scale"),
    Case(23, "crossed", "ct-name-crossed", "scale.crossed", engine=None,
         tensor="model.layers.0.self_attn.k_proj.v_scale"),
    Case(23, "crossed", "ct-name-crossed", "engine.default", engine="sglang"),
    Case(23, "affine biases", "ct-modelopt-biases", "engine.zero_point", engine="sglang"),
    Case(24, "module attn", "gpt2-ct", "engine.load", "gpt2-ct-names-attn"),
    Case(24, "module attn", "gpt2-ct", "scale.missing", "gpt2-ct-names-attn", engine=None),
    Case(24, "vLLM's own name", "ct-name-attn", "engine.default", engine="sglang"),
    Case(24, "vLLM's own name", "ct-name-attn", "scale.spelling", engine=None),
    Case(24, "modelopt elsewhere", "gpt_neox-modelopt", "engine.load", "gpt_neox-ct"),
    Case(24, "modelopt elsewhere", "falcon-modelopt", "engine.load", "falcon-ct"),
    Case(25, "fused", "phi3-modelopt-names-fused", "engine.default", "phi3-modelopt",
         engine="sglang"),
    Case(25, "fused", "phi3-modelopt-names-fused", "scale.spelling", "phi3-modelopt", engine=None),
    Case(25, "fused falcon", "falcon-ct-names-fused", "engine.load", "falcon-ct"),
    Case(26, "latent attention", MLA, "engine.unquantized"),
    Case(26, "latent attention modelopt", "deepseek_v2-modelopt", "engine.default", modelopt()),
    *[Case(27, name, f"{name}-ct", "engine.default", "qwen3-ct", engine="sglang",
           words="reads no scales of attention")
      for name in ("qwen2", "qwen3_moe", "mixtral")],
    Case(28, "integers", "ct-dtype-i32", "scale.dtype", tensor=K0),
    Case(28, "8-bit floats", "ct-dtype-f8_e4m3", "scale.dtype", tensor=K0),
    Case(28, "integers", "ct-dtype-i32", "scale.dtype", "ct-dtype-f64", engine=None),
    *[Case(28, dtype, f"ct-dtype-{dtype}", "scale.precision", engine=None, severity="warning")
      for dtype in ("f16", "bf16")],
    Case(28, "subnormal f16", modelopt(scales(*NAMES["modelopt"], dtype="F16", scale=1e-3)),
         "scale.precision", modelopt(), engine=None, severity="warning", words="few digits"),
    Case(29, "modelopt rounds", "modelopt-name-modelopt", "engine.value", modelopt(),
         severity="warning", words="rounded to bfloat16"),
    Case(29, "modelopt rounds", "modelopt-name-modelopt", "scale.rounded", modelopt(), engine=None,
         severity="warning"),
    Case(29, "modelopt rounds to nothing", "modelopt-fp16-model-1e-9", "engine.load",
         "modelopt-fp16-model"),
    *[Case(30, name, f"ct-value-{name}", code, engine=engine)
      for name, code in [("0", "scale.nonpositive"), ("negative", "scale.nonpositive"),
                         ("nan", "scale.nonfinite"), ("inf", "scale.nonfinite"),
                         ("1", "scale.all_one"), ("bf16-exact", "scale.all_equal"),
                         ("5e4", "scale.range"), ("1e-9", "scale.range")]
      for engine in ("vllm", None)],
    Case(30, "0", modelopt(constant(0.0)), "engine.load", modelopt()),
    Case(30, "nan", "ct-value-nan", "engine.load", engine="sglang"),
    Case(30, "1", "ct-value-1", "engine.all_one"),
    Case(30, "one of them 1", ct_scales(scales() | {K0: np.ones(1, np.float32)}), "scale.one",
         engine=None, severity="warning"),
    Case(30, "outlier", ct_scales(scales() | {K0: np.full(1, 1.5, np.float32)}), "scale.outlier",
         engine=None, severity="warning", tensor=K0),
    Case(31, "inverted", ct_scales(inverted(scales())), "scale.implausible", words="inverted"),
    Case(31, "inverted", ct_scales(inverted(scales())), "scale.implausible", engine=None),
    Case(31, "inverted with amax", kvq_made(inverted), "provenance.scale", kvq_made(),
         words="it is inverted"),
    Case(31, "inverted with a reference", ct_scales(inverted(scales())), "reference.differs",
         engine=None, options=("--against", "{root}/right"), words="it is inverted"),
    Case(32, "amax itself", ct_scales(times(E4M3.max)(scales())), "scale.implausible",
         engine=None, severity="warning", words="may be amax itself"),
    Case(32, "divided by the largest of E5M2",
         ct_scales(times(0.2 * E4M3.max / FP8_E5M2.scale_divisor)(scales())),
         "scale.implausible", engine=None, severity="warning", words="another format"),
    *[Case(32, f"{words} with amax", kvq_made(times(E4M3.max / divisor)), "provenance.scale",
           kvq_made(), words=words)
      for words, divisor in [("amax itself", 1), ("for E4M3 fnuz", E4M3_FNUZ_MAX),
                             ("for E5M2", FP8_E5M2.scale_divisor),
                             ("for INT8", INT8.scale_divisor)]],
    *[Case(32, f"{words} with a reference", ct_scales(times(E4M3.max / divisor)(scales())),
           "reference.differs", options=("--against", "{root}/right"), words=words)
      for words, divisor in [("amax itself", 1), ("for E4M3 fnuz", E4M3_FNUZ_MAX),
                             ("for INT8", INT8.scale_divisor)]],
    Case(33, "divisor of weights", kvq_made(times(E4M3.max / NVFP4.scale_divisor)),
         "provenance.scale", kvq_made(), words="for NVFP4 weights"),
    Case(33, "divisor of weights with a reference",
         ct_scales(times(E4M3.max / NVFP4.scale_divisor)(scales())), "reference.differs",
         options=("--against", "{root}/right"), words="for NVFP4 weights"),
    Case(33, "factor 6", unquantized(FLAT_FP4), "engine.value", unquantized(FLAT_FP4),
         engine="sglang", options=("--kv-cache-dtype", "nvfp4", "--platform", "sm100"),
         twin_options=("--kv-cache-dtype", "nvfp4", "--platform", "sm120"), words="times 6"),
    Case(34, "before RoPE", kvq_made(lambda t: t | times(0.8)({K1: t[K1]})), "provenance.scale",
         kvq_made(), tensor=K1),
    Case(34, "before RoPE", ct_scales(scales() | times(0.8)({K1: scales()[K1]})),
         "reference.differs", engine=None, options=("--against", "{root}/right"), tensor=K1),
    Case(35, "other weights", kvq_made(other_weights=True), "provenance.weights", kvq_made()),
    Case(36, "skipped layer without", kvq_made(without(K1, V1), skip_layers=[1]),
         "engine.default", kvq_made(skip_layers=[1]), layer=1,
         twin_options=("--kv-cache-dtype-skip-layers", "1")),
    Case(36, "skipped layer without", kvq_made(without(K1, V1), skip_layers=[1]), "scale.missing",
         kvq_made(skip_layers=[1]), engine=None, layer=1),
    Case(36, "flag forgotten", kvq_made(skip_layers=[1]), "engine.skip_layers",
         kvq_made(skip_layers=[1]), layer=1, severity="warning",
         twin_options=("--kv-cache-dtype-skip-layers", "1")),
    Case(36, "flag not meant", kvq_made(), "engine.unquantized", kvq_made(skip_layers=[1]),
         layer=1, options=("--kv-cache-dtype-skip-layers", "1"), severity="warning",
         twin_options=("--kv-cache-dtype-skip-layers", "1")),
    *[Case(37, "zero points", "ct-zero-points-nonzero", "engine.zero_point", "ct-zero-points",
           engine=engine) for engine in ("vllm", "sglang", "transformers")],
    Case(37, "zero points", "ct-zero-points-nonzero", "scale.stray", "ct-zero-points", engine=None),
    Case(38, "query scale in some layers", "ct-q-scale", "scale.missing",
         ct_scales(scales() | scales(f"{BASE}.q_scale", sides="k")), layer=1),
    Case(38, "query scales lost", kvq_made(lambda t: {n: a for n, a in t.items() if "q_" not in n},
                                           sides="kvq"),
         "provenance.lost", kvq_made(sides="kvq")),
    Case(38, "per KV head", "ct-heads-q-scale-2", "scale.shape", "ct-heads-q-scale"),
    Case(38, "another number", "ct-heads-q-scale-3", "engine.load", "ct-heads-q-scale"),
    Case(38, "not read", ct_scales(scales() | scales(f"{BASE}.q_scale", sides="k"),
                                   architecture="deepseek_v2"),
         "engine.query", ct_scales(scales() | scales(f"{BASE}.q_scale", sides="k"))),
    Case(39, "GPUs that cannot share heads", "ct-heads-2x1x1", "engine.load", "ct-heads-2x1x1",
         options=("--tp", "3"), twin_options=("--tp", "4")),
    Case(39, "json ranks", beside(GOOD, "kv_cache_scales.json", scales_json(ranks=2)),
         "engine.scales_json", beside(GOOD, "kv_cache_scales.json", scales_json(ranks=2)),
         engine="sglang", twin_options=("--tp", "2")),
    Case(39, "json model type", beside(GOOD, "kv_cache_scales.json", scales_json(model_type=None)),
         "files.scales_json", beside(GOOD, "kv_cache_scales.json", scales_json()), engine="sglang"),
    Case(39, "json layers", beside(GOOD, "kv_cache_scales.json", scales_json(layers=1)),
         "files.scales_json", beside(GOOD, "kv_cache_scales.json", scales_json()), engine=None),
    Case(40, "e5m2", "ct-cache-fp8_e5m2", "engine.load", "ct-cache-fp8_e4m3"),
    Case(40, "e5m2 without a scheme", "ct-no-scheme-cache-fp8_e5m2", "engine.e5m2",
         "ct-no-scheme-cache-fp8"),
    Case(40, "e5m2", "ct-cache-fp8_e5m2", "engine.e5m2", "ct-cache-fp8_e4m3", engine="sglang"),
    Case(41, "underscore", "ct-config-underscore", "engine.load", engine="sglang"),
    Case(41, "underscore", "ct-config-underscore", "engine.unquantized", engine="transformers"),
    Case(41, "underscore", "ct-config-underscore", "config.quant_method", engine=None),
    Case(41, "no method", "ct-config-no-method", "engine.load"),
    Case(41, "no method", "ct-config-no-method", "config.quant_method", engine=None),
    Case(42, "group alone", Variant(scales(), {**group(), "kv_cache_scheme": None}),
         "engine.unquantized", Variant(scales(), group())),
    Case(42, "group of another kind", Variant(scales(), group(num_bits=4)),
         "config.attention_group", Variant(scales(), group())),
    Case(42, "group by a pattern", "ct-config-attention-group-regex", "engine.load",
         "ct-config-attention-group"),
    Case(43, "cross-attention", whisper("self_attn"), "engine.default",
         whisper("self_attn", "encoder_attn"), words="k 1"),
    Case(43, "cross-attention", whisper("self_attn"), "scale.missing",
         whisper("self_attn", "encoder_attn"), engine=None,
         tensor="model.decoder.layers.0.encoder_attn.k_scale"),
    Case(44, "total_size", ct_scales(scales(), layout=stale_size(-16)), "index.total_size",
         ct_scales(scales(), layout=stale_size(0)), engine=None, severity="warning"),
    Case(45, "saved by transformers 5", "gemma3-ct-resaved",
         "engine.load", "gemma3-ct", words="vision_tower.embeddings"),
    Case(45, "saved by transformers 5", "gemma3-ct-resaved",
         "files.renamed", "gemma3-ct", engine=None, severity="warning"),
]  # fmt: skip


def arguments(case: Case, options: tuple[str, ...], root: Path) -> list[str]:
    asked = ["--engine", case.engine] if case.engine else []
    return [*asked, *(option.format(root=root) for option in options), "--json"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_trap_is_found_and_its_twin_is_not_one(kvq, tmp_path, case):
    write_fixture(GOOD, tmp_path / "right")
    own = write_fixture(case.fails, tmp_path / "trap")
    argv = arguments(case, own + case.options, tmp_path)
    result = kvq("verify", tmp_path / "trap", *argv)
    found = [f for f in result.json["findings"] if f["code"] == case.code]
    assert found, result.json["findings"]
    assert {finding["severity"] for finding in found} == {case.severity}
    assert all(f["fix"] and f["expected"] and f["found"] for f in found)
    assert case.layer in {None, *(finding["layer_idx"] for finding in found)}
    assert case.tensor in {None, *(finding["tensor"] for finding in found)}
    assert any(case.words in finding["message"] for finding in found)
    assert result.code == (1 if case.severity == "error" else 0)
    assert kvq("verify", tmp_path / "trap", *argv, "--strict").code == 1

    own = write_fixture(case.holds, tmp_path / "twin")
    twin_options = case.options if case.twin_options is None else case.twin_options
    result = kvq("verify", tmp_path / "twin", *arguments(case, own + twin_options, tmp_path))
    assert case.code not in {finding["code"] for finding in result.json["findings"]}
    assert result.code == 0, result.json["findings"]


def test_every_trap_has_a_case():
    assert {case.trap for case in CASES} == set(range(1, 46))


# What no file shows where neither kvq's record nor a reference is there: the numbers are as
# plausible as the right ones. (trap, why) → the checkpoint
UNKNOWN = {
    (32, "another divisor within a factor of 4"): ct_scales(
        times(E4M3.max / E4M3_FNUZ_MAX)(scales())),
    (32, "that of INT8"): ct_scales(times(E4M3.max / INT8.scale_divisor)(scales())),
    (33, "a sixth"): ct_scales(times(E4M3.max / NVFP4.scale_divisor)(scales())),
    (34, "keys seen before RoPE or a norm"): ct_scales(times(0.8)(scales())),
    (35, "scales of other weights, or of merged heads"): ct_scales(times(1.5)(scales())),
    (38, "no scale of queries: 1.0, if the backend quantizes them"): GOOD,
}  # fmt: skip


@pytest.mark.parametrize("trap", UNKNOWN, ids=lambda trap: f"{trap[0]}-{trap[1]}")
def test_what_files_alone_cannot_show_is_not_claimed(kvq, tmp_path, trap):
    write_fixture(UNKNOWN[trap], tmp_path / "checkpoint")
    for engine in ([], ["--engine", "vllm"]):
        result = kvq("verify", tmp_path / "checkpoint", *engine, "--strict", "--json")
        assert (result.code, result.json["findings"]) == (0, [])
    assert trap[0] in {case.trap for case in CASES}  # where there is something to compare with
