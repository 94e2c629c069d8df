"""What is shown of a calibration or a checkpoint: the per-layer table and its JSON document."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvq.dialects.spellings import SPELLINGS
from kvq.outliers import KeyTraits


@dataclass(frozen=True)
class LayerRow:
    """One line of the per-layer table; numbers per side, flags in words.

    `raised` is the batch that raised a maximum last, counted from 1. A checkpoint has none.
    """

    layer_idx: int
    attention: str
    amax: Mapping[str, float]
    scale: Mapping[str, tuple[float, ...]]
    tokens: int | None
    flags: tuple[str, ...]
    traits: KeyTraits | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)  # side → name of the scale
    raised: Mapping[str, int] = field(default_factory=dict)
    percentile_99_9: Mapping[str, float] = field(default_factory=dict)

    @property
    def spread(self) -> dict[str, float]:
        """By side, how many times the 99.9th percentile amax is: what is left to outliers."""
        return {
            side: self.amax[side] / percentile if percentile else math.inf
            for side, percentile in self.percentile_99_9.items()
            if self.amax[side]
        }

    def to_json(self, *, observed: bool) -> dict[str, Any]:
        """Return the row as JSON; one that was observed with how its maxima converged."""
        found = {
            "layer_idx": self.layer_idx,
            "attention": self.attention,
            "amax": {side: _json_numbers([value])[0] for side, value in self.amax.items()},
            "scale": {side: _json_numbers(values) for side, values in self.scale.items()},
            "tokens": self.tokens,
            "flags": list(self.flags),
            **_json_traits(self.traits),
        }
        if observed:
            found["raised_in_batch"] = dict(self.raised)
            found["percentile_99_9"] = dict(self.percentile_99_9)
            found["amax_over_percentile_99_9"] = {
                side: _json_numbers([value])[0] for side, value in self.spread.items()
            }
        return found


@dataclass(frozen=True)
class Inspection:
    """What `inspect` shows; of a calibration, also how its maxima converged."""

    kind: str
    tree: str
    rows: tuple[LayerRow, ...]
    summary: str
    uncached: tuple[int, ...] = ()
    drafts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # attention → side → name
    batches: int | None = None  # of the plan
    batches_run: int | None = None
    convergence: tuple[str, ...] = ()  # in words, a sentence each

    def scales(self) -> dict[str, Any]:
        """Return the scales document that `verify --against` reads."""
        named = {
            row.tensors.get(side, SPELLINGS["attention"].tensor(row.attention, side)): (
                numbers[0] if len(numbers) == 1 else numbers
            )
            for row in self.rows
            for side, values in row.scale.items()
            for numbers in [_json_numbers(values)]
        }
        return {"schema": 1, "scales": named}

    def to_json(self) -> dict[str, Any]:
        """Return the document of `inspect --json`."""
        observed = self.kind == "calibration"
        converged = {
            "batches": self.batches,
            "batches_run": self.batches_run,
            "convergence": list(self.convergence),
        }
        return {
            "schema": 1,
            "command": "inspect",
            "kind": self.kind,
            "summary": self.summary,
            **(converged if observed else {}),
            "layers_without_cache": list(self.uncached),
            "draft_layers": {path: dict(tensors) for path, tensors in self.drafts.items()},
            "layers": [row.to_json(observed=observed) for row in self.rows],
        }


def _json_traits(traits: KeyTraits | None) -> dict[str, Any]:
    found = {} if traits is None else vars(traits)
    return {
        key: _json_numbers([value])[0] if isinstance(value, float) else value
        for key, value in found.items()
    }


def _json_numbers(values: Iterable[float]) -> list[float | str]:
    """Return numbers as JSON has them; NaN and infinity, which it has not, as text."""
    return [value if math.isfinite(value) else repr(value) for value in values]
