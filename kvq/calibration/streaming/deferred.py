"""Weights that are not read yet, but know of which stored tensors they are made, and how.

transformers' own loader maps a checkpoint's names to parameters, merges experts and casts. It does
so once, with tensors that note what it does to them. From these notes any weight is made later:
stored tensors are read right into their place, and what is stacked or concatenated of many is
never held twice.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import _TYPES
from torch import Tensor

from kvq.calibration.streaming.errors import NotStreamable
from kvq.calibration.streaming.stored import Reader
from kvq.tensorfile import TensorInfo


@dataclass(frozen=True, eq=False)
class Call:
    """A function of torch and its arguments, some of which are deferred."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(eq=False)
class Storage:
    """What a tensor and its views have in common."""

    written: bool = False


class Deferred(Tensor):
    """A tensor that lies on the meta device until it is made.

    Attributes:
        made_of: the stored tensor that it is, or the call that makes it.
        index: which of the tensors that the call makes; None if it makes one.
        memory: its storage, which it shares with its views.
    """

    made_of: TensorInfo | Call
    index: int | None
    memory: Storage

    @staticmethod
    def of(info: TensorInfo) -> "Deferred":
        """Return what stands for a stored tensor."""
        return _deferred(torch.empty(info.shape, dtype=_TYPES[info.dtype], device="meta"), info)

    @property
    def source(self) -> TensorInfo | Call | None:
        """What it is made of; None if it, or a tensor that shares its memory, was written to."""
        return None if self.memory.written else self.made_of

    @property
    def stored(self) -> TensorInfo | None:
        """The stored tensor that it is, perhaps cast once; None if more than that is done."""
        source = self.source
        if isinstance(source, Call) and source.func is Tensor.to:
            inner = source.args[0]  # a second cast rounds what the first one has rounded
            source = inner.source if isinstance(inner, Deferred) else None
        return source if isinstance(source, TensorInfo) else None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.detach or (func is Tensor.__getitem__ and args[1] is ...):
            return args[0]
        if func is Tensor.to and isinstance(args[0], Deferred):
            args, kwargs = args[:1], {"dtype": _dtype_of_cast(*args, *kwargs.values())}
        given = list(_deferred_in((args, kwargs)))
        with torch._C.DisableTorchFunctionSubclass():
            versions = [one._version for one in given]
            found = func(*args, **kwargs)
            for one, version in zip(given, versions, strict=True):
                # torch counts no version where `data` is set, after which two tensors are one
                one.memory.written |= one._version != version or func == Tensor.data.__set__
        if any(found is one for one in (*args, *given)):
            return found
        call = Call(func, args, kwargs)
        if isinstance(found, Tensor):
            return _deferred(found, call, given)
        if type(found) in (tuple, list) and any(isinstance(one, Tensor) for one in found):
            return type(found)(_deferred(one, call, given, i) for i, one in enumerate(found))
        return found


def _deferred(
    like: Tensor, made_of: TensorInfo | Call, given: Iterable[Deferred] = (),
    index: int | None = None,
) -> Deferred:  # fmt: skip
    """Return a tensor as a deferred one, which may be a view of those that are given."""
    made = like.as_subclass(Deferred)
    made.made_of, made.index = made_of, index
    with torch._C.DisableTorchFunctionSubclass():
        place = made.untyped_storage()._cdata
        bases = [one.memory for one in given if one.untyped_storage()._cdata == place]
    made.memory = bases[0] if bases else Storage()
    return made


def _deferred_in(value: Any) -> Iterator[Deferred]:
    if isinstance(value, Deferred):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _deferred_in(part)


def _dtype_of_cast(tensor: Tensor, *given: Any) -> torch.dtype:
    """Return the dtype of `tensor.to(*given)`: wherever it is sent, it stays."""
    found = [one.dtype if isinstance(one, Tensor) else one for one in given]
    return next((one for one in found if isinstance(one, torch.dtype)), tensor.dtype)


class Making:
    """Makes weights; what several of them share is made once.

    Args:
        reader: reads stored tensors.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._reads: list[tuple[TensorInfo, Tensor]] = []
        self._called: dict[int, Any] = {}

    def make(self, weights: Iterable[Deferred]) -> list[Tensor]:
        """Return the weights, on the reader's device.

        Raises:
            NotStreamable: one was written to, by whatever loaded it.
            CheckpointError: a file cannot be read.
        """
        with self.reader.arriving() as arrived:
            made = [self._begin(weight) for weight in weights]
            self._read()
            arrived.extend(made)
        return made

    def _read(self) -> None:
        self.reader.read(self._reads)
        self._reads.clear()

    def _begin(self, weight: Deferred) -> Tensor:
        """Return a weight whose values are there after the next `_read`."""
        if not _is_laid(weight):
            return self._result(weight)
        room = self.reader.empty(weight.shape, weight.dtype, weight.stored)
        self._lay(weight, room)
        return room

    def _lay(self, weight: Deferred, place: Tensor) -> None:
        """Have the values of a weight in `place` after the next `_read`."""
        if weight.stored is not None:
            self._reads.append((weight.stored, place))
        elif not _is_laid(weight):
            place.copy_(self._result(weight))
        else:
            assert isinstance(weight.source, Call)
            parts, dim = _parts(weight.source)
            start = 0
            for i, part in enumerate(parts):
                if weight.source.func is torch.stack:
                    self._lay(part, place.select(dim, i))
                else:
                    self._lay(part, place.narrow(dim, start, part.shape[dim]))
                    start += part.shape[dim]

    def _result(self, weight: Deferred) -> Tensor:
        """Return what a call makes."""
        call = weight.source
        if not isinstance(call, Call):
            raise NotStreamable("transformers writes into its weights while it loads them")
        if id(call) not in self._called:
            args, kwargs = self._values(call.args), self._values(call.kwargs)
            self._called[id(call)] = call.func(*args, **kwargs)
        found = self._called[id(call)]
        made = found if weight.index is None else found[weight.index]
        if made.device.type == "meta":
            raise NotStreamable("transformers makes its weights of tensors that have no values yet")
        return made

    def _values(self, value: Any) -> Any:
        if isinstance(value, Deferred):
            made = self._begin(value)
            self._read()
            return made
        if type(value) in (tuple, list):
            return type(value)(self._values(part) for part in value)
        if type(value) is dict:
            return {key: self._values(value[key]) for key in value}
        return value


def _is_laid(weight: Deferred) -> bool:
    """Whether its parts can be read to their places, without making them first."""
    if weight.stored is not None:
        return True
    call = weight.source
    if not isinstance(call, Call) or call.func not in (torch.stack, torch.cat):
        return False
    parts, _ = _parts(call)
    return all(isinstance(part, Deferred) and part.dtype == weight.dtype for part in parts)


def _parts(call: Call) -> tuple[list[Any], int]:
    """Return what `stack` or `cat` puts together, and along which dimension."""
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    return list(call.args[0] if call.args else call.kwargs["tensors"]), dim
