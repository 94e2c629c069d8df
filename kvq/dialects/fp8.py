"""Scales beside weights of the method `fp8`: `<attention>.k_scale`, one float32 number.

The method has no place to declare a cache, so the engine is told by its own option
(`--kv-cache-dtype fp8`). vLLM's `layers/quantization/fp8.py` reads the scales as it does
ModelOpt's, in the model's dtype: they are rounded up to one that it has.
"""

import numpy as np

from kvq.checkpoint import CONFIG_NAME, CheckpointView
from kvq.dialects.base import Declared, DialectPlan, Documents, Target
from kvq.dialects.documents import at_place, method_of, other_method
from kvq.dialects.modelopt import CACHE_KEYS, ModelOpt, round_up
from kvq.dialects.spellings import SPELLINGS
from kvq.errors import DialectError
from kvq.scales import ScaleSet


class FP8:
    """Scales of a checkpoint with FP8 weights in DeepSeek's or AutoFP8's form."""

    name = "fp8"
    spelling = "attention"

    def plan(self, scales: ScaleSet, view: CheckpointView, target: Target) -> DialectPlan:
        """Return tensors; no file changes.

        Raises:
            DialectError: another format than FP8, scales per head, or another method's base.
        """
        method = str(method_of(view.quantization_config))
        if method != self.name:
            raise other_method(method, None)
        if scales.format != "fp8_e4m3" or scales.granularity != "tensor":
            raise DialectError(
                f"`{scales.format}` scales per {scales.granularity} cannot stand beside weights of "
                "the method fp8: engines read one FP8 scale for each tensor there",
                code="dialect.format",
                hint="--kv-cfg FP8_KV_CFG --granularity tensor",
            )
        stored = round_up(scales, self.stored, view)
        tensors = {
            SPELLINGS[self.spelling].tensor(layer.attention, side): np.array(values, np.float32)
            for layer in stored.layers
            for side, values in layer.scales.items()
        }
        loss = "the method fp8 cannot declare a cache: the engine must be told by its option"
        return DialectPlan(tensors, {}, stored, (loss,))

    def declared(self, view: CheckpointView) -> Declared:
        """Return what keys that some engines look for say, if they are there."""
        return ModelOpt().declared(view)

    def stored(self, values: np.ndarray, view: CheckpointView) -> np.ndarray:
        """Return each value, or the next larger one that the model's dtype has."""
        return ModelOpt().stored(values, view)

    def strip(self, view: CheckpointView) -> Documents:
        """Return config.json without such keys."""
        config, place = view.quantization_config, view.quantization_config_place
        if config is None or place is None or not any(config.get(key) for key in CACHE_KEYS):
            return {}
        kept = {key: value for key, value in config.items() if key not in CACHE_KEYS}
        return {CONFIG_NAME: at_place(view.config, place, kept)}
