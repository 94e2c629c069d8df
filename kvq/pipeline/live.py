"""Calibrate a model that is already in memory, on any inputs: the Python API."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.checkpoint import (
    CheckpointView,
    Weight,
    config_digest,
    fingerprint,
    open_checkpoint,
    weight_fingerprint,
)
from kvq.configs import get_config, resolve
from kvq.errors import InputError
from kvq.geometry import Geometry, is_key_or_value_weight, read_geometry
from kvq.pipeline.calibrate import check_observable, check_queries
from kvq.pipeline.record import layer_statistics, model_identity, versions
from kvq.quantizers import QUERY
from kvq.state import Calibration
from kvq.tensorfile import read_bytes

if TYPE_CHECKING:
    from torch import Tensor

Batch = Mapping[str, Any]


def calibrate(
    model: Any,
    batches: Iterable[Any],
    *,
    kv_cfg: str = "FP8_KV_CFG",
    checkpoint: Path | str | None = None,
) -> Calibration:
    """Observe a transformers model's keys and values on batches of its own inputs.

    Weights, mode, hooks and attention functions of the model are left as they were. It takes
    whatever it needs: pixels, audio features, decoder inputs. Where it runs and in which dtype is
    yours to choose; other threads may use it meanwhile.

    Args:
        model: a transformers model with a KV cache, e.g. from `from_pretrained`.
        batches: token ids [batch, seq_len], or mappings of what the model's forward takes. Rows
            of one batch have equal lengths: kvq never counts padding.
        kv_cfg: a named configuration.
        checkpoint: the folder it was loaded from, whose tensor names and weights the calibration
            then belongs to; weights that differ are refused. Without it, names and weights are
            those of the model in memory.

    Returns:
        The calibration; `kvq.write_calibration` saves it for `kvq export`.

    Raises:
        KvqError: any reason why the statistics would not be exact and complete.
    """
    from kvq.calibration.amax import Observer
    from kvq.calibration.modules import attention_modules, module_list
    from kvq.calibration.observe import observing

    _refuse_compiled(model)
    entries = get_config(kv_cfg)
    view = None if checkpoint is None else open_checkpoint(Path(checkpoint))
    geometry = live_geometry(model) if view is None else read_geometry(view.config, view.tensors)
    if view is not None:
        check_observable(view, geometry)
    check_queries(geometry, entries, kv_cfg)
    paths = [layer.attention for layer in geometry.layers]
    attentions = attention_modules(model, paths)
    weights = _fingerprint(model, attentions, view)
    names = [f"{layer.attention}.{q}" for layer in geometry.layers for q in layer.quantizers]
    quantizers = resolve(entries, names)
    queries = any(config and name.endswith(QUERY) for name, config in quantizers.items())
    observer = Observer(geometry.layers, queries=queries)
    tally = _Tally()
    with observing(model, attentions, observer, cross=geometry.is_encoder_decoder) as run:
        for observer.batch, batch in enumerate(tally.count(batches)):
            run(batch)
    data = tally.identity()
    results = observer.results()
    config = _config(model) if view is None else view.config
    return Calibration(
        kv_cfg=kv_cfg,
        layers=layer_statistics(geometry.layers, results, observer),
        quantizers=quantizers,
        modules=module_list(model, paths),
        model={
            **model_identity(geometry, attentions),
            "config_digest": config_digest(config),
            "weight_fingerprint": weights,
        },
        data=data,
        run=_run_record(model, tally),
    )


def _run_record(model: Any, tally: "_Tally") -> dict[str, Any]:
    from kvq.calibration.blocks import described

    implementation = str(model.config.get_text_config(decoder=True)._attn_implementation)
    return {
        "observer": "amax",
        "batch_plan": {"batches": len(tally.digests)},
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": described(implementation, long=tally.long),
        "versions": versions(),
    }


def _refuse_compiled(model: Any) -> None:
    if hasattr(model, "_orig_mod"):
        raise InputError(
            "the model is compiled: its numbers, and its module names, are others",
            code="live.compiled",
            hint="give the model that was passed to torch.compile",
        )


def _fingerprint(model: Any, attentions: Mapping[str, Any], view: CheckpointView | None) -> str:
    if view is None:
        return live_fingerprint(model)
    _check_same_weights(attentions, view)
    return weight_fingerprint(view)


def live_geometry(model: Any) -> Geometry:
    """Return the geometry of a model in memory, under the names of its own modules."""
    return read_geometry(_config(model), model.state_dict())


def live_fingerprint(model: Any) -> str:
    """Return the fingerprint that a checkpoint of the model's names and weights would have."""
    state = model.state_dict()
    return fingerprint(_weight(n, state[n]) for n in sorted(filter(is_key_or_value_weight, state)))


def _check_same_weights(attentions: Mapping[str, Any], view: CheckpointView) -> None:
    """Refuse a model whose K/V weights are not the checkpoint's, where the names tell them."""
    for path, module in attentions.items():
        for name, tensor in module.named_parameters():
            info = view.tensors.get(f"{path}.{name}")
            if info is None or not is_key_or_value_weight(info.name) or info.dtype not in _DTYPES:
                continue
            stored = tensor.detach().to(_torch_dtype(info.dtype))
            ours = _weight(info.name, stored)
            theirs = (info.name, info.dtype, info.shape, info.end - info.start,
                      partial(read_bytes, info))  # fmt: skip
            if fingerprint([ours]) != fingerprint([theirs]):
                raise InputError(
                    f"`{info.name}` of the model in memory is not that of `{view.root}`",
                    code="live.weights",
                    hint="leave `checkpoint` out, and export onto a checkpoint of these weights",
                )


_DTYPES = ("F32", "BF16", "F16")


def _torch_dtype(name: str) -> Any:
    from safetensors.torch import _TYPES  # dtype names of the safetensors format

    return _TYPES[name]


def _weight(name: str, tensor: "Tensor") -> Weight:
    import torch
    from safetensors.torch import _TYPES

    if tensor.device.type == "meta":
        raise InputError(
            f"`{name}` is not in memory (offloaded by accelerate?)",
            code="live.offloaded",
            hint="give the folder it was loaded from as `checkpoint`",
        )
    dtype = next(short for short, kind in _TYPES.items() if kind == tensor.dtype)
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)

    def read(offset: int, size: int) -> bytes:
        return bytes(flat[offset : offset + size].cpu().numpy().tobytes())

    return name, dtype, tuple(tensor.shape), flat.numel(), read


def _config(model: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return {**config, "architectures": [type(model).__name__]}


class _Tally:
    """Counts and identifies what was run."""

    def __init__(self) -> None:
        self.sequences = self.tokens = 0
        self.long = False  # whether any batch was attended to in blocks of queries
        self.digests: list[str] = []

    def count(self, batches: Iterable[Any]) -> Iterator[Batch]:
        from kvq.calibration.blocks import has_long

        for number, batch in enumerate(batches):
            given = _checked(batch, number)
            main = next(given[key] for key in _MAIN if given.get(key) is not None)
            self.sequences += int(main.shape[0])
            self.tokens += int(main.shape[0] * main.shape[1])
            self.long |= has_long(given)
            digest = hashlib.sha256()
            for key in sorted(key for key in given if hasattr(given[key], "detach")):
                value = given[key].detach().cpu().contiguous()
                digest.update(f"{key} {tuple(value.shape)} {value.dtype}\n".encode())
                digest.update(value.float().numpy().tobytes())
            self.digests.append(digest.hexdigest())
            yield given

    def identity(self) -> dict[str, Any]:
        if not self.digests:
            raise InputError("there are no batches", code="live.no_batches")
        return {
            "source": {"type": "python", "name": "batches given in Python"},
            "sequences": self.sequences,
            "tokens": self.tokens,
            "digest": hashlib.sha256("".join(sorted(self.digests)).encode()).hexdigest(),
        }


def _checked(batch: Any, number: int) -> Batch:
    """Return a batch as a mapping of tensors, without padding and with nothing that kvq gives."""
    import torch

    given = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    for key in (*_MAIN, *_MASKS):
        if isinstance(given.get(key), list | tuple):
            given[key] = torch.tensor(given[key])
    main = next((given[key] for key in _MAIN if given.get(key) is not None), None)
    reserved = sorted(given.keys() & {"past_key_values", "use_cache", "labels"})
    if main is None or main.ndim < 2 or reserved:
        found = f"`{reserved[0]}`" if reserved else f"{sorted(given)}"
        shape = "" if main is None or reserved else f" of shape {list(main.shape)}"
        raise InputError(
            f"batch {number} has {found}{shape}",
            code="live.batch",
            hint=f"give one of {', '.join(_MAIN)} as [batch, seq_len, ...], and what else forward "
            "takes except labels and cache",
        )
    for key in _MASKS:
        mask = given.get(key)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not bool(mask.all()):
            raise InputError(
                f"batch {number} is padded: {int((mask == 0).sum())} positions of `{key}` are "
                "masked",
                code="live.padding",
                hint="batch only rows of equal length; padding moves the maxima of real tokens",
            )
    return given


_MASKS = ("attention_mask", "decoder_attention_mask")
# What counts as a batch's tokens; the decoder's of an encoder-decoder model.
_MAIN = ("decoder_input_ids", "input_ids", "inputs_embeds", "input_features", "flattened_patches")
