"""SGLang's file for `--quantization-param-path`: one number per layer, for K and V together.

Schema: SGLang 0.5.23 `model_executor/model_runner.py` and `layers/quantization/kv_cache.py`
(`QuantParamSchema`): `model_type` as in config.json, `kv_cache.dtype`, and under
`kv_cache.scaling_factor` a map for each rank with every layer from 0 on.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.dialects.base import Declared, DialectPlan, Documents, Target
from kvq.dialects.documents import LEGACY_NAME, method_of
from kvq.errors import CheckpointError, DialectError
from kvq.files import read_json
from kvq.geometry import Geometry, text_config
from kvq.scales import LayerScales, ScaleSet

FILE_NAME = "kv_cache_scales.json"
_DTYPE = "float8_e4m3fn"
_UNREAD = (
    "SGLang 0.5.23 reads the file, but leaves the number that most attention backends use unset: "
    "FlashInfer and AMX read the cache back unscaled, FA3 stops; trtllm_mha alone uses it"
)
# Model types whose class has a `load_kv_cache_scales`; that of others stops with a RuntimeError,
# unless it inherits one.
_LOADERS = (
    "apertus", "arcee", "exaone4", "glm4", "glm5_next", "hunyuan", "llama", "mimo", "opt", "qwen2",
    "qwen3", "solar",
)  # fmt: skip


class SGLangJSON:
    """The file beside a checkpoint that stays as it is."""

    name = "sglang-json"
    spelling = "attention"

    def plan(self, scales: ScaleSet, view: CheckpointView, target: Target) -> DialectPlan:
        """Return the file; the larger scale of K and V stands for both.

        Raises:
            DialectError: the format, scales per head, layers without a cache, or a base whose
                method loads scales itself, where SGLang stops.
        """
        if scales.format != "fp8_e4m3" or scales.granularity != "tensor":
            raise DialectError(
                f"sglang-json has one FP8 number for each layer, not `{scales.format}` per "
                f"{scales.granularity}",
                code="dialect.format",
                hint="--kv-cfg FP8_KV_CFG --granularity tensor",
            )
        method = method_of(view.quantization_config)
        if view.quantization_config is None and (view.root / LEGACY_NAME).is_file():
            method = "modelopt"
        if method is not None and (view.kv_cache_scheme or method.startswith("modelopt")):
            raise DialectError(
                f"`{method}` loads scales of its own, and SGLang stops with a TypeError when such "
                "a file is given as well",
                code="dialect.base",
                hint="leave --dialect out, to write the scales into the checkpoint",
            )
        model_type = view.config.get("model_type")
        numbers = [layer.layer_idx for layer in scales.layers]
        if numbers != list(range(len(numbers))) or not isinstance(model_type, str):
            raise DialectError(
                f"sglang-json needs every layer from 0 on and a model type: there are layers "
                f"{numbers} of `{model_type}`",
                code="dialect.layers",
                hint="leave --dialect out, to write the scales into the checkpoint",
            )
        stored, losses = _joined(scales)
        factors = {str(layer.layer_idx): layer.scales["k"][0] for layer in stored.layers}
        document = {
            "kv_cache": {
                "dtype": _DTYPE,
                "scaling_factor": {str(rank): factors for rank in range(target.tp)},
            },
            "model_type": model_type,
        }
        unread = _UNREAD
        if model_type not in _LOADERS and not model_type.startswith(("hunyuan_v1", "mimo_v2")):
            unread += f"; its class for `{model_type}` is not known to take such a file at all"
        return DialectPlan({}, {FILE_NAME: document}, stored, losses, unread)

    def declared(self, view: CheckpointView) -> Declared:
        """Return nothing: the file declares, the checkpoint does not."""
        return Declared(None)

    def stored(self, values: np.ndarray, view: CheckpointView) -> np.ndarray:
        """Return the values themselves."""
        return values

    def strip(self, view: CheckpointView) -> Documents:
        """Return nothing to change."""
        return {}


def _joined(scales: ScaleSet) -> tuple[ScaleSet, tuple[str, ...]]:
    """Return the set with the larger of K and V for both, and what that loses."""
    layers, wider = [], []
    for layer in scales.layers:
        k, v = layer.scales["k"][0], layer.scales["v"][0]
        both = max(k, v)
        if k != v:
            smaller = "k" if k < v else "v"
            wider.append(f"layer {layer.layer_idx} {smaller} {both / min(k, v):.3g}x")
        sides = {"k": (both,), "v": (both,)}
        layers.append(LayerScales(layer.layer_idx, layer.attention, sides, layer.provenance))
    losses = [f"one number for K and V; coarser than observed: {', '.join(wider)}"] if wider else []
    if scales.has_query:
        losses.append("no query scales in this dialect")
    return ScaleSet(scales.format, scales.granularity, tuple(layers)), tuple(losses)


def is_sglang_json(document: Mapping[str, Any]) -> bool:
    """Whether a JSON document has this file's form."""
    cache = document.get("kv_cache")
    return isinstance(cache, dict) and "scaling_factor" in cache


def read_sglang_json(path: Path, config: Mapping[str, Any], geometry: Geometry) -> ScaleSet:
    """Return the scales of such a file, as SGLang would apply them to a model.

    Raises:
        CheckpointError: SGLang would refuse the file, or ranks differ.
    """
    document = read_json(path)
    cache = document["kv_cache"]
    ranks = list(cache["scaling_factor"].values()) if isinstance(
        cache.get("scaling_factor"), dict) else []  # fmt: skip
    wanted = [str(layer.layer_idx) for layer in geometry.layers]
    types = {config.get("model_type"), text_config(config).get("model_type")}
    sound = (
        cache.get("dtype") == _DTYPE
        and document.get("model_type") in types
        and ranks
        and all(isinstance(one, dict) and sorted(one) == sorted(wanted) for one in ranks)
        and all(one == ranks[0] for one in ranks)
        and all(type(x) in (int, float) and 0 < x < 1e38 for x in ranks[0].values())
    )
    if not sound:
        raise CheckpointError(
            f"`{path.name}` is not a file that SGLang takes for this model: expected model_type "
            f"{sorted(filter(None, map(str, types)))}, dtype {_DTYPE}, and for each rank the same "
            f"numbers above 0 for layers {wanted[0] if wanted else '-'} to "
            f"{wanted[-1] if wanted else '-'}",
            code="sglang_json.invalid",
        )
    layers = tuple(
        LayerScales(
            layer.layer_idx,
            layer.attention,
            dict.fromkeys(("k", "v"), (float(ranks[0][str(layer.layer_idx)]),)),
            dict.fromkeys(("k", "v"), "unknown"),
        )
        for layer in geometry.layers
    )
    return ScaleSet("fp8_e4m3", "tensor", layers)
