"""What the rules look at, and the list of all rules."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.checks.findings import Finding
from kvq.dialects.base import FoundScale
from kvq.geometry import Geometry
from kvq.provenance import Provenance

SUFFIXES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")


@dataclass(frozen=True)
class Context:
    """What the rules look at; `values` holds the scales that could be decoded."""

    view: CheckpointView
    geometry: Geometry
    scales: tuple[FoundScale, ...]
    values: dict[str, np.ndarray]
    provenance: Provenance | None = None
    reference: dict[str, list[float]] | None = None
    rtol: float = 0.0
    drafts: tuple[FoundScale, ...] = ()  # scales of draft layers
    by_side: dict[tuple[str, str], FoundScale] = field(default_factory=dict)  # attention, side


Rule = Callable[[Context], Iterator[Finding]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule."""
    RULES.append(function)
    return function


def file_of(context: Context, tensor: str) -> str:
    """Return the name of the file that holds a tensor."""
    return context.view.tensors[tensor].path.name
