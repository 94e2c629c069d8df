"""What the decoder's layers are called with, found by running the model around them.

The model's own forward runs with every layer's forward exchanged for one that notes its arguments
and returns its hidden states. Masks, position embeddings and whatever else a model computes before
its layers are therefore its own. What this cannot be true for is found and refused: hidden states
changed between layers, arguments that depend on what a layer returns, layers called twice.
"""

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvq.calibration.blocks import in_blocks
from kvq.calibration.observe import cache_arguments
from kvq.calibration.restore import rotary_restorers
from kvq.calibration.streaming.errors import NotStreamable
from kvq.errors import first_line

MAX_KEPT_BYTES = 256 << 20  # arguments kept for further batches of the same shape

Wrap = Callable[[Tensor], Any]
FORMS: Mapping[str, Wrap] = {  # how a layer returns its hidden states
    "tensor": lambda states: states,
    "tuple": lambda states: (states,),
    "tuple, None": lambda states: (states, None),
}


class _Hidden:
    """Stands for the hidden states among a layer's arguments."""


class _Cache:
    """Stands for the cache among a layer's arguments."""


@dataclass(frozen=True)
class _Shared:
    """Stands for a dict that layers may write into for later ones; `number` tells them apart."""

    number: int
    kind: type
    value: Any


HIDDEN, CACHE = _Hidden(), _Cache()


class BodyFails(NotStreamable):
    """The model does not even reach its first layer."""


class _Enough(Exception):
    """The last layer in question was called."""


@dataclass
class Calls:
    """The arguments of each layer in one forward pass, and the hidden states of the first."""

    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    states: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor among the arguments once."""
        seen: set[int] = set()
        for leaf in _leaves(self.arguments):
            if isinstance(leaf, Tensor) and id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf

    def same(self, other: "Calls") -> bool:
        """Whether both passes call the layers with equal arguments, hidden states apart."""
        mine, others = list(_leaves(self.arguments)), list(_leaves(other.arguments))
        if len(mine) != len(others):
            return False
        equal: set[tuple[int, int]] = set()
        for one, two in zip(mine, others, strict=True):
            if (id(one), id(two)) in equal:
                continue
            if type(one) is not type(two) or not _equal(one, two):
                return False
            equal.add((id(one), id(two)))
        return True


def _equal(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == two)
    alike = one.dtype == two.dtype and one.shape == two.shape and one.device == two.device
    return alike and torch.equal(one, two)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in value:
            yield key
            yield from _leaves(value[key])
    elif isinstance(value, tuple | list):
        yield len(value)
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, _Shared):
        yield value.number
        yield from _leaves(value.value)
    else:
        yield value


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


class Caller:
    """Runs a model around its layers.

    Args:
        body: what is run.
        layers: its decoder's layers.
        cache: makes an empty cache for a forward pass.

    Attributes:
        needed: how many layers to call; the forward pass ends there.
        form: how the model takes what its layers return.
    """

    def __init__(
        self, body: nn.Module, layers: Sequence[nn.Module], cache: Callable[[], Cache]
    ) -> None:
        self.body, self.layers, self.cache = body, layers, cache
        self.needed = len(layers)
        self.form = "tensor"
        self._rotary = rotary_restorers(body, apart=layers)
        self._ignored: set[int] = set()
        self._reached = False

    def find_form(self, inputs: Mapping[str, Tensor]) -> None:
        """Find out in which form the model takes what its layers return.

        Raises:
            NotStreamable: in none that carries hidden states alone.
        """
        reasons = []
        for form in FORMS:
            self.form, self._reached = form, False
            try:
                self.run(inputs)
                return
            except NotStreamable as found:
                reasons.append(str(found))
            except Exception as error:  # of model code, handed another form than it takes
                reasons.append(f"{type(error).__name__}: {first_line(error)}")
                if not self._reached and "meta" not in reasons[-1]:
                    raise BodyFails(reasons[-1]) from error
        raise NotStreamable(reasons[0])

    def ignores(self, inputs: Mapping[str, Tensor], others: int) -> bool:
        """Whether it makes no difference that layers return `others` values beside the first."""
        if others not in self._ignored and self.form == "tuple":
            try:
                if self.run(inputs).same(self.run(inputs, others=others)):
                    self._ignored.add(others)
            except Exception:  # of model code that does use them
                return False
        return others in self._ignored

    @torch.inference_mode()
    def run(
        self, inputs: Mapping[str, Tensor], *, until: int | None = None, changed: bool = False,
        others: int = 0,
    ) -> Calls:  # fmt: skip
        """Return the arguments of the layers, those after layer `until` left out.

        With `changed`, layers return other hidden states than they get; with `others`, so many
        tensors after them.
        """
        for restore in self._rotary:
            restore()
        calls, returned = Calls(), None
        last = self.needed - 1 if until is None else until
        shared: dict[int, tuple[Any, _Shared]] = {}  # by the id of a dict, which thus stays alive
        cache = self.cache()

        def called(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal returned
            if number != len(calls.arguments):
                raise NotStreamable(
                    f"layer {number} is called when layer {len(calls.arguments)} is due"
                )
            self._reached = True
            states: Any = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(states, Tensor):
                raise NotStreamable(f"layer {number} gets no hidden states first")
            if states.device.type == "meta":
                raise NotStreamable("what it computes before its layers takes weights of others")
            if number == 0:
                calls.states = states
            elif states is not returned:
                raise NotStreamable(f"something comes between layers {number - 1} and {number}")
            noted = [self._noted(value, states, cache, shared) for value in args]
            named = {key: self._noted(kwargs[key], states, cache, shared) for key in kwargs}
            calls.arguments.append((tuple(noted), named))
            if number == last:
                raise _Enough
            returned = states * -0.5 + 1 if changed else states
            formed = FORMS[self.form](returned)
            return (*formed, *(states.new_ones(1) for _ in range(others))) if others else formed

        with _exchanged(self.layers, called), in_blocks(self.body, inputs):
            try:
                self.body(**inputs, **cache_arguments(self.body, cache))
            except _Enough:
                return calls
        raise NotStreamable(f"it calls {len(calls.arguments)} of {self.needed} layers")

    def _noted(
        self, value: Any, states: Tensor, cache: Any, shared: dict[int, tuple[Any, _Shared]]
    ) -> Any:
        if value is states:
            return HIDDEN
        if value is cache or isinstance(value, Cache):
            return CACHE
        if type(value) in (dict, UserDict):
            if id(value) not in shared:
                noted = {k: self._noted(value[k], states, cache, shared) for k in value}
                shared[id(value)] = value, _Shared(len(shared), type(value), noted)
            return shared[id(value)][1]
        if type(value) in (tuple, list):
            return type(value)(self._noted(part, states, cache, shared) for part in value)
        if isinstance(value, Tensor) and value.device.type != "meta":
            return value
        if isinstance(value, _PLAIN):
            return value
        raise NotStreamable(f"it hands its layers a `{type(value).__name__}`")


def filled(noted: Any, states: Tensor, cache: Any, shared: dict[int, Any]) -> Any:
    """Return noted arguments with hidden states, cache and shared dicts in their places."""
    if noted is HIDDEN:
        return states
    if noted is CACHE:
        return cache
    if isinstance(noted, _Shared):
        if noted.number not in shared:
            value = {k: filled(noted.value[k], states, cache, shared) for k in noted.value}
            shared[noted.number] = noted.kind(value)
        return shared[noted.number]
    if type(noted) is dict:
        return {key: filled(noted[key], states, cache, shared) for key in noted}
    if type(noted) in (tuple, list):
        return type(noted)(filled(part, states, cache, shared) for part in noted)
    return noted


@contextmanager
def _exchanged(layers: Sequence[nn.Module], called: Callable[..., Any]) -> Iterator[None]:
    """Let layers hand their arguments to `called` inside the block; their attributes stay."""

    def forward(number: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: called(number, args, kwargs)

    try:
        for number, layer in enumerate(layers):
            layer.forward = forward(number)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


class Kept:
    """Arguments by shape of the inputs, the latest used first, within a number of bytes."""

    def __init__(self, limit: int = MAX_KEPT_BYTES) -> None:
        self.limit = limit
        self.found: OrderedDict[Any, tuple[Calls, int]] = OrderedDict()

    def get(self, shape: Any) -> Calls | None:
        """Return the arguments kept for a shape."""
        if shape not in self.found:
            return None
        self.found.move_to_end(shape)
        return self.found[shape][0]

    def put(self, shape: Any, calls: Calls) -> None:
        """Keep arguments, and let go of those not used for longest."""
        calls.states = None
        size = sum(tensor.untyped_storage().nbytes() for tensor in calls.tensors())
        self.found[shape] = calls, size
        while len(self.found) > 1 and sum(s for _, s in self.found.values()) > self.limit:
            self.found.popitem(last=False)
