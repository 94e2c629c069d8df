"""One checkpoint folder to be written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.engines.layouts import Layout, single
from tests.engines.tensors import Tensors


@dataclass(frozen=True)
class Variant:
    """One folder, and the options with which the engine is to load it."""

    scales: Tensors
    quantization: Mapping[str, Any] | None = None
    weights: str = "bf16"
    architecture: str = "llama"
    config: Mapping[str, Any] = field(default_factory=dict)
    text_config: Mapping[str, Any] = field(default_factory=dict)
    hf_quant: Mapping[str, Any] | None = None
    layout: Layout = single
    kv_cache_dtype: str = "auto"
    skip_layers: tuple[str, ...] = ()
