"""A model of how TensorRT-LLM's PyTorch backend loads the scales of a checkpoint, from its files.

Read in the source of autumn 2026, nothing of it was run: `quantization/modelopt_config.py`,
`models/quant_config_utils.py`, `_torch/modules/attention.py` and `linear.py`. What was not found
there is unknown here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.engines.base import (
    Engine,
    EngineOptions,
    EngineReading,
    LayerReading,
    SideReading,
    not_modelled,
)
from kvq.engines.vllm_config import CT, LEGACY_NAME, LoadError, NotModelledError
from kvq.engines.vllm_values import default, unknown
from kvq.errors import KvqError
from kvq.files import read_json
from kvq.geometry import Geometry, LayerGeometry

_NOTES = ("all of this was read in TensorRT-LLM's source; none of it was run",)
_NVFP4_NOTE = (
    "scales of nvfp4 caches are used as they are, like those of fp8; older releases multiplied by "
    "6, and TRTLLM_LOAD_KV_SCALES=0 turns loading off"
)
_CACHE_DTYPES = {"FP8": "fp8", "NVFP4": "nvfp4", "INT8": "int8"}
_DTYPE_OPTIONS = ("auto", "fp8", "nvfp4")


class TensorRTLLM(Engine):
    """The loader of TensorRT-LLM's PyTorch backend."""

    name = "tensorrt-llm"
    versions = ("main, autumn 2026",)

    def read(
        self, view: CheckpointView, geometry: Geometry, options: EngineOptions
    ) -> EngineReading:
        """Return what TensorRT-LLM does with a checkpoint."""
        blank = EngineReading(self.name, self.version, options, None, (), None, _NOTES)
        try:
            declared, notes = _declared(view)
            blank = replace(blank, notes=(*_NOTES, *notes))
            cache_dtype = _cache_dtype(declared, options.kv_cache_dtype)
            if cache_dtype == "nvfp4":
                blank = replace(blank, notes=(*blank.notes, _NVFP4_NOTE))
            if options.skip_layers:
                note = "layers to leave unquantized are an option of vLLM: their effect is unknown"
                blank = replace(blank, notes=(*blank.notes, note))
            layers = tuple(_layer(view, layer, cache_dtype) for layer in geometry.layers)
            return replace(blank, cache_dtype=cache_dtype, layers=layers)
        except LoadError as error:
            return replace(blank, error=str(error))
        except NotModelledError as error:
            return not_modelled(blank, geometry, str(error))


def _declared(view: CheckpointView) -> tuple[str | None, tuple[str, ...]]:
    """Return the cache algorithm that the checkpoint declares, and what is to be noted.

    Raises:
        LoadError: TensorRT-LLM refuses the config.
        NotModelledError: what it does with this one is not known.
    """
    inline = view.config.get("quantization_config")
    if (view.root / LEGACY_NAME).is_file():
        try:
            config = read_json(view.root / LEGACY_NAME)
        except KvqError as error:
            raise NotModelledError(str(error)) from error
        algo, notes = _modelopt(config)
        if inline is not None:
            notes += (f"{LEGACY_NAME} is followed, not config.json",)
        return algo, notes
    if inline is None:
        if view.quantization_config_place is not None:
            place = view.quantization_config_place
            raise NotModelledError(f"`{place}` under TensorRT-LLM is not known")
        return None, ()
    method = inline.get("quant_method") if isinstance(inline, dict) else None
    if not isinstance(inline, dict) or not isinstance(method, str):
        raise NotModelledError("a quantization config without `quant_method` is not modelled")
    if method.startswith("modelopt"):
        return _modelopt(inline)
    if method == CT:
        return _compressed_tensors(inline), ()
    raise NotModelledError(f"quantization method `{method}` is not modelled")


def _modelopt(config: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """Return the cache algorithm of either form, whatever `quant_algo` is."""
    if "quantization" in config:
        inner = config["quantization"]
        if not isinstance(inner, dict):
            raise NotModelledError("`quantization` of a ModelOpt config is not an object")
        declared: Any = inner.get("kv_cache_quant_algo")
    else:
        declared = config.get("kv_cache_scheme")
        if isinstance(declared, dict):
            kind = f"{declared.get('type')}{declared.get('num_bits')}"
            declared = {"float8": "FP8", "float4": "NVFP4", "int8": "INT8"}.get(kind, declared)
    if isinstance(declared, str) and declared in _CACHE_DTYPES:
        return declared, ()
    if declared is None:
        return None, ()
    return None, (f"the cache algorithm {declared!r} is ignored, with a warning",)


def _compressed_tensors(config: Mapping[str, Any]) -> str | None:
    groups = config.get("config_groups")
    if groups is None:
        raise LoadError("ValueError: config_groups is not set")
    if not groups:
        raise LoadError("ValueError: config_groups is empty")
    scheme = config.get("kv_cache_scheme")
    if scheme is None:
        return None
    if not isinstance(scheme, dict):
        raise NotModelledError("a `kv_cache_scheme` that is not an object is not modelled")
    if scheme.get("type") != "float" or scheme.get("num_bits") != 8:
        raise LoadError(f"ValueError: Unsupported kv_cache_scheme: {scheme}.")
    return "FP8"


def _cache_dtype(declared: str | None, requested: str) -> str:
    """Return the cache's dtype; `auto` is that of the model."""
    if requested not in _DTYPE_OPTIONS:
        options = ", ".join(_DTYPE_OPTIONS)
        raise NotModelledError(f"KvCacheConfig.dtype is one of {options}, not `{requested}`")
    found = _CACHE_DTYPES[declared] if declared else "auto"
    if requested in ("auto", found):
        return found
    if requested == "fp8" and found == "auto":
        return requested
    raise NotModelledError(f"KvCacheConfig.dtype {requested} over a checkpoint of {found} caches")


def _layer(view: CheckpointView, layer: LayerGeometry, cache_dtype: str) -> LayerReading:
    if layer.kv_lora_rank is not None and cache_dtype != "auto":
        k = v = unknown("scales of latent attention (MLA) are not modelled")
    elif cache_dtype == "auto":
        k = v = default("1.0: the cache is not quantized")
    elif cache_dtype == "fp8":
        k = v = default("1.0: scales of the checkpoint are ignored for FP8 caches")
    elif cache_dtype == "int8":
        k = v = unknown("scales of INT8 caches are not modelled")
    else:
        k, v = _nvfp4(view, layer)
    return LayerReading(layer.layer_idx, layer.attention, layer.attention, cache_dtype, k, v)


def _nvfp4(view: CheckpointView, layer: LayerGeometry) -> tuple[SideReading, SideReading]:
    """Return the scales that the fused Q/K/V layer takes: both sides, or none."""
    reason = _why_unknown(view, layer)
    if reason:
        return unknown(reason), unknown(reason)
    names = [f"{layer.attention}.{side}_proj.{side}_scale" for side in "kv"]
    present = [name for name in names if name in view.tensors]
    if not present:
        reason = f"neither `{names[0]}` nor v's: what is used then is not known"
        return unknown(reason), unknown(reason)
    if len(present) == 1:
        raise LoadError(f"k_scale and v_scale must be loaded together (only `{present[0]}`)")
    values = [float(view.read(name).ravel().astype(np.float32)[0]) for name in names]
    if not all(0 < value < np.inf for value in values):
        reason = "what becomes of scales that are not above zero and finite is not known"
        return unknown(reason), unknown(reason)
    k, v = (SideReading((value,), name, "") for value, name in zip(values, names, strict=True))
    return k, v


def _why_unknown(view: CheckpointView, layer: LayerGeometry) -> str:
    path = layer.attention
    if layer.shared_from is not None:
        return "scales of a layer that reads another's cache are not modelled"
    if not any(name.startswith(f"{path}.k_proj.") and "scale" not in name for name in view.tensors):
        return "which scales a checkpoint of fused projections gives is not modelled"
    for name in view.tensors:
        if not name.startswith(f"{path}."):
            continue
        projection, _, scale = name.removeprefix(f"{path}.").partition(".")
        if scale not in ("k_scale", "v_scale") or projection not in ("q_proj", "k_proj", "v_proj"):
            continue
        if projection[0] != scale[0]:
            return f"`{name}` also counts, perhaps; not modelled"
        if view.tensors[name].numel != 1:
            return f"`{name}` is not one number"
        if name in view.duplicates:
            return f"`{name}` lies in several files; which is read is not modelled"
    return ""
