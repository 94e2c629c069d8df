"""Hidden states between two layers: in memory, or past a budget in memory-mapped files."""

import itertools
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.calibration.progress import damaged, sync
from kvq.calibration.streaming.transfers import Transfers
from kvq.errors import InputError

Shape = tuple[int, ...]
_CHUNK = 16 << 20


class Activations:
    """The hidden states of every batch, read and written one batch at a time.

    In memory there is one copy, which each layer overwrites and `prepare` writes to a file. In
    files there are two copies, and each batch has its place in one of them: what was saved last
    stays whole, and a layer writes to the other one.

    Args:
        shapes: of each batch's hidden states.
        dtype: of all of them.
        device: where `read` puts them.
        folder: where files go.
        in_files: keep them in files, not in memory.
        saved: what `prepare` returned, to go on from there.

    Raises:
        InputError: there is no room for the files.
        CheckpointError: what was saved is not whole.
    """

    def __init__(
        self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device, folder: Path, *,
        in_files: bool, saved: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.shapes, self.dtype, self.device, self.in_files = shapes, dtype, device, in_files
        self._starts = [0, *itertools.accumulate(math.prod(shape) for shape in shapes)]
        self.bytes = self._starts[-1] * dtype.itemsize
        self.paths = [folder / f"activations-{i}.bin" for i in (0, 1)]
        self._at = [0] * len(shapes)  # the copy that holds a batch
        self._saved: list[int] | None = None  # the same when it was saved last
        self._file = 0  # where a copy in memory is saved next
        pinned = device.type == "cuda" and not in_files
        self._transfers = Transfers(device) if pinned else None
        if in_files:
            self._open(saved)
        else:
            self._copies = [torch.empty(self._starts[-1], dtype=dtype, pin_memory=pinned)]
            if saved is not None:
                self._load(saved)

    def read(self, batch: int) -> Tensor:
        """Return what the next layer reads of a batch, in memory of its own."""
        found = self._slot(self._at[batch], batch)
        if self._transfers is not None:
            last = batch + 1 == len(self.shapes)
            following = None if last else self._slot(self._at[batch + 1], batch + 1)
            return self._transfers.read(batch, found, following)
        # some layers write into their input
        return found.clone() if self.device.type == "cpu" else found.to(self.device)

    def write(self, batch: int, states: Tensor) -> None:
        """Keep what a layer made of a batch."""
        assert tuple(states.shape) == self.shapes[batch]
        assert states.dtype == self.dtype
        if self._saved is not None:
            self._at[batch] = 1 - self._saved[batch]
        slot = self._slot(self._at[batch], batch)
        if self._transfers is None:
            slot.copy_(states)
        else:
            self._transfers.write(slot, states)

    def prepare(self) -> dict[str, Any]:
        """Have everything on disk, beside what was saved before; return how to find it."""
        if self.in_files:
            for path in self.paths:
                with path.open("rb") as file:
                    sync(file.fileno())
            return {"at": "".join(map(str, self._at))}
        if self._transfers is not None:
            self._transfers.finish()
        path, crc = self.paths[self._file], 0
        data = self._bytes()
        with path.open("wb") as file:
            for start in range(0, len(data), _CHUNK):
                chunk = data[start : start + _CHUNK]
                crc = zlib.crc32(chunk, crc)
                file.write(chunk)
            file.flush()
            sync(file.fileno())
        return {"file": self._file, "crc": crc}

    def commit(self) -> None:
        """Keep what `prepare` made from now on, and let go of what was saved before."""
        if self.in_files:
            self._saved = list(self._at)
        else:
            self._file = 1 - self._file
            self.paths[self._file].unlink(missing_ok=True)

    def _open(self, saved: Mapping[str, Any] | None) -> None:
        for path in self.paths:
            if saved is not None:
                self._check_size(path)
                continue
            try:
                with path.open("wb") as file:  # a full disk later on would kill the process
                    os.posix_fallocate(file.fileno(), 0, self.bytes)
            except OSError as error:
                raise InputError(
                    f"two files of {self.bytes} bytes for hidden states do not fit into "
                    f"`{path.parent.parent}`: {error.strerror}",
                    code="streaming.disk",
                    hint="a larger --memory-budget, fewer --num-samples, or -o on another disk",
                ) from error
        self._copies = [
            torch.from_file(str(path), shared=True, size=self._starts[-1], dtype=self.dtype)
            for path in self.paths
        ]
        if saved is not None:
            self._at = [int(copy) for copy in saved["at"]]
            if len(self._at) != len(self.shapes):
                raise damaged(self.paths[0], f"{len(self._at)} batches, not {len(self.shapes)}")
            self._saved = list(self._at)

    def _load(self, saved: Mapping[str, Any]) -> None:
        path, data, crc = self.paths[saved["file"]], self._bytes(), 0
        self._check_size(path)
        with path.open("rb", buffering=0) as file:
            for start in range(0, len(data), _CHUNK):
                chunk = data[start : start + _CHUNK]
                file.readinto(chunk)
                crc = zlib.crc32(chunk, crc)
        if crc != saved["crc"]:
            raise damaged(path, f"its checksum is {crc}, expected {saved['crc']}")
        self._file = 1 - saved["file"]

    def _check_size(self, path: Path) -> None:
        size = path.stat().st_size if path.is_file() else 0
        if size != self.bytes:
            raise damaged(path, f"{size} bytes, expected {self.bytes}")

    def _bytes(self) -> memoryview:
        return memoryview(self._copies[0].view(torch.uint8).numpy())

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
