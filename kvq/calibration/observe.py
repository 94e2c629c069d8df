"""Run whole forward passes of a model under observation."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from kvq.calibration.amax import Observer
from kvq.calibration.blocks import in_blocks
from kvq.calibration.restore import evaluating, rotary_restorers
from kvq.calibration.watch import (
    LastLayerReached,
    Watch,
    hooked,
    observed_queries,
    observing_cache,
)


@contextmanager
def observing(
    model: nn.Module, modules: Mapping[str, nn.Module], observer: Observer, *, cross: bool = False
) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
    """Yield a function that runs a batch of model inputs under observation.

    Args:
        model: a transformers model; one without language head, such as `LlamaModel`, saves time.
        modules: attention path → the module of `model` that it names.
        observer: receives the states; it may be used again for more data.
        cross: the model is an encoder-decoder: it has a second cache for cross-attention.
    """
    watch = Watch(observer)

    @torch.inference_mode()
    def run(inputs: Mapping[str, Tensor]) -> None:
        for restore in rotary:
            restore()
        watch.start()
        cache = observing_cache(model, watch)
        if cross:
            cache = EncoderDecoderCache(cache, observing_cache(model, watch, cross=True))
        with suppress(LastLayerReached), in_blocks(model, inputs):
            model(**inputs, **cache_arguments(model, cache, cross=cross))
            watch.finish()

    rotary = rotary_restorers(model)
    with watching(model, modules, watch), ExitStack() as stack:
        for restore in rotary:
            stack.callback(restore)
        yield run


def cache_arguments(model: nn.Module, cache: Any, *, cross: bool = False) -> dict[str, Any]:
    """Return the arguments of a model's forward that hand it a cache."""
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"  # XLM's own name
    # an encoder that shares its class with the decoder refuses the flag (Switch Transformers)
    return {name: cache} if cross else {name: cache, "use_cache": True}


@contextmanager
def watching(model: nn.Module, modules: Mapping[str, nn.Module], watch: Watch) -> Iterator[None]:
    """Let the watch see what a model's attention modules do inside the block."""
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(hooked(model, modules, watch))
        if watch.observer.queries:
            stack.enter_context(observed_queries(model, watch))
        yield
