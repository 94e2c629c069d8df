"""Scales in another format or granularity, from their numbers alone; what makes a set complete."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kvq.configs import QuantConfig, get_config, with_granularity
from kvq.errors import CheckpointError, DialectError
from kvq.formats import get_format
from kvq.geometry import Geometry
from kvq.quantizers import QUERY, QuantizerConfig
from kvq.scales import ScaleSet


@dataclass(frozen=True)
class Wanted:
    """What the user asked for: a named configuration and a granularity, each perhaps left out.

    Raises:
        InputError: either is unknown.
    """

    kv_cfg: str | None = None
    granularity: str | None = None

    def __post_init__(self) -> None:
        if self.kv_cfg is not None:
            get_config(self.kv_cfg)
        if self.granularity is not None:
            QuantizerConfig("fp8_e4m3", self.granularity)

    def entries(self, default: str) -> QuantConfig:
        """Return the configuration, `default` where none was named."""
        entries = get_config(self.kv_cfg or default)
        return with_granularity(entries, self.granularity) if self.granularity else entries


def check_complete(scales: ScaleSet, where: str) -> None:
    """Refuse a set with a layer that lacks K or V, or with a number that is no scale.

    Raises:
        CheckpointError: with the first layer and how many there are.
    """
    missing = [
        f"{side} of layer {layer.layer_idx}"
        for layer in scales.layers
        for side in ("k", "v")
        if not layer.scales.get(side)
    ]
    if missing:
        raise CheckpointError(
            f"`{where}` lacks {len(missing)} scales, first {missing[0]}",
            code="scales.missing",
            hint="calibrate the model: what was never observed cannot be written",
        )
    for layer in scales.layers:
        for side, values in layer.scales.items():
            wrong = [x for x in values if not 0 < x < np.inf]
            if wrong:
                raise CheckpointError(
                    f"the {side} scale of layer {layer.layer_idx} in `{where}` is {wrong[0]!r}",
                    code="scales.invalid",
                    hint="calibrate the model again",
                )


def check_lengths(scales: ScaleSet, geometry: Geometry, where: str) -> None:
    """Refuse numbers of scales that fit neither one per tensor nor one per head.

    Raises:
        CheckpointError: with layer, side and what was expected.
    """
    for layer, own in zip(geometry.layers, scales.layers, strict=True):
        for side, values in own.scales.items():
            heads = layer.num_attention_heads if side == "q" else layer.num_key_value_heads
            if len(values) != (heads if scales.granularity == "head" else 1):
                raise CheckpointError(
                    f"the {side} scale of layer {layer.layer_idx} in `{where}` has {len(values)} "
                    f"numbers, expected 1 in all layers or {heads}, one per head",
                    code="scales.length",
                )


def convert_scales(scales: ScaleSet, wanted: Wanted) -> ScaleSet:
    """Return a set in another format or granularity, from its numbers alone.

    Raises:
        DialectError: scales per head are wanted from scales per tensor, a query's where there is
            none, or constants, for which no source is needed.
    """
    target_format, granularity = scales.format, scales.granularity
    if wanted.kv_cfg:
        config = next(entry.config for entry in get_config(wanted.kv_cfg) if entry.config)
        if config.constant_amax is not None:
            raise DialectError(
                f"`{wanted.kv_cfg}` has constant scales and needs none of the source's",
                code="scales.constant",
                hint="give a calibration as --scales",
            )
        target_format, granularity = config.format, config.granularity
        scales = _with_or_without_query(scales, wanted.kv_cfg)
    granularity = wanted.granularity or granularity
    if granularity == "head" and scales.granularity == "tensor":
        raise DialectError(
            "scales per head cannot be made from one number for all heads",
            code="scales.granularity",
            hint="calibrate the model: a calibration has amax for each head",
        )
    source, target = get_format(scales.format), get_format(target_format)

    def convert(values: Iterable[float]) -> tuple[float, ...]:
        kept = list(values) if granularity == "head" else [max(values)]
        if source.scale_divisor == target.scale_divisor:
            return tuple(kept)
        return tuple(target.scale(source.amax(value)) for value in kept)

    layers = tuple(
        replace(layer, scales={side: convert(values) for side, values in layer.scales.items()})
        for layer in scales.layers
    )
    return ScaleSet(target_format, granularity, layers)


def _with_or_without_query(scales: ScaleSet, kv_cfg: str) -> ScaleSet:
    """Return a set with the sides that a configuration has.

    Raises:
        DialectError: the configuration has the query, and the set does not.
    """
    wanted = any(entry.config and entry.matches(QUERY) for entry in get_config(kv_cfg))
    if wanted and not scales.has_query:
        raise DialectError(
            f"`{kv_cfg}` has query scales, and the source of the scales has none",
            code="scales.not_observed",
            hint="calibrate the model with that configuration",
        )
    if wanted:
        return scales
    layers = tuple(
        replace(one, scales={side: x for side, x in one.scales.items() if side != "q"},
                provenance={side: x for side, x in one.provenance.items() if side != "q"})
        for one in scales.layers
    )  # fmt: skip
    return replace(scales, layers=layers)
