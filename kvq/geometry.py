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
    r"^(?P<path>(?P<prefix>.*?)(?:layers|h|blocks)\.(?P<layer>\d+)\.(?P<attention>[\w.]+?))"
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


def read_geometry(config: Mapping[str, Any], tensor_names: Iterable[str]) -> Geometry:
    """Derive the geometry of a decoder-only model.

    Raises:
        UnsupportedModelError: config or tensor names describe no decoder that kvq knows, or one
            whose cache is not plain keys and values (MLA, layers that share another's cache).
    """
    text = text_config(config)
    architecture = (config.get("architectures") or [config.get("model_type") or "unknown"])[0]
    _refuse_unplain_caches(config, text, architecture)
    count = text.get("num_hidden_layers")
    heads = text.get("num_attention_heads")
    if not isinstance(count, int) or not isinstance(heads, int) or count < 1 or heads < 1:
        raise UnsupportedModelError(
            f"config.json of `{architecture}` has no `num_hidden_layers` and `num_attention_heads`",
            code="geometry.no_layers",
        )
    kinds = text.get("layer_types") or ["full_attention"] * count
    if len(kinds) != count:
        raise UnsupportedModelError(
            f"config.json of `{architecture}` lists {len(kinds)} `layer_types` for {count} layers",
            code="geometry.layer_types",
        )
    paths = _attention_paths(tensor_names)
    layers = []
    for i, kind in enumerate(kinds):
        if _is_cached(kind, architecture):
            layers.append(_layer(i, kind, paths, text, heads, architecture))
    return Geometry(architecture, count, tuple(layers))


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
    heads: int,
    architecture: str,
) -> LayerGeometry:
    if layer_idx not in paths:
        raise UnsupportedModelError(
            f"no key projection of layer {layer_idx} of `{architecture}` among the tensor names",
            code="geometry.no_attention",
            hint="expected names like `model.layers.0.self_attn.k_proj.weight`",
        )
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or text.get("hidden_size", 0) // heads
    return LayerGeometry(layer_idx, kind, paths[layer_idx], heads, kv_heads, head_dim)
