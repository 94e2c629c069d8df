"""The streaming loop: every batch through one layer, then through the next."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvq.calibration.amax import Observer
from kvq.calibration.batches import Sequence as TokenSequence
from kvq.calibration.blocks import in_blocks
from kvq.calibration.model import LoadedModel, no_progress_bars
from kvq.calibration.modules import attention_modules
from kvq.calibration.observe import watching
from kvq.calibration.restore import rotary_restorers
from kvq.calibration.run import Progress, batch_inputs, model_errors, runs
from kvq.calibration.streaming.activations import Activations, Shape, SharedStates
from kvq.calibration.streaming.calls import BodyFails, Caller, Calls, Kept
from kvq.calibration.streaming.errors import NotStreamable
from kvq.calibration.streaming.hollow import HollowModel, bodies, loaded_model
from kvq.calibration.streaming.step import call, guarded_cache, hidden_states
from kvq.calibration.watch import LastLayerReached, Watch, observing_cache


@dataclass
class Position:
    """How far a run has come: batches before `batch` have passed `layer`."""

    layer: int = 0
    batch: int = 0


class Stream:
    """A model and its data, ready to pass layer by layer.

    Args:
        hollow: the model.
        attentions: paths of the attention modules to observe.
        observer: receives their states.
        sequences: the data.
        plan: batches, as indices into `sequences`.
        numbers: of the batches; counted from 0 by default.

    Raises:
        NotStreamable: the model's layers cannot be run one after the other.
    """

    def __init__(
        self, hollow: HollowModel, attentions: Sequence[str], observer: Observer,
        sequences: Sequence[TokenSequence], plan: Sequence[Sequence[int]],
        numbers: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.hollow, self.observer, self.sequences = hollow, observer, sequences
        numbered = list(runs(plan, hollow.device, numbers))
        self.numbers = [number for number, _ in numbered]
        self.runs = [run for _, run in numbered]
        self.tokens = sum(len(sequence) for sequence in sequences)
        self.watch = Watch(observer)
        with no_progress_bars():
            self.loaded, self.caller = self._choose_body(attentions)
        self.modules = attention_modules(self.loaded.body, attentions)
        self.keys = self._keys_by_layer()
        self.caller.needed = 1 + max(number for number, keys in enumerate(self.keys) if keys)
        self.shapes, self.dtype = self._shapes()
        self.kept = Kept()
        self.fixed = True  # whether batches of one shape call the layers with equal arguments
        self.checked: set[tuple[int, Any]] = set()  # layers and shapes that left their arguments
        self.shared = SharedStates(0, Path())

    @property
    def layers(self) -> int:
        """How many layers are run: nothing after the last one with a cache matters."""
        return self.caller.needed

    @property
    def activation_bytes(self) -> int:
        """The size of the hidden states of all batches."""
        return sum(int(np.prod(shape)) for shape in self.shapes) * self.dtype.itemsize

    @property
    def largest_layer_bytes(self) -> int:
        """The size of the largest layer's weights."""
        return max(self.hollow.layer_bytes(number) for number in range(self.layers))

    def activations(
        self, folder: Path, *, in_files: bool, saved: Mapping[str, Any] | None = None
    ) -> Activations:
        """Return room for the hidden states, in memory or in files; holding what was saved."""
        return Activations(
            self.shapes, self.dtype, self.hollow.device, folder, in_files=in_files, saved=saved
        )

    def run(
        self, activations: Activations, at: Position, progress: Progress | None = None,
        after_batch: Callable[[Position], None] = lambda at: None,
    ) -> None:  # fmt: skip
        """Pass all batches through all layers from `at` on, which moves along.

        Args:
            activations: of the batches; from the start, what it holds does not matter.
            at: where to begin.
            progress: receives tokens done, tokens in all and seconds.
            after_batch: called after every batch, with the position of the next.
        """
        start, whole = time.perf_counter(), len(self.runs) * self.layers
        with self._watching(), ThreadPoolExecutor(1, "kvq-weights") as pool:
            ahead: Future[None] = pool.submit(self._fill, at.layer)
            self._embed(activations, resumed=at != Position(), after_batch=lambda: after_batch(at))
            while at.layer < self.layers:
                with model_errors(self.loaded, self._inputs(0)):
                    ahead.result()
                ahead = pool.submit(self._fill, at.layer + 1)
                with self._layer(at.layer) as restorers:
                    for batch in range(at.batch, len(self.runs)):
                        for restore in restorers:
                            restore()
                        self._pass(at.layer, batch, activations)
                        at.batch = batch + 1
                        done = at.layer * len(self.runs) + at.batch
                        if at.batch == len(self.runs):
                            at.layer, at.batch = at.layer + 1, 0
                        after_batch(at)
                        if progress is not None:
                            seconds = time.perf_counter() - start
                            progress(self.tokens * done // whole, self.tokens, seconds)

    def _fill(self, number: int) -> None:
        if number < self.layers:
            self.hollow.fill(number)

    def _choose_body(self, attentions: Sequence[str]) -> tuple[LoadedModel, Caller]:
        used = np.unique(np.concatenate([one.token_ids for one in self.sequences]))
        for body in bodies(self.hollow.model):
            self.hollow.fill_outside(body, torch.from_numpy(used))
            layers = self.hollow.layers
            caller = Caller(body, layers, partial(observing_cache, body, self.watch))
            with watching(body, attention_modules(body, attentions), self.watch):
                try:
                    caller.find_form(self._inputs(0))
                except BodyFails as found:
                    failed = found
                    continue
            return loaded_model(self.hollow, body), caller
        raise failed

    def _keys_by_layer(self) -> list[frozenset[tuple[str, str]]]:
        layer_of = {
            id(module): number
            for number, layer in enumerate(self.hollow.layers)
            for module in layer.modules()
        }
        found: list[set[tuple[str, str]]] = [set() for _ in self.hollow.layers]
        for key in self.observer.expected:
            module = self.modules[key[0]]
            if id(module) not in layer_of:
                raise NotStreamable(f"`{key[0]}` is not inside of a layer")
            found[layer_of[id(module)]].add(key)
        return [frozenset(keys) for keys in found]

    def _shapes(self) -> tuple[list[Shape], torch.dtype]:
        found: dict[Any, Tensor] = {}
        shapes = []
        for batch in range(len(self.runs)):
            shape = self._shape(batch)
            if shape not in found:
                calls = self._calls(batch)
                if not calls.same(self._calls(batch, changed=True)):
                    raise NotStreamable("what its layers receive depends on the layers before them")
                assert calls.states is not None
                found[shape] = calls.states.to("meta")
            shapes.append(tuple(found[shape].shape))
        dtypes = {states.dtype for states in found.values()}
        if len(dtypes) > 1:
            raise NotStreamable("its hidden states have several dtypes")
        return shapes, dtypes.pop()

    def _shape(self, batch: int) -> tuple[int, ...]:
        run = self.runs[batch]
        return len(run), *self.sequences[run[0]].lengths

    def _inputs(self, batch: int) -> dict[str, Tensor]:
        return batch_inputs([self.sequences[i] for i in self.runs[batch]], self.hollow.device)

    def _calls(self, batch: int, *, until: int | None = None, changed: bool = False) -> Calls:
        inputs = self._inputs(batch)
        with model_errors(self.loaded, inputs):
            return self.caller.run(inputs, until=until, changed=changed)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with no_progress_bars(), watching(self.loaded.body, self.modules, self.watch):
            yield

    def _embed(
        self, activations: Activations, *, resumed: bool, after_batch: Callable[[], None]
    ) -> None:
        """Make the hidden states that the first layer reads, and what it is called with beside."""
        for batch in range(len(self.runs)):
            calls = self._calls(batch)
            states, calls.states = calls.states, None
            assert states is not None
            if not resumed:
                activations.write(batch, states)
            shape = self._shape(batch)
            known = self.kept.get(shape)
            if known is None:
                self.kept.put(shape, calls)
            elif not known.same(calls):
                self.fixed = False
            after_batch()

    @torch.inference_mode()
    def _pass(self, number: int, batch: int, activations: Activations) -> None:
        """Pass one batch through one layer."""
        shape = self._shape(batch)
        calls = self.kept.get(shape) if self.fixed else None
        first = calls is None or (number, shape) not in self.checked
        if calls is None:
            calls = self._calls(batch, until=None if self.fixed else number)
            if self.fixed:
                self.kept.put(shape, calls)
        layer, last = self.hollow.layers[number], number == self.layers - 1
        states = activations.read(batch)
        shared = self.shared.of(batch)
        self.watch.start()
        self.observer.batch = self.numbers[batch]
        inputs = self._inputs(batch)
        with model_errors(self.loaded, inputs), in_blocks(self.loaded.body, inputs):
            try:
                cache = guarded_cache(self.loaded.body, self.watch)
                returned = call(layer, calls.arguments[number], states, cache, shared, check=first)
            except LastLayerReached:
                return
        self.checked.add((number, shape))
        self.shared.keep(batch)
        if last:
            self.watch.finish()
            return
        found, others = hidden_states(returned, self.caller.form, number)
        if others and not self.caller.ignores(inputs, others):
            raise NotStreamable(f"layer {number} returns more than hidden states")
        activations.write(batch, found)

    @contextmanager
    def _layer(self, number: int) -> Iterator[list[Callable[[], None]]]:
        """Have a layer's weights in memory inside the block."""
        self.watch.expected, self.watch.may_stop = self.keys[number], False
        try:
            yield rotary_restorers(self.hollow.layers[number])
        finally:
            if self.hollow.device.type == "cuda":
                torch.cuda.current_stream(self.hollow.device).synchronize()
            self.hollow.empty(number)
