"""Hidden states between two layers: in memory, or past a budget in memory-mapped files."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Activations:
    """The hidden states of every batch, read and written one batch at a time.

    In memory there is one copy, which each layer overwrites. In files there are two, so that the
    one that was saved last stays whole while a layer writes the other.

    Args:
        shapes: of each batch's hidden states.
        dtype: of all of them.
        device: where `read` puts them.
        folder: where the files go; None keeps all in memory.
        fresh: begin with empty files; else with what they hold.
    """

    def __init__(
        self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device,
        folder: Path | None, *, fresh: bool = True,
    ) -> None:  # fmt: skip
        self.shapes, self.dtype, self.device = shapes, dtype, device
        counts = [math.prod(shape) for shape in shapes]
        self._starts = [0, *itertools.accumulate(counts)]
        self.before = self.after = 0  # which copy a layer reads, which one it writes
        self.saved: int | None = None  # the copy that a run could continue from
        total = self._starts[-1]
        if folder is None:
            pinned = device.type == "cuda"
            self.paths: list[Path] = []
            self._copies = [torch.empty(total, dtype=dtype, pin_memory=pinned)]
        else:
            self.paths = [folder / f"activations-{i}.bin" for i in (0, 1)]
            for path in self.paths:
                with path.open("wb" if fresh else "r+b") as file:
                    file.truncate(total * dtype.itemsize)
            self._copies = [
                torch.from_file(str(path), shared=True, size=total, dtype=dtype)
                for path in self.paths
            ]

    @property
    def in_files(self) -> bool:
        """Whether they are in files."""
        return bool(self.paths)

    def read(self, batch: int) -> Tensor:
        """Return what the next layer reads of a batch, in memory of its own."""
        found = self._slot(self.before, batch)
        if self.device.type == "cpu":
            return found.clone()  # some layers write into their input
        return found.to(self.device, non_blocking=True)

    def write(self, batch: int, states: Tensor) -> None:
        """Keep what a layer made of a batch."""
        assert tuple(states.shape) == self.shapes[batch]
        assert states.dtype == self.dtype
        self._slot(self.after, batch).copy_(states)

    def begin_layer(self) -> None:
        """Begin with the first batch; what is saved in a file stays until the layer is done."""
        self.after = 1 - self.before if self.before == self.saved else self.before

    def end_layer(self) -> None:
        """Let the next layer read what this one wrote."""
        self.before = self.after

    def _slot(self, copy: int, batch: int) -> Tensor:
        flat = self._copies[copy][self._starts[batch] : self._starts[batch + 1]]
        return flat.view(self.shapes[batch])


class SharedStates:
    """What layers leave for later ones in dicts that all of them are handed, by batch.

    Past a number of bytes, their tensors go to files that nothing names, so that they end with
    the process.

    Args:
        room: how many bytes to keep in memory.
        folder: where the files go; it is made when it is needed.
    """

    def __init__(self, room: int, folder: Path) -> None:
        self.room, self.folder = room, folder
        self._found: dict[int, dict[int, Any]] = {}
        self._kept: dict[int, Tensor] = {}  # by id, which therefore stays taken

    def of(self, batch: int) -> dict[int, Any]:
        """Return a batch's dicts by their number; layers read them and write into them."""
        return self._found.setdefault(batch, {})

    @property
    def empty(self) -> bool:
        """Whether no layer has left anything."""
        return not self._kept

    def keep(self, batch: int) -> None:
        """Take what a layer has just left for later ones off its device, and out of memory."""
        for shared in self._found[batch].values():
            for key in shared:
                shared[key] = self._keep(shared[key])

    def _keep(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(self._keep(part) for part in value)
        if not isinstance(value, Tensor) or id(value) in self._kept:
            return value
        size = value.numel() * value.element_size()
        kept = value.cpu()
        if size > self.room:
            kept = self._in_file(kept)
        else:
            self.room -= size
        self._kept[id(kept)] = kept
        return kept

    def _in_file(self, value: Tensor) -> Tensor:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / "shared.bin"
        count = value.numel()
        flat = torch.from_file(str(path), shared=True, size=count, dtype=value.dtype)
        path.unlink()
        # the same strides, since kernels may choose by them
        strides = torch.empty_like(value, device="meta").stride()
        return flat.as_strided(value.shape, strides).copy_(value)
