"""Layers whose keys or values stand out from the others, and what to do about them.

The measure is Qwen2 and 2.5: the key bias of their first and last layer is 27 and 42 times that of
the middle ones, and an fp8 cache at scale 1.0 breaks them; models with a norm on K have no such
layers (QwenLM/Qwen3#840, ggml-org/llama.cpp#21385).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.formats import FP8_E4M3
from kvq.geometry import KEY_NORMS
from kvq.quantizers import KEY, VALUE
from kvq.state import Calibration

RATIO = 8.0  # times the lower median of the layers, or of the heads of a layer


@dataclass(frozen=True)
class KeyTraits:
    """What the weights alone say about a layer's keys; None where there is no bias."""

    k_norm: bool
    k_bias_norm: float | None = None
    k_bias_absmax: float | None = None


def read_key_traits(view: CheckpointView, attention: str) -> KeyTraits:
    """Read the traits of one attention module; a bias fused with others is left out."""
    normed = any(f"{attention}.{name}.weight" in view.tensors for name in KEY_NORMS)
    for name in ("k_proj", "key", "to_k", "k"):
        tensor = f"{attention}.{name}.bias"
        if tensor in view.tensors and view.tensors[tensor].dtype in ("F32", "F16", "BF16", "F64"):
            bias = view.read(tensor).astype(np.float64)
            with np.errstate(over="ignore"):
                norm = float(np.linalg.norm(bias))
            return KeyTraits(normed, norm, float(np.abs(bias).max(initial=0.0)))
    return KeyTraits(normed)


def standing_out(values: Mapping[str, float]) -> dict[str, float]:
    """Return those far above the lower median, as multiples of it."""
    middle = median_low(values.values()) if values else 0.0
    if not middle > 0:
        return {}
    return {key: value / middle for key, value in values.items() if value > RATIO * middle}


def amax_flags(amax: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[str, ...]]:
    """Return attention path → what is striking about its amax, in words.

    Args:
        amax: attention path → side (`k`, `v`) → amax of the layer.
    """
    flags: dict[str, list[str]] = {}
    for side in ("k", "v"):
        values = {path: sides[side] for path, sides in amax.items() if side in sides}
        largest = FP8_E4M3.element.max
        for path, value in values.items():
            if value > largest:
                flags.setdefault(path, []).append(f"{side} amax > {largest:g}")
        for path, ratio in standing_out(values).items():
            flags.setdefault(path, []).append(f"{side} amax {ratio:.0f} x median")
    return {path: tuple(words) for path, words in flags.items()}


def bias_flags(traits: Mapping[str, KeyTraits]) -> dict[str, tuple[str, ...]]:
    """Return attention path → what is striking about its key bias, in words."""
    norms = {path: t.k_bias_norm for path, t in traits.items() if t.k_bias_norm is not None}
    return {
        path: (f"k bias norm {norms[path]:.0f}, {ratio:.0f} x median",)
        for path, ratio in standing_out(norms).items()
    }


def outlier_layers(calibration: Calibration) -> dict[int, bool]:
    """Return the layers that stand out, each with whether a few of its heads do so alone."""
    found: dict[int, bool] = {}
    for quantizer in (KEY, VALUE):
        layers = [layer for layer in calibration.layers if quantizer in layer.amax]
        outliers = standing_out({x.attention: float(x.amax[quantizer].max()) for x in layers})
        for layer in layers:
            if layer.attention in outliers:
                heads = {str(i): float(a) for i, a in enumerate(layer.amax[quantizer])}
                alone = bool(standing_out(heads))
                found[layer.layer_idx] = found.get(layer.layer_idx, False) or alone
    return dict(sorted(found.items()))


def without_layers(calibration: Calibration, skipped: tuple[int, ...]) -> Calibration:
    """Return the calibration with layers marked for the engine to leave unquantized.

    Their statistics stay, and their scales are written: an engine takes a missing scale for 1.0.
    Layers of one cache are skipped together.
    """
    chosen = {x.shared_from or x.attention for x in calibration.layers if x.layer_idx in skipped}
    skipped = tuple(
        sorted(
            {x.layer_idx for x in calibration.layers if (x.shared_from or x.attention) in chosen}
        )
    )
    paths = {layer.attention for layer in calibration.layers if layer.layer_idx in skipped}
    quantizers = {
        name: None if name.rpartition(".")[0] in paths else config
        for name, config in calibration.quantizers.items()
    }
    return replace(calibration, quantizers=quantizers, skip_layers=skipped)


def skip_flag(layers: Sequence[int]) -> str:
    """Return the vLLM option that leaves layers unquantized; a checkpoint cannot say it."""
    return f"--kv-cache-dtype-skip-layers {' '.join(str(layer) for layer in layers)}"


def advice(layers: Sequence[int], *, heads_differ: bool) -> str:
    """Return what to do about layers that stand out.

    Args:
        layers: their numbers.
        heads_differ: a few of their heads are far above the others.
    """
    listed = ", ".join(str(layer) for layer in layers)
    ways = [
        "leave them unquantized (`kvq calibrate --skip-layers auto`; "
        f"vllm serve {skip_flag(layers)})"
    ]
    if heads_differ:
        ways.append("give each head its own scale (`kvq export --granularity head`)")
    ways.append("leave room for larger values than were seen (`kvq calibrate --margin 1.25`)")
    return f"layers {listed} stand out: {'; or '.join(ways)}"
