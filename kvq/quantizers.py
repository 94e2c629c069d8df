"""Quantizer configuration and the one line that prints a quantizer and its amax."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq.errors import InputError
from kvq.formats import FORMATS, KVFormat, get_format

QUERY, KEY, VALUE = "q_bmm_quantizer", "k_bmm_quantizer", "v_bmm_quantizer"
# MLA caches one row per token: the normalized latent and the rotated part of the key.
KV_C, KEY_PE = "kv_c_bmm_quantizer", "k_pe_bmm_quantizer"
QUANTIZERS = (QUERY, KEY, VALUE, KV_C, KEY_PE)  # in the order of the tree


@dataclass(frozen=True)
class QuantizerConfig:
    """How one tensor is quantized: format, granularity, and where its amax comes from.

    `granularity` is `tensor` (one scale for all heads) or `head` (one per head). With
    `constant_amax` the amax is that number by request instead of an observation.
    """

    format: str
    granularity: str = "tensor"
    constant_amax: float | None = None

    def __post_init__(self) -> None:
        get_format(self.format)
        if self.granularity not in ("tensor", "head"):
            raise InputError(
                f"unknown granularity `{self.granularity}`; known: tensor, head",
                code="config.granularity",
            )

    @property
    def number_format(self) -> KVFormat:
        """The format's description."""
        return FORMATS[self.format]

    def to_json(self) -> dict[str, Any]:
        """Return the plain form stored in a calibration's config.json."""
        return {
            "format": self.format,
            "granularity": self.granularity,
            "constant_amax": self.constant_amax,
        }


def describe(config: QuantizerConfig | None, amax: np.ndarray | None) -> str:
    """Return the line of one quantizer, e.g. `TensorQuantizer((4, 3) bit fake per-tensor …)`.

    Args:
        config: None for a disabled quantizer.
        amax: observed maximum per head, float32 [heads]; None if it was never observed.
    """
    if config is None:
        return "TensorQuantizer(disabled)"
    fmt = config.number_format
    parts = [f"{fmt.num_bits} bit fake"]
    if fmt.block_size is not None:
        blocks = {-1: fmt.block_size, "type": "dynamic", "scale_bits": fmt.scale_bits}
        parts.append(f"block_sizes={blocks},")
    elif config.granularity == "head":
        parts.append("axis=1")
    else:
        parts.append("per-tensor")
    parts.append(f"amax={_amax(config, amax)}")
    parts.append("calibrator=MaxCalibrator quant")
    return f"TensorQuantizer({' '.join(parts)})"


def _amax(config: QuantizerConfig, amax: np.ndarray | None) -> str:
    if config.number_format.scale_divisor is None:
        return "None"
    if config.constant_amax is not None:
        return f"{config.constant_amax:.4f}(const)"
    if amax is None:
        return "unobserved"
    if config.granularity == "head" and amax.size > 1:
        return f"[{amax.min():.4f}, {amax.max():.4f}]({amax.size})"
    return f"{amax.max():.4f}"
