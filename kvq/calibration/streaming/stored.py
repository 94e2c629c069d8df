"""Tensors that stay in their safetensors file until they are asked for."""

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors.torch import _TYPES
from torch import Tensor

from kvq.calibration.streaming.errors import NotStreamable
from kvq.errors import CheckpointError
from kvq.tensorfile import TensorInfo


class _Shape:
    """What a tensor that is not read looks like; stays on the meta device wherever it is sent."""

    def __init__(self, info: TensorInfo) -> None:
        self.info = info

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        found = torch.empty(self.info.shape, dtype=_TYPES[self.info.dtype], device="meta")
        return found if dtype is None else found.to(dtype)


class Stored:
    """One tensor of a checkpoint as transformers' loader takes it; `[...]` reads it, or its shape.

    Args:
        info: where it lies.
        read: returns its values; without it, the loader gets a tensor on the meta device.
    """

    def __init__(
        self, info: TensorInfo, read: Callable[[TensorInfo], Tensor] | None = None
    ) -> None:
        self.info, self.read = info, read
        self.dtype = _TYPES[info.dtype]

    def __getitem__(self, _: Any) -> Any:
        return _Shape(self.info) if self.read is None else self.read(self.info)

    def get_dtype(self) -> str:
        """Return the dtype as safetensors spells it."""
        return self.info.dtype

    def is_floating_point(self) -> bool:
        """Whether its dtype is a float."""
        return self.dtype.is_floating_point


class Reader:
    """Reads tensors of a checkpoint to a device, each byte once and into memory of its own.

    On CUDA they arrive by a stream of their own, so that reading the next layer does not wait for
    what this one computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, info: TensorInfo) -> Tensor:
        """Return a whole tensor."""
        return self._arrived(self._read(info, [(0, info.end - info.start)]).view(info.shape))

    def rows(self, info: TensorInfo, numbers: Sequence[int]) -> Tensor:
        """Return rows of a matrix, [len(numbers), ...]; `numbers` are sorted and unique."""
        size = (info.end - info.start) // info.shape[0]
        parts: list[tuple[int, int]] = []
        for number in numbers:
            if parts and parts[-1][0] + parts[-1][1] == number * size:
                parts[-1] = parts[-1][0], parts[-1][1] + size
            else:
                parts.append((number * size, size))
        return self._arrived(self._read(info, parts).view(len(numbers), *info.shape[1:]))

    def _read(self, info: TensorInfo, parts: Sequence[tuple[int, int]]) -> Tensor:
        total = sum(size for _, size in parts)
        if self.stream is not None:
            data = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        elif total:  # malloc keeps what it frees of tensors of a few megabytes
            memory = mmap.mmap(-1, total, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            data = torch.frombuffer(memory, dtype=torch.uint8)
        else:
            data = torch.empty(0, dtype=torch.uint8)
        into, position = memoryview(data.numpy()), 0
        try:
            with info.path.open("rb", buffering=0) as file:
                for start, size in parts:
                    file.seek(info.start + start)
                    end = position + size
                    while position < end:
                        count = file.readinto(into[position:end])
                        if not count:
                            raise CheckpointError(
                                f"`{info.path.name}` ended early", code="tensorfile.truncated"
                            )
                        position += count
        except OSError as error:
            raise CheckpointError(
                f"cannot read `{info.path}`: {error.strerror}", code="file.unreadable"
            ) from error
        return data.view(_TYPES[info.dtype])

    def _arrived(self, tensor: Tensor) -> Tensor:
        if self.stream is None:
            return tensor
        with torch.cuda.stream(self.stream):
            there = tensor.to(self.device, non_blocking=True)
        self.stream.synchronize()
        # it is used, and freed, under the stream that computes
        there.record_stream(torch.cuda.default_stream(self.device))
        return there


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
