"""Every way in which tools have named the scales of attention, and where they are found."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvq.checkpoint import CheckpointView
from kvq.geometry import Geometry

SIDES = ("k", "v", "q")


@dataclass(frozen=True)
class Spelling:
    """One naming: what follows the attention module's path, with `{s}` for the side.

    `whose` says who writes it.
    """

    name: str
    leaf: str
    whose: str
    query_leaf: str | None = None

    def tensor(self, attention: str, side: str) -> str:
        """Return a scale's tensor name.

        vLLM puts its scales below a module `attn` inside of the attention module, and takes a name
        that ends in `.attn.k_scale` for one that says so already: where the attention module itself
        is called `attn` (GPT-2), it must be written out (`layers/quantization/base_config.py`).
        """
        leaf = self.query_leaf if side == "q" and self.query_leaf else self.leaf
        inner = ".attn" if self.name == "attention" and attention.endswith(".attn") else ""
        return f"{attention}{inner}.{leaf.format(s=side)}"


SPELLINGS: Mapping[str, Spelling] = {
    spelling.name: spelling
    for spelling in (
        Spelling("attention", "{s}_scale", "llm-compressor, Megatron"),
        Spelling("projection", "{s}_proj.{s}_scale", "ModelOpt"),
        Spelling("inner", "attn.{s}_scale", "vLLM's own modules"),
        Spelling("fused", "qkv_proj.{s}_scale", "older ModelOpt and llm-compressor"),
        Spelling("output", "{s}_proj.output_scale", "Quark, older llm-compressor"),
        Spelling("cache", "{s}_cache.scale", "HYV3", query_leaf="q.scale"),
        Spelling("native", "{s}_fake_quantizer.qscale_act", "Mistral"),
        Spelling("single", "kv_scale", "AutoFP8"),  # one number for K and V
        Spelling("native-single", "kv_fake_quantizer.qscale_act", "Mistral"),
    )
}


@dataclass(frozen=True)
class FoundScale:
    """A scale tensor in a checkpoint: its layer and attention, side (`k`, `v`, `q`) and name."""

    layer_idx: int
    attention: str
    side: str
    tensor: str
    spelling: str = "attention"


@dataclass(frozen=True)
class FoundScales:
    """All scale tensors of a checkpoint that belong to a layer.

    `scales` has at most one for each attention module and side, in the preferred spelling where
    that is there; `others` are the same under further names; `drafts` those of draft layers.
    """

    scales: tuple[FoundScale, ...]
    others: tuple[FoundScale, ...]
    drafts: tuple[FoundScale, ...]

    @property
    def all(self) -> tuple[FoundScale, ...]:
        """Every one of them."""
        return self.scales + self.others + self.drafts


def find_scales(view: CheckpointView, geometry: Geometry, preferred: str) -> FoundScales:
    """Find the scales of a checkpoint under every spelling, `preferred` first."""
    order = [SPELLINGS[preferred], *(s for s in SPELLINGS.values() if s.name != preferred)]
    scales, others = [], []
    for layer in geometry.layers:
        for side in ("q", "k", "v"):
            found = list(_named(view, order, layer.layer_idx, layer.attention, side))
            scales += found[:1]
            others += found[1:]
    drafts = [
        scale
        for path in geometry.drafts
        for side in ("k", "v")
        for scale in list(_named(view, order, geometry.num_hidden_layers, path, side))[:1]
    ]
    return FoundScales(tuple(scales), tuple(others), tuple(drafts))


def _named(
    view: CheckpointView, order: list[Spelling], layer_idx: int, attention: str, side: str
) -> Iterator[FoundScale]:
    seen = set()
    for spelling in order:
        if side == "q" and "single" in spelling.name:
            continue
        name = spelling.tensor(attention, side)
        if name in view.tensors and name not in seen:
            seen.add(name)
            yield FoundScale(layer_idx, attention, side, name, spelling.name)
