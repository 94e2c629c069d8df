"""A model of how SGLang 0.5.23 loads the scales of a checkpoint, from its files alone.

It reads headers, JSON and the scale tensors, and runs nothing. tests/goldens/sglang.json holds what
pieces of SGLang made of several hundred small checkpoints of Llama, made by
scripts/record_sglang.py: config, cache dtype, names, and the rules for missing and odd values. The
rest was read in its source; a server never ran. What neither says is unknown here.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.engines.base import (
    Engine,
    EngineOptions,
    EngineReading,
    LayerReading,
    SideReading,
    not_modelled,
)
from kvq.engines.sglang_config import Quantization, read_quantization, resolve_cache_dtype
from kvq.engines.sglang_names import LENIENT, NO_REMAP, REMAP, remap
from kvq.engines.vllm_config import LoadError, NotModelledError
from kvq.engines.vllm_names import is_scale
from kvq.engines.vllm_values import FNUZ_PLATFORMS, default, unknown
from kvq.geometry import Geometry, LayerGeometry
from kvq.tensorfile import TensorInfo, read_tensor

_NOTES = (
    "read in SGLang's source, not run: which model classes read scales, the order of files, the "
    "factor 6 of nvfp4 on SM100, and what the kernels do with scales",
)
_BF16_NOTE = "kept, although the cache is not quantized: FlashInfer would use it (source only)"
_E5M2_NOTE = "scales for E4M3 are applied to E5M2; SGLang refuses fp8_e5m2 on the CPU (source only)"


class SGLang(Engine):
    """SGLang's loader."""

    name = "sglang"
    versions = ("0.5.23",)

    def read(
        self, view: CheckpointView, geometry: Geometry, options: EngineOptions
    ) -> EngineReading:
        """Return what SGLang does with a checkpoint."""
        blank = EngineReading(self.name, self.version, options, None, (), None, _NOTES)
        cache_dtype = None
        try:
            quantization = read_quantization(view)
            cache_dtype = resolve_cache_dtype(
                quantization, options.kv_cache_dtype, options.platform
            )
            if cache_dtype == "fp8_e5m2":
                blank = replace(blank, notes=(*blank.notes, _E5M2_NOTE))
            if options.skip_layers:
                note = "layers to leave unquantized are an option of vLLM: SGLang has none"
                blank = replace(blank, notes=(*blank.notes, note))
            _check_files(view)
            loading = _Loading(view, geometry, quantization, cache_dtype, options.platform)
            layers = tuple(loading.layer(layer) for layer in geometry.layers)
            return replace(blank, cache_dtype=cache_dtype, layers=layers)
        except LoadError as error:
            return replace(blank, error=str(error))
        except NotModelledError as error:
            blank = replace(blank, cache_dtype=cache_dtype)
            return not_modelled(blank, geometry, str(error), inner=".attn")


def _path(layer: LayerGeometry) -> str:
    return f"{layer.attention}.attn"


def _check_files(view: CheckpointView) -> None:
    if any(name.startswith("consolidated") for name in view.files):
        raise NotModelledError("which files SGLang reads beside `consolidated*` is not modelled")
    missing = sorted(set((view.weight_map or {}).values()) - set(view.files))
    if missing:
        raise NotModelledError(f"the index names `{missing[0]}`, which does not exist")


@dataclass(frozen=True)
class _Loading:
    """The scales of one checkpoint on their way into SGLang's layers."""

    view: CheckpointView
    geometry: Geometry
    quantization: Quantization
    cache_dtype: str
    platform: str

    def layer(self, layer: LayerGeometry) -> LayerReading:
        """Return one layer after loading.

        Raises:
            LoadError: SGLang ends with one of its scales.
        """
        k, v = self._sides(layer)
        path = _path(layer)
        return LayerReading(layer.layer_idx, layer.attention, path, self.cache_dtype, k, v)

    def _sides(self, layer: LayerGeometry) -> tuple[SideReading, SideReading]:
        architecture = self.geometry.architecture
        if not self.quantization.has_kv_method and not self._odd():
            return self._unread(layer, self.quantization.why)
        reason = self._not_modelled(layer)
        if reason:
            return unknown(reason), unknown(reason)
        if architecture in NO_REMAP:
            return self._unread(layer, f"SGLang's `{architecture}` reads no scales of attention")
        found = [self._find(f"{_path(layer)}.{side}_scale") for side in "kv"]
        for infos in found:
            if any(info.numel != 1 for info in infos):
                shape = next(list(info.shape) for info in infos if info.numel != 1)
                raise LoadError(
                    f"AssertionError: Attempted to load weight (torch.Size({shape})) into "
                    "parameter (torch.Size([]))"
                )
        numbers = [{_number(info) for info in infos} for infos in found]
        if any(len(set(map(repr, values))) > 1 for values in numbers):
            reason = "several tensors are read into this scale, in an order that is not modelled"
            return unknown(reason), unknown(reason)
        k, v = (
            SideReading((_number(infos[-1]),), infos[-1].name, "") if infos else None
            for infos in found
        )
        k, v = settle(k, v)
        return self._used(layer, k, "k"), self._used(layer, v, "v")

    def _not_modelled(self, layer: LayerGeometry) -> str:
        """Return why this layer's scales are not known, empty if they are."""
        architecture = self.geometry.architecture
        if self.cache_dtype in ("mxfp8", "fp4_mx_block16"):
            return f"`{self.cache_dtype}`, which has scales of its own, is not modelled"
        if layer.kv_lora_rank is not None:
            return "loading of latent attention (MLA) is not modelled"
        if architecture not in (*REMAP, *NO_REMAP):
            return f"how SGLang's `{architecture}` reads scales is not modelled"
        if layer.shared_from is not None:
            return "scales of a layer that reads another's cache are not modelled"
        if not layer.attention.endswith(".self_attn"):
            return f"SGLang's path of `{layer.attention}` is not known"
        if architecture in NO_REMAP:
            exact = [x.name for x in self._scales if x.name.startswith(f"{_path(layer)}.")]
            return f"`{exact[0]}` has SGLang's own name; not modelled" if exact else ""
        odd = self._odd()
        return f"`{odd[0]}` may end loading in `{architecture}`; not modelled" if odd else ""

    @cached_property
    def _scales(self) -> list[TensorInfo]:
        """What is, or is meant to be, a scale, in the files that are read."""
        files = (self.view.files[name].tensors for name in self.view.loaded_files)
        return [tensors[name] for tensors in files for name in tensors if is_scale(name)]

    @cached_property
    def _all_scales(self) -> list[str]:
        """The same in all files."""
        files = self.view.files.values()
        return [name for file in files for name in file.tensors if is_scale(name)]

    def _odd(self) -> list[str]:
        """Return scales that the helper leaves alone, where the class may end with them."""
        if self.geometry.architecture in LENIENT or self.geometry.architecture not in REMAP:
            return []
        left = [info.name for info in self._scales]
        if self.quantization.has_kv_method:
            return [name for name in left if not remap(name).endswith(("k_scale", "v_scale"))]
        return [name for name in left if not name.endswith((".k_scale", ".v_scale", ".kv_scale"))]

    def _find(self, parameter: str) -> list[TensorInfo]:
        return [info for info in self._scales if remap(info.name) == parameter]

    def _unread(self, layer: LayerGeometry, why: str) -> tuple[SideReading, SideReading]:
        k, v = (default(f"default 1.0: {why}{self._dropped(layer, side)}") for side in ("k", "v"))
        return k, v

    def _dropped(self, layer: LayerGeometry, side: str) -> str:
        names = [
            name
            for name in self._all_scales
            if name.startswith(f"{layer.attention}.")
            and (f"{side}_" in name.rpartition(".")[2] or f".{side}_proj." in name)
        ]
        return f"; `{names[0]}` is dropped" if names else ""

    def _used(self, layer: LayerGeometry, side: SideReading, name: str) -> SideReading:
        """Return a side as the cache uses it: doubled, times 6, or for nothing."""
        if side.value is None:
            return side
        if side.tensor is None:
            return replace(side, reason=f"{side.reason}{self._dropped(layer, name)}")
        value, reasons = side.value[0], [side.reason]
        if self.platform in FNUZ_PLATFORMS and not side.reason.startswith("default"):
            value, reasons = value * 2, [*reasons, f"doubled for {self.platform}"]
        if self.cache_dtype == "nvfp4" and self.platform.startswith("sm100") and value != 1.0:
            value = float(np.float32(value * 6))
            reasons.append(
                "times 6 on SM100, as if the largest code of fp4 were left out (source only)"
            )
        if self.cache_dtype in ("auto", "bf16", "bfloat16"):
            reasons.append(_BF16_NOTE)
        return SideReading((value,), side.tensor, "; ".join(filter(None, reasons)))


def _number(info: TensorInfo) -> float:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return float(read_tensor(info).ravel().astype(np.float32)[0])


def settle(k: SideReading | None, v: SideReading | None) -> tuple[SideReading, SideReading]:
    """Return what BaseKVCacheMethod makes of a layer's scales once all are loaded.

    Raises:
        LoadError: a combination that it refuses.
    """
    no_tensor = "default 1.0: no tensor is read into this layer"
    if k is None and v is None:
        return default(no_tensor), default(no_tensor)
    k_value, v_value = (-1.0 if x is None or x.value is None else x.value[0] for x in (k, v))
    if k is not None and v is not None and k_value > 0 and v_value > 0:
        return k, v
    if k_value <= 0 and v_value <= 0:
        reason = "default 1.0: not above zero, which stands for no scale"
        k, v = (default(reason if x else no_tensor, x.tensor if x else None) for x in (k, v))
        return k, v
    if k is None or not k_value > 0:
        raise LoadError("AssertionError: ")
    what = "no v scale" if v is None else f"the v scale is {v_value}, not above zero"
    return k, SideReading(k.value, k.tensor, f"copied from k: {what}")
