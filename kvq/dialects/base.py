"""The dialect seam: how scales and their declaration are written into a checkpoint, and read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.scales import ScaleSet

Documents = Mapping[str, Mapping[str, Any] | None]  # file name → whole content; None: left out


@dataclass(frozen=True)
class DialectPlan:
    """What a dialect adds to a checkpoint.

    Args:
        tensors: name → float32 scale.
        documents: JSON files to write, whole, by name; `config.json` among them if it changes. None
            for a file of the base that has nothing more to say, and is left out.
        stored: the scales as they are written, after the dialect's rounding.
        losses: what the dialect cannot say, in words.
        unread: why its reader does not use the scales as meant, None if it does.
    """

    tensors: Mapping[str, np.ndarray]
    documents: Documents
    stored: ScaleSet
    losses: tuple[str, ...] = ()
    unread: str | None = None


@dataclass(frozen=True)
class Declared:
    """What a checkpoint's configuration says of its cache; None where it says nothing."""

    format: str | None
    granularity: str = "tensor"


@dataclass(frozen=True)
class Target:
    """For whom scales are written.

    Args:
        engines: who must read them.
        attention_class: class name of the attention modules, where it is known.
        tp: number of GPUs, for dialects that list scales for each.
    """

    engines: tuple[str, ...] = ("vllm",)
    attention_class: str | None = None
    tp: int = 1


class Dialect(Protocol):
    """A way to write scales and to declare them; `plan` and reading are inverse up to `stored`.

    `spelling` is the naming that it writes, a key of `SPELLINGS`.
    """

    name: str
    spelling: str

    def plan(self, scales: ScaleSet, view: CheckpointView, target: Target) -> DialectPlan:
        """Return what to write, or raise DialectError with the reason and what to do."""
        ...

    def declared(self, view: CheckpointView) -> Declared:
        """Return what the checkpoint's configuration declares in this dialect."""
        ...

    def stored(self, values: np.ndarray, view: CheckpointView) -> np.ndarray:
        """Return float32 scales as the dialect stores them; never smaller."""
        ...

    def strip(self, view: CheckpointView) -> Documents:
        """Return the JSON files, by name, without any declaration of the cache; None: left out."""
        ...
