"""compressed-tensors: `<attention>.k_scale`, float32, [1] per tensor or [heads, 1, 1] per head.

Readers: vLLM `layers/quantization/compressed_tensors/compressed_tensors.py` (float, 8 bits,
symmetric, strategy `tensor` or `attn_head`; anything else is an error there) and transformers
`quantizers/quantizer_compressed_tensors.py` (wraps the cache; scales are cast to the load dtype).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvq.checkpoint import CONFIG_NAME, CheckpointView
from kvq.dialects.base import Declared, DialectPlan, Documents, Target
from kvq.dialects.documents import LEGACY_NAME, at_place, method_of, other_method
from kvq.dialects.spellings import SPELLINGS
from kvq.engines.transformers_config import MERGED_EXPERTS, model_types
from kvq.errors import DialectError
from kvq.scales import ScaleSet

STRATEGY = {"tensor": "tensor", "head": "attn_head"}
SCHEMA_VERSION = "0.20.0"  # of compressed-tensors, whose schema this is
_TYPES = {"fp8_e4m3": "float", "int8": "int"}  # of `kv_cache_scheme`, all of 8 bits
_MORE = ("transform_config", "sparsity_config", "moe_sparsity_config")  # not of the cache
# transformers looks for the group of a mixture's experts, and fails where there is no group at all
# (`integrations/compressed_tensors.py`, get_experts_scheme). One that matches no layer does; vLLM
# loads it as well.
_NO_LAYER = {
    "format": "dense",
    "input_activations": None,
    "output_activations": None,
    "targets": ["re:^$"],
    "weights": {
        "dynamic": False, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "float",
    },
}  # fmt: skip

_REASON = {
    "int8": "vLLM accepts only 8-bit floats in `kv_cache_scheme`; transformers alone runs INT8",
    "nvfp4": "compressed-tensors has no NVFP4 cache scheme that an engine reads",
}


class CompressedTensors:
    """The dialect of llm-compressor, read by vLLM, SGLang and transformers."""

    name = "compressed-tensors"
    spelling = "attention"

    def plan(self, scales: ScaleSet, view: CheckpointView, target: Target) -> DialectPlan:
        """Return tensors and configuration.

        Raises:
            DialectError: the format or the base's own quantization cannot be expressed.
        """
        only_transformers = target.engines == ("transformers",)
        if scales.format not in _TYPES or (scales.format == "int8" and not only_transformers):
            reason = _REASON.get(scales.format, "engines read only FP8 E4M3 in this dialect")
            raise DialectError(
                f"`{scales.format}` cannot be written as compressed-tensors: {reason}",
                code="dialect.format",
                hint="export the same calibration as FP8: --kv-cfg FP8_KV_CFG",
            )
        base = _base_config(view)
        scheme = _scheme(_TYPES[scales.format], STRATEGY[scales.granularity])
        if scales.has_query:
            groups = base["config_groups"]
            base["config_groups"] = _with_attention(groups, scheme, target.attention_class)
        base["kv_cache_scheme"] = scheme
        has_experts = bool(MERGED_EXPERTS & {*model_types(view)})
        if "transformers" in target.engines and has_experts and not base["config_groups"]:
            base["config_groups"] = {"group_0": _NO_LAYER}
        if scales.granularity == "head":
            _check_heads(scales)
        shape = (-1, 1, 1) if scales.granularity == "head" else (1,)
        tensors = {
            SPELLINGS[self.spelling].tensor(layer.attention, side): (
                np.array(values, np.float32).reshape(shape)
            )
            for layer in scales.layers
            for side, values in layer.scales.items()
        }
        place = view.quantization_config_place or "quantization_config"
        return DialectPlan(tensors, {CONFIG_NAME: at_place(view.config, place, base)}, scales)

    def declared(self, view: CheckpointView) -> Declared:
        """Return format and granularity of `kv_cache_scheme`."""
        scheme = view.kv_cache_scheme
        per_head = scheme.get("strategy") == STRATEGY["head"]
        formats = {("float", 8): "fp8_e4m3", ("int", 8): "int8"}
        kind, bits = scheme.get("type"), scheme.get("num_bits")
        key = (kind, bits) if isinstance(kind, str) and isinstance(bits, int) else None
        return Declared(formats.get(key) if key else None, "head" if per_head else "tensor")

    def stored(self, values: np.ndarray, view: CheckpointView) -> np.ndarray:
        """Return the values themselves: they are stored and read in float32."""
        return values

    def strip(self, view: CheckpointView) -> Documents:
        """Return config.json without cache scheme and attention groups."""
        place, config = view.quantization_config_place, view.quantization_config
        if place is None or config is None:
            return {}
        groups = {
            name: group for name, group in view.config_groups.items() if quantizes_weights(group)
        }
        kept = {key: value for key, value in config.items() if key != "kv_cache_scheme"}
        if method_of(config) != self.name:  # of another method, whose weights need it
            return {CONFIG_NAME: at_place(view.config, place, kept)}
        some = groups or any(kept.get(key) for key in _MORE)
        rest = {**kept, "config_groups": groups} if some else None
        return {CONFIG_NAME: at_place(view.config, place, rest)}


def quantizes_weights(group: Mapping[str, Any]) -> bool:
    """Whether a group of `config_groups` has weights of some layer."""
    return bool(group.get("weights")) and group.get("targets") != _NO_LAYER["targets"]


def _check_heads(scales: ScaleSet) -> None:
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


def _scheme(kind: str, strategy: str) -> dict[str, Any]:
    return {
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
    }


def _base_config(view: CheckpointView) -> dict[str, Any]:
    """Return the checkpoint's own configuration to extend, or that of an unquantized one."""
    base = view.quantization_config
    if base is not None and str(base.get("quant_method")).startswith("modelopt"):
        alone = not base.get("quant_algo") and "quantization" not in base
        hint = "first `kvq export MODEL --strip -o BARE`, then export onto that" if alone else None
        raise DialectError(
            f"the checkpoint is quantized with `{base['quant_method']}`; scales in another dialect "
            "would not be read",
            code="dialect.base",
            hint=hint or "leave --dialect out, to follow the checkpoint",
        )
    if base is None:
        if (view.root / LEGACY_NAME).exists():
            raise other_method(f"modelopt (`{LEGACY_NAME}`)", "modelopt")
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
    if method_of(base) != "compressed-tensors":
        raise other_method(str(method_of(base)), None)
    groups = base.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise DialectError(
            "`config_groups` of the checkpoint is not an object of objects", code="dialect.base"
        )
    # as every reader wants them: SGLang and transformers know one spelling of the method
    own = {"quant_method": CompressedTensors.name, "quantization_status": "compressed"}
    return {**base, "config_groups": groups, **own}


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
