"""The engine seam: what a serving engine makes of a checkpoint, read from its files alone."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from kvq.checkpoint import CheckpointView
from kvq.errors import InputError
from kvq.geometry import Geometry

MISAPPLIED = "the scale of a latent row (MLA), applied to expanded keys and values"  # a reason
PLATFORM = re.compile(r"cpu|sm[1-9][0-9]{1,2}a?|gfx[0-9]{3,4}[a-z]?")


@dataclass(frozen=True)
class EngineOptions:
    """How the engine is started, as far as it matters for scales.

    Args:
        kv_cache_dtype: its option of that name.
        platform: `cpu`, an NVIDIA compute capability as `sm90`, or an AMD one as `gfx942`.
        tp: number of GPUs that share the heads.
        skip_layers: vLLM's `--kv-cache-dtype-skip-layers`: layer indices, or `sliding_window`.

    Raises:
        InputError: a platform or number that does not exist.
    """

    kv_cache_dtype: str = "auto"
    platform: str = "sm90"
    tp: int = 1
    skip_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not PLATFORM.fullmatch(self.platform):
            raise InputError(
                f"unknown --platform `{self.platform}`",
                code="option.platform",
                hint="expected cpu, sm80, sm89, sm90, sm100, sm120, gfx942, gfx950, ...",
            )
        if self.tp < 1:
            raise InputError(f"--tp is {self.tp}, expected 1 or more", code="option.tp")

    def __str__(self) -> str:
        skipped = f", skipping {','.join(self.skip_layers)}" if self.skip_layers else ""
        return f"--kv-cache-dtype {self.kv_cache_dtype}, {self.platform}, tp {self.tp}{skipped}"


@dataclass(frozen=True)
class SideReading:
    """The scale in use: one number or one per head, None where unknown; where it comes from.

    `reason` says in words how the value came about, and is empty where nothing is to be said: the
    tensor is read as it is.
    """

    value: tuple[float, ...] | None
    tensor: str | None
    reason: str


@dataclass(frozen=True)
class LayerReading:
    """One attention layer as the engine sees it; `engine_name` is the engine's own path of it.

    `q` is None where the engine has no scale for queries, or its model does not cover it.
    """

    layer_idx: int
    attention: str
    engine_name: str
    cache_dtype: str | None
    k: SideReading
    v: SideReading
    q: SideReading | None = None


@dataclass(frozen=True)
class EngineReading:
    """All layers, or the error with which the engine refuses the checkpoint.

    What the model of the engine does not cover is None, with the reason in the layers and notes.
    `checked` says whether the engine itself loaded a checkpoint of this model class for comparison,
    where the model of the engine keeps count of that.
    """

    engine: str
    version: str
    options: EngineOptions
    cache_dtype: str | None
    layers: tuple[LayerReading, ...]
    error: str | None = None
    notes: tuple[str, ...] = ()
    checked: bool = True


def not_modelled(
    blank: EngineReading, geometry: Geometry, reason: str, *, inner: str = ""
) -> EngineReading:
    """Return a reading that knows no layer, and says why; `inner` ends the engine's own names."""
    side = SideReading(None, None, reason)
    layers = tuple(
        LayerReading(x.layer_idx, x.attention, x.attention + inner, blank.cache_dtype, side, side)
        for x in geometry.layers
    )
    return replace(blank, layers=layers, notes=(*blank.notes, reason))


class Engine(ABC):
    """A model of a serving engine in one of its versions; nothing of the engine is imported.

    `versions` are those that are modelled, the latest last; what differs between them is data.
    """

    name: str
    versions: tuple[str, ...]

    def __init__(self, version: str | None = None) -> None:
        self.version = version or self.versions[-1]

    @abstractmethod
    def read(
        self, view: CheckpointView, geometry: Geometry, options: EngineOptions
    ) -> EngineReading:
        """Return what the engine does with a checkpoint."""
