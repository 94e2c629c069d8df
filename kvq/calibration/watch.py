"""Observe keys and values where the cache receives them, queries where attention does.

A transformers cache is handed K after q/k norm and rotation and before `repeat_kv`, V as it is
stored, and under MLA the latent row and the rotated key: exactly what a serving engine quantizes.
So kvq passes a cache that reduces what it is given and keeps no more than the last layer's; hooks
that say which attention module is running tell whose states they are. Queries never reach a cache:
for them alone the attention function is exchanged, by name in the model's config, while observing.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvq.calibration.amax import Key, Observer
from kvq.calibration.attention import exchanged_attention
from kvq.errors import CalibrationError
from kvq.geometry import LayerGeometry
from kvq.quantizers import QUERY


class LastLayerReached(Exception):
    """Raised once every layer was observed: nothing after it changes a maximum."""


class Watch:
    """Knows which attention module is running, and when all of them have run."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.running: list[str] = []
        self.latent: Tensor | None = None  # of the running MLA module
        self.thread = 0  # other threads may run the same model meanwhile
        self.seen: Counter[Key] = Counter()
        self.expected = frozenset(observer.expected)  # of one forward pass
        self.may_stop = False

    def start(self) -> None:
        """Begin a forward pass."""
        self.thread = get_ident()
        self.running.clear()
        self.seen.clear()

    def finish(self) -> None:
        """End a whole forward pass: where each layer ran just once, later ones may stop early."""
        self.may_stop = set(self.seen) == self.expected and set(self.seen.values()) == {1}

    def cached(self, first: Tensor, second: Tensor, layer_idx: int) -> None:
        """Observe what the cache is handed: K and V, or MLA's latent and rotary part."""
        if not self.running:
            raise CalibrationError(
                f"cache entry {layer_idx} is written by a module that config.json and the tensor "
                "names do not show: its scales would be missing",
                code="calibrate.unknown_layer",
                hint="please report this architecture with its config.json",
            )
        layer = self.observer.layers[self.running[-1]]
        if layer.kv_lora_rank is not None and first.shape[1] == layer.num_attention_heads > 1:
            first, second = self._latent_row(layer, first)
        for (quantizer, _), states in zip(layer.cached, (first, second), strict=False):
            self.see(quantizer, states)  # a latent row without rotary part has no second

    def _latent_row(self, layer: LayerGeometry, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return latent and rotary part where transformers caches the expanded heads of MLA.

        Args:
            layer: its geometry.
            keys: [batch, heads, seq_len, qk_nope_head_dim + qk_rope_head_dim]; the rotary part is
                the same in every head.
        """
        rotary = keys[..., layer.qk_nope_head_dim :]  # perhaps of size 0
        if self.latent is None or not torch.equal(rotary[:, 0], rotary[:, -1]):
            raise CalibrationError(
                f"`{layer.attention}` caches expanded heads without a latent row that kvq finds",
                code="calibrate.mla",
                hint="please report this architecture with its config.json",
            )
        return self.latent.unsqueeze(1), rotary[:, :1]

    def see(self, quantizer: str, states: Tensor) -> None:
        """Observe one state of the running module; stop once nothing else is to come."""
        if not self.running or self.thread != get_ident():  # no cache, such as an encoder's
            return
        key = self.running[-1], quantizer
        self.observer.see(key, states)
        self.seen[key] += 1
        if self.may_stop and len(self.seen) == len(self.expected):
            raise LastLayerReached


class ObservingCache:
    """Hands every update to the watch and keeps the last one only; mixed into a class of caches.

    Some models look at the layer that they have just updated (GLM-5's sparse indexer).
    """

    watch: Watch
    layers: list[Any]
    last: Any = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Show the states to the watch and give them back."""
        self.watch.cached(key_states, value_states, layer_idx)
        if self.last is not None:
            self.last.keys = self.last.values = None
        if layer_idx < len(self.layers):
            self.last = self.layers[layer_idx]
            self.last.keys, self.last.values = key_states, value_states
        return key_states, value_states


def observing_cache(model: nn.Module, watch: Watch, *, cross: bool = False) -> Any:
    """Return a cache of the kind that the model makes itself (MiniMax has one of its own).

    With `cross`, one for keys of the encoder: there, no layer has a window.
    """
    code = sys.modules[type(model).__module__]
    own = [
        kind
        for kind in vars(code).values()
        if isinstance(kind, type) and issubclass(kind, DynamicCache) and kind is not DynamicCache
    ]
    config: Any = model.config
    kind = _observing_class(own[0] if own else DynamicCache)
    cache = kind() if own or cross else kind(config=config)
    cache.watch = watch
    return cache


@functools.cache  # compiled layers are those of one class
def _observing_class(base: type) -> Any:
    return type(f"Observing{base.__name__}", (ObservingCache, base), {})


@contextmanager
def hooked(model: nn.Module, modules: Mapping[str, nn.Module], watch: Watch) -> Iterator[None]:
    """Tell the watch when an attention module, or the module around it alone, is running."""

    def entering(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if watch.thread == get_ident():
                watch.running.append(path)
                watch.latent = None

        return hook

    def leaving(*_: Any) -> None:
        if watch.running and watch.thread == get_ident():
            watch.running.pop()

    def latent(_: nn.Module, __: Any, output: Tensor) -> None:
        if watch.thread == get_ident():
            watch.latent = output

    handles = []
    try:
        for path, module in _hooked(model, modules):
            handles.append(module.register_forward_pre_hook(entering(path)))
            handles.append(module.register_forward_hook(leaving, always_call=True))
        for module in modules.values():
            norm = getattr(module, "kv_a_layernorm", None)
            if norm is not None:
                handles.append(norm.register_forward_hook(latent))
        yield
    finally:
        for handle in handles:
            handle.remove()


def hooked_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the modules whose calls `hooked` tells of."""
    return [module for _, module in _hooked(model, modules)]


def _hooked(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    return [*modules.items(), *_wrappers(model, modules)]


def _wrappers(
    model: nn.Module, modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules around one attention module, in its layer: BigBird exchanges the inner one."""
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    inside: dict[str, list[str]] = {}
    for path, module in modules.items():
        parent = names[id(module)].rpartition(".")[0]
        while parent and not parent.rpartition(".")[2].isdigit():
            inside.setdefault(parent, []).append(path)
            parent = parent.rpartition(".")[0]
    for parent, paths in inside.items():
        if len(paths) == 1:
            yield paths[0], model.get_submodule(parent)


@contextmanager
def observed_queries(model: nn.Module, watch: Watch) -> Iterator[None]:
    """Exchange the attention function for one that observes the query and calls the original."""

    def observed(original: Callable[..., Any]) -> Callable[..., Any]:
        def attention(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            watch.see(QUERY, query)
            return original(module, query, *args, **kwargs)

        return attention

    with exchanged_attention(model, observed):
        yield
