"""Calibrate: checkpoint and data in, statistics out."""

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kvq
from kvq.calibration.batches import describe_plan, plan_batches
from kvq.calibration.data import CalibrationData, DataOptions, load
from kvq.checkpoint import (
    SINGLE_NAME,
    CheckpointView,
    config_digest,
    open_checkpoint,
    weight_fingerprint,
)
from kvq.configs import QuantConfig, get_config, resolve
from kvq.errors import CheckpointError, InputError
from kvq.files import check_target
from kvq.geometry import Geometry, count, read_geometry, text_config
from kvq.pipeline.locate import locate
from kvq.quantizers import KEY, QUERY, VALUE
from kvq.state import Calibration, LayerStats, write_calibration

AUTO_BATCH_TOKENS = {"cuda": 16384}  # elsewhere sequences run one by one
Notify = Callable[[str], None]
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of a calibration; `batch_size` None resolves once, from the device kind alone."""

    kv_cfg: str = "FP8_KV_CFG"
    data: DataOptions = field(default_factory=DataOptions)
    batch_size: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    overwrite: bool = False
    trust_remote_code: bool = False


def calibrate(
    model: str, target: Path, options: CalibrateOptions, *,
    notify: Notify = lambda text: None, progress: Progress | None = None,
) -> Calibration:  # fmt: skip
    """Observe a model's keys and values on data and write the calibration folder.

    Args:
        model: a checkpoint folder or a hub id.
        target: the folder to write.
        options: what to observe, on which data, where.
        notify: receives one sentence at a time for the user.
        progress: receives tokens done, tokens in all and seconds.

    Raises:
        KvqError: any reason why the statistics would not be exact and complete.
    """
    root = locate(model)
    check_target(target, overwrite=options.overwrite, inputs=[root])
    entries = get_config(options.kv_cfg)
    if options.batch_size is not None and options.batch_size < 1:
        raise InputError(
            f"--batch-size is {options.batch_size}, expected at least 1 or `auto`",
            code="option.batch_size",
        )
    view = open_checkpoint(root)
    geometry = read_geometry(view.config, view.tensors)
    _check_observable(view, geometry)
    data = _load_data(root, view, options)
    for notice in data.notices:
        notify(notice)
    calibration = _observe(root, view, geometry, data, entries, options, notify, progress)
    write_calibration(calibration, target, overwrite=options.overwrite)
    return calibration


def _check_observable(view: CheckpointView, geometry: Geometry) -> None:
    """Refuse checkpoints of which transformers would run something else than the files say."""
    attention_groups = [g for g in view.config_groups.values() if not g.get("weights")]
    if view.kv_cache_scheme or attention_groups:
        raise InputError(
            "the checkpoint already quantizes its cache: transformers would run it quantized, and "
            "the maxima would be those of rounded values",
            code="calibrate.quantized_cache",
            hint="calibrate the checkpoint it was made from",
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


def _load_data(root: Path, view: CheckpointView, options: CalibrateOptions) -> CalibrationData:
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
                f"cannot load the tokenizer of `{root}`: {str(error).strip().splitlines()[0]}",
                code="model.tokenizer",
                hint="rows of `input_ids` need none: remove the tokenizer's files to use them",
            ) from error
    text = text_config(view.config)
    return load(
        options.data,
        tokenizer,
        max_length=count(text, "max_position_embeddings", default=None),
        vocab_size=count(text, "vocab_size"),
    )


def _observe(
    root: Path, view: CheckpointView, geometry: Geometry, data: CalibrationData,
    entries: QuantConfig, options: CalibrateOptions, notify: Notify, progress: Progress | None,
) -> Calibration:  # fmt: skip
    import torch

    from kvq.calibration.model import load_model, module_list
    from kvq.calibration.observe import Observer
    from kvq.calibration.run import estimate, fixed_threads, run_batches

    names = [f"{layer.attention}.{q}" for layer in geometry.layers for q in (QUERY, KEY, VALUE)]
    quantizers = resolve(entries, names)
    queries = any(config and name.endswith(QUERY) for name, config in quantizers.items())
    with fixed_threads() as threads:
        loaded = load_model(
            root, dict(view.config), device=options.device, dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
            attentions=[layer.attention for layer in geometry.layers],
        )  # fmt: skip
        modules = module_list(loaded, [layer.attention for layer in geometry.layers])
        sequences = [sequence.token_ids for sequence in data.sequences]
        longest = max(len(sequence) for sequence in sequences)
        batch_size = options.batch_size or max(
            1, AUTO_BATCH_TOKENS.get(loaded.device.type, 0) // longest
        )
        tokens = sum(len(sequence) for sequence in sequences)
        guess = estimate(loaded, tokens=tokens, batch_tokens=batch_size * longest)
        notify(
            f"{len(sequences)} sequences, {tokens} tokens, batches of {batch_size} on "
            f"{loaded.device}, at least {guess.memory_bytes / 2**30:.1f} GiB and "
            f"{guess.seconds:.0f} s"
        )
        observer = Observer([layer.layer_idx for layer in geometry.layers], queries=queries)
        plan = plan_batches(data.sequences, batch_size)
        run_batches(loaded, observer, sequences, plan, progress)
        results = observer.results()
    layers = []
    for layer in geometry.layers:
        amax = {
            side: np.asarray(results[layer.layer_idx, side].numpy(), np.float32)
            for side in (QUERY, KEY, VALUE)
            if (layer.layer_idx, side) in results
        }
        seen = observer.tokens[layer.layer_idx, KEY]
        layers.append(LayerStats(layer.layer_idx, layer.attention, amax, seen))
    return Calibration(
        kv_cfg=options.kv_cfg,
        layers=tuple(layers),
        quantizers=quantizers,
        modules=modules,
        model=_model_identity(view, geometry, loaded),
        data=data.identity,
        run={
            "observer": "amax",
            "batch_plan": describe_plan(data.sequences, batch_size),
            "device": loaded.device.type,
            "dtype": loaded.dtype,
            "attention": loaded.attention,
            "threads": threads,
            "versions": _versions(torch.__version__),
        },
    )


def _model_identity(view: CheckpointView, geometry: Geometry, loaded: Any) -> dict[str, Any]:
    classes = {
        type(module).__name__
        for module in loaded.decoder.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and "attention" in type(module).__name__.lower()
    }
    return {
        "architecture": geometry.architecture,
        "attention_class": sorted(classes)[0] if classes else None,
        "num_hidden_layers": geometry.num_hidden_layers,
        "config_digest": config_digest(view.config),
        "weight_fingerprint": weight_fingerprint(view),
    }


def _versions(torch_version: str) -> dict[str, str]:
    import transformers

    return {
        "kvq": kvq.__version__,
        "python": platform.python_version(),
        "torch": torch_version,
        "transformers": transformers.__version__,
    }
