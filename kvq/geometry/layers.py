"""Per layer: kind of cache, heads and head sizes, from config.json and the tensor names alone."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvq.errors import UnsupportedModelError
from kvq.files import shorten
from kvq.geometry.config import (
    CROSS,
    FULL,
    HEAD_DIM,
    HIDDEN,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    OTHER_CACHES,
    SLIDING,
    STATE_KINDS,
    Config,
    count,
    layer_kinds,
    lookup,
    text_config,
    with_defaults,
)
from kvq.geometry.paths import AttentionPaths, find_attention
from kvq.quantizers import KEY, KEY_PE, KV_C, QUERY, VALUE

_MAX_LAYERS, _MAX_HEADS, _MAX_NAME = 4096, 1 << 16, 200


@dataclass(frozen=True)
class LayerGeometry:
    """One attention module with a KV cache; `attention` is its path as in the tensor names.

    `head_dim` is that of K, `v_head_dim` that of V. Under MLA the cache holds one row per token:
    `kv_lora_rank` latent numbers and `head_dim` rotary ones, perhaps none. A layer that keeps no
    cache of its own reads that of `shared_from`, an attention path.
    """

    layer_idx: int
    kind: str
    attention: str
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    shared_from: str | None = None

    @property
    def cached(self) -> tuple[tuple[str, int], ...]:
        """The quantizers of what the cache is handed, each with its head size."""
        if self.kv_lora_rank is None:
            return (KEY, self.head_dim), (VALUE, self.v_head_dim)
        rotary = ((KEY_PE, self.head_dim),) if self.head_dim else ()
        return (KV_C, self.kv_lora_rank), *rotary

    @property
    def quantizers(self) -> tuple[str, ...]:
        """Names of the layer's quantizers, the query's first."""
        return QUERY, *(quantizer for quantizer, _ in self.cached)


@dataclass(frozen=True)
class Geometry:
    """The decoder: its attention modules with a cache, and how many layers there are in all.

    `drafts` are attention paths of MTP or EAGLE layers: engines may run them, transformers never
    does, so their caches are not calibrated.
    """

    architecture: str
    num_hidden_layers: int
    layers: tuple[LayerGeometry, ...]
    drafts: tuple[str, ...] = ()
    is_encoder_decoder: bool = False

    @property
    def uncached(self) -> tuple[int, ...]:
        """Layers without a KV cache (linear attention and state-space layers)."""
        cached = {layer.layer_idx for layer in self.layers}
        return tuple(i for i in range(self.num_hidden_layers) if i not in cached)

    @property
    def is_mla(self) -> bool:
        """Whether some layers cache a latent row (multi-head latent attention)."""
        return any(layer.kv_lora_rank is not None for layer in self.layers)


def architecture_name(config: Config) -> str:
    """Return the model class that config.json names, else its model type."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    name = first if isinstance(first, str) else str(config.get("model_type") or "unknown")
    return name if name.isprintable() and len(name) <= _MAX_NAME else shorten(name)


def read_geometry(config: Config, tensor_names: Iterable[str]) -> Geometry:
    """Derive the geometry of a model's text decoder.

    Raises:
        UnsupportedModelError: config or tensor names describe no decoder that kvq knows, or one
            whose cache is not keys and values per token; the message says what it is.
    """
    text, architecture = with_defaults(text_config(config)), architecture_name(config)
    names = sorted(tensor_names)
    _refuse_other_caches(config, text, architecture)
    num_layers = _num_layers(text)
    kinds = layer_kinds(text, num_layers, architecture)
    shared = text.get("num_kv_shared_layers") or 0
    if type(shared) is not int or not 0 <= shared <= num_layers:
        raise UnsupportedModelError(
            f"`num_kv_shared_layers` in config.json is {shorten(shared)}, "
            f"expected 0 to {num_layers}",
            code="geometry.number",
        )
    drafts = text.get("num_nextn_predict_layers")
    cached = frozenset(
        i for i in range(num_layers - shared) if kinds is None or kinds[i] not in STATE_KINDS
    )
    paths = find_attention(
        names, num_layers, cached, architecture, drafts if type(drafts) is int else 0
    )
    encoder_decoder = bool(config.get("is_encoder_decoder"))
    if not encoder_decoder:
        paths = _without_cross(paths, text)
    if cached and not paths.own and not paths.cross:
        raise UnsupportedModelError(
            f"no layer of `{architecture}` has a key projection among the tensor names: it keeps "
            "no keys and values, or names them in a way that kvq does not know",
            code="geometry.no_attention",
            hint="expected names like `model.layers.0.self_attn.k_proj.weight`",
        )
    layers: list[LayerGeometry] = []
    for i in range(num_layers):
        kind = FULL if kinds is None else kinds[i]
        if kind in STATE_KINDS:
            continue
        if shared and i >= num_layers - shared:
            layers.append(_sharing_layer(layers, i, kind, names, text, architecture))
        else:
            layers += _own_layers(paths, i, kind, text, architecture)
    return Geometry(architecture, num_layers, tuple(layers), paths.drafts, encoder_decoder)


def _without_cross(paths: AttentionPaths, text: Config) -> AttentionPaths:
    """Return the paths of a model without encoder: its cross-attention, if any, never runs."""
    if lookup(text, "cross_attention_layers"):  # these read images, and cache their features
        return paths
    return AttentionPaths(paths.own, {}, paths.drafts)


def _num_layers(text: Config) -> int:
    if text.get("model_type") == "longcat_flash":  # two attentions in each of these
        return _checked(count(text, "num_layers"))
    for key in ("layers_block_type", "hybrid_override_pattern"):  # some configs count by these
        if lookup(text, *NUM_LAYERS) is None and isinstance(text.get(key), list | str):
            return _checked(len(text[key]))
    return _checked(count(text, *NUM_LAYERS))


def _checked(num_layers: int) -> int:
    if not 0 < num_layers <= _MAX_LAYERS:
        raise UnsupportedModelError(
            f"config.json says {num_layers} layers, expected 1 to {_MAX_LAYERS}",
            code="geometry.number",
        )
    return num_layers


def _refuse_other_caches(config: Config, text: Config, architecture: str) -> None:
    reason = OTHER_CACHES.get(str(config.get("model_type"))) or OTHER_CACHES.get(
        str(text.get("model_type"))
    )
    if text.get("use_cla"):
        reason = "its layers share caches in a pattern that kvq does not know (`use_cla`)"
    if reason:
        raise UnsupportedModelError(
            f"`{architecture}` is not supported: {reason}", code="geometry.unsupported"
        )


def _own_layers(
    paths: AttentionPaths, layer_idx: int, kind: str, text: Config, architecture: str
) -> list[LayerGeometry]:
    own = paths.own.get(layer_idx, ())
    cross = paths.cross.get(layer_idx, ())
    if not own and paths.own and text.get("model_type") in ("zamba", "zamba2"):
        # its attention blocks have caches of their own, but tied weights, stored once
        first = min(paths.own)
        own = tuple(p.replace(f".{first}.", f".{layer_idx}.", 1) for p in paths.own[first])
    if not own and not cross:
        raise UnsupportedModelError(
            f"no key projection of layer {layer_idx} of `{architecture}` among the tensor names, "
            "and config.json does not say that this layer keeps no cache",
            code="geometry.no_attention",
            hint="expected names like `model.layers.0.self_attn.k_proj.weight`",
        )
    found = [_layer(layer_idx, kind, path, text) for path in own]
    return found + [_layer(layer_idx, CROSS, path, text) for path in cross]


def _sharing_layer(
    layers: list[LayerGeometry], layer_idx: int, kind: str, names: list[str], text: Config,
    architecture: str,
) -> LayerGeometry:  # fmt: skip
    """Return a layer that reads the cache of the last layer of its kind that has its own.

    Source: transformers `models/gemma3n/modeling_gemma3n.py`, vLLM `model_executor/models/gemma3n`.
    """
    donors = [layer for layer in layers if layer.kind == kind and layer.shared_from is None]
    if not donors:
        raise UnsupportedModelError(
            f"layer {layer_idx} of `{architecture}` reads the cache of an earlier `{kind}` layer, "
            "and this model has none: a draft model that reads another one's cache keeps no own",
            code="geometry.no_donor",
        )
    donor = donors[-1]
    path = donor.attention.replace(f".{donor.layer_idx}.", f".{layer_idx}.", 1)
    at = bisect_left(names, f"{path}.")
    if not names[at : at + 1] or not names[at].startswith(f"{path}."):
        raise UnsupportedModelError(
            f"no tensor of layer {layer_idx} of `{architecture}` under `{path}`",
            code="geometry.no_attention",
        )
    own = _layer(layer_idx, kind, path, text)
    return LayerGeometry(
        layer_idx, kind, path, own.num_attention_heads, donor.num_key_value_heads, donor.head_dim,
        donor.v_head_dim, shared_from=donor.attention,
    )  # fmt: skip


def _layer(layer_idx: int, kind: str, attention: str, text: Config) -> LayerGeometry:
    per_layer: Any = text.get("per_layer_config")
    for width in range(1, 7) if isinstance(per_layer, Mapping) else ():  # `5`, `05`, `005`
        own = per_layer.get(str(layer_idx).zfill(width))
        if isinstance(own, Mapping):
            text = {**text, **own}

    def number(*names: str) -> int:
        return int(count(text, *names, layer_idx=layer_idx))

    def optional(*names: str) -> int | None:
        found: int | None = count(text, *names, layer_idx=layer_idx, default=None)
        return found

    heads_names, kv_names, dim_names, v_names = _SPECIAL.get(kind, ((), (), (), ()))
    heads = optional(*heads_names, "num_attention_heads_per_layer") or number(*NUM_HEADS)
    kv_heads = optional(*kv_names, *NUM_KV_HEADS) or _kv_heads(text, heads)
    if max(heads, kv_heads) > _MAX_HEADS:
        raise UnsupportedModelError(
            f"config.json says {max(heads, kv_heads)} heads, expected at most {_MAX_HEADS}",
            code="geometry.number",
        )
    if text.get("kv_lora_rank") is not None:
        rank = number("kv_lora_rank")
        rope = 0 if text.get("qk_rope_head_dim") == 0 else number("qk_rope_head_dim")
        nope = optional("qk_nope_head_dim") or 0
        return LayerGeometry(layer_idx, kind, attention, heads, 1, rope, rank, rank, nope)
    head_dim = optional(*dim_names, *HEAD_DIM) or number(*HIDDEN) // heads
    if text.get("model_type") == "mimo_v2_flash" and kind == SLIDING and not optional(*kv_names):
        kv_heads *= 2  # transformers' class says so where config.json does not
    if text.get("v_head_dim") == 0:  # DeepSeek-VL2 without MLA
        text = {**text, "v_head_dim": None}
    v_head_dim = optional(*v_names, "v_head_dim") or head_dim
    return LayerGeometry(layer_idx, kind, attention, heads, kv_heads, head_dim, v_head_dim)


# Kinds of layers whose heads, KV heads and head sizes of K and V have names of their own.
_SPECIAL: dict[str, tuple[tuple[str, ...], ...]] = {
    SLIDING: (
        ("swa_num_attention_heads",),
        ("swa_num_key_value_heads",),
        ("swa_head_dim",),
        ("swa_v_head_dim",),
    ),
    FULL: ((), ("num_global_key_value_heads",), ("global_head_dim",), ()),
}


def _kv_heads(text: Config, heads: int) -> int:
    """Return the number of KV heads where the config has no `num_key_value_heads`."""
    if text.get("new_decoder_architecture"):  # Falcon
        return int(count(text, "num_kv_heads", default=heads))
    if text.get("multi_query_attention"):  # ChatGLM
        return int(count(text, "multi_query_group_num"))
    one = text.get("multi_query") or lookup(text, "attn_config.attn_type") == "multiquery_attention"
    return 1 if one else heads
