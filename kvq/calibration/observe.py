"""Observe keys and values where the cache receives them, queries where attention does.

A transformers cache is handed K after q/k norm and rotation and before `repeat_kv`, and V as it is
stored: exactly what a serving engine quantizes. So kvq passes a cache that reduces what it is
given and stores nothing; the model itself is not touched. Queries never reach a cache: for them
alone the attention function is exchanged, by name in the model's config, while observing.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from kvq.errors import CalibrationError
from kvq.quantizers import KEY, QUERY, VALUE

_names = (f"kvq_observed_{i}" for i in itertools.count())


class LastLayerReached(Exception):
    """Raised once the last layer was observed: nothing after it changes a maximum."""


def head_amax(states: Tensor) -> Tensor:
    """Return the maximum magnitude per head; NaN and infinity propagate.

    Args:
        states: [batch, heads, seq_len, head_dim], any strides.

    Returns:
        float32 [heads]. Exact: a maximum rounds nothing, and float32 holds every bfloat16/float16.
    """
    per_token = states.transpose(1, 2).flatten(0, 1)  # [tokens, heads, head_dim], as in memory
    return per_token.abs().amax(0).amax(-1).float()


class Observer:
    """Running maxima: (layer index, quantizer) → amax [heads], and how many tokens were seen."""

    def __init__(self, layers: Sequence[int], *, queries: bool) -> None:
        self.layers = tuple(layers)
        self.queries = queries
        self.amax: dict[tuple[int, str], Tensor] = {}
        self.tokens: dict[tuple[int, str], int] = {}

    def see(self, layer_idx: int, quantizer: str, states: Tensor) -> None:
        """Fold one batch of states [batch, heads, seq_len, head_dim] into the maximum."""
        key = (layer_idx, quantizer)
        amax = head_amax(states.detach())
        seen = self.amax.get(key)
        self.amax[key] = amax if seen is None else torch.maximum(seen, amax)
        self.tokens[key] = self.tokens.get(key, 0) + states.shape[0] * states.shape[2]

    def results(self) -> dict[tuple[int, str], Tensor]:
        """Return all maxima on the CPU.

        Raises:
            CalibrationError: a layer or side was never observed, or saw NaN or infinity; all of
                them are named.
        """
        sides = (QUERY, KEY, VALUE) if self.queries else (KEY, VALUE)
        expected = [(layer, side) for layer in self.layers for side in sides]
        missing = [key for key in expected if key not in self.amax]
        if missing:
            raise CalibrationError(
                f"0 observations of {_listed(missing)}",
                code="calibrate.not_observed",
                hint="this architecture does not hand these layers to the cache; please report it",
            )
        results = {key: self.amax[key].cpu() for key in expected}
        nonfinite = [key for key in expected if not results[key].isfinite().all()]
        if nonfinite:
            raise CalibrationError(
                f"NaN or infinity in {_listed(nonfinite)}; nothing was written",
                code="calibrate.nonfinite",
                hint="float16 overflows where bfloat16 does not: try --dtype bfloat16 or float32",
            )
        return results


def _listed(keys: Sequence[tuple[int, str]]) -> str:
    return ", ".join(f"layer {layer} `{side}`" for layer, side in keys)


class _ObservingCache(DynamicCache):
    """Hands every update to the observer and stores nothing."""

    def __init__(self, config: Any, observer: Observer) -> None:
        super().__init__(config=config)
        self.observer = observer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.observer.see(layer_idx, KEY, key_states)
        self.observer.see(layer_idx, VALUE, value_states)
        if layer_idx == self.observer.layers[-1] and not self.observer.queries:
            raise LastLayerReached
        return key_states, value_states


@contextmanager
def observing(decoder: nn.Module, observer: Observer) -> Iterator[Callable[[Tensor], None]]:
    """Yield a function that runs token ids [batch, seq_len] through `decoder` under observation.

    Args:
        decoder: a transformers decoder without language head, e.g. `LlamaModel`.
        observer: receives the states; it may be used again for more data.
    """
    config: Any = decoder.config

    @torch.inference_mode()
    def run(input_ids: Tensor) -> None:
        cache = _ObservingCache(config, observer)
        with suppress(LastLayerReached):
            decoder(input_ids=input_ids, past_key_values=cache, use_cache=True)

    training = [(module, module.training) for module in decoder.modules()]
    decoder.eval()
    try:
        if observer.queries:
            with _observed_queries(decoder, observer):
                yield run
        else:
            yield run
    finally:
        for module, was_training in training:
            module.training = was_training


@contextmanager
def _observed_queries(decoder: nn.Module, observer: Observer) -> Iterator[None]:
    """Exchange the attention function for one that observes the query and calls the original."""
    config: Any = decoder.config
    implementation: str = config._attn_implementation
    layer_of = {
        id(module): module.layer_idx
        for module in decoder.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
    }

    def attention(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer_idx = layer_of[id(module)]
        observer.see(layer_idx, QUERY, query)
        if layer_idx == observer.layers[-1]:
            raise LastLayerReached
        return _original(module, implementation)(module, query, *args, **kwargs)

    name = next(_names)
    attention_functions: dict = AttentionInterface._global_mapping
    mask_functions: dict = AttentionMaskInterface._global_mapping
    attention_functions[name] = attention
    if implementation in mask_functions:
        mask_functions[name] = mask_functions[implementation]
    before = [(c, c._attn_implementation) for c in _configs(decoder)]
    try:
        for module_config, _ in before:
            module_config._attn_implementation = name
        yield
    finally:
        for module_config, original in before:
            module_config._attn_implementation = original
        del attention_functions[name]
        mask_functions.pop(name, None)


def _configs(decoder: nn.Module) -> list[Any]:
    found: Mapping[int, Any] = {
        id(module.config): module.config
        for module in decoder.modules()
        if hasattr(getattr(module, "config", None), "_attn_implementation")
    }
    return list(found.values())


def _original(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """Return the attention function that `module` would have called itself."""
    code = sys.modules[type(module).__module__]
    return code.ALL_ATTENTION_FUNCTIONS.get_interface(
        implementation, getattr(code, "eager_attention_forward", None)
    )
