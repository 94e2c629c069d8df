"""Calibrate a model that is already in memory, on any inputs: the Python API."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.checkpoint import (
    Weight,
    config_digest,
    fingerprint,
    open_checkpoint,
    weight_fingerprint,
)
from kvq.configs import get_config, resolve
from kvq.errors import InputError
from kvq.geometry import Geometry, is_key_or_value_weight, read_geometry
from kvq.pipeline.record import layer_statistics, model_identity, versions
from kvq.quantizers import QUERY
from kvq.state import Calibration

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

    The model is left exactly as it was. It takes whatever it needs: pixels, audio features,
    decoder inputs. Where it runs and in which dtype is yours to choose.

    Args:
        model: a transformers model with a KV cache, e.g. from `from_pretrained`.
        batches: token ids [batch, seq_len], or mappings of what the model's forward takes. Rows
            of one batch have equal lengths: kvq never counts padding.
        kv_cfg: a named configuration.
        checkpoint: the folder it was loaded from, whose tensor names and weights the calibration
            then belongs to. Without it, names and weights are those of the model in memory.

    Returns:
        The calibration; `kvq.write_calibration` saves it for `kvq export`.

    Raises:
        KvqError: any reason why the statistics would not be exact and complete.
    """
    from kvq.calibration.amax import Observer
    from kvq.calibration.modules import attention_modules, module_list
    from kvq.calibration.observe import observing

    entries = get_config(kv_cfg)
    view = None if checkpoint is None else open_checkpoint(Path(checkpoint))
    geometry = live_geometry(model) if view is None else read_geometry(view.config, view.tensors)
    paths = [layer.attention for layer in geometry.layers]
    names = [f"{layer.attention}.{q}" for layer in geometry.layers for q in layer.quantizers]
    quantizers = resolve(entries, names)
    queries = any(config and name.endswith(QUERY) for name, config in quantizers.items())
    attentions = attention_modules(model, paths)
    observer = Observer(geometry.layers, queries=queries)
    tally = _Tally()
    with observing(model, attentions, observer, cross=geometry.is_encoder_decoder) as run:
        for batch in tally.count(batches):
            run(batch)
    data = tally.identity()
    results = observer.results()
    config = _config(model) if view is None else view.config
    weights = live_fingerprint(model) if view is None else weight_fingerprint(view)
    return Calibration(
        kv_cfg=kv_cfg,
        layers=layer_statistics(geometry.layers, results, observer.tokens),
        quantizers=quantizers,
        modules=module_list(model, paths),
        model={
            **model_identity(geometry, attentions),
            "config_digest": config_digest(config),
            "weight_fingerprint": weights,
        },
        data=data,
        run={
            "observer": "amax",
            "device": model.device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": str(model.config.get_text_config(decoder=True)._attn_implementation),
            "versions": versions(),
        },
    )


def live_geometry(model: Any) -> Geometry:
    """Return the geometry of a model in memory, under the names of its own modules."""
    return read_geometry(_config(model), model.state_dict())


def live_fingerprint(model: Any) -> str:
    """Return the fingerprint that a checkpoint of the model's names and weights would have."""
    state = model.state_dict()
    return fingerprint(_weight(n, state[n]) for n in sorted(filter(is_key_or_value_weight, state)))


def _weight(name: str, tensor: "Tensor") -> Weight:
    import torch
    from safetensors.torch import _TYPES  # dtype names of the safetensors format

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
        self.digests: list[str] = []

    def count(self, batches: Iterable[Any]) -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            given: Batch = batch if isinstance(batch, Mapping) else {"input_ids": batch}
            mask = given.get("attention_mask")
            if mask is not None and not bool(mask.all()):
                raise InputError(
                    f"batch {number} is padded: {int((mask == 0).sum())} positions are masked",
                    code="live.padding",
                    hint="batch only rows of equal length; padding moves the maxima of real tokens",
                )
            main = next((given[key] for key in _MAIN if given.get(key) is not None), None)
            if main is None:
                raise InputError(
                    f"batch {number} has {sorted(given)}, expected one of {', '.join(_MAIN)}",
                    code="live.batch",
                )
            self.sequences += int(main.shape[0])
            self.tokens += int(main.shape[0] * main.shape[1])
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


# What counts as a batch's tokens; the decoder's of an encoder-decoder model.
_MAIN = ("decoder_input_ids", "input_ids", "inputs_embeds", "input_features", "flattened_patches")
