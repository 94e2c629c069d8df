"""compressed-tensors: `<attention>.k_scale`, float32, [1] per tensor or [heads, 1, 1] per head.

Readers: vLLM `layers/quantization/compressed_tensors/compressed_tensors.py` (float, 8 bits,
symmetric, strategy `tensor` or `attn_head`; anything else is an error there) and transformers
`quantizers/quantizer_compressed_tensors.py` (wraps the cache; scales are cast to the load dtype).
"""

from typing import Any

import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.dialects.base import DialectPlan, FoundScale
from kvq.errors import DialectError
from kvq.geometry import Geometry
from kvq.scales import LayerScales, ScaleSet

STRATEGY = {"tensor": "tensor", "head": "attn_head"}
SCHEMA_VERSION = "0.20.0"  # of compressed-tensors, whose schema this is

_REASON = {
    "int8": "vLLM accepts only 8-bit floats in `kv_cache_scheme`",
    "nvfp4": "compressed-tensors has no NVFP4 cache scheme that vLLM reads",
}


def scale_name(attention: str, side: str) -> str:
    """Return the tensor name of a scale.

    vLLM puts its scales below a module `attn` inside of the attention module, and takes a name that
    ends in `.attn.k_scale` for one that says so already: where the attention module itself is
    called `attn` (GPT-2), it must be written out (`layers/quantization/base_config.py`).
    """
    inner = ".attn" if attention.endswith(".attn") else ""
    return f"{attention}{inner}.{side}_scale"


class CompressedTensors:
    """The dialect of llm-compressor, read by vLLM, SGLang and transformers."""

    name = "compressed-tensors"

    def plan(
        self, scales: ScaleSet, view: CheckpointView, attention_class: str | None
    ) -> DialectPlan:
        """Return tensors and configuration for FP8 scales.

        Raises:
            DialectError: the format or the base's own quantization cannot be expressed.
        """
        if scales.format != "fp8_e4m3":
            reason = _REASON.get(scales.format, "vLLM reads only FP8 E4M3 caches in this dialect")
            raise DialectError(
                f"`{scales.format}` cannot be written as compressed-tensors: {reason}",
                code="dialect.format",
                hint="export the same calibration as FP8: --kv-cfg FP8_KV_CFG",
            )
        base = _base_config(view)
        scheme = _scheme(STRATEGY[scales.granularity])
        if scales.has_query:
            base["config_groups"] = _with_attention(base["config_groups"], scheme, attention_class)
        base["kv_cache_scheme"] = scheme
        if scales.granularity == "head":
            _check_heads(scales, view)
        shape = (-1, 1, 1) if scales.granularity == "head" else (1,)
        tensors = {
            scale_name(layer.attention, side): np.array(values, np.float32).reshape(shape)
            for layer in scales.layers
            for side, values in layer.scales.items()
        }
        return DialectPlan(tensors, base)

    def read(self, view: CheckpointView, geometry: Geometry) -> ScaleSet:
        """Return the scales of all layers, as they are; a layer may have none."""
        found = self.find(view, geometry)
        per_head = view.kv_cache_scheme.get("strategy") == STRATEGY["head"]
        layers = []
        for layer in geometry.layers:
            scales = {
                scale.side: tuple(float(value) for value in view.read(scale.tensor).ravel())
                for scale in found
                if scale.attention == layer.attention
            }
            status = dict.fromkeys(scales, "unknown")
            layers.append(LayerScales(layer.layer_idx, layer.attention, scales, status))
        return ScaleSet("fp8_e4m3", "head" if per_head else "tensor", tuple(layers))

    def find(self, view: CheckpointView, geometry: Geometry) -> tuple[FoundScale, ...]:
        """Return the scales stored under the names of `scale_name`."""
        return tuple(
            FoundScale(layer.layer_idx, layer.attention, side, name)
            for layer in geometry.layers
            for side in ("q", "k", "v")
            if (name := scale_name(layer.attention, side)) in view.tensors
        )


def _check_heads(scales: ScaleSet, view: CheckpointView) -> None:
    """Refuse per-head scales where layers differ: vLLM divides by config.json's one number.

    Source: vLLM `compressed_tensors.py`, `_tp_aware_loader`.
    """
    heads = {len(layer.scales["k"]) for layer in scales.layers if "k" in layer.scales}
    if len(heads) > 1:
        raise DialectError(
            f"the layers have {sorted(heads)} KV heads: vLLM crashes on scales per head unless all "
            "layers have the same number",
            code="dialect.heads_differ",
            hint="use --granularity tensor",
        )


def _scheme(strategy: str) -> dict[str, Any]:
    return {
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "strategy": strategy,
        "symmetric": True,
        "type": "float",
    }


def _base_config(view: CheckpointView) -> dict[str, Any]:
    """Return the checkpoint's own configuration to extend, or that of an unquantized one."""
    base = view.quantization_config
    if base is None:
        if (view.root / "hf_quant_config.json").exists():
            raise _other_method("modelopt (`hf_quant_config.json`)")
        return {
            "config_groups": {},
            "format": "dense",
            "global_compression_ratio": None,
            "ignore": [],
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": SCHEMA_VERSION,
        }
    if base.get("quant_method") != "compressed-tensors":
        raise _other_method(str(base.get("quant_method")))
    if view.quantization_config_place != "quantization_config":
        raise DialectError(
            f"the checkpoint declares its quantization under `{view.quantization_config_place}`; "
            "one written at the top level would hide it",
            code="dialect.base_place",
            hint="move it to the top level of config.json first",
        )
    groups = base.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise DialectError(
            "`config_groups` of the checkpoint is not an object of objects", code="dialect.base"
        )
    return {**base, "config_groups": groups, "quantization_status": "compressed"}


def _other_method(method: str) -> DialectError:
    return DialectError(
        f"the checkpoint is quantized with `{method}`; compressed-tensors scales added to it would "
        "not be read",
        code="dialect.base",
        hint="export onto the unquantized or a compressed-tensors checkpoint of the model",
    )


def _with_attention(
    groups: dict[str, Any], scheme: dict[str, Any], attention_class: str | None
) -> dict[str, Any]:
    if not attention_class:
        raise DialectError(
            "query scales need the attention's class name, which this calibration did not record",
            code="dialect.attention_class",
            hint="calibrate again",
        )
    kept = {name: g for name, g in groups.items() if g.get("targets") != [attention_class]}
    number = next(i for i in range(len(kept) + 1) if f"group_{i}" not in kept)
    group = {
        "format": "dense",
        "input_activations": scheme,
        "output_activations": None,
        "targets": [attention_class],
        "weights": None,
    }
    return {**kept, f"group_{number}": group}
