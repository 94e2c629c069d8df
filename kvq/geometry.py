"""Per layer: kind of cache, heads and head sizes, from config.json and the tensor names alone."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvq.errors import UnsupportedModelError

# Layer kinds as config.json spells them, and whether such a layer keeps keys and values.
CACHED_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
STATE_KINDS = ("linear_attention", "mamba", "conv", "recurrent", "moe", "mlp")

_ATTENTION = re.compile(
    r"^(?P<path>.*?(?:layers|h|blocks)\.(?P<layer>\d+)\.[\w.]+?)"
    r"\.(?:k_proj|qkv_proj|query_key_value|c_attn|Wqkv|kv_proj|kv_b_proj|kv_a_proj_with_mqa)"
    r"\.(?:weight|weight_packed|qweight)$"
)
_NOT_THE_DECODER = re.compile(r"(^|\.)(vision\w*|visual|audio\w*|mtp\w*|encoder)(\.|$)")


@dataclass(frozen=True)
class LayerGeometry:
    """One decoder layer; `attention` is the attention module's path as in the tensor names."""

    layer_idx: int
    kind: str
    attention: str
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


@dataclass(frozen=True)
class Geometry:
    """The decoder: its layers that keep keys and values, and how many layers there are in all."""

    architecture: str
    num_hidden_layers: int
    layers: tuple[LayerGeometry, ...]

    @property
    def uncached(self) -> tuple[int, ...]:
        """Layers without a KV cache (linear attention and state-space layers)."""
        cached = {layer.layer_idx for layer in self.layers}
        return tuple(i for i in range(self.num_hidden_layers) if i not in cached)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that describes the text decoder."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


_REQUIRED = object()


def count(text: Mapping[str, Any], key: str, *, default: Any = _REQUIRED) -> Any:
    """Return a positive integer of the config; `default` where it is absent or null.

    Raises:
        UnsupportedModelError: another type or value, or absent without a default.
    """
    value = text.get(key)
    if value is None and default is not _REQUIRED:
        return default
    if type(value) is not int or value < 1:
        raise UnsupportedModelError(
            f"`{key}` in config.json is {value!r}, expected a positive integer",
            code="geometry.number",
        )
    return value


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return str(config.get("model_type") or "unknown")


def read_geometry(config: Mapping[str, Any], tensor_names: Iterable[str]) -> Geometry:
    """Derive the geometry of a decoder-only model.

    Raises:
        UnsupportedModelError: config or tensor names describe no decoder that kvq knows, or one
            whose cache is not plain keys and values (MLA, layers that share another's cache).
    """
    text = text_config(config)
    architecture = _architecture(config)
    _refuse_unplain_caches(config, text, architecture)
    num_layers = count(text, "num_hidden_layers")
    kinds = text.get("layer_types")
    kinds = ["full_attention"] * num_layers if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise UnsupportedModelError(
            f"`layer_types` of `{architecture}` is {kinds!r}, expected one for each of the "
            f"{num_layers} layers",
            code="geometry.layer_types",
        )
    paths = _attention_paths(tensor_names)
    layers = []
    for i, kind in enumerate(kinds):
        if _is_cached(kind, architecture):
            layers.append(_layer(i, kind, paths, text, architecture))
    return Geometry(architecture, num_layers, tuple(layers))


def _refuse_unplain_caches(
    config: Mapping[str, Any], text: Mapping[str, Any], architecture: str
) -> None:
    reasons = {
        "it caches a latent row per token (MLA, `kv_lora_rank`)": text.get("kv_lora_rank"),
        "its last layers share other layers' caches (`num_kv_shared_layers`)": text.get(
            "num_kv_shared_layers"
        ),
        "it is an encoder-decoder model": config.get("is_encoder_decoder"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(
                f"`{architecture}` is not supported yet: {reason}", code="geometry.unsupported"
            )


def _is_cached(kind: str, architecture: str) -> bool:
    if kind not in CACHED_KINDS and kind not in STATE_KINDS:
        raise UnsupportedModelError(
            f"`{architecture}` has a layer of unknown kind `{kind}`; "
            f"known: {', '.join(CACHED_KINDS + STATE_KINDS)}",
            code="geometry.layer_kind",
        )
    return kind in CACHED_KINDS


def _attention_paths(tensor_names: Iterable[str]) -> dict[int, str]:
    paths: dict[int, str] = {}
    for name in tensor_names:
        match = _ATTENTION.match(name)
        if match and not _NOT_THE_DECODER.search(match["path"]):
            paths[int(match["layer"])] = match["path"]
    return paths


def _layer(
    layer_idx: int,
    kind: str,
    paths: Mapping[int, str],
    text: Mapping[str, Any],
    architecture: str,
) -> LayerGeometry:
    if layer_idx not in paths:
        raise UnsupportedModelError(
            f"no key projection of layer {layer_idx} of `{architecture}` among the tensor names",
            code="geometry.no_attention",
            hint="expected names like `model.layers.0.self_attn.k_proj.weight`",
        )
    heads = count(text, "num_attention_heads")
    kv_heads = count(text, "num_key_value_heads", default=heads)
    head_dim = count(text, "head_dim", default=None) or count(text, "hidden_size") // heads
    return LayerGeometry(layer_idx, kind, paths[layer_idx], heads, kv_heads, head_dim)
