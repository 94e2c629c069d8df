"""Run the model over the data: whole in memory, or streamed layer by layer."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.calibration.batches import describe_plan, plan_batches
from kvq.calibration.data import CalibrationData
from kvq.checkpoint import CheckpointView, config_digest, weight_fingerprint
from kvq.errors import UnsupportedModelError
from kvq.geometry import Geometry
from kvq.pipeline.record import layer_statistics, model_identity, versions
from kvq.quantizers import QUERY, QuantizerConfig
from kvq.state import Calibration, Module

if TYPE_CHECKING:
    import torch

    from kvq.calibration.amax import Observer
    from kvq.calibration.model import LoadedModel
    from kvq.pipeline.calibrate import CalibrateOptions

AUTO_BATCH_TOKENS = {"cuda": 16384}  # elsewhere sequences run one by one
Notify = Callable[[str], None]
Progress = Callable[[int, int, float], None]
GIB = 1 << 30


@dataclass(frozen=True)
class Job:
    """All that a calibration runs on."""

    view: CheckpointView
    geometry: Geometry
    data: CalibrationData
    quantizers: Mapping[str, QuantizerConfig | None]
    options: "CalibrateOptions"
    target: Path

    @property
    def attentions(self) -> list[str]:
        """Paths of the attention modules."""
        return [layer.attention for layer in self.geometry.layers]

    @property
    def work(self) -> Path:
        """Where a run keeps what it may need again, beside the folder that it writes."""
        return self.target.with_name(f".{self.target.name}.kvq-progress")

    def observer(self) -> "Observer":
        """Return an observer that has seen nothing."""
        from kvq.calibration.amax import Observer

        queries = any(config and n.endswith(QUERY) for n, config in self.quantizers.items())
        return Observer(self.geometry.layers, queries=queries)

    def batch_size(self, device: str) -> int:
        """Return how many sequences share a batch, from the device's kind alone."""
        longest = max(len(sequence) for sequence in self.data.sequences)
        automatic = max(1, AUTO_BATCH_TOKENS.get(device, 0) // longest)
        return self.options.batch_size or automatic


@dataclass(frozen=True)
class Outcome:
    """What a run saw, and the model it saw it in."""

    observer: "Observer"
    loaded: "LoadedModel"
    modules: tuple[Module, ...]


def observe(job: Job, notify: Notify, progress: Progress | None) -> Calibration:
    """Run the model over the data and return what was observed.

    Raises:
        KvqError: any reason why the statistics would not be exact and complete.
    """
    from kvq.calibration.model import find_device
    from kvq.calibration.modules import attention_modules
    from kvq.calibration.run import fixed_threads

    with fixed_threads() as threads:
        outcome = _streamed(job, find_device(job.options.device), notify, progress)
        outcome = outcome or _in_memory(job, notify, progress)
        results = outcome.observer.results()
    loaded = outcome.loaded
    attentions = attention_modules(loaded.body, job.attentions)
    batch_size = job.batch_size(loaded.device.type)
    return Calibration(
        kv_cfg=job.options.kv_cfg,
        layers=layer_statistics(job.geometry.layers, results, outcome.observer.tokens),
        quantizers=job.quantizers,
        modules=outcome.modules,
        model={
            **model_identity(job.geometry, attentions),
            "config_digest": config_digest(job.view.config),
            "weight_fingerprint": weight_fingerprint(job.view),
        },
        data=job.data.identity,
        margin=job.options.margin,
        run={
            "observer": "amax",
            "batch_plan": describe_plan(job.data.sequences, batch_size),
            "device": loaded.device.type,
            "dtype": loaded.dtype,
            "attention": loaded.attention,
            "threads": threads,
            "versions": versions(),
        },
    )


def _in_memory(job: Job, notify: Notify, progress: Progress | None) -> Outcome:
    from kvq.calibration.model import load_model
    from kvq.calibration.modules import attention_modules, module_list
    from kvq.calibration.run import run_batches

    options = job.options
    loaded = load_model(
        job.view.root, dict(job.view.config), device=options.device, dtype=options.dtype,
        trust_remote_code=options.trust_remote_code, attentions=job.attentions,
    )  # fmt: skip
    modules = module_list(loaded.model, job.attentions)
    batch_size = job.batch_size(loaded.device.type)
    _announce(loaded, job.data, batch_size, notify)
    observer = job.observer()
    plan = plan_batches(job.data.sequences, batch_size)
    attentions = attention_modules(loaded.body, job.attentions)
    run_batches(loaded, attentions, observer, job.data.sequences, plan, progress,
                cross=job.geometry.is_encoder_decoder)  # fmt: skip
    return Outcome(observer, loaded, modules)


def _streamed(
    job: Job, device: "torch.device", notify: Notify, progress: Progress | None
) -> Outcome | None:
    """Stream where that is asked for or needed; None where the model has to be loaded whole."""
    from kvq.calibration.memory import FULL, available_bytes, weight_bytes
    from kvq.calibration.streaming.errors import NotStreamable

    needed, there = weight_bytes(job.view, job.options.dtype), available_bytes(device)
    fits = needed <= FULL * there
    if fits and not job.options.streaming:
        return None
    sizes = f"the weights take {needed / GIB:.1f} GiB, and {device} has {there / GIB:.1f} GiB left"
    try:
        outcome = _stream(job, "" if fits else f"{sizes}: ", notify, progress)
    except NotStreamable as reason:
        if fits:
            notify(f"Not streamed, since {reason}. The whole model is loaded instead.")
            return None
        raise UnsupportedModelError(
            f"{sizes}; `{job.geometry.architecture}` cannot be run layer by layer, since {reason}",
            code="streaming.impossible",
            hint="use a machine or device with more memory",
        ) from reason
    return outcome


def _stream(job: Job, why: str, notify: Notify, progress: Progress | None) -> Outcome:
    from kvq.calibration.memory import available_bytes
    from kvq.calibration.modules import module_list
    from kvq.calibration.streaming.activations import SharedStates
    from kvq.calibration.streaming.hollow import load_hollow
    from kvq.calibration.streaming.loop import Position, Stream

    options = job.options
    hollow = load_hollow(
        job.view, device=options.device, dtype=options.dtype, attentions=job.attentions,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    modules = module_list(hollow.model, job.attentions)
    observer = job.observer()
    batch_size = job.batch_size(hollow.device.type)
    plan = plan_batches(job.data.sequences, batch_size)
    stream = Stream(hollow, job.attentions, observer, job.data.sequences, plan)
    import torch

    there = available_bytes(torch.device("cpu")) - 2 * stream.largest_layer_bytes
    budget = max(0, there // 2) if options.memory_budget is None else options.memory_budget
    in_files = stream.activation_bytes > budget
    notify(
        f"Streaming, {why}one decoder layer of up to {stream.largest_layer_bytes / GIB:.2f} GiB at "
        f"a time; hidden states of {stream.activation_bytes / GIB:.2f} GiB "
        + (f"in files beside {job.target.name}" if in_files else "in memory")
    )
    if stream.loaded.text_alone:
        notify("The whole model needs more than tokens: its text decoder is run alone.")
    notify(
        f"{len(job.data.sequences)} sequences, {stream.tokens} tokens, batches of {batch_size} on "
        f"{hollow.device}, {stream.layers} layers"
    )
    try:
        stream.shared = SharedStates(budget - stream.activation_bytes, job.work)
        if in_files:
            job.work.mkdir(exist_ok=True)
        activations = stream.activations(job.work if in_files else None)
        stream.run(activations, Position(), progress)
    finally:
        shutil.rmtree(job.work, ignore_errors=True)
    return Outcome(observer, stream.loaded, modules)


def _announce(loaded: Any, data: CalibrationData, batch_size: int, notify: Notify) -> None:
    from kvq.calibration.run import estimate

    if loaded.text_alone:
        notify("The whole model needs more than tokens: its text decoder is run alone.")
    lengths = [len(sequence) for sequence in data.sequences]
    guess = estimate(loaded, tokens=sum(lengths), batch_tokens=batch_size * max(lengths))
    notify(
        f"{len(lengths)} sequences, {sum(lengths)} tokens, batches of {batch_size} on "
        f"{loaded.device}, at least {guess.memory_bytes / 2**30:.1f} GiB and {guess.seconds:.0f} s"
    )
