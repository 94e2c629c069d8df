"""Rules about scales that are read without a word, and are not what their name says."""

from collections.abc import Iterator

import numpy as np

from kvq.checks.context import Context, file_of, rule
from kvq.checks.findings import Finding


@rule(beside_engine=True)
def spellings_agree(context: Context) -> Iterator[Finding]:
    """A scale that stands under several names has one value: which is used differs by engine."""
    for other in context.found.others:
        if "single" in other.spelling and other.side == "v":
            continue  # stands for K alone where V has its own (vLLM, same place)
        first = context.by_side[other.attention, other.side].tensor
        one, two = (context.values.get(name) for name in (first, other.tensor))
        if one is not None and two is not None and not _same(one, two):
            yield Finding(
                "scale.conflict", "error",
                f"`{first}` and `{other.tensor}` are scales of the same {other.side}, and differ: "
                "which one is used depends on the engine and on the order of files",
                other.layer_idx, other.tensor, file_of(context, other.tensor),
                str(one.ravel().tolist()), str(two.ravel().tolist()),
                fix="`kvq export --strip`, then `kvq export` with the model's calibration",
            )  # fmt: skip


def _same(one: np.ndarray, two: np.ndarray) -> bool:
    first, second = (values.astype(np.float64).ravel() for values in (one, two))
    return np.array_equal(first, second, equal_nan=True)


@rule(beside_engine=True)
def sides_are_not_crossed(context: Context) -> Iterator[Finding]:
    """No scale of V stands at K's projection: vLLM goes by the last part of the name alone.

    Source: vLLM `layers/quantization/base_config.py`, whose pattern takes either projection.
    """
    for layer in context.geometry.layers:
        for projection, side in (("k", "v"), ("v", "k")):
            name = f"{layer.attention}.{projection}_proj.{side}_scale"
            if name in context.view.tensors:
                yield Finding(
                    "scale.crossed", "error",
                    f"`{name}` names both sides: vLLM takes it for {side}, other engines for none",
                    layer.layer_idx, name, file_of(context, name),
                    f"{layer.attention}.{side}_proj.{side}_scale", name,
                    fix="`kvq export --strip`, then `kvq export` with the model's calibration",
                )  # fmt: skip
