"""What config.json says about the decoder's layers, in every spelling that models use."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from kvq.errors import UnsupportedModelError
from kvq.files import shorten

Config = Mapping[str, Any]

# One quantity, many spellings; the first that is set counts. Those of the decoder of an
# encoder-decoder model come first, since such a config names the encoder's beside them.
NUM_LAYERS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers",
              "num_layers", "layers")  # fmt: skip
NUM_HEADS = ("decoder_attention_heads", "num_decoder_attention_heads", "num_attention_heads",
             "n_head", "n_heads", "num_heads", "attention_heads")  # fmt: skip
NUM_KV_HEADS = ("num_key_value_heads", "num_attention_groups", "n_head_kv",
                "attn_config.kv_n_heads")  # fmt: skip
HEAD_DIM = ("head_dim", "d_kv", "attention_head_dim", "kv_channels", "dim_head", "d_head")
HIDDEN = ("hidden_size", "n_embed", "n_embd", "d_model", "emb_dim", "embed_dim", "dim")
# Positions that a token can have; T5's relative ones have no end.
MAX_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
# Keys whose absence means the default of the model's config class, and no other thing.
DEFAULTED = (
    *NUM_LAYERS, *NUM_HEADS, *NUM_KV_HEADS[:1], *HEAD_DIM, *HIDDEN, *MAX_POSITIONS, "vocab_size",
    "kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "num_kv_shared_layers", "multi_query",
    "new_decoder_architecture", "num_kv_heads", "full_attention_interval", "sliding_window_pattern",
    "_sliding_window_pattern", "global_head_dim", "num_global_key_value_heads",
    "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim",
    "attn_layer_period", "attn_layer_offset", "decoder_start_token_id",
)  # fmt: skip

_USUAL = ("num_hidden_layers", "num_attention_heads", "hidden_size")  # to name what is missing

# Where a composite config describes its text decoder.
_TEXT = ("text_config", "thinker_config", "llm_config", "language_config", "decoder", "generator")


def text_config(config: Config) -> Config:
    """Return the part of config.json that describes the text decoder."""
    for key in _TEXT:
        nested = config.get(key)
        if isinstance(nested, dict):
            return text_config(nested)
    return config


@cache
def _defaults() -> Mapping[str, Mapping[str, Any]]:
    """Model type → the defaults of its config class, as scripts/make_config_defaults.py found."""
    text = files("kvq.geometry").joinpath("defaults.json").read_text("utf-8")
    found: Mapping[str, Mapping[str, Any]] = json.loads(text)["defaults"]
    return found


def with_defaults(text: Config) -> Config:
    """Return the decoder's config with what its class assumes where config.json is silent.

    A quantity that is set under any spelling keeps that value alone.
    """
    defaults = dict(_defaults().get(str(text.get("model_type")), {}))
    for spellings in (NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, MAX_POSITIONS):
        if any(name in text or lookup(text, name) is not None for name in spellings):
            for name in spellings:
                defaults.pop(name, None)
    if text.get("kv_lora_rank", 0) is None:  # a model of an MLA family without MLA
        for name in (*HEAD_DIM, "v_head_dim", "qk_rope_head_dim"):
            defaults.pop(name, None)
    return {**defaults, **text}


def lookup(text: Config, *names: str) -> Any:
    """Return the first of `names` that is set; a dotted name reaches into a nested object."""
    for name in names:
        found: Any = text
        for key in name.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is not None:
            return found
    return None


_REQUIRED = object()
MAX_COUNT = 2**31 - 1


def count(text: Config, *names: str, layer_idx: int | None = None, default: Any = _REQUIRED) -> Any:
    """Return a positive integer of the config; `default` where none of `names` is set.

    Args:
        text: the text decoder's config.
        names: spellings of the quantity.
        layer_idx: take this entry where the value is a list with one entry per layer.
        default: what an absent or null value means.

    Raises:
        UnsupportedModelError: another type or value, or absent without a default.
    """
    value = lookup(text, *names)
    if value is None and default is not _REQUIRED:
        return default
    if isinstance(value, list) and layer_idx is not None and layer_idx < len(value):
        value = value[layer_idx]
    if type(value) is not int or not 0 < value <= MAX_COUNT:
        written = [name for name in names if name in text or lookup(text, name) is not None]
        named = next(iter(written or [name for name in names if name in _USUAL]), names[0])
        raise UnsupportedModelError(
            f"`{named}` in config.json is {shorten(value)}, expected a positive integer",
            code="geometry.number",
        )
    return value


# Models whose cache is not keys and values per token and layer, and what they keep instead.
OTHER_CACHES = {
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), "it keeps a recurrent state"
    ),
    "blt": "it runs three decoders over bytes and patches",
    "deepseek_v4": "its cache compresses tokens",
    "diffusion_gemma": "it denoises a canvas against a cache that its encoder fills",
    "fsmt": "with a cache, its decoder reads one token at a time",
    "pi0": "its action expert goes on from a cache of images, text and robot states",
    "hrm_text": "it runs its layers many times, with a cache for each time",
    "openai-gpt": "its class in transformers has no cache",
    "reformer": "it caches hashed buckets of hidden states",
    "voxtral_realtime": "its audio encoder keeps a KV cache of its own",
    "xlnet": "it caches hidden states (`mems`)",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "this draft model reads the cache of the model that it drafts for",
    ),
}

FULL, SLIDING, CHUNKED, CROSS = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "cross_attention",
)
# Kinds of layers as config.json spells them. A cached layer keeps keys and values (or MLA's
# latent row); a `hybrid` one does so beside a recurrent state; the others keep no such cache.
CACHED_KINDS = {
    **{kind: kind for kind in (FULL, SLIDING, CHUNKED, "hybrid")},
    **dict.fromkeys(("attention", "global"), FULL),
    **dict.fromkeys(
        (
            "deepseek_sparse_attention",
            "minimax_m3_sparse",
            "qwen_sparse_attention",
            "indexed_attention",
        ),
        FULL,
    ),
    **dict.fromkeys(("local", "hybrid_sliding"), SLIDING),
}
STATE_KINDS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp")


def layer_kinds(text: Config, num_layers: int, architecture: str) -> list[str] | None:
    """Return each layer's kind as the config declares it; None if it declares nothing.

    Raises:
        UnsupportedModelError: a declaration of another length, or a kind that is not known.
    """
    declared = _declared_kinds(text, num_layers)
    if declared is None:
        return None
    key, kinds = declared
    drafts = text.get("num_nextn_predict_layers")
    if isinstance(kinds, list) and type(drafts) is int and len(kinds) == num_layers + drafts:
        kinds = kinds[:num_layers]  # Step lists its draft layers too
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise UnsupportedModelError(
            f"`{key}` of `{architecture}` is {shorten(kinds)}, expected one for each of the "
            f"{num_layers} layers",
            code="geometry.layer_types",
        )
    for kind in kinds:
        if str(kind) not in CACHED_KINDS and str(kind) not in STATE_KINDS:
            raise UnsupportedModelError(
                f"`{architecture}` has a layer of unknown kind {shorten(kind)}; "
                f"known: {', '.join([*CACHED_KINDS, *STATE_KINDS])}",
                code="geometry.layer_kind",
            )
    return [CACHED_KINDS.get(str(kind), str(kind)) for kind in kinds]


_NEMOTRON: Config = {"*": FULL, "M": "mamba", "-": "mlp", "E": "moe"}


def _declared_kinds(text: Config, num_layers: int) -> tuple[str, Any] | None:
    for key in ("layer_types", "layers_block_type", "attention_layers"):
        if text.get(key) is not None:
            return key, text[key]
    every = range(num_layers)
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return "hybrid_override_pattern", [_NEMOTRON.get(letter, letter) for letter in pattern]
    types = text.get("attn_type_list")
    if isinstance(types, list):  # MiniMax-Text-01: 1 is softmax attention, 0 lightning
        return "attn_type_list", [FULL if kind == 1 else "linear_attention" for kind in types]
    for key in ("attn_layer_indices", "full_attn_idxs", "linear_attn_config.full_attn_layers"):
        chosen = lookup(text, key)
        if isinstance(chosen, list):
            first = 1 if "." in key else 0  # Kimi counts its layers from 1
            chosen = {number for number in chosen if type(number) is int}
            return key, [FULL if i + first in chosen else "linear_attention" for i in every]
    if text.get("attn_layer_period") is not None:  # Jamba
        period, offset = count(text, "attn_layer_period"), text.get("attn_layer_offset") or 0
        return "attn_layer_period", [FULL if i % period == offset else "mamba" for i in every]
    interval = text.get("full_attention_interval")
    if interval is not None:  # Qwen3-Next: every interval-th layer is full attention
        every_nth = count(text, "full_attention_interval")
        kinds = [FULL if (i + 1) % every_nth == 0 else "linear_attention" for i in every]
        return "full_attention_interval", kinds
    blocks = text.get("block_types")
    if isinstance(blocks, list) and blocks:  # RecurrentGemma repeats its pattern
        return "block_types", [blocks[i % len(blocks)] for i in every]
    return _declared_windows(text, num_layers)


def _declared_windows(text: Config, num_layers: int) -> tuple[str, Any] | None:
    every = range(num_layers)
    hybrid = text.get("hybrid_layer_pattern")
    if isinstance(hybrid, list):  # MiMo V2: 1 is sliding
        return "hybrid_layer_pattern", [SLIDING if entry else FULL for entry in hybrid]
    pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    if type(pattern) is int and pattern > 0:  # every pattern-th layer sees everything
        kinds = [SLIDING if (i + 1) % pattern else FULL for i in every]
        return "sliding_window_pattern", kinds
    return None
