"""Leave a model as it was found: modes of its modules, frequencies of its rotary embeddings."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

_ROTARY = ("RotaryEmbedding", "RotaryPositionEmbedding")


def _restorer(module: nn.Module) -> Callable[[], None]:
    """Return what sets a module back: dynamic RoPE keeps the frequencies of its longest input."""
    own = {
        key: dict(value) if type(value) is dict else value
        for key, value in vars(module).items()
        if not key.startswith("_")
    }
    buffers = dict(module._buffers)

    def restore() -> None:
        for key in [key for key in vars(module) if not key.startswith("_") and key not in own]:
            delattr(module, key)
        vars(module).update({k: dict(v) if type(v) is dict else v for k, v in own.items()})
        module._buffers.clear()
        module._buffers.update(buffers)

    return restore


def rotary_restorers(
    model: nn.Module, *, apart: Iterable[nn.Module] = ()
) -> list[Callable[[], None]]:
    """Return one function per rotary embedding of the model that sets it back to what it is now.

    Those inside of the modules `apart` are left out.
    """
    left_out = {id(inner) for module in apart for inner in module.modules()}
    rotary = (m for m in model.modules() if type(m).__name__.endswith(_ROTARY))
    return [_restorer(module) for module in rotary if id(module) not in left_out]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside the block; each module its own mode afterwards."""
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in training:
            module.training = was_training
