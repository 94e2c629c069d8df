"""Where a decoder's attention modules are, from the checkpoint's tensor names."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvq.errors import UnsupportedModelError

# The layer that makes keys, alone or fused with others, as model codes name it.
KEY_PROJECTIONS = (
    "k_proj", "key_proj", "to_k", "key", "k", "Wk", "project_k", "c_attn", "qkv_proj", "qkv",
    "query_key_value", "Wqkv", "W_pack", "kv_proj", "kv_a_proj_with_mqa", "kv_a_proj", "kv_b_proj",
    "k_lin", "kv",
)  # fmt: skip
VALUE_PROJECTIONS = ("v_proj", "value_proj", "to_v", "value", "v", "Wv", "project_v", "v_lin")
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "qk_norm", "kv_a_layernorm", "kv_norm")
VALUE_NORMS = ("v_norm",)

_WEIGHTS = ("weight", "bias", "weight_packed", "qweight", "_weight_qdata")
_ATTENTION = re.compile(
    rf"^(?P<path>(?P<prefix>(?:[A-Za-z_]\w*\.)*)(?P<layer>\d+)(?P<suffix>(?:\.\w+)*?))"
    rf"\.(?:{'|'.join(KEY_PROJECTIONS)})(?:\.linear|\.base_layer)?\.(?:{'|'.join(_WEIGHTS)})$"
)
_KEYS_AND_VALUES = re.compile(
    rf"\.(?:{'|'.join(KEY_PROJECTIONS + VALUE_PROJECTIONS + KEY_NORMS + VALUE_NORMS)})"
    rf"(?:\.linear|\.base_layer)?\.(?:{'|'.join(_WEIGHTS)})$"
)
# Parts of a model that hold attention but no cache of the text decoder.
_ELSEWHERE = re.compile(
    r"(^|\.)(\w*(vision|visual|image|audio|speech|protein|qformer|perceiver|resampler|patcher|"
    r"talker|tower|sam_model|qwen2_model|gated_cross|depth_decoder)\w*|vit|vq\w*)\."
)
_DRAFT = re.compile(r"(^|\.)(mtp\w*|eagle\w*)\.")
_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
_STATE = re.compile(r"linear_attn|mamba|ssm|recurrent|conv|indexer|compressor", re.IGNORECASE)


@dataclass(frozen=True)
class AttentionPaths:
    """Paths of the decoder's attention modules by layer number; `drafts` are MTP layers'."""

    own: Mapping[int, tuple[str, ...]]
    cross: Mapping[int, tuple[str, ...]]
    drafts: tuple[str, ...]


def is_key_or_value_weight(name: str) -> bool:
    """Whether a tensor takes part in making keys or values."""
    return bool(_KEYS_AND_VALUES.search(name))


def is_text_path(path: str) -> bool:
    """Whether a module path lies outside of the towers of other modalities."""
    return not _ELSEWHERE.search(f"{path}.")


def find_attention(
    names: Iterable[str],
    num_layers: int,
    cached: frozenset[int],
    architecture: str,
    num_drafts: int = 0,
) -> AttentionPaths:
    """Find the attention modules of the text decoder.

    A module counts when a key projection lies in it. Where several stacks of layers are left after
    those of other modalities, it is the one called decoder, else the one that has every cached
    layer.

    Args:
        names: the checkpoint's tensor names.
        num_layers: how many layers the decoder has.
        cached: numbers of the layers that must have attention.
        architecture: for errors.
        num_drafts: how many draft layers follow the decoder's, with numbers that go on.

    Raises:
        UnsupportedModelError: several stacks could be the text decoder, or it has more layers than
            config.json says.
    """
    stacks: dict[str, dict[str, int]] = {}  # prefix before the layer number → path → layer
    drafts = set()
    for name in names:
        match = _ATTENTION.match(name) if _may_be_key(name) else None
        if not match or not is_text_path(match["path"]) or _STATE.search(match["suffix"]):
            continue
        path = match["path"]
        if path.rpartition(".")[2] in KEY_PROJECTIONS:  # a module of projections inside attention
            path = path.rpartition(".")[0]
        if _DRAFT.search(path):
            drafts.add(path)
        else:
            stacks.setdefault(match["prefix"], {})[path] = int(match["layer"])
    chosen = _decoder_stack(stacks, cached, architecture)
    for path in [path for path, layer in chosen.items() if layer >= num_layers]:
        if (layer := chosen.pop(path)) >= num_layers + num_drafts:
            raise UnsupportedModelError(
                f"`{path}` is of layer {layer}, and config.json says that `{architecture}` has "
                f"{num_layers}: transformers would leave it out",
                code="geometry.surplus",
                hint="config.json and the tensors disagree; compare them with the original model",
            )
        drafts.add(path)
    own: dict[int, tuple[str, ...]] = {}
    cross: dict[int, tuple[str, ...]] = {}
    for path, layer in sorted(chosen.items()):
        kind = cross if _CROSS.search(path.split(f".{layer}.", 1)[-1]) else own
        kind[layer] = (*kind.get(layer, ()), path)
    return AttentionPaths(own, cross, tuple(sorted(drafts)))


def _may_be_key(name: str) -> bool:
    """Whether a name ends as those do that `_ATTENTION` matches; much faster than that."""
    *_, above, module, leaf = "", "", *name.rsplit(".", 3)
    return leaf in _WEIGHTS and (module in KEY_PROJECTIONS or above in KEY_PROJECTIONS)


def _decoder_stack(
    stacks: Mapping[str, dict[str, int]], cached: frozenset[int], architecture: str
) -> dict[str, int]:
    prefixes = [p for p in stacks if re.search(r"(^|\.|_)decoder\.", p)] or list(stacks)
    if len(prefixes) > 1:
        prefixes = [p for p in prefixes if cached.issubset(stacks[p].values())] or prefixes
    if len(prefixes) > 1:
        raise UnsupportedModelError(
            f"`{architecture}` has {len(prefixes)} stacks of attention layers, and kvq does not "
            f"know which one is the text decoder: {', '.join(f'`{p}N`' for p in sorted(prefixes))}",
            code="geometry.stacks",
        )
    return stacks[prefixes[0]] if prefixes else {}
