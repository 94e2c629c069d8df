"""One batch through one layer, and what must be true for that to be the same as in a whole run."""

from typing import Any

import torch
from torch import Tensor, nn

from kvq.calibration.streaming.calls import filled
from kvq.calibration.streaming.errors import NotStreamable
from kvq.calibration.watch import Watch, observing_cache


class _Elsewhere:
    """Stands for the states of another layer, which are not there."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotStreamable("a layer reads what another one has cached")

    __getattr__ = __getitem__ = __bool__ = __len__ = __iter__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise NotStreamable("a layer reads what another one has cached")


def guarded_cache(body: nn.Module, watch: Watch) -> Any:
    """Return an empty observing cache that lets a layer see nothing but what it puts there."""
    cache = observing_cache(body, watch)
    for entry in cache.layers:
        if hasattr(entry, "keys"):
            entry.keys = entry.values = _Elsewhere()
    return cache


def call(
    layer: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], states: Tensor, cache: Any,
    shared: dict[int, Any], *, check: bool,
) -> Any:  # fmt: skip
    """Run a layer with the arguments that were noted for it.

    Args:
        layer: filled.
        arguments: positional and named ones.
        states: its hidden states.
        cache: an empty one.
        shared: dicts that layers share, by their number; layers may write into them.
        check: make sure that it leaves its other arguments as they are.

    Raises:
        NotStreamable: it does not.
    """
    positional = filled(arguments[0], states, cache, shared)
    named = filled(arguments[1], states, cache, shared)
    tensors = [t for t in _tensors([positional, named]) if t is not states] if check else []
    before = [tensor.clone() for tensor in tensors]
    returned = layer(*positional, **named)
    if not all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)):
        raise NotStreamable(f"a `{type(layer).__name__}` writes into what other layers receive")
    return returned


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if type(value) in (tuple, list):
        return [tensor for part in value for tensor in _tensors(part)]
    return [t for part in value.values() for t in _tensors(part)] if type(value) is dict else []


def hidden_states(returned: Any, form: str, number: int) -> tuple[Tensor, int]:
    """Return the hidden states that a layer returned, and how many values beside them.

    Raises:
        NotStreamable: it returned them in another form than the model takes.
    """
    if isinstance(returned, Tensor) and form == "tensor":
        return returned, 0
    if form != "tensor" and type(returned) in (tuple, list) and isinstance(returned[0], Tensor):
        others = returned[1:]
        return returned[0], len(others) if any(other is not None for other in others) else 0
    raise NotStreamable(f"layer {number} returns a `{type(returned).__name__}`")
