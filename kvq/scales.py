"""Amax to scale: `scale = amax / scale_divisor` in float32, the dequantization multiplier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvq.configs import QuantConfig, resolve
from kvq.errors import CalibrationError, FormatError
from kvq.quantizers import KEY, KEY_PE, KV_C, QUERY, VALUE, QuantizerConfig
from kvq.state import Calibration, LayerStats

SHORT = {QUERY: "q", KEY: "k", VALUE: "v", KV_C: "k", KEY_PE: "v"}


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

    Under MLA an engine writes latent and rotary part into one row with one scale: the scale covers
    both, and K and V get the same.

    Raises:
        CalibrationError: a quantizer of the configuration was not observed, or its amax is zero
            or not finite; the message names the layer.
    """
    return layer_scales(calibration.layers, entries, calibration.margin)


def layer_scales(
    layers: Sequence[LayerStats], entries: QuantConfig, margin: float = 1.0
) -> ScaleSet:
    """Return the same from the statistics alone."""
    names = [f"{layer.attention}.{name}" for layer in layers for name in layer.quantizers]
    quantizers = resolve(entries, names)
    enabled = [config for config in quantizers.values() if config is not None]
    kinds = {(config.format, config.granularity) for config in enabled}
    if len(kinds) != 1:
        raise CalibrationError(
            f"the configuration mixes {sorted(kinds)}; one format and granularity is expected",
            code="scales.mixed",
        )
    return ScaleSet(*kinds.pop(), tuple(_layer(layer, quantizers, margin) for layer in layers))


def _layer(
    layer: LayerStats, quantizers: Mapping[str, QuantizerConfig | None], margin: float
) -> LayerScales:
    scales, provenance, per_head = {}, {}, False
    for quantizer in layer.quantizers:
        config = quantizers[f"{layer.attention}.{quantizer}"]
        if config is None:
            continue
        if quantizer not in layer.amax:
            raise CalibrationError(
                f"`{quantizer}` of layer {layer.layer_idx} was not observed by this calibration",
                code="scales.not_observed",
                hint="calibrate with a configuration that includes it, e.g. FP8_ATTN_CFG",
            )
        short, per_head = SHORT[quantizer], config.granularity == "head"
        scales[short] = _scales(layer, quantizer, config, margin)
        shared = layer.shared_from is not None and quantizer != QUERY
        observed = f"shared from {layer.shared_from}" if shared else "calibrated"
        provenance[short] = observed if config.constant_amax is None else "constant"
    if layer.is_mla and "k" in scales:
        if per_head:
            raise CalibrationError(
                f"layer {layer.layer_idx} caches one latent row for all heads (MLA): it has no "
                "scale per head",
                code="scales.mla_head",
                hint="use --granularity tensor",
            )
        scales["k"] = scales["v"] = max(scales["k"], scales.get("v", scales["k"]))
        provenance["v"] = provenance["k"]
    return LayerScales(layer.layer_idx, layer.attention, scales, provenance)


def _scales(
    layer: LayerStats, quantizer: str, config: QuantizerConfig, margin: float
) -> tuple[float, ...]:
    amax = layer.amax[quantizer]
    values = amax if config.granularity == "head" else amax.max(keepdims=True)
    try:
        return tuple(
            config.number_format.scale(
                config.constant_amax if config.constant_amax is not None else float(value) * margin
            )
            for value in values
        )
    except FormatError as error:
        raise CalibrationError(
            f"`{quantizer}` of layer {layer.layer_idx} (`{layer.attention}`): {error}",
            code="scales.invalid",
            hint="look at the layer with `kvq inspect CALIBRATION --scales`",
        ) from error
