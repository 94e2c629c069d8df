"""Random weights, and scales of every name, shape, dtype and value.

Each scale has its own value, `value(layer, side)`, so that a mix-up of layers or sides shows.
"""

import re
from typing import Any

import ml_dtypes
import numpy as np

from tests.engines.architectures import Architecture, rows

Tensors = dict[str, np.ndarray]
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip
NUMPY = {spelled: np.dtype(getattr(ml_dtypes, name, name)) for name, spelled in DTYPES.items()}
NUMPY["FP16"] = NUMPY["F16"]


def weights_of(architecture: Architecture, method: str) -> Tensors:
    """Return the weights, linear ones inside layers stored as `method` says."""
    generator = np.random.default_rng(0)
    tensors = {}
    for name, shape in rows(architecture.rest):
        tensors[name] = _random(generator, shape)
    for layer in range(architecture.num_layers):
        for name, shape in rows(architecture.layer):
            if layer < architecture.unshared or not re.match(r"self_attn\.[kv]_", name):
                tensors[f"{architecture.layers}.{layer}.{name}"] = _random(generator, shape)
    return {k: v for name, w in tensors.items() for k, v in _stored(name, w, method).items()}


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
