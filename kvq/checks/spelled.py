"""Names that say something else than their scale: of which a rule of its own speaks."""

from collections.abc import Iterator

import numpy as np

from kvq.checks.context import Context
from kvq.dialects.spellings import FoundScale


def conflicts(context: Context) -> Iterator[tuple[FoundScale, str]]:
    """Yield scales that stand under a second name with another value, and the first name."""
    for other in context.found.others:
        if "single" in other.spelling and other.side == "v":
            continue  # stands for K alone where V has its own (vLLM, same place)
        first = context.by_side[other.attention, other.side].tensor
        one, two = (context.values.get(name) for name in (first, other.tensor))
        if one is not None and two is not None and not _same(one, two):
            yield other, first


def _same(one: np.ndarray, two: np.ndarray) -> bool:
    first, second = (values.astype(np.float64).ravel() for values in (one, two))
    return np.array_equal(first, second, equal_nan=True)


def crossed(context: Context) -> dict[str, tuple[int, str, str]]:
    """Return the names of one side at the projection of the other.

    Each with its layer, the side that its last part says, and the name that says it throughout.
    """
    names = {
        f"{layer.attention}.{projection}_proj.{side}_scale": (
            layer.layer_idx, side, f"{layer.attention}.{side}_proj.{side}_scale",
        )
        for layer in context.geometry.layers
        for projection, side in (("k", "v"), ("v", "k"))
    }  # fmt: skip
    return {name: said for name, said in names.items() if name in context.view.tensors}
