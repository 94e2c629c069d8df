"""Run the model over the data: whole in memory, or streamed layer by layer."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvq.calibration.batches import describe_plan
from kvq.calibration.data import CalibrationData
from kvq.checkpoint import config_digest, weight_fingerprint
from kvq.errors import InputError, UnsupportedModelError
from kvq.pipeline.job import Job, Notify, Progress
from kvq.pipeline.placement import memory_of_devices, places
from kvq.pipeline.record import layer_statistics, model_identity, versions
from kvq.pipeline.resume import Session
from kvq.state import Calibration, Module

if TYPE_CHECKING:
    import torch

    from kvq.calibration.amax import Observer
    from kvq.calibration.model import LoadedModel
    from kvq.calibration.streaming.loop import Position, Stream

GIB = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """What a run saw, the model it saw it in, and where it ended, if before its plan did."""

    observer: "Observer"
    loaded: "LoadedModel"
    modules: tuple[Module, ...]
    ended_after: int | None = None  # batches of the whole plan


def observe(job: Job, run: Session, progress: Progress | None) -> Calibration:
    """Run the model over the data and return what was observed.

    Raises:
        KvqError: any reason why the statistics would not be exact and complete.
    """
    from kvq.calibration.blocks import described
    from kvq.calibration.distributed import merge
    from kvq.calibration.modules import attention_modules
    from kvq.calibration.run import fixed_threads

    if job.long_tokens is not None:
        run.notify(
            f"Where the model would make a mask of length x length, attention over "
            f"{job.long_tokens} tokens runs in blocks of queries."
        )
    with fixed_threads() as threads:
        outcome = _streamed(job, run, progress) or _in_memory(job, run, progress)
        merge(job.ranks, outcome.observer, job.device)
        results = outcome.observer.results()
    loaded = outcome.loaded
    attentions = attention_modules(loaded.body, job.attentions)
    return Calibration(
        kv_cfg=job.options.kv_cfg,
        layers=layer_statistics(job.geometry.layers, results, outcome.observer),
        quantizers=job.quantizers,
        modules=outcome.modules,
        model={
            **model_identity(job.geometry, attentions),
            "config_digest": config_digest(job.view.config),
            "weight_fingerprint": weight_fingerprint(job.view),
        },
        data=_seen(job, outcome.ended_after),
        margin=job.options.margin,
        run={
            "observer": "amax",
            "batch_plan": describe_plan(job.data.sequences, job.batch_size),
            "stop_when_stable": job.options.stop_when_stable,
            "ended_after": outcome.ended_after,
            "device": loaded.device.type,
            "dtype": loaded.dtype,
            "attention": described(loaded.attention, long=job.long_tokens is not None),
            **({"compiled": True} if job.options.compile else {}),
            "threads": threads,
            "versions": versions(),
        },
    )


def _seen(job: Job, ended_after: int | None) -> dict[str, Any]:
    """Return the identity of the data with the amounts that were run, and those that were given."""
    given = dict(job.data.identity)
    if ended_after is None:
        return given
    run = [job.data.sequences[i] for batch in job.whole_plan[:ended_after] for i in batch]
    amounts = {"sequences": len(run), "tokens": sum(len(sequence) for sequence in run)}
    return given | amounts | {"given": {name: given[name] for name in amounts}}


def no_early_end(why: str) -> InputError:
    """Return the error of --stop-when-stable where the model is streamed."""
    return InputError(
        f"--stop-when-stable cannot end a streamed run early ({why}): each layer sees all batches "
        "before the next one sees any",
        code="option.stop_when_stable",
        hint="leave it out, or lower --num-samples",
    )


def _in_memory(job: Job, run: Session, progress: Progress | None) -> Outcome:
    from kvq.calibration.compiling import check_shapes
    from kvq.calibration.model import load_model
    from kvq.calibration.modules import attention_modules, module_list
    from kvq.calibration.run import run_batches
    from kvq.calibration.stability import stable

    options = job.options
    loaded = load_model(
        job.view.root, dict(job.view.config), device=str(job.device), dtype=options.dtype,
        trust_remote_code=options.trust_remote_code, attentions=job.attentions,
        memory=memory_of_devices(job),
    )  # fmt: skip
    if options.device_map is not None:
        run.notify(places(loaded.model))
    if options.compile:
        check_shapes(job.data.sequences, job.plan)
    modules = module_list(loaded.model, job.attentions)
    _announce(loaded, job.data, job.batch_size, run.notify)
    observer = job.observer()
    start = 0
    if run.state is not None:
        start = run.state.position["batches"]
        run.state.restore(observer, loaded.device)
        run.notify(f"Resumed after {start} batches.")
    attentions = attention_modules(loaded.body, job.attentions)
    boundaries = _boundaries_ahead(job, start, loaded.device, run.notify)
    saver = run.saver("memory", observer)
    with saver.interruptible():
        ended_after = run_batches(
            loaded, attentions, observer, job.data.sequences, job.plan, progress,
            cross=job.geometry.is_encoder_decoder, numbers=job.numbers, start=start,
            after_batch=lambda done: saver.after_batch(lambda: {"batches": done}),
            boundaries=boundaries, may_end=partial(stable, job.ranks, observer),
            compile_layers=options.compile,
        )  # fmt: skip
    return Outcome(observer, loaded, modules, ended_after)


def _boundaries_ahead(
    job: Job, start: int, device: "torch.device", notify: Notify
) -> Sequence[int]:
    """Return the boundaries that no process has passed; a resumed one has those behind it.

    Args:
        job: the calibration.
        start: how many runs this process has behind it.
        device: where it runs.
        notify: is told where there are none at all.
    """
    from kvq.calibration.distributed import furthest
    from kvq.calibration.run import runs

    if not job.options.stop_when_stable:
        return ()
    if not job.boundaries:
        notify(f"--stop-when-stable changes nothing: {len(job.whole_plan)} batches are too few.")
    numbers = [number for number, _ in runs(job.plan, device, job.numbers)]
    passed = furthest(job.ranks, numbers[start - 1] if start else -1)
    return [boundary for boundary in job.boundaries if boundary > passed]


def _streamed(job: Job, run: Session, progress: Progress | None) -> Outcome | None:
    """Stream where that is asked for or needed; None where the model has to be loaded whole."""
    outcome = None
    if job.options.device_map is None and not (run.state and run.state.mode == "memory"):
        outcome = _streamed_if_needed(job, run, progress)
    if outcome is None and job.options.memory_budget is not None:
        run.notify("--memory-budget changes nothing: the whole model is in memory.")
    return outcome


def _streamed_if_needed(job: Job, run: Session, progress: Progress | None) -> Outcome | None:
    from kvq.calibration.memory import FULL, available_bytes, weight_bytes
    from kvq.calibration.streaming.errors import NotStreamable

    needed, there = weight_bytes(job.view, job.options.dtype), available_bytes(job.device)
    if job.device.type == "cpu":
        there //= job.ranks.local_world
    fits = needed <= FULL * there
    if fits and not job.options.streaming and run.state is None:
        return None
    sizes = (
        f"the weights take {needed / GIB:.1f} GiB, and {job.device} has {there / GIB:.1f} GiB left"
    )
    if job.options.compile:
        raise InputError(
            f"{sizes}: layers have to be read one by one, and those are not compiled",
            code="option.compile",
            hint="leave --compile out",
        )
    if job.options.stop_when_stable:
        raise no_early_end(sizes)
    try:
        return _stream(job, "" if fits else f"{sizes}: ", run, progress)
    except NotStreamable as reason:
        run.start_over()
        if fits:
            run.notify(f"Not streamed, since {reason}. The whole model is loaded instead.")
            return None
        raise UnsupportedModelError(
            f"{sizes}; `{job.geometry.architecture}` cannot be run layer by layer, since {reason}",
            code="streaming.impossible",
            hint="use a machine or device with more memory",
        ) from reason


def _stream(job: Job, why: str, run: Session, progress: Progress | None) -> Outcome:
    from kvq.calibration.modules import module_list
    from kvq.calibration.streaming.activations import SharedStates
    from kvq.calibration.streaming.hollow import load_hollow
    from kvq.calibration.streaming.loop import Position, Stream

    options = job.options
    hollow = load_hollow(
        job.view, device=str(job.device), dtype=options.dtype, attentions=job.attentions,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    modules = module_list(hollow.model, job.attentions)
    observer = job.observer()
    stream = Stream(hollow, job.attentions, observer, job.data.sequences, job.plan, job.numbers)
    budget = _budget(job, stream)
    in_files = stream.activation_bytes > budget
    at = Position()
    saved = None
    if run.state is not None:
        position = run.state.position
        at, saved = Position(position["layer"], position["batch"]), position["activations"]
        in_files = position["in_files"]
        run.state.restore(observer, hollow.device)
    run.notify(
        f"Streaming, {why}one decoder layer of up to {stream.largest_layer_bytes / GIB:.2f} GiB at "
        f"a time; hidden states of {stream.activation_bytes / GIB:.2f} GiB "
        + (f"in files beside {job.target.name}" if in_files else "in memory")
    )
    if stream.loaded.text_alone:
        run.notify("The whole model needs more than tokens: its text decoder is run alone.")
    run.notify(
        f"{len(job.data.sequences)} sequences, {stream.tokens} tokens, batches of "
        f"{job.batch_size} on {hollow.device}, {stream.layers} layers"
    )
    donors = {layer.shared_from for layer in job.geometry.layers}
    sharing = [layer.layer_idx for layer in job.geometry.layers if layer.attention in donors]
    if sharing:
        run.notify(
            f"Progress is saved before layer {min(sharing)} alone: what it leaves for later layers "
            "stays in memory."
        )
    if run.state is not None:
        run.notify(f"Resumed after {at.layer} layers and {at.batch} batches.")
    activations = stream.activations(job.work, in_files=in_files, saved=saved)
    stream.shared = SharedStates(0 if in_files else budget - activations.bytes, job.work)
    saver = run.saver("streaming", observer, size=activations.bytes)

    def position_of(at: "Position") -> dict[str, Any] | None:
        if at == Position() or not stream.shared.empty:
            return None  # nothing to save yet, or what layers share, which stays in memory
        return {**asdict(at), "in_files": in_files, "activations": activations.prepare()}

    with saver.interruptible():
        stream.run(
            activations, at, progress,
            lambda at: saver.after_batch(lambda: position_of(at), activations.commit),
        )  # fmt: skip
    return Outcome(observer, stream.loaded, modules)


def _budget(job: Job, stream: "Stream") -> int:
    """Return how many bytes of hidden states to keep in memory: half of what is left, or told."""
    import torch

    from kvq.calibration.memory import available_bytes

    if job.options.memory_budget is not None:
        return job.options.memory_budget
    there = available_bytes(torch.device("cpu")) // job.ranks.local_world
    return max(0, (there - 2 * stream.largest_layer_bytes) // 2)


def _announce(loaded: Any, data: CalibrationData, batch_size: int, notify: Notify) -> None:
    from kvq.calibration.run import enough_memory, estimate

    if loaded.text_alone:
        notify("The whole model needs more than tokens: its text decoder is run alone.")
    lengths = [len(sequence) for sequence in data.sequences]
    with enough_memory(loaded.device, batch_size):
        guess = estimate(loaded, tokens=sum(lengths), batch_tokens=batch_size * max(lengths))
    notify(
        f"{len(lengths)} sequences, {sum(lengths)} tokens, batches of {batch_size} on "
        f"{loaded.device}, at least {guess.memory_bytes / 2**30:.1f} GiB and {guess.seconds:.0f} s"
    )
