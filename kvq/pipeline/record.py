"""What a calibration records: statistics per layer, the model's identity, versions."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import kvq
from kvq.geometry import CROSS, Geometry, LayerGeometry
from kvq.quantizers import QUERY
from kvq.state import LayerStats

Key = tuple[str, str]  # attention path, quantizer


def layer_statistics(
    layers: Sequence[LayerGeometry], results: Mapping[Key, Any], observer: Any
) -> tuple[LayerStats, ...]:
    """Return each layer's statistics; a layer that reads another's cache has that one's."""
    from kvq.calibration.magnitudes import percentile_99_9

    found = []
    for layer in layers:
        source = layer.shared_from or layer.attention
        amax, raised, percentiles = {}, {}, {}
        for quantizer in layer.quantizers:
            key = (layer.attention if quantizer == QUERY else source, quantizer)
            if key in results:
                amax[quantizer] = np.asarray(results[key].numpy(), np.float32)
                raised[quantizer] = int(observer.raised[key].max())
                percentile = percentile_99_9(observer.counts[key].cpu().numpy())
                percentiles[quantizer] = min(percentile, float(amax[quantizer].max()))
        seen = observer.tokens[source, layer.cached[0][0]]
        found.append(
            LayerStats(layer.layer_idx, layer.attention, amax, seen, layer.shared_from, raised,
                       percentiles)
        )  # fmt: skip
    return tuple(found)


def model_identity(geometry: Geometry, attentions: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a calibration records about the model, without its weights."""
    first = next((layer for layer in geometry.layers if layer.kind != CROSS), geometry.layers[0])
    return {
        "architecture": geometry.architecture,
        "attention_class": type(attentions[first.attention]).__name__,
        "num_hidden_layers": geometry.num_hidden_layers,
    }


def versions() -> dict[str, str]:
    """Return the versions of everything that computes."""
    import torch
    import transformers

    return {
        "kvq": kvq.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
