"""The calibration loop: batches of equal length through the decoder, maxima out."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from torch import nn

from kvq.calibration.amax import Observer
from kvq.calibration.batches import Sequence as TokenSequence
from kvq.calibration.compiling import compiled
from kvq.calibration.model import LoadedModel
from kvq.calibration.observe import observing
from kvq.calibration.streaming.errors import NotStreamable
from kvq.errors import (
    CalibrationError,
    KvqError,
    MissingDependencyError,
    UnsupportedModelError,
    first_line,
)
from kvq.geometry import is_text_path

Progress = Callable[[int, int, float], None]  # tokens done, tokens in all, seconds since start


@dataclass(frozen=True)
class Estimate:
    """What a run will take at least: bytes of memory, and seconds in the linear layers."""

    memory_bytes: int
    seconds: float


def cpu_threads() -> int:
    """Number of threads kvq computes with: the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def fixed_threads() -> Iterator[int]:
    """Compute with `cpu_threads()` threads inside the block; the previous count afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(cpu_threads())
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def run_batches(
    loaded: LoadedModel,
    modules: Mapping[str, nn.Module],
    observer: Observer,
    sequences: Sequence[TokenSequence],
    plan: Sequence[Sequence[int]],
    progress: Progress | None = None,
    *,
    cross: bool = False,
    numbers: Sequence[int] | None = None,
    start: int = 0,
    after_batch: Callable[[int], None] = lambda done: None,
    boundaries: Sequence[int] = (),
    may_end: Callable[[int], bool] = lambda batches: False,
    compile_layers: bool = False,
) -> int | None:
    """Run every batch of the plan; `plan` holds indices into `sequences` of equal lengths.

    Batches have the given numbers, or are counted from 0. With `start`, that many of what `runs`
    yields are left out, having run before; `after_batch` is called with how many have run.

    Once all batches with lower numbers have run, `may_end` is asked with each of the boundaries.

    Returns:
        The boundary at which the run ended; None if it ran to the end of the plan.

    On the CPU the sequences of a batch run one by one, so that the maxima do not depend on the
    batch size: a matrix product of another height sums in another order there. Measured on a
    135M-parameter model in bfloat16, 8 sequences in one batch instead of 8: up to 3.8 % off in 41
    of 60 maxima, in 0.88 of the time at 512 tokens a sequence and 0.31 at 32.
    """
    total = sum(len(sequence) for sequence in sequences)
    done, count, began = 0, 0, time.perf_counter()
    steps: list[tuple[int, Sequence[int]]] = [(boundary, ()) for boundary in boundaries]
    steps += runs(plan, loaded.device, numbers)
    with ExitStack() as stack:
        run = stack.enter_context(observing(loaded.body, modules, observer, cross=cross))
        if compile_layers:
            run = stack.enter_context(compiled(loaded.body, modules, run))
        for number, batch in sorted(steps, key=itemgetter(0)):  # a boundary before its batch
            if not batch:
                if may_end(number):
                    return number
                continue
            count += 1
            if count <= start:
                done += sum(len(sequences[i]) for i in batch)
                continue
            inputs = batch_inputs([sequences[i] for i in batch], loaded.device)
            observer.batch = number
            with model_errors(loaded, inputs):
                run(inputs)
            done += sum(ids.numel() for ids in inputs.values())
            if progress is not None:
                progress(done, total, time.perf_counter() - began)
            after_batch(count)
    return None


@contextmanager
def enough_memory(device: torch.device, sequences: int) -> Iterator[None]:
    """Turn too little memory for a batch of so many sequences into an error of kvq's."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CalibrationError(
            f"out of memory on {device} with {sequences} sequences in a batch",
            code="calibrate.memory",
            hint="lower --batch-size or --seq-len",
        ) from error


@contextmanager
def model_errors(loaded: LoadedModel, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Turn what a model raises while it runs into kvq's errors."""
    shapes = {name: list(ids.shape) for name, ids in inputs.items()}
    try:
        with enough_memory(loaded.device, len(next(iter(inputs.values())))):
            yield
    except (KvqError, NotStreamable):
        raise
    except ImportError as error:  # kernels of a quantization, for one, are looked for this late
        raise MissingDependencyError(
            f"`{type(loaded.model).__name__}` needs another package to run: {first_line(error)}",
            code="dependency.model",
        ) from error
    except Exception as error:  # model code raises anything
        raise UnsupportedModelError(
            f"`{type(loaded.model).__name__}` fails on token ids {shapes}: "
            f"{type(error).__name__}: {first_line(error)}",
            code="model.forward",
            hint="if it needs images or sound, the Python API takes any inputs",
        ) from error


def batch_inputs(batch: Sequence[TokenSequence], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the model's inputs for sequences of equal length, on the device."""
    inputs = {"input_ids": torch.from_numpy(np.stack([one.token_ids for one in batch]))}
    decoder = [one.decoder_ids for one in batch if one.decoder_ids is not None]
    if decoder:
        inputs["decoder_input_ids"] = torch.from_numpy(np.stack(decoder))
    if device.type == "cuda":  # else the copy waits for all that the device has still to do
        inputs = {name: ids.pin_memory() for name, ids in inputs.items()}
    return {name: ids.to(device, non_blocking=True) for name, ids in inputs.items()}


def runs(
    plan: Sequence[Sequence[int]], device: torch.device, numbers: Sequence[int] | None = None
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield each batch's number and what runs at once of it: all, or one after the other."""
    for number, batch in zip(numbers or range(len(plan)), plan, strict=True):
        for part in ([i] for i in batch) if device.type == "cpu" else [batch]:
            yield number, part


def estimate(loaded: LoadedModel, *, tokens: int, batch_tokens: int) -> Estimate:
    """Estimate memory and time before the first batch; each shape of linear layer is timed once."""
    linears = [
        module
        for name, module in loaded.body.named_modules()
        # of a mixture's experts a token visits few, and text visits no other modality's tower
        if type(module) is nn.Linear and "expert" not in name and is_text_path(name)
    ]
    shapes = Counter(tuple(linear.weight.shape) for linear in linears)
    one_of = {tuple(linear.weight.shape): linear for linear in linears}
    seconds = sum(
        _seconds(one_of[shape], batch_tokens, loaded.device) * n for shape, n in shapes.items()
    )
    weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    widest = max((sum(shape) for shape in shapes), default=0)
    item = next(loaded.body.parameters()).element_size()
    return Estimate(weights + 4 * batch_tokens * widest * item, seconds * tokens / batch_tokens)


@torch.inference_mode()
def _seconds(linear: nn.Linear, tokens: int, device: torch.device) -> float:
    weight = linear.weight
    if weight.device.type == "meta":
        weight = torch.zeros(weight.shape, dtype=weight.dtype, device=device)
    # of a model that is spread, its layers are on several devices
    states = torch.zeros(tokens, linear.in_features, dtype=weight.dtype, device=weight.device)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        nn.functional.linear(states, weight)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return best
