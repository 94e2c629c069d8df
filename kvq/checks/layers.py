"""Rules about layers that do not stand alone: one latent row, shared caches, draft layers."""

from collections.abc import Iterator

import numpy as np

from kvq.checks.context import Context, file_of, rule
from kvq.checks.findings import Finding


@rule()
def latent_rows_have_one_scale(context: Context) -> Iterator[Finding]:
    """Under MLA, K and V are one row in the cache: their scales are the same number."""
    for layer in context.geometry.layers:
        if layer.kv_lora_rank is None:
            continue
        found = _values(context, layer.attention)
        if len(found) == 2 and not np.array_equal(found["k"], found["v"]):
            yield Finding(
                "scale.mla", "error",
                "this layer caches one latent row, and its k and v scale differ",
                layer.layer_idx, context.name(layer.attention, "v"),
                expected=str(found["k"].tolist()), found=str(found["v"].tolist()),
                fix="the larger of the two for both: `kvq export` writes that",
            )  # fmt: skip


@rule()
def sharing_layers_have_their_donors_scales(context: Context) -> Iterator[Finding]:
    """A layer that reads another's cache must read it with the scale it was written with."""
    for layer in context.geometry.layers:
        if layer.shared_from is None:
            continue
        own, donor = _values(context, layer.attention), _values(context, layer.shared_from)
        for side in own.keys() & donor.keys():
            if not np.array_equal(own[side], donor[side]):
                scale = context.by_side[layer.attention, side]
                yield Finding(
                    "scale.shared", "error",
                    f"this layer reads the cache of `{layer.shared_from}` with "
                    f"another {side} scale than it was written with",
                    layer.layer_idx, scale.tensor, file_of(context, scale.tensor),
                    str(donor[side].tolist()), str(own[side].tolist()),
                    fix=f"the scale of `{layer.shared_from}`: `kvq export` writes that",
                )  # fmt: skip


@rule()
def draft_layers_have_scales(context: Context) -> Iterator[Finding]:
    """An engine that drafts with MTP layers quantizes their caches too."""
    if not context.scales:
        return
    have = {(scale.attention, scale.side) for scale in context.drafts}
    for attention in context.geometry.drafts:
        for side in ("k", "v"):
            if (attention, side) not in have:
                yield Finding(
                    "layer.draft", "warning",
                    f"the draft layer `{attention}` has no {side} scale: an engine that runs it "
                    "uses 1.0",
                    tensor=context.name(attention, side), expected="a scale tensor", found="none",
                    fix="serve without drafting, or with an unquantized cache",
                )  # fmt: skip


def _values(context: Context, attention: str) -> dict[str, np.ndarray]:
    found = {}
    for side in ("k", "v"):
        scale = context.by_side.get((attention, side))
        if scale is not None and scale.tensor in context.values:
            found[side] = context.values[scale.tensor].ravel()
    return found
