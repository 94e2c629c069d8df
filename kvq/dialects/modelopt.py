"""ModelOpt: `<attention>.k_proj.k_scale`, one float32 number, declared in one or two JSON files.

The divisor on disk is 448 for FP8 and NVFP4 alike (ModelOpt 0.47 `export/quant_utils.py`). vLLM
holds such a scale in the model's dtype (`layers/quantization/kv_cache.py`), so a value that this
dtype does not have would be loaded as another one: scales are rounded up to one that it has.

`config.json` has the flat form, `kv_cache_scheme`: an object for FP8, the word NVFP4 else;
`hf_quant_config.json` has the words under `quantization.kv_cache_quant_algo`. vLLM and SGLang
follow the first, TensorRT-LLM the second, so that both must say the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from kvq.checkpoint import CONFIG_NAME, CheckpointView
from kvq.dialects.base import Declared, DialectPlan, Documents, Target
from kvq.dialects.documents import LEGACY_NAME, at_place, method_of, other_method
from kvq.dialects.spellings import SPELLINGS
from kvq.engines.vllm_values import FLOAT16, model_dtype
from kvq.errors import CheckpointError, DialectError
from kvq.files import read_json
from kvq.scales import LayerScales, ScaleSet

_ALGORITHMS = {"fp8_e4m3": "FP8", "nvfp4": "NVFP4"}
_FORMATS = {"FP8": "fp8_e4m3", "NVFP4": "nvfp4", "INT8": "int8"}
_NUMBERS = {("float", 8): "fp8_e4m3", ("float", 4): "nvfp4", ("int", 8): "int8"}
_FP8_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")


class ModelOpt:
    """The dialect of NVIDIA ModelOpt, read by vLLM, SGLang and TensorRT-LLM."""

    name = "modelopt"
    spelling = "projection"

    def plan(self, scales: ScaleSet, view: CheckpointView, target: Target) -> DialectPlan:
        """Return tensors and both configurations.

        Raises:
            DialectError: the format, scales per head, or another method's base.
        """
        algorithm = _ALGORITHMS.get(scales.format)
        if algorithm is None:
            raise DialectError(
                f"`{scales.format}` cannot be written as modelopt: engines read FP8 and NVFP4",
                code="dialect.format",
                hint="--kv-cfg FP8_KV_CFG or NVFP4_KV_CFG, from the same calibration",
            )
        if scales.granularity != "tensor":
            raise DialectError(
                "modelopt has one scale for all heads: engines refuse a tensor of several numbers",
                code="dialect.granularity",
                hint="--granularity tensor, or --dialect compressed-tensors",
            )
        documents = _documents(view, algorithm)
        stored = round_up(without_query(scales), self.stored, view)
        tensors = {
            SPELLINGS[self.spelling].tensor(layer.attention, side): np.array(values[0], np.float32)
            for layer in stored.layers
            for side, values in layer.scales.items()
        }
        losses = ("engines read no query scale in this dialect",) if scales.has_query else ()
        return DialectPlan(tensors, documents, stored, losses)

    def declared(self, view: CheckpointView) -> Declared:
        """Return the format that config.json declares, else hf_quant_config.json."""
        config = view.quantization_config
        if config is None:
            config = _legacy(view) or {}
        return Declared(_declared(config))

    def stored(self, values: np.ndarray, view: CheckpointView) -> np.ndarray:
        """Return each value, or the next larger one that the model's dtype has."""
        half = model_dtype(view) == FLOAT16
        return ceil_to(values, np.float16 if half else ml_dtypes.bfloat16)

    def strip(self, view: CheckpointView) -> Documents:
        """Return both files without an algorithm for the cache, if something is left in them."""
        documents: dict[str, Mapping[str, Any] | None] = {}
        config, place = view.quantization_config, view.quantization_config_place
        if config is not None and place is not None:
            kept = {key: value for key, value in config.items() if key not in CACHE_KEYS}
            if isinstance(kept.get("quantization"), dict):
                kept["quantization"] = {**kept["quantization"], "kv_cache_quant_algo": None}
            weights = ("quant_algo", "quantization", "quantized_layers", "config_groups")
            only_cache = not any(kept.get(key) for key in weights)
            documents[CONFIG_NAME] = at_place(view.config, place, None if only_cache else kept)
        legacy = _legacy(view)
        if legacy is not None:
            inner = {**legacy["quantization"], "kv_cache_quant_algo": None}
            some = inner.get("quant_algo") or inner.get("quantized_layers")
            documents[LEGACY_NAME] = {**legacy, "quantization": inner} if some else None
        return documents


def declared_formats(view: CheckpointView) -> set[str]:
    """Return the cache formats that config.json and hf_quant_config.json declare, if both exist.

    More than one: the two contradict each other, and engines follow one or the other.
    """
    config, legacy = view.quantization_config, _legacy(view)
    found = {_declared(places) for places in (config, legacy) if places is not None}
    return {name for name in found if name is not None}


def _declared(config: Mapping[str, Any]) -> str | None:
    inner = config.get("quantization")
    places = (inner, config) if isinstance(inner, dict) else (config,)
    for key in CACHE_KEYS:
        for place in places:
            if place.get(key):
                return _format(place[key])
    return None


def without_query(scales: ScaleSet) -> ScaleSet:
    """Return a scale set without the query's."""

    def cache_only(sides: Mapping[str, Any]) -> dict[str, Any]:
        return {side: value for side, value in sides.items() if side != "q"}

    layers = tuple(
        replace(one, scales=cache_only(one.scales), provenance=cache_only(one.provenance))
        for one in scales.layers
    )
    return replace(scales, layers=layers)


def round_up(scales: ScaleSet, stored: Any, view: CheckpointView) -> ScaleSet:
    """Return a scale set with each value as a dialect stores it."""
    layers = tuple(
        LayerScales(
            layer.layer_idx,
            layer.attention,
            {
                side: tuple(float(x) for x in stored(np.array(values, np.float32), view))
                for side, values in layer.scales.items()
            },
            layer.provenance,
        )
        for layer in scales.layers
    )
    return ScaleSet(scales.format, scales.granularity, layers)


def ceil_to(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Return float32 values above zero, each the smallest not below that `dtype` has.

    Raises:
        DialectError: a value above the largest of the dtype.
    """
    with np.errstate(over="ignore", under="ignore"):
        near = np.asarray(values, np.float32).astype(dtype)
    codes = near.view(np.uint16)
    raised = np.where(near.astype(np.float32) < values, codes + np.uint16(1), codes)
    found = raised.astype(np.uint16).view(dtype).astype(np.float32)
    if not np.isfinite(found).all():
        raise DialectError(
            f"a scale of {float(np.max(values)):g} is above the largest number of the model's "
            "dtype, in which vLLM holds it",
            code="dialect.dtype",
            hint="--dialect compressed-tensors, whose scales are float32",
        )
    result: np.ndarray = found
    return result


def _documents(view: CheckpointView, algorithm: str) -> dict[str, Mapping[str, Any]]:
    """Return every file of the base that declares its quantization, with the cache's algorithm."""
    inner: dict[str, Any]
    scheme: Any = _FP8_SCHEME if algorithm == "FP8" else algorithm
    config, legacy = view.quantization_config, _legacy(view)
    documents: dict[str, Mapping[str, Any]] = {}
    if config is None and legacy is None:
        producer = {"name": "modelopt", "written_by": "kvq"}
        alone = {"ignore": [], "kv_cache_scheme": scheme, "quant_method": "modelopt"}
        inner = {"kv_cache_quant_algo": algorithm, "quant_algo": None, "quantized_layers": {}}
        return {
            CONFIG_NAME: {**view.config, "quantization_config": {**alone, "producer": producer}},
            LEGACY_NAME: {"producer": producer, "quantization": inner},
        }
    if config is not None:
        method = str(method_of(config))
        if not method.startswith("modelopt"):
            raise other_method(method, None)
        place = view.quantization_config_place
        assert place is not None
        kept = {key: value for key, value in config.items() if key not in CACHE_KEYS}
        if isinstance(kept.get("quantization"), dict):
            inner = {k: v for k, v in kept["quantization"].items() if k not in CACHE_KEYS}
            kept["quantization"] = {**inner, "kv_cache_quant_algo": algorithm}
        else:
            kept["kv_cache_scheme"] = scheme
        documents[CONFIG_NAME] = at_place(view.config, place, kept)
    if legacy is not None:
        inner = {k: v for k, v in legacy["quantization"].items() if k not in CACHE_KEYS}
        inner["kv_cache_quant_algo"] = algorithm
        documents[LEGACY_NAME] = {**legacy, "quantization": inner}
    return documents


def _legacy(view: CheckpointView) -> dict[str, Any] | None:
    """Return hf_quant_config.json, None if there is none.

    Raises:
        CheckpointError: it has no object `quantization`.
    """
    path = view.root / LEGACY_NAME
    if not path.is_file():
        return None
    found = read_json(path)
    if not isinstance(found.get("quantization"), dict):
        raise CheckpointError(
            f"`{LEGACY_NAME}` has no object `quantization`", code="modelopt.legacy"
        )
    return found


def _format(declared: Any) -> str | None:
    if isinstance(declared, str):
        return _FORMATS.get(declared.upper())
    if isinstance(declared, dict):
        kind, bits = declared.get("type"), declared.get("num_bits")
        if isinstance(kind, str) and type(bits) is int:
            return _NUMBERS.get((kind, bits))
    return None
