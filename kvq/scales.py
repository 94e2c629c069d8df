"""Amax to scale: `scale = amax / scale_divisor` in float32, the dequantization multiplier."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvq.configs import QuantConfig, resolve
from kvq.errors import CalibrationError, FormatError
from kvq.quantizers import KEY, QUERY, VALUE, QuantizerConfig
from kvq.state import Calibration, LayerStats

SHORT = {QUERY: "q", KEY: "k", VALUE: "v"}


@dataclass(frozen=True)
class LayerScales:
    """Scales of one layer: `k`, `v` (and `q`) → one float per tensor, or one per head."""

    layer_idx: int
    attention: str
    scales: Mapping[str, tuple[float, ...]]
    provenance: Mapping[str, str]


@dataclass(frozen=True)
class ScaleSet:
    """All scales of a model in one format and granularity."""

    format: str
    granularity: str
    layers: tuple[LayerScales, ...]

    @property
    def has_query(self) -> bool:
        """Whether query scales are part of the set."""
        return all("q" in layer.scales for layer in self.layers)


def compute_scales(calibration: Calibration, entries: QuantConfig) -> ScaleSet:
    """Turn statistics into scales, for any configuration whose tensors were observed.

    Raises:
        CalibrationError: a quantizer of the configuration was not observed, or its amax is zero
            or not finite; the message names the layer.
    """
    names = [f"{layer.attention}.{name}" for layer in calibration.layers for name in SHORT]
    quantizers = resolve(entries, names)
    layers = tuple(_layer(layer, quantizers) for layer in calibration.layers)
    enabled = [config for config in quantizers.values() if config is not None]
    kinds = {(config.format, config.granularity) for config in enabled}
    if len(kinds) != 1:
        raise CalibrationError(
            f"the configuration mixes {sorted(kinds)}; one format and granularity is expected",
            code="scales.mixed",
        )
    return ScaleSet(*kinds.pop(), layers)


def _layer(layer: LayerStats, quantizers: Mapping[str, QuantizerConfig | None]) -> LayerScales:
    scales, provenance = {}, {}
    for quantizer, short in SHORT.items():
        config = quantizers[f"{layer.attention}.{quantizer}"]
        if config is None:
            continue
        if quantizer not in layer.amax:
            raise CalibrationError(
                f"`{quantizer}` of layer {layer.layer_idx} was not observed by this calibration",
                code="scales.not_observed",
                hint="calibrate with a configuration that includes it, e.g. FP8_ATTN_CFG",
            )
        scales[short] = _scales(layer, quantizer, config)
        provenance[short] = "calibrated" if config.constant_amax is None else "constant"
    return LayerScales(layer.layer_idx, layer.attention, scales, provenance)


def _scales(layer: LayerStats, quantizer: str, config: QuantizerConfig) -> tuple[float, ...]:
    amax = layer.amax[quantizer]
    if config.constant_amax is not None:
        amax = np.full_like(amax, config.constant_amax)
    values = amax if config.granularity == "head" else amax.max(keepdims=True)
    try:
        return tuple(config.number_format.scale(float(value)) for value in values)
    except FormatError as error:
        raise CalibrationError(
            f"`{quantizer}` of layer {layer.layer_idx} (`{layer.attention}`): {error}",
            code="scales.invalid",
            hint="look at the layer with `kvq inspect CALIBRATION --scales`",
        ) from error
