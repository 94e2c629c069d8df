"""Tensors of safetensors files, read to where they are needed, and embeddings by their rows."""

import itertools
import math
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from safetensors.torch import _TYPES
from torch import Tensor

from kvq.calibration.streaming.errors import NotStreamable
from kvq.calibration.streaming.files import PAGE, File
from kvq.tensorfile import TensorInfo

_PIECE = 16 << 20  # bytes that are cast, or sent to CUDA, at once


class Memory:
    """Memory that is handed out again once nothing refers to it.

    The first touch of new memory takes longer than filling it from the page cache: measured for
    1 GiB, 0.7 to 1.3 s instead of 0.2 s. And malloc keeps what it frees of a few megabytes.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}  # by the number of pages

    def take(self, size: int, skew: int = 0) -> Tensor:
        """Return bytes [size] that begin `skew` bytes after a page does.

        Where no memory of as many pages is free, what is free is given up.
        """
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        pages = -(-(skew + size) // PAGE)
        try:
            memory = self._free[pages].pop()
        except (KeyError, IndexError):
            self._free = {}
            memory = mmap.mmap(-1, pages * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        lent = memoryview(memory)  # torch holds it as long as there is a tensor in it
        weakref.finalize(lent, self._give_back, pages, memory).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8)[skew : skew + size]

    def _give_back(self, pages: int, memory: mmap.mmap) -> None:
        self._free.setdefault(pages, []).append(memory)


class Reader:
    """Reads tensors of a checkpoint to a device, right into their places.

    On CUDA they arrive by a stream of their own, so that reading the next layer does not wait for
    what this one computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory = Memory()
        self._piece: Tensor | None = None  # through which all is cast

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, info: TensorInfo | None = None
    ) -> Tensor:
        """Return room for a tensor, best for the one of `info`; on CUDA, inside of `arriving`."""
        if self.stream is not None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        skew = 0 if info is None or info.start % dtype.itemsize else info.start % PAGE
        room = self._memory.take(math.prod(shape) * dtype.itemsize, skew)
        return room.view(dtype).view(tuple(shape))

    @contextmanager
    def arriving(self) -> Iterator[list[Tensor]]:
        """Have what is read inside the block on the device after it.

        Yields a list, for the tensors that are to be used by the stream that computes.
        """
        arrived: list[Tensor] = []
        if self.stream is None:
            yield arrived
            return
        with torch.cuda.stream(self.stream):
            yield arrived
        self.stream.synchronize()
        for tensor in arrived:  # under that stream, it will be freed as well
            tensor.record_stream(torch.cuda.default_stream(self.device))

    def read(self, reads: Iterable[tuple[TensorInfo, Tensor]]) -> None:
        """Read tensors to their places, in the order of the files; casts to the places' dtypes.

        Raises:
            CheckpointError: a file cannot be read, or has ended.
        """
        ordered = sorted(reads, key=lambda read: (read[0].path, read[0].start))
        pinned = None if self.stream is None or not ordered else _Pinned()
        for path, group in itertools.groupby(ordered, key=lambda read: read[0].path):
            with File(path) as file:
                read = file.read if pinned is None else partial(pinned.read, file)
                for info, place in group:
                    self._fill(read, info, [(0, info.end - info.start)], place)

    def rows(self, info: TensorInfo, numbers: Sequence[int]) -> Tensor:
        """Return rows of a matrix, [len(numbers), ...]; `numbers` are sorted and unique."""
        size = (info.end - info.start) // info.shape[0]
        parts: list[tuple[int, int]] = []
        for number in numbers:
            if parts and parts[-1][0] + parts[-1][1] == number * size:
                parts[-1] = parts[-1][0], parts[-1][1] + size
            else:
                parts.append((number * size, size))
        with self.arriving() as arrived:
            found = self.empty((len(numbers), *info.shape[1:]), _TYPES[info.dtype])
            with File(info.path) as file:
                read = file.read if self.stream is None else partial(_Pinned().read, file)
                self._fill(read, info, parts, found)
            arrived.append(found)
        return found

    def _fill(
        self, read: Callable[[int, Tensor], None], info: TensorInfo,
        parts: Iterable[tuple[int, int]], place: Tensor,
    ) -> None:  # fmt: skip
        """Read parts of a tensor, (first byte, bytes), one after the other to its place."""
        dtype = _TYPES[info.dtype]
        into = place if place.is_contiguous() else self.empty(place.shape, dtype, info)
        if into.dtype != dtype:
            self._cast(read, info, parts, into)
            return
        data, position = into.view(-1).view(torch.uint8), 0
        for start, size in parts:
            read(info.start + start, data[position : position + size])
            position += size
        if into is not place:
            place.copy_(into)

    def _cast(
        self, read: Callable[[int, Tensor], None], info: TensorInfo,
        parts: Iterable[tuple[int, int]], place: Tensor,
    ) -> None:  # fmt: skip
        """Read parts of a tensor to a place of another dtype, through one piece of memory."""
        dtype, rest = _TYPES[info.dtype], place.view(-1)
        for start, size in parts:
            for first in range(start, start + size, _PIECE):
                piece = self._room(info.start + first, min(_PIECE, start + size - first), dtype)
                read(info.start + first, piece.view(torch.uint8))
                rest[: len(piece)].copy_(piece)
                rest = rest[len(piece) :]

    def _room(self, start: int, size: int, dtype: torch.dtype) -> Tensor:
        """Return room for bytes that lie at `start`, the same one whenever there is a cast."""
        if self._piece is None:
            room = partial(torch.empty, dtype=torch.uint8, device=self.device)
            self._piece = (Memory().take if self.stream is None else room)(_PIECE + PAGE)
        skew = 0 if start % dtype.itemsize else start % PAGE
        return self._piece[skew : skew + size].view(dtype)


class _Pinned:
    """Two pieces of pinned memory, through which bytes go to CUDA in turns."""

    def __init__(self) -> None:
        self._pieces = itertools.cycle([
            (torch.empty(_PIECE + PAGE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(2)
        ])  # fmt: skip

    def read(self, file: File, start: int, into: Tensor) -> None:
        """Read bytes from `start` on into uint8 [size]."""
        for part in into.split(_PIECE):
            piece, sent = next(self._pieces)
            piece = piece[start % PAGE :][: len(part)]
            sent.synchronize()
            file.read(start, piece)
            part.copy_(piece, non_blocking=True)
            sent.record()
            start += len(part)


class Rows(Tensor):
    """An embedding of which only the rows in use are read; looks like a whole one on the device."""

    info: TensorInfo
    reader: Reader
    place: Tensor  # row number → row of `held`, or -1
    held: Tensor

    @staticmethod
    def of(parameter: Tensor, info: TensorInfo, reader: Reader) -> "Rows":
        """Return what stands for `parameter` [rows, size], which lies in `info`."""
        rows = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").as_subclass(Rows)
        rows.info, rows.reader = info, reader
        device = reader.device
        rows.place = torch.full(parameter.shape[:1], -1, device=device)
        rows.held = torch.empty(0, parameter.shape[1], dtype=parameter.dtype, device=device)
        return rows

    def want(self, numbers: Tensor) -> None:
        """Read the rows of `numbers`, unique, that are not held yet."""
        new = numbers[self.place[numbers] < 0].sort().values
        if new.numel():
            read = self.reader.rows(self.info, new.tolist()).to(self.held.dtype)
            self.place[new] = torch.arange(len(new), device=new.device) + len(self.held)
            self.held = torch.cat([self.held, read])

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, as an embedding of all rows would."""
        self.want(ids.unique())
        return torch.nn.functional.embedding(self.place[ids], self.held)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.embedding:
            ids, weight, _, max_norm = (*args, None, None)[:4]
            if isinstance(weight, Rows) and (max_norm or kwargs.get("max_norm")) is None:
                return weight.look_up(ids)
        if func is Tensor.__getitem__:
            numbers = torch.arange(len(args[0].place), device=args[0].reader.device)[args[1]]
            return args[0].look_up(numbers)
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if func == Tensor.device.__get__:
                return args[0].reader.device
            if name == "__get__" or name in _HARMLESS:
                return func(*args, **kwargs)
        raise NotStreamable(f"it uses its embedding otherwise than row by row (`{name}`)")


_HARMLESS = ("size", "dim", "numel", "element_size", "is_floating_point", "__len__", "detach")
