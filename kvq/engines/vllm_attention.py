"""vLLM's attention layers as they are built: their paths, cache dtypes and parameters.

Sources, in vLLM 0.32: `model_executor/layers/attention/attention.py` (Attention),
`compressed_tensors/compressed_tensors.py` (validate_kv_cache_scheme), `transformers_utils/
model_arch_config_convertor.py` (numbers of heads).
"""

from dataclasses import dataclass
from typing import Any

from kvq.checkpoint import CheckpointView
from kvq.engines.base import EngineOptions
from kvq.engines.vllm_classes import UNSUPPORTED, Loader, ModelClass, class_of, inner_of, model_type
from kvq.engines.vllm_config import (
    LoadError,
    NotModelledError,
    Quantization,
    no_attribute,
)
from kvq.engines.vllm_names import Modules
from kvq.engines.vllm_values import Heads
from kvq.geometry import Geometry, LayerGeometry, text_config, with_defaults

_BUFFERS = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")
_SCALES = ("q_scale", "k_scale", "v_scale")
_PARAMETERS: dict[str | None, tuple[str, ...]] = {
    None: (),
    "base": (*_SCALES, "prob_scale"),
    "ct": (*_SCALES, "q_zero_point", "k_zero_point", "v_zero_point"),
}
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
_MULTI_QUERY = ("falcon", "RefinedWeb", "RefinedWebModel")  # one KV head, whatever else is said


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer: `path` is where its scales are, `name` what it is called."""

    geometry: LayerGeometry
    modules: Modules
    name: str
    path: str
    method: str | None
    cache_dtype: str
    heads: Heads | None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of what a tensor can be loaded into."""
        return (*_BUFFERS, *_PARAMETERS[self.method])

    @property
    def num_scales(self) -> int:
        """How many numbers K and V have, on all GPUs together."""
        if self.heads is None:
            return 1
        return self.heads.kv * min(self.heads.tp, max(1, self.heads.total_kv // self.heads.kv))


def attention_layers(
    view: CheckpointView, geometry: Geometry, quantization: Quantization, options: EngineOptions,
    version: str,
) -> tuple[str, tuple[AttentionLayer, ...]]:  # fmt: skip
    """Return the engine's cache dtype, and all layers.

    Raises:
        LoadError: vLLM does not build the model.
        NotModelledError: how it builds this one is not known.
    """
    cls = class_of(view, version)
    if model_type(view) in UNSUPPORTED:
        raise LoadError(UNSUPPORTED[model_type(view)])
    scheme = quantization.scheme
    if scheme is not None and not isinstance(scheme, dict):
        raise no_attribute(scheme, "items")
    if geometry.is_mla and cls.loader is not Loader.REMAP and not cls.expands_latent:
        raise NotModelledError("loading of this model's latent attention (MLA) is not modelled")
    _check_tp(view, geometry, options.tp)
    modules = _modules(view, cls, geometry, quantization)
    cache_dtype, layers = quantization.cache_dtype, []
    for layer in geometry.layers:
        is_mla = layer.kv_lora_rank is not None and not cls.expands_latent
        method = _method(cls, quantization, is_mla=is_mla)
        dtype = cache_dtype if cls.has_cache_config else "auto"
        if method == "ct" and scheme is not None:
            if dtype == "auto":
                dtype = "fp8"
                cache_dtype = dtype if cls.has_cache_config else cache_dtype
            _check_scheme(scheme)
        if cls.has_cache_config and _is_skipped(layer, geometry, view, options):
            dtype = "auto"
        if dtype == "fp8_e5m2" and method and (method != "ct" or scheme is not None):
            raise LoadError("ValueError: fp8_e5m2 kv-cache is not supported with fp8 checkpoints.")
        name = modules.engine_path(layer.attention)
        name, path = (f"{name}.mla_attn.mla_attn",) * 2 if is_mla else (name, f"{name}.attn")
        heads = (
            _heads(view, geometry, layer, quantization, options.tp)
            if method == "ct" and quantization.per_head
            else None
        )
        layers.append(AttentionLayer(layer, modules, name, path, method, dtype, heads))
    return cache_dtype, tuple(layers)


def _check_tp(view: CheckpointView, geometry: Geometry, tp: int) -> None:
    """Refuse numbers of heads that the GPUs cannot share.

    Sources: `config/model.py` (verify_with_parallel_config), `models/llama.py` (LlamaAttention).
    """
    if tp == 1 or not geometry.layers:
        return
    total, total_kv = _total_heads(view, geometry)
    if total % tp:
        raise LoadError(
            f"ValueError: Total number of attention heads ({total}) must be divisible by tensor "
            f"parallel size ({tp})."
        )
    if max(total_kv, tp) % min(total_kv, tp):
        raise LoadError(f"AssertionError: {tp} GPUs cannot share {total_kv} KV heads evenly")


def _total_heads(view: CheckpointView, geometry: Geometry) -> tuple[int, int]:
    text, first = with_defaults(text_config(view.config)), geometry.layers[0]
    return (
        _number(text.get("num_attention_heads"), first.num_attention_heads),
        _number(text.get("num_key_value_heads"), first.num_key_value_heads),
    )


def _modules(
    view: CheckpointView, cls: ModelClass, geometry: Geometry, quantization: Quantization
) -> Modules:
    name = cls.name or geometry.architecture
    bare = Modules(cls, name, quantization.method, ())
    attention = bare.engine_path(geometry.layers[0].attention) if geometry.layers else ""
    return Modules(cls, name, quantization.method, inner_of(view, cls, geometry, attention))


def _method(cls: ModelClass, quantization: Quantization, *, is_mla: bool) -> str | None:
    if not cls.attention_is_quantized:
        return None
    if is_mla and not (quantization.method or "").startswith("modelopt"):
        return None
    if is_mla and quantization.method == "modelopt_mixed":
        return None
    return quantization.kv_method


def _check_scheme(scheme: dict[str, Any]) -> None:
    kind, bits = scheme.get("type"), scheme.get("num_bits")
    if kind != "float" or bits != 8:
        raise LoadError(
            "NotImplementedError: Currently supported kv cache quantization is num_bits=8, "
            f"type=float, however received num_bits={bits}, type={kind}"
        )
    strategy = scheme.get("strategy")
    if strategy not in _STRATEGIES:
        raise LoadError(f"ValueError: {strategy!r} is not a valid QuantizationStrategy")
    if strategy not in ("tensor", "attn_head"):
        raise LoadError(
            "NotImplementedError: Invalid strategy for compressed-tensors KV cache. Expected "
            "strategies: (<QuantizationStrategy.TENSOR: 'tensor'>, "
            "<QuantizationStrategy.ATTN_HEAD: 'attn_head'>), found strategy: "
            f"QuantizationStrategy.{strategy.upper()}"
        )
    if not scheme.get("symmetric"):
        raise LoadError(
            "NotImplementedError: Only support symmetric scaling factor for compressed-tensors KV "
            f"cache. However found symmetric: {scheme.get('symmetric')}"
        )


def _is_skipped(
    layer: LayerGeometry, geometry: Geometry, view: CheckpointView, options: EngineOptions
) -> bool:
    if str(layer.layer_idx) in options.skip_layers:
        return True
    return "sliding_window" in options.skip_layers and _has_window(layer, geometry, view)


def _has_window(layer: LayerGeometry, geometry: Geometry, view: CheckpointView) -> bool:
    """Whether a layer slides: by its own kind, or all do by the config's one number."""
    sliding = [other for other in geometry.layers if other.kind == "sliding_attention"]
    if sliding:
        return layer in sliding
    text = text_config(view.config)
    return bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False


def _heads(
    view: CheckpointView, geometry: Geometry, layer: LayerGeometry, quantization: Quantization,
    tp: int,
) -> Heads:  # fmt: skip
    text = with_defaults(text_config(view.config))
    total, total_kv = _total_heads(view, geometry)
    kv = layer.num_key_value_heads
    if text.get("model_type") in _MULTI_QUERY and text.get("multi_query", True):
        total_kv, kv = (total_kv, kv) if text.get("new_decoder_architecture") else (1, 1)
    config = quantization.config
    has_groups = "config_groups" in config and config.get("quant_method") == "compressed-tensors"
    return Heads(total, total_kv, max(1, kv // tp), tp, has_groups)


def _number(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and value > 0 else otherwise
