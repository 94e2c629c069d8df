"""The dialect seam: `plan` says what to write, `read` says what is there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.geometry import Geometry
from kvq.scales import ScaleSet


@dataclass(frozen=True)
class DialectPlan:
    """What a dialect adds to a checkpoint: float32 tensors and the whole quantization config."""

    tensors: Mapping[str, np.ndarray]
    quantization_config: Mapping[str, Any]


@dataclass(frozen=True)
class FoundScale:
    """A scale tensor in a checkpoint: its layer and attention, side (`k`, `v`, `q`) and name."""

    layer_idx: int
    attention: str
    side: str
    tensor: str


class Dialect(Protocol):
    """A way to write scales; `plan` and `read` are inverse up to the declared rounding."""

    name: str

    def plan(
        self, scales: ScaleSet, view: CheckpointView, attention_class: str | None
    ) -> DialectPlan:
        """Return what to write, or raise DialectError with the reason and what to do."""
        ...

    def read(self, view: CheckpointView, geometry: Geometry) -> ScaleSet:
        """Return the scales of all layers, as they are; a layer may have none."""
        ...

    def find(self, view: CheckpointView, geometry: Geometry) -> tuple[FoundScale, ...]:
        """Return the scale tensors that belong to the geometry's attention modules."""
        ...
