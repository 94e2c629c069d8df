"""Rules about scales that are read without a word, and are not what their name says."""

from collections.abc import Iterator

from kvq.checks.context import Context, file_of, rule
from kvq.checks.findings import Finding
from kvq.checks.spelled import conflicts, crossed


@rule()
def spellings_agree(context: Context) -> Iterator[Finding]:
    """A scale that stands under several names has one value: which is used differs by engine."""
    for other, first in conflicts(context):
        yield Finding(
            "scale.conflict", "error",
            f"`{first}` and `{other.tensor}` are scales of the same {other.side}, and differ: "
            "which one is used depends on the engine and on the order of files",
            other.layer_idx, other.tensor, file_of(context, other.tensor),
            str(context.values[first].ravel().tolist()),
            str(context.values[other.tensor].ravel().tolist()),
            fix="`kvq export --strip`, then `kvq export` with the model's calibration",
        )  # fmt: skip


@rule()
def sides_are_not_crossed(context: Context) -> Iterator[Finding]:
    """No scale of V stands at K's projection: vLLM goes by the last part of the name alone.

    Source: vLLM `layers/quantization/base_config.py`, whose pattern takes either projection.
    """
    for name, (layer_idx, side, right) in crossed(context).items():
        yield Finding(
            "scale.crossed", "error",
            f"`{name}` names both sides: vLLM takes it for {side}, other engines for none",
            layer_idx, name, file_of(context, name), right, name,
            fix="`kvq export --strip`, then `kvq export` with the model's calibration",
        )  # fmt: skip
