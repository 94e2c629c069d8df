"""What the rules look at, and the list of all rules."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.checks.findings import Finding
from kvq.dialects.base import Dialect
from kvq.dialects.sglang_json import FILE_NAME
from kvq.dialects.spellings import SPELLINGS, FoundScale, FoundScales
from kvq.geometry import Geometry
from kvq.provenance import Provenance

SUFFIXES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")


@dataclass(frozen=True)
class Context:
    """What the rules look at; `values` holds the scales that could be decoded.

    `reference` maps (attention, side) to expected values, not rounded; what it names beyond the
    checkpoint's layers stands in `strangers`.
    """

    view: CheckpointView
    geometry: Geometry
    dialect: Dialect
    found: FoundScales
    values: Mapping[str, np.ndarray]
    provenance: Provenance | None = None
    reference: Mapping[tuple[str, str], list[float]] | None = None
    strangers: tuple[str, ...] = ()
    rtol: float = 0.0

    @property
    def scales(self) -> tuple[FoundScale, ...]:
        """At most one scale for each attention module and side."""
        return self.found.scales

    @property
    def drafts(self) -> tuple[FoundScale, ...]:
        """Scales of draft layers."""
        return self.found.drafts

    @cached_property
    def by_side(self) -> Mapping[tuple[str, str], FoundScale]:
        """Scales by attention module and side."""
        return {(scale.attention, scale.side): scale for scale in self.scales}

    @cached_property
    def elsewhere(self) -> str:
        """Words on the file for SGLang's option, where all scales there are stand in it."""
        if self.scales or not (self.view.root / FILE_NAME).is_file():
            return ""
        return f" (`{FILE_NAME}` is read by SGLang's --quantization-param-path alone)"

    def name(self, attention: str, side: str) -> str:
        """Return the name that a scale has in the checkpoint's dialect."""
        return SPELLINGS[self.dialect.spelling].tensor(attention, side)


Check = Callable[[Context], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """One check.

    Args:
        check: yields one finding per thing wrong.
        dialect: the one dialect that it speaks of; None for all.
        spelling: whether it asks for names and declarations that fit the dialect. Where an engine
            is asked, its reading says what becomes of others.
    """

    check: Check
    dialect: str | None = None
    spelling: bool = False

    def applies(self, dialect: str, *, engine_asked: bool) -> bool:
        """Whether it is asked of a checkpoint in a dialect."""
        if self.dialect not in (None, dialect):
            return False
        return not (self.spelling and engine_asked)


RULES: list[Rule] = []


def rule(*, dialect: str | None = None, spelling: bool = False) -> Callable[[Check], Check]:
    """Register a rule."""

    def register(check: Check) -> Check:
        RULES.append(Rule(check, dialect, spelling))
        return check

    return register


def rules_for(context: Context, *, engine_asked: bool) -> list[Rule]:
    """Return the rules that apply to a checkpoint."""
    name = context.dialect.name
    return [one for one in RULES if one.applies(name, engine_asked=engine_asked)]


def file_of(context: Context, tensor: str) -> str:
    """Return the name of the file that holds a tensor."""
    return context.view.tensors[tensor].path.name
