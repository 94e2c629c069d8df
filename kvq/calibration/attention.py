"""Exchange the attention function of a model, by its name in the configs, and leave no trace."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

Function = Callable[..., Any]


class _Name(str):
    """The name of an implementation that stands for another function than the name does.

    It equals the plain name, since models compare theirs: DeepSeek-V3.2 applies its indexer's mask
    only if the name is `eager` or `sdpa`, and Falcon adds another kind of mask unless it is `sdpa`.
    As a key, and to other ones, it is itself alone.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other or (not isinstance(other, _Name) and str.__eq__(self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __deepcopy__(self, _: object) -> "_Name":
        return self

    def __reduce__(self) -> Any:
        return str, (str(self),)  # elsewhere, it is the plain name


@contextmanager
def exchanged_attention(
    model: nn.Module,
    attention: Callable[[Function], Function],
    mask: Callable[[Function], Function] = lambda original: original,
    *,
    only: Collection[str] | None = None,
) -> Iterator[None]:
    """Exchange the attention and mask functions of a model inside the block.

    Args:
        model: a transformers model.
        attention: makes the new function of one that calls what the module would have called.
        mask: makes the new mask function of the one there was, where there was one.
        only: the implementations to exchange; all of them by default.
    """
    attention_functions: dict = AttentionInterface._global_mapping
    mask_functions: dict = AttentionMaskInterface._global_mapping
    configs = [(config, i) for config, i in _configs(model) if only is None or i in only]
    name_of = {implementation: _Name(implementation) for _, implementation in configs}
    for implementation, name in name_of.items():
        attention_functions[name] = attention(_original(implementation))
        if implementation in mask_functions:
            mask_functions[name] = mask(mask_functions[implementation])
    try:
        for config, implementation in configs:
            # its property's setter would change the configs inside of this one too
            config._attn_implementation_internal = name_of[implementation]
        yield
    finally:
        for config, implementation in configs:
            config._attn_implementation_internal = implementation
        for name in name_of.values():
            del attention_functions[name]
            mask_functions.pop(name, None)


def _configs(model: nn.Module) -> list[tuple[Any, str]]:
    """Return each config of the model's modules with its attention implementation."""
    found: Mapping[int, Any] = {
        id(module.config): module.config
        for module in model.modules()
        if getattr(getattr(module, "config", None), "_attn_implementation", None) is not None
    }
    return [(config, config._attn_implementation) for config in found.values()]


def _original(implementation: str) -> Function:
    """Return what calls the attention function that a module would have called itself."""

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        code = sys.modules[type(module).__module__]
        function = code.ALL_ATTENTION_FUNCTIONS.get_interface(
            implementation, getattr(code, "eager_attention_forward", None)
        )
        return function(module, *args, **kwargs)

    return attention
