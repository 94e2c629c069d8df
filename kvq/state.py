"""The calibration folder: float32 statistics per head, and where they come from."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvq.errors import CheckpointError
from kvq.files import dump_json, new_folder, read_json, shorten, write_json
from kvq.quantizers import KEY, KEY_PE, KV_C, QUANTIZERS, QUERY, VALUE, QuantizerConfig
from kvq.tensorfile import TensorInfo, read_header, read_tensor, write_float32

SCHEMA = 1
STATISTICS_NAME = "calibration.safetensors"
CONFIG_NAME = "config.json"
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class LayerStats:
    """Observed maxima of one layer: quantizer name → amax, float32 [heads], never scales.

    A layer that reads another's cache has that one's K and V, and its path in `shared_from`.
    `raised` is the number of the batch after which no head's maximum changed. `percentile_99_9` is
    that of the magnitudes of all heads together, in a sample of the tokens, to within 3.2 %. A
    merged calibration has neither.
    """

    layer_idx: int
    attention: str
    amax: Mapping[str, np.ndarray]
    tokens: int
    shared_from: str | None = None
    raised: Mapping[str, int] = field(default_factory=dict)
    percentile_99_9: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_mla(self) -> bool:
        """Whether the layer caches a latent row instead of keys and values."""
        return KV_C in self.amax

    @property
    def quantizers(self) -> tuple[str, ...]:
        """Names of the layer's quantizers, the query's first, observed or not."""
        if self.is_mla:
            return (QUERY, KV_C, KEY_PE) if KEY_PE in self.amax else (QUERY, KV_C)
        return QUERY, KEY, VALUE


@dataclass(frozen=True)
class Module:
    """One module of the tree: dotted path, class name, printed attributes."""

    path: str
    class_name: str
    attributes: str


@dataclass(frozen=True)
class Calibration:
    """A whole calibration; `quantizers` maps full quantizer names to their configuration."""

    kv_cfg: str
    layers: tuple[LayerStats, ...]
    quantizers: Mapping[str, QuantizerConfig | None]
    modules: tuple[Module, ...]
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    run: Mapping[str, Any]
    margin: float = 1.0  # scales cover amax times this
    skip_layers: tuple[int, ...] = ()  # to be left unquantized by an engine flag

    @property
    def batches(self) -> int | None:
        """How many batches the plan has; None for merged calibrations, which have no common one."""
        batches: int | None = self.run.get("batch_plan", {}).get("batches")
        return batches

    @property
    def batches_run(self) -> int | None:
        """How many of them were run: all, unless the run ended early."""
        return self.run.get("ended_after") or self.batches

    @cached_property
    def digest(self) -> str:
        """Digest of the statistics: independent of batch size, devices and mode."""
        digest = hashlib.sha256()
        for name, amax in sorted(self.statistics().items()):
            digest.update(f"{name} {amax.shape}\n".encode() + amax.astype("<f4").tobytes())
        return digest.hexdigest()

    def statistics(self) -> dict[str, np.ndarray]:
        """Return tensor name → amax, as stored."""
        return {
            f"{layer.attention}.{quantizer}._amax": amax
            for layer in self.layers
            for quantizer, amax in layer.amax.items()
        }


def write_calibration(calibration: Calibration, target: Path, *, overwrite: bool) -> None:
    """Write the folder whole or not at all; same calibration, same bytes."""
    config = {
        "schema": SCHEMA,
        "kind": "kvq-calibration",
        "kv_cfg": calibration.kv_cfg,
        "margin": calibration.margin,
        "skip_layers": list(calibration.skip_layers),
        "quantizers": {
            name: None if config is None else config.to_json()
            for name, config in calibration.quantizers.items()
        },
        "layers": [
            {"layer_idx": layer.layer_idx, "attention": layer.attention, "tokens": layer.tokens,
             "shared_from": layer.shared_from, "provenance": _provenance(calibration, layer),
             "raised": layer.raised, "percentile_99_9": layer.percentile_99_9}
            for layer in calibration.layers
        ],
        "modules": [[m.path, m.class_name, m.attributes] for m in calibration.modules],
        "model": calibration.model,
        "data": calibration.data,
        "run": calibration.run,
    }  # fmt: skip
    dump_json(config)  # refuses NaN before anything is written
    with new_folder(target, overwrite=overwrite) as folder:
        metadata = {"format": "pt", "kvq": dump_json({"schema": SCHEMA, "unit": "amax"}).strip()}
        write_float32(folder / STATISTICS_NAME, calibration.statistics(), metadata)
        write_json(folder / CONFIG_NAME, config)


def _provenance(calibration: Calibration, layer: LayerStats) -> dict[str, str]:
    def source(quantizer: str) -> str:
        config = calibration.quantizers.get(f"{layer.attention}.{quantizer}")
        if config is not None and config.constant_amax is not None:
            return "constant"
        shared = layer.shared_from is not None and quantizer != QUERY
        return f"shared from {layer.shared_from}" if shared else "calibrated"

    return {quantizer: source(quantizer) for quantizer in layer.amax}


def is_calibration(path: Path) -> bool:
    """Whether `path` looks like a calibration folder."""
    return (path / STATISTICS_NAME).is_file()


def read_calibration(path: Path) -> Calibration:
    """Read a calibration folder.

    Raises:
        CheckpointError: not a calibration folder, another schema, or statistics missing.
    """
    if not is_calibration(path):
        raise CheckpointError(
            f"`{path}` is not a calibration folder: it has no `{STATISTICS_NAME}`",
            code="calibration.missing",
            hint="make one with `kvq calibrate MODEL -o CALIBRATION`",
        )
    config = read_json(path / CONFIG_NAME)
    if config.get("schema") != SCHEMA or config.get("kind") != "kvq-calibration":
        raise CheckpointError(
            f"`{path / CONFIG_NAME}` has schema {config.get('schema')!r}, expected {SCHEMA}",
            code="calibration.schema",
            hint="calibrate again with this version of kvq",
        )
    try:
        return _parse(config, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"`{path / CONFIG_NAME}` is damaged: {error!r}", code="calibration.damaged"
        ) from error


_NEEDED = {
    "model": ("architecture", "weight_fingerprint"),
    "data": ("source", "sequences", "tokens"),
    "run": (),
}


def _statistic(info: TensorInfo) -> np.ndarray:
    """Return amax [heads], checked: float32, finite, never negative."""
    amax = read_tensor(info)
    if info.dtype != "F32" or amax.ndim != 1 or amax.size == 0:
        raise CheckpointError(
            f"`{info.name}` is {info.dtype} {info.shape}, expected F32 [heads]",
            code="calibration.statistic",
        )
    if not np.isfinite(amax).all() or (amax < 0).any():
        raise CheckpointError(
            f"`{info.name}` holds a negative or non-finite amax", code="calibration.statistic"
        )
    return amax


def _numbers(
    entry: Mapping[str, Any], name: str, quantizers: Iterable[str], kind: type[N]
) -> dict[str, N]:
    """Return numbers of quantizers, none where earlier versions recorded none."""
    found = entry.get(name, {})
    if not found.keys() <= set(quantizers) or not all(
        type(number) in (int, kind) and 0 <= number < math.inf for number in found.values()
    ):
        raise ValueError(f"`{name}` of layer {entry['layer_idx']} is {shorten(found)}")
    return {quantizer: kind(number) for quantizer, number in found.items()}


def _parse(config: dict[str, Any], path: Path) -> Calibration:
    tensors = read_header(path / STATISTICS_NAME).tensors
    layers = []
    for entry in config["layers"]:
        amax = {}
        for quantizer in QUANTIZERS:
            name = f"{entry['attention']}.{quantizer}._amax"
            if name in tensors:
                amax[quantizer] = _statistic(tensors[name])
        if set(amax) - {QUERY} not in ({KEY, VALUE}, {KV_C, KEY_PE}, {KV_C}):
            raise CheckpointError(
                f"`{STATISTICS_NAME}` lacks K or V of layer {entry['layer_idx']}",
                code="calibration.layer_missing",
            )
        layers.append(
            LayerStats(entry["layer_idx"], entry["attention"], amax, entry["tokens"],
                       entry.get("shared_from"), _numbers(entry, "raised", amax, int),
                       _numbers(entry, "percentile_99_9", amax, float))
        )  # fmt: skip
    if not layers or not isinstance(config["kv_cfg"], str):
        raise ValueError("no layers, or `kv_cfg` is not a name")
    for part, keys in _NEEDED.items():
        if not isinstance(config[part], dict) or not all(key in config[part] for key in keys):
            raise ValueError(f"`{part}` lacks one of {keys}")
    found = Calibration(
        kv_cfg=config["kv_cfg"],
        layers=tuple(layers),
        quantizers={
            name: None if value is None else QuantizerConfig(**value)
            for name, value in config["quantizers"].items()
        },
        modules=tuple(Module(*entry) for entry in config["modules"]),
        model=config["model"],
        data=config["data"],
        run=config["run"],
        margin=float(config.get("margin", 1.0)),
        skip_layers=tuple(int(layer) for layer in config.get("skip_layers", ())),
    )
    _check_batches(found)
    return found


def _check_batches(found: Calibration) -> None:
    planned, run = found.batches, found.batches_run
    if planned is None or run is None:
        return
    if not 0 < int(run) <= int(planned):
        raise ValueError(f"`run` has {run} of {planned} batches")
    last = max((number for layer in found.layers for number in layer.raised.values()), default=0)
    if last >= run:
        raise ValueError(f"batch {last} of {run} raised a maximum, counted from 0")
