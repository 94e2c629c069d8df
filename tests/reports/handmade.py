"""Checkpoints of which only names and scales count: weights of one number each."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvq.tensorfile import write_float32
from tests.engines.tensors import Tensors

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def layers(numbers: int | Iterable[int]) -> Tensors:
    """Return the attention weights of these layers, by the usual names."""
    counted = range(numbers) if isinstance(numbers, int) else numbers
    return weights(
        f"model.layers.{i}.self_attn.{projection}" for i in counted for projection in PROJECTIONS
    )


def weights(modules: Iterable[str]) -> Tensors:
    """Return a weight for each module."""
    return {f"{module}.weight": np.zeros((1, 1), np.float32) for module in modules}


def checkpoint(parent: Path, config: Mapping[str, Any], *tensors: Tensors) -> Path:
    """Write a new folder with one file; returns it."""
    folder = parent / f"handmade-{len(list(parent.iterdir()))}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    together = {name: array for some in tensors for name, array in some.items()}
    as_float32 = {name: array.astype(np.float32) for name, array in together.items()}
    write_float32(folder / "model.safetensors", as_float32, {"format": "pt"})
    return folder
