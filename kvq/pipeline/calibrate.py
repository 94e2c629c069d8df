"""Calibrate: checkpoint and data in, statistics out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.calibration.data import CalibrationData, DataOptions, load
from kvq.checkpoint import SINGLE_NAME, CheckpointView, open_checkpoint
from kvq.configs import QuantConfig, get_config, resolve
from kvq.errors import CheckpointError, InputError, first_line
from kvq.files import check_target, read_json
from kvq.geometry import (
    MAX_POSITIONS,
    Geometry,
    count,
    read_geometry,
    text_config,
    with_defaults,
)
from kvq.outliers import advice, outlier_layers, without_layers
from kvq.pipeline.job import Job, Notify, Progress
from kvq.pipeline.locate import locate
from kvq.pipeline.observe import no_early_end, observe
from kvq.pipeline.placement import check_placement
from kvq.pipeline.resume import check_resumable, session
from kvq.quantizers import QUERY
from kvq.state import Calibration, write_calibration

if TYPE_CHECKING:
    import torch

    from kvq.calibration.distributed import Ranks

LARGEST_MARGIN = 16.0


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of a calibration; `batch_size` None resolves once, from the device kind alone."""

    kv_cfg: str = "FP8_KV_CFG"
    data: DataOptions = field(default_factory=DataOptions)
    batch_size: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    skip_layers: str | None = None  # numbers separated by commas, or `auto`
    margin: float = 1.0
    overwrite: bool = False
    trust_remote_code: bool = False
    streaming: bool = False  # also chosen when the weights do not fit
    memory_budget: int | None = None  # bytes of hidden states to keep in memory while streaming
    device_map: str | None = None  # `auto`: accelerate spreads the model over all devices
    compile: bool = False  # the layers, around their attention; CUDA only
    resume: bool = False  # go on with the progress of an unfinished calibration of the same
    stop_when_stable: bool = False  # end early once half of the batches so far changed nothing


def calibrate(
    model: str, target: Path, options: CalibrateOptions, *,
    notify: Notify = lambda text: None, progress: Progress | None = None,
) -> Calibration:  # fmt: skip
    """Observe a model's keys and values on data and write the calibration folder.

    Under torchrun, each process runs a part of the batches, all return the whole result, and the
    first one writes it.

    Args:
        model: a checkpoint folder or a hub id.
        target: the folder to write.
        options: what to observe, on which data, where.
        notify: receives one sentence at a time for the user.
        progress: receives tokens done, tokens in all and seconds.

    Raises:
        KvqError: any reason why the statistics would not be exact and complete.
    """
    from kvq.calibration.distributed import connected, named_errors, ranks
    from kvq.calibration.model import find_device

    ours = ranks()
    device = find_device(ours.device(options.device, spread=options.device_map is not None))
    if not ours.first:
        notify, progress = _silent, None
    with named_errors(ours), connected(ours, device):
        return _calibrate(model, target, options, device, ours, notify, progress)


def _silent(text: str) -> None:
    """Say nothing: the first process speaks for all."""


def _calibrate(
    model: str, target: Path, options: CalibrateOptions, device: "torch.device", ours: "Ranks",
    notify: Notify, progress: Progress | None,
) -> Calibration:  # fmt: skip
    root = locate(model)
    check_target(target, overwrite=options.overwrite, inputs=[root])
    check_resumable(target, ours, resume=options.resume, overwrite=options.overwrite)
    entries = get_config(options.kv_cfg)
    _check_options(options, entries)
    check_placement(options, device)
    view = open_checkpoint(root)
    geometry = read_geometry(view.config, view.tensors)
    chosen = _chosen_layers(options.skip_layers, geometry)
    check_observable(view, geometry)
    check_queries(geometry, entries, options.kv_cfg)
    for notice in _geometry_notices(view, geometry):
        notify(notice)
    data = _load_data(root, view, geometry, options)
    for notice in data.notices:
        notify(notice)
    quantizers = resolve(entries, [
        f"{layer.attention}.{q}" for layer in geometry.layers for q in layer.quantizers
    ])  # fmt: skip
    job = Job(view, geometry, data, quantizers, options, target, device, ours)
    with session(job, notify) as run:
        calibration = observe(job, run, progress)
        calibration = _skipping(calibration, chosen, options, notify)
        if ours.first:
            write_calibration(calibration, target, overwrite=options.overwrite)
    return calibration


def _check_options(options: CalibrateOptions, entries: QuantConfig) -> None:
    if options.stop_when_stable and options.streaming:
        raise no_early_end("--streaming")
    if options.batch_size is not None and options.batch_size < 1:
        raise InputError(
            f"--batch-size is {options.batch_size}, expected at least 1 or `auto`",
            code="option.batch_size",
        )
    if not 1 <= options.margin <= LARGEST_MARGIN:
        raise InputError(
            f"--margin is {options.margin}, expected 1 to {LARGEST_MARGIN:g}: scales cover amax "
            "times the margin",
            code="option.margin",
        )
    if options.margin != 1 and any(e.config and e.config.constant_amax for e in entries):
        raise InputError(
            f"{options.kv_cfg} has a constant amax, to which --margin adds nothing",
            code="option.margin",
            hint="leave --margin out, or use FP8_KV_CFG",
        )


def _skipping(
    calibration: Calibration, chosen: tuple[int, ...], options: CalibrateOptions, notify: Notify
) -> Calibration:
    """Return the calibration with the layers marked that an engine is to leave unquantized."""
    outliers = outlier_layers(calibration)
    if options.skip_layers == "auto":
        chosen = tuple(outliers)
    elif outliers and not set(outliers) <= set(chosen):
        notify(advice(list(outliers), heads_differ=any(outliers.values())))
    calibration = without_layers(calibration, chosen)
    if set(calibration.skip_layers) > set(chosen):
        listed = ", ".join(str(layer) for layer in calibration.skip_layers)
        notify(f"Layers of one cache are skipped together: {listed}.")
    return calibration


def _chosen_layers(text: str | None, geometry: Geometry) -> tuple[int, ...]:
    if text is None or text == "auto":
        return ()
    known = {layer.layer_idx for layer in geometry.layers}
    try:
        chosen = sorted({int(part) for part in text.split(",")})
    except ValueError:
        chosen = [-1]
    if not known.issuperset(chosen):
        raise InputError(
            f"--skip-layers is `{text}`, expected `auto` or numbers of layers with a KV cache, "
            f"{min(known)} to {max(known)}, separated by commas",
            code="option.skip_layers",
        )
    return tuple(chosen)


def check_observable(view: CheckpointView, geometry: Geometry) -> None:
    """Refuse checkpoints of which transformers would run something else than the files say."""
    attention_groups = [g for g in view.config_groups.values() if not g.get("weights")]
    if view.kv_cache_scheme or attention_groups:
        raise InputError(
            "the checkpoint already quantizes its cache: transformers would run it quantized, and "
            "the maxima would be those of rounded values",
            code="calibrate.quantized_cache",
            hint="calibrate the checkpoint it was made from, or this one without its scales: "
            "`kvq export CHECKPOINT --strip -o BARE`",
        )
    if SINGLE_NAME in view.files and view.loaded_files != (SINGLE_NAME,):
        raise InputError(
            f"`{SINGLE_NAME}` lies beside other shards: transformers would read it alone, engines "
            "the others",
            code="calibrate.single_and_shards",
            hint="keep one of the two",
        )
    if not geometry.layers:
        raise InputError(
            f"`{geometry.architecture}` has no layer that keeps keys and values",
            code="calibrate.no_cache",
        )


def check_queries(geometry: Geometry, entries: QuantConfig, kv_cfg: str) -> None:
    """Refuse queries of MLA."""
    queries = [f"{layer.attention}.{QUERY}" for layer in geometry.layers]
    if geometry.is_mla and any(entry.matches(name) for entry in entries for name in queries):
        raise InputError(
            f"{kv_cfg} includes queries: engines quantize the query of MLA after absorbing a "
            "projection into it, a tensor that transformers never computes",
            code="calibrate.mla_query",
            hint="use a KV configuration, e.g. FP8_KV_CFG",
        )


def _geometry_notices(view: CheckpointView, geometry: Geometry) -> Iterator[str]:
    towers = [name for name in ("vision", "audio") if f"{name}_config" in view.config]
    if towers:
        yield (
            f"The text decoder alone is calibrated: the {' and '.join(towers)} tower stays as it "
            "is, and no image or audio tokens are seen."
        )
    if geometry.drafts:
        yield (
            f"{len(geometry.drafts)} draft layers (`{geometry.drafts[0]}`) are never run by "
            "transformers: they get no scales."
        )
    sharing = [layer for layer in geometry.layers if layer.shared_from]
    if sharing:
        yield f"{len(sharing)} layers read the cache of an earlier one and get its scales."


def _load_data(
    root: Path, view: CheckpointView, geometry: Geometry, options: CalibrateOptions
) -> CalibrationData:
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    tokenizer = None
    if any((root / name).exists() for name in files):
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                root, trust_remote_code=options.trust_remote_code
            )
        except Exception as error:  # the tokenizers library raises plain exceptions
            raise CheckpointError(
                f"cannot load the tokenizer of `{root}`: {first_line(error)}",
                code="model.tokenizer",
                hint="rows of `input_ids` need none: remove the tokenizer's files to use them",
            ) from error
    text = with_defaults(text_config(view.config))
    endless = "relative_attention_num_buckets" in text  # T5: n_positions is a mere habit
    return load(
        options.data,
        tokenizer,
        max_length=None if endless else count(text, *MAX_POSITIONS, default=None),
        vocab_size=count(text, "vocab_size", "vocab_size_or_config_json_file"),
        decoder_start=_decoder_start(view, text) if geometry.is_encoder_decoder else None,
    )


def _decoder_start(view: CheckpointView, text: Mapping[str, Any]) -> int:
    generation = view.root / "generation_config.json"
    places = [view.config, read_json(generation) if generation.exists() else {}, text]
    keys = ["decoder_start_token_id", "bos_token_id"]
    if "relative_attention_num_buckets" in text:  # T5 and its kin begin with padding
        keys[1] = "pad_token_id"
    for key in keys:
        for place in places:
            if type(place.get(key)) is int:
                return int(place[key])
    raise CheckpointError(
        "config.json names no `decoder_start_token_id`, with which a decoder begins",
        code="model.decoder_start",
        hint="add it to config.json, as in the model's generation_config.json",
    )
