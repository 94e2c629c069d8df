"""A model of how transformers 5.17 loads scales, beside compressed-tensors 0.20.1.

It reads headers, JSON and the scale tensors, and runs nothing. tests/goldens/transformers.json,
made by scripts/record_transformers.py, holds what transformers made of small checkpoints.

Sources: transformers `modeling_utils.py` (from_pretrained), `core_model_loading.py`
(convert_and_load_state_dict_in_model, rename_source_key), `conversion_mapping.py`;
compressed-tensors `quantization/lifecycle/initialize.py` (is_cached_attention_module).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from kvq.checkpoint import INDEX_NAME, SINGLE_NAME, CheckpointView
from kvq.engines.base import (
    Engine,
    EngineOptions,
    EngineReading,
    LayerReading,
    SideReading,
    not_modelled,
)
from kvq.engines.transformers_config import (
    CHECKED,
    LAYER_PAST,
    LLAVA,
    MERGED_EXPERTS,
    PROJECTIONS,
    LoadError,
    NotModelledError,
    Quantization,
    Scheme,
    model_types,
    read_quantization,
)
from kvq.files import read_json
from kvq.geometry import Geometry, LayerGeometry
from kvq.tensorfile import TensorInfo, read_tensor

UNINITIALISED = "uninitialised memory"
_DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32,
    "float64": np.float64,
}  # fmt: skip
_OF_HEADER = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class Transformers(Engine):
    """The loader of `AutoModelForCausalLM.from_pretrained(folder, dtype="auto")`."""

    name = "transformers"
    versions = ("5.17.0 with compressed-tensors 0.20.1",)

    def read(
        self, view: CheckpointView, geometry: Geometry, options: EngineOptions
    ) -> EngineReading:
        """Return what transformers does with a checkpoint; no option has a meaning to it."""
        model_type = model_types(view)[0]
        notes = () if model_type in CHECKED else (
            f"model class not checked against real transformers: `{model_type or 'unknown'}`",
        )  # fmt: skip
        blank = EngineReading(self.name, self.version, options, None, (), None, notes)
        try:
            quantization = read_quantization(view)
            files = _files_read(view)
            loading = _Loading(view, geometry, quantization, files, _dtype(view, files))
            layers = loading.readings()
        except LoadError as error:
            return replace(blank, error=str(error), notes=(*notes, *error.notes))
        except NotModelledError as error:
            return not_modelled(blank, geometry, f"not modelled: {error}")
        dtypes = [layer.cache_dtype for layer in layers if layer.cache_dtype != "auto"]
        return replace(blank, cache_dtype=dtypes[0] if dtypes else "auto", layers=layers)


def _files_read(view: CheckpointView) -> tuple[str, ...]:
    """Return the files that are read, the last one winning; some of them may not exist.

    Raises:
        LoadError: none, or an index that transformers does not take.
        NotModelledError: not safetensors.
    """
    if view.config.get("transformers_weights"):
        raise NotModelledError("`transformers_weights` in config.json")
    if SINGLE_NAME in view.files:
        return (SINGLE_NAME,)
    if view.weight_map is not None:
        index = read_json(view.root / INDEX_NAME)
        if not isinstance(index.get("metadata", index), dict):
            raise NotModelledError("an index whose `metadata` is no object")
        if "metadata" not in index:
            raise LoadError("KeyError: 'metadata'")
        return tuple(sorted(set(view.weight_map.values())))
    if any((view.root / name).exists() for name in _PICKLED):
        raise NotModelledError("transformers reads a .bin file of this folder")
    raise LoadError(
        f"OSError: Error no file named {SINGLE_NAME}, or {_PICKLED[0]}, found in directory "
        f"{view.root.name}."
    )


def _dtype(view: CheckpointView, files: tuple[str, ...]) -> str:
    """Return the dtype that the model is loaded in.

    Raises:
        NotModelledError: its choice is not modelled.
    """
    declared = view.config.get("dtype") or view.config.get("torch_dtype")
    if declared is None and SINGLE_NAME not in files:
        declared = read_json(view.root / INDEX_NAME)["metadata"].get("dtype")
    if declared is None and files and files[0] in view.files:
        tensors = view.files[files[0]].tensors
        found = [tensors[name].dtype for name in sorted(tensors)]
        declared = next((_OF_HEADER[dtype] for dtype in found if dtype in _OF_HEADER), None)
    dtype = str(declared).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise NotModelledError(f"the dtype of the model, `{dtype}`")
    return dtype


@dataclass(frozen=True)
class _Loading:
    """The loading of one checkpoint."""

    view: CheckpointView
    geometry: Geometry
    quantization: Quantization
    files: tuple[str, ...]
    dtype: str

    def readings(self) -> tuple[LayerReading, ...]:
        """Return all layers as they are after loading.

        Raises:
            LoadError: transformers ends with it.
            NotModelledError: how the layers are loaded is not modelled.
        """
        self._check()
        scheme, layers = self.quantization.scheme, self.geometry.layers
        paths = {layer.attention: self._engine_name(layer.attention) for layer in layers}
        quantized = {layer.attention: scheme for layer in layers
                     if scheme is not None and self._has_wrapped_cache(layer)}  # fmt: skip
        parameters = {f"{paths[layer]}.{side}_scale" for layer in quantized for side in "kv"}
        loaded = dict(self._loaded(parameters)) if quantized else {}
        found: dict[str, LayerReading] = {}
        for layer in layers:
            path, own = paths[layer.attention], quantized.get(layer.attention)
            donor = found.get(layer.shared_from or "")
            if own is not None:
                sides = [self._side(layer, side, own, loaded.get(f"{path}.{side}_scale"))
                         for side in "kv"]  # fmt: skip
            elif donor is not None and donor.cache_dtype != "auto":
                sides = [_donated(side, donor) for side in (donor.k, donor.v)]
            else:
                sides = [self._unquantized()] * 2
            dtype = own.cache_dtype if own else donor.cache_dtype if donor else "auto"
            found[layer.attention] = LayerReading(
                layer.layer_idx, layer.attention, path, dtype, *sides
            )
        return tuple(found.values())

    def _check(self) -> None:
        """Raise what ends the loading, in transformers' order."""
        quantization = self.quantization
        if quantization.late is not None:
            raise quantization.late
        is_ct = quantization.scheme is not None or quantization.has_groups
        if is_ct and not quantization.has_groups and MERGED_EXPERTS & {*model_types(self.view)}:
            raise LoadError(
                "IndexError: list index out of range",
                "transformers looks in `config_groups` for the group of this model's experts, and "
                "there is no group at all",
            )
        for name in self.files:
            if name not in self.view.files:
                raise LoadError(f"FileNotFoundError: No such file or directory: {name}")
        if quantization.scheme is None:
            return
        if self.geometry.is_encoder_decoder:
            raise NotModelledError("a model with an encoder")
        if self.geometry.is_mla:
            raise NotModelledError("latent attention (MLA) under compressed-tensors")
        if quantization.scheme.strategy == "group" and not quantization.scheme.dynamic:
            raise NotModelledError("scales of groups of K and V")

    def _engine_name(self, path: str) -> str:
        """Return where a module of the files is in the module tree.

        Raises:
            NotModelledError: how this model class renames it is not known.
        """
        kind = model_types(self.view)[0]
        if kind in LLAVA:
            return _renamed(path)
        is_nested = isinstance(self.view.config.get("text_config"), dict)
        is_renamed = is_nested and not path.startswith("model.language_model.")
        if is_renamed and self.quantization.scheme is not None:
            raise NotModelledError(f"how the tensors of `{kind}` are renamed")
        return f"model.{path}" if path.startswith(("layers.", "decoder.layers.")) else path

    def _has_wrapped_cache(self, layer: LayerGeometry) -> bool:
        if layer.shared_from is not None or model_types(self.view)[1] in LAYER_PAST:
            return False
        starts = tuple(f"{layer.attention}.{name}." for name in PROJECTIONS)
        return any(name.startswith(starts) and "weight" in name.rpartition(".")[2]
                   for file in self.files for name in self.view.files[file].tensors)  # fmt: skip

    def _loaded(self, parameters: set[str]) -> Iterator[tuple[str, SideReading]]:
        """Yield each parameter that a tensor is read into: the last file's, the first name's."""
        tensors = {name: info for file in self.files
                   for name, info in self.view.files[file].tensors.items()}  # fmt: skip
        seen: set[str] = set()
        for name in sorted(tensors, key=_natural_key):
            if not name.endswith("_scale"):
                continue
            found = self._parameter(name, parameters)
            if found in parameters and found not in seen:
                seen.add(found)
                yield found, self._cast(tensors[name], is_renamed=found != name)

    def _parameter(self, name: str, parameters: set[str]) -> str:
        """Return the name under which a tensor is looked up among the parameters."""
        if model_types(self.view)[0] in LLAVA:
            name = _renamed(name)
        if name.startswith("model.") and name.removeprefix("model.") in parameters:
            return name.removeprefix("model.")
        return f"model.{name}" if f"model.{name}" in parameters else name

    def _cast(self, info: TensorInfo, *, is_renamed: bool) -> SideReading:
        exact = read_tensor(info).ravel()
        if is_renamed or not info.dtype.startswith(("F", "BF")):  # keeps the dtype of the file
            return SideReading(tuple(float(value) for value in exact), info.name, "")
        with np.errstate(all="ignore"):
            single = exact if self.dtype == "float64" else exact.astype(np.float32)
            cast = single.astype(_DTYPES[self.dtype])
        values = tuple(float(value) for value in cast)
        same = np.array_equal(cast.astype(np.float64), exact.astype(np.float64), equal_nan=True)
        reason = "" if same else f"rounded to {self.dtype}, the model's dtype"
        return SideReading(values, info.name, reason)

    def _side(
        self, layer: LayerGeometry, side: str, scheme: Scheme, loaded: SideReading | None
    ) -> SideReading:
        if scheme.dynamic:
            return SideReading(None, None, "dynamic: computed anew for what is cached")
        if loaded is None:
            return SideReading(None, None, f"{UNINITIALISED}: {self._missing(layer, side)}")
        reasons = [loaded.reason]
        heads = layer.num_key_value_heads if scheme.strategy == "attn_head" else 1
        count = len(loaded.value or ())
        if count not in (1, heads):
            reasons.append(f"{count} numbers for {heads}: transformers does not check shapes")
        if not scheme.symmetric:
            reasons.append("the zero point is that of the file, or uninitialised memory")
        return replace(loaded, reason="; ".join(filter(None, reasons)))

    def _missing(self, layer: LayerGeometry, side: str) -> str:
        """Return why a side has no scale: what there is of it in the checkpoint, and its fate."""
        for name, file in self.view.files.items():
            for tensor in file.tensors:
                last = tensor.rpartition(".")[2]
                mine = f"{side}_" in last or last.startswith("kv_")
                if not tensor.startswith(f"{layer.attention}.") or not mine or "zero" in last:
                    continue
                if "scale" in last and name not in self.files:
                    return f"`{tensor}` lies in `{name}`, which is not read"
                if "scale" in last:
                    return f"`{tensor}` is not a name that is read"
        return "no tensor is read into this layer"

    def _unquantized(self) -> SideReading:
        reason, method = "1.0: the cache is not quantized", self.quantization.method
        if self.quantization.scheme is not None:
            reason += ", since compressed-tensors does not recognize this attention module"
        elif method is not None:
            reason += f": `{method}` leaves it as it is"
        return SideReading((1.0,), None, reason)


def _donated(side: SideReading, donor: LayerReading) -> SideReading:
    """Return a side of a layer that reads another one's cache, and has no scales of its own."""
    reasons = (side.reason, f"reads the cache of `{donor.engine_name}`")
    return replace(side, reason="; ".join(filter(None, reasons)))


def _renamed(name: str) -> str:
    """Return a name of a model of the LLaVA family as it is in the module tree."""
    if name.startswith("language_model."):
        name = f"model.{name}"
    below = "model.language_model.model."
    return name.replace(below, "model.language_model.", 1) if name.startswith(below) else name


def _natural_key(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]
