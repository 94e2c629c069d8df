"""A model of how vLLM 0.32 loads the scales of a checkpoint, compared with vLLM itself.

It reads headers, JSON and the scale tensors, and runs nothing. tests/goldens/vllm.json holds what
vLLM made of several hundred small checkpoints, made by scripts/record_vllm.py; the model predicts
each of them.
"""

from dataclasses import dataclass, field, replace

from kvq.checkpoint import CheckpointView
from kvq.engines.base import (
    MISAPPLIED,
    Engine,
    EngineOptions,
    EngineReading,
    LayerReading,
    SideReading,
    not_modelled,
)
from kvq.engines.vllm_attention import AttentionLayer, attention_layers
from kvq.engines.vllm_checked import checked
from kvq.engines.vllm_classes import VERSIONS, model_type, renamed_tower
from kvq.engines.vllm_config import (
    LoadError,
    NotModelledError,
    Quantization,
    read_quantization,
)
from kvq.engines.vllm_linear import QuantizedLinears
from kvq.engines.vllm_names import Modules, files_read, is_expert, is_scale, stream
from kvq.engines.vllm_values import (
    NO_QUERY,
    default,
    load_base,
    load_ct,
    model_dtype,
    process_base,
    process_query,
    with_reason,
)
from kvq.errors import KvqError
from kvq.geometry import Geometry
from kvq.tensorfile import TensorInfo

_NO_TENSOR = "default 1.0: no tensor is read into this layer"


class VLLM(Engine):
    """vLLM's loader."""

    name = "vllm"
    versions = VERSIONS

    def read(
        self, view: CheckpointView, geometry: Geometry, options: EngineOptions
    ) -> EngineReading:
        """Return what vLLM does with a checkpoint."""
        known = checked(model_type(view), self.version)
        notes = (*_notes(view, known=known), *_replicas(geometry, options.tp))
        blank = EngineReading(self.name, self.version, options, None, (), None, notes, known)
        try:
            quantization = read_quantization(view, options.kv_cache_dtype)
            cache_dtype, layers = attention_layers(
                view, geometry, quantization, options, self.version
            )
            if quantization.per_head:
                blank = replace(blank, notes=(*blank.notes, _per_head(options.platform)))
            loading = _Loading(view, geometry, quantization, options, layers)
            loading.run()
            return replace(blank, cache_dtype=cache_dtype, layers=loading.readings())
        except LoadError as error:
            return replace(blank, error=str(error))
        except NotModelledError as error:
            return not_modelled(blank, geometry, str(error))


def _per_head(platform: str) -> str:
    """Return what scales per head come to on a platform.

    Source: `v1/attention/backends/*.py`, `supports_per_head_quant_scales`: FlashAttention 3 alone.

    Raises:
        LoadError: no attention backend takes them there.
    """
    if platform == "cpu":
        return "scales per head: the CPU uses their maximum"
    if not platform.startswith("sm9"):
        raise LoadError(
            f"no attention backend takes scales per head on {platform}: FlashAttention 3 on sm90 "
            "alone does (source only)"
        )
    return "scales per head need FlashAttention 3, which other attention backends do not replace"


def _replicas(geometry: Geometry, tp: int) -> tuple[str, ...]:
    """Say how GPUs share KV heads of which there are fewer."""
    fewest = min((layer.num_key_value_heads for layer in geometry.layers), default=tp)
    if geometry.is_mla or tp <= fewest or tp % fewest:
        return ()
    return (f"{fewest} KV heads on {tp} GPUs: each is replicated x{tp // fewest}, scales too",)


def _notes(view: CheckpointView, *, known: bool) -> tuple[str, ...]:
    kind = model_type(view) or "unknown"
    return () if known else (f"model class not checked against real vLLM: `{kind}`",)


@dataclass
class _Loading:
    """The loading of one checkpoint: tensors in vLLM's order, each with its effect."""

    view: CheckpointView
    geometry: Geometry
    quantization: Quantization
    options: EngineOptions
    layers: tuple[AttentionLayer, ...]
    loaded: dict[tuple[str, str], SideReading] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)  # tensor → why

    def run(self) -> None:
        """Load every tensor.

        Raises:
            LoadError: vLLM ends with one of them.
        """
        files = files_read(self.view)
        modules = self._modules()
        renamed = renamed_tower(self.view)
        if renamed is not None:
            tower = ".".join(renamed.removeprefix("model.").split(".")[:2])
            raise LoadError(
                f"ValueError: There is no module or parameter named {tower!r} in {modules.name}."
            )
        linears = QuantizedLinears(self.view, self.quantization)
        by_path = {layer.path: layer for layer in self.layers}
        drafts = tuple(f"{path}." for path in self.geometry.drafts)
        dtype = model_dtype(self.view)
        for info in stream(self.view, files):
            if not is_scale(info.name) and not linears.leave_over(info.name):
                continue
            if info.name.startswith(drafts):
                continue
            parameter = modules.find(info.name)
            path, _, name = (parameter or "").rpartition(".")
            if parameter is None:
                self.dropped[info.name] = "is not read by this model class"
            elif path in by_path:
                self._load(by_path[path], name, info, dtype)
        for name, file in self.view.files.items():
            for tensor in file.tensors if name not in files else ():
                self.dropped.setdefault(tensor, f"lies in `{name}`, which is not read")

    def _modules(self) -> Modules:
        modules = self.layers[0].modules if self.layers else None
        if modules is None:
            raise NotModelledError("no layer of the checkpoint keeps a KV cache")
        for file in self.view.files.values():
            for name in file.tensors:
                if not is_expert(name) and not is_scale(name):
                    modules.add_tensor(name)
        modules.add_encoder_attention()
        for layer in self.layers if modules.cls.attention_in_tree else ():
            modules.add_module(layer.path)
            modules.parameters |= {f"{layer.path}.{name}" for name in layer.parameters}
        return modules

    def _load(self, layer: AttentionLayer, name: str, info: TensorInfo, dtype: str | None) -> None:
        if name.startswith("_"):
            if info.numel != 1:
                shape = list(info.shape)
                raise LoadError(
                    f"AssertionError: Attempted to load weight (torch.Size({shape})) into "
                    "parameter (torch.Size([]))"
                )
            self.dropped[info.name] = "is overwritten after loading"
            return
        if name.endswith("zero_point") and layer.heads is not None:
            return
        side = name.partition("_")[0]
        try:
            if layer.method == "base":
                reading = load_base(info, dtype)
            else:
                reading = load_ct(info, layer.heads, side)
        except KvqError as error:  # of the file, or a dtype that is none of a scale
            reading = SideReading(None, info.name, str(error))
        if not name.endswith("_scale"):
            return
        before = self.loaded.get((layer.path, side))
        if before is not None:
            other = "one of another file" if before.tensor == info.name else f"`{before.tensor}`"
            reading = with_reason(reading, f"read after {other}, which it replaces")
        self.loaded[layer.path, side] = reading

    def readings(self) -> tuple[LayerReading, ...]:
        """Return all layers as they are after loading.

        Raises:
            LoadError: values that vLLM refuses then.
        """
        return tuple(self._reading(layer) for layer in self.layers)

    def _reading(self, layer: AttentionLayer) -> LayerReading:
        k, v = (self.loaded.get((layer.path, side)) for side in "kv")
        if layer.method == "base":
            k, v = process_base(k, v, layer.cache_dtype, self.options.platform)
        else:
            k, v = (self._kept(layer, side) for side in (k, v))
        k, v = (
            side if side.reason or side.tensor else replace(side, reason=self._missing(layer, name))
            for name, side in (("k", k), ("v", v))
        )
        geometry = layer.geometry
        if geometry.kv_lora_rank is not None and layer.path.endswith(".attn"):
            k, v = (with_reason(side, MISAPPLIED) if side.tensor else side for side in (k, v))
        return LayerReading(
            geometry.layer_idx, geometry.attention, layer.name, layer.cache_dtype, k, v,
            self._query(layer),
        )  # fmt: skip

    def _query(self, layer: AttentionLayer) -> SideReading:
        q = self.loaded.get((layer.path, "q"))
        if layer.method == "base":
            return process_query(q, layer.cache_dtype, self.options.platform)
        return q or replace(default(NO_QUERY), value=(1.0,) * layer.num_scales)

    def _kept(self, layer: AttentionLayer, side: SideReading | None) -> SideReading:
        """Return a side as compressed-tensors leaves it: whatever the cache's dtype."""
        if side is None:
            return replace(default(""), value=(1.0,) * layer.num_scales)
        if layer.cache_dtype.startswith(("fp8_per", "int", "turbo", "ultra")):
            return with_reason(side, f"kept, but `{layer.cache_dtype}` does not use it")
        if not layer.cache_dtype.startswith(("fp8", "nvfp4")):
            return with_reason(side, "kept, although the cache is not quantized")
        return side

    def _missing(self, layer: AttentionLayer, side: str) -> str:
        """Return why a side has no scale: what there is of it in the checkpoint, and its fate."""
        names = [
            name
            for name in self.dropped
            if name.startswith(f"{layer.geometry.attention}.")
            and any(f"{word}_" in name.rpartition(".")[2] for word in (side, "kv"))
            and "zero_point" not in name
        ]
        if not names:
            return _NO_TENSOR
        if self.quantization.kv_method is None and self.quantization.method is not None:
            return (
                f"default 1.0: `{self.quantization.method}` reads no scales of attention, not "
                f"`{names[0]}` either"
            )
        return f"default 1.0: `{names[0]}` {self.dropped[names[0]]}"
