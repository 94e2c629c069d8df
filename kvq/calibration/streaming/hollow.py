"""A model without weights: built by transformers as ever, filled and emptied layer by layer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvq.calibration.model import (
    LoadedModel,
    attention_implementation,
    check_code,
    check_quantization,
    check_tensors,
    find_device,
    implementation_of,
    loading,
    model_class,
)
from kvq.calibration.modules import live_names
from kvq.calibration.streaming.errors import NotStreamable
from kvq.calibration.streaming.stored import Reader, Rows, Stored
from kvq.checkpoint import CheckpointView
from kvq.errors import UnsupportedModelError
from kvq.geometry import is_text_path
from kvq.tensorfile import TensorInfo


class HollowModel:
    """A model on the meta device, with what it takes to fill any part of it from its checkpoint.

    transformers' own loader maps the checkpoint's names to parameters, merges experts and casts,
    once with nothing but shapes for the whole model, then with the values of one part at a time.

    Attributes:
        model: the whole model; its parameters are on the meta device, its other buffers filled.
        layers: the decoder's layers.
        device: where parts are filled.
    """

    def __init__(
        self, model: Any, attentions: Sequence[str], view: CheckpointView, device: torch.device
    ) -> None:
        self.model, self.device = model, device
        self.reader = Reader(device)
        names = list(live_names(model, attentions).values())
        self._container, self.layers = _decoder_layers(model, names)
        self._sources = _sources(model, view.tensors)
        for name, buffer in model.named_buffers():
            if buffer.device.type != "meta":
                _owner(model, name)._buffers[name.rpartition(".")[2]] = buffer.to(device)
        modules = [module for layer in self.layers for module in layer.modules()]
        self._meta = {id(m): (dict(m._parameters), dict(m._buffers)) for m in modules}
        if len(self._meta) != len(modules):
            raise NotStreamable("its layers share modules")

    def layer_bytes(self, number: int) -> int:
        """Return how many bytes of the checkpoint a layer has."""
        return sum(_size(stored) for stored in self._stored_of(number))

    def fill_outside(self, body: nn.Module, tokens: Tensor) -> None:
        """Fill what `body` has outside of its layers; of embeddings, only the rows in use.

        Args:
            body: what is run.
            tokens: all token ids in use, sorted and unique.
        """
        prefix = next(name for name, module in self.model.named_modules() if module is body)
        inside = f"{prefix}." if prefix else ""
        wanted: dict[str, TensorInfo] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            outside = name.startswith(inside) and not name.startswith(f"{self._container}.")
            if not outside or not is_text_path(name) or parameter.device.type != "meta":
                continue
            owner, stored = _owner(self.model, name), self._sources.get(name, {})
            if isinstance(owner, nn.Embedding) and _as_stored(parameter, stored):
                rows = Rows.of(parameter, next(iter(stored.values())), self.reader)
                if tokens.numel() and int(tokens[-1]) < rows.place.numel():
                    rows.want(tokens.to(self.device))
                owner._parameters["weight"] = rows
            elif not name.endswith("lm_head.weight"):
                wanted |= stored
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            if buffer.device.type == "meta" and name.startswith(inside) and is_text_path(name):
                wanted |= self._sources.get(name, {})
        self._load(wanted)

    def fill(self, number: int) -> None:
        """Read the weights of a layer.

        Raises:
            NotStreamable: some of them are stored with another layer.
        """
        # what is merged of many tensors alone, the largest first: merging holds it twice
        stored = sorted(self._stored_of(number), key=_size, reverse=True)
        for parts in [parts for parts in stored if len(parts) > 1]:
            self._load(parts)
        self._load({name: info for parts in stored if len(parts) == 1
                    for name, info in parts.items()})  # fmt: skip
        layer = self.layers[number]
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        absent = [name for name, tensor in tensors if tensor.device.type == "meta"]
        if absent:
            raise NotStreamable(f"layer {number} shares `{absent[0]}` with another module")
        layer.requires_grad_(False)

    def empty(self, number: int) -> None:
        """Let go of the weights of a layer."""
        for module in self.layers[number].modules():
            if id(module) not in self._meta:
                raise NotStreamable(f"layer {number} exchanges its modules while it runs")
            parameters, buffers = self._meta[id(module)]
            module._parameters.update(parameters)
            module._buffers.update(buffers)

    def _stored_of(self, number: int) -> list[dict[str, TensorInfo]]:
        """Return the stored tensors of each parameter of a layer."""
        prefix = f"{self._container}.{number}."
        found = {id(s): s for name, s in self._sources.items() if name.startswith(prefix)}
        return list(found.values())

    def _load(self, stored: Mapping[str, TensorInfo]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        dtype = self.model.dtype
        info, _ = convert_and_load_state_dict_in_model(
            model=self.model,
            state_dict={name: Stored(info, self.reader) for name, info in stored.items()},
            load_config=LoadStateDictConfig(
                device_map={"": str(self.device)},
                dtype=dtype,
                dtype_plan=self.model._get_dtype_plan(dtype),
                weight_mapping=get_model_conversion_mapping(self.model),
            ),
        )
        if info.conversion_errors:
            name, text = next(iter(info.conversion_errors.items()))
            raise UnsupportedModelError(
                f"transformers cannot convert `{name}`: {text.splitlines()[0]}", code="model.load"
            )


def load_hollow(
    view: CheckpointView,
    *,
    device: str,
    dtype: str,
    attentions: Sequence[str],
    trust_remote_code: bool,
) -> HollowModel:
    """Build a model of which no weight is read; its tensors are checked as if it were loaded.

    Raises:
        NotStreamable: transformers alone can load it, and only whole.
        KvqError: as for `load_model`.
    """
    config = dict(view.config)
    check_code(view.root, config, trust_remote_code=trust_remote_code)
    check_quantization(view.root, config)
    target = find_device(device)
    if trust_remote_code and config.get("auto_map"):
        raise NotStreamable("it brings its own code")
    if view.quantization_config is not None:
        raise NotStreamable("its weights are quantized, and transformers unpacks them as a whole")
    if view.duplicates:
        raise NotStreamable(f"several files hold `{min(view.duplicates)}`")
    found = model_class(config, trust_remote_code=False)
    with loading(view.root):
        from transformers import AutoConfig

        kind = getattr(found, "config_class", None) or AutoConfig
        model, info = found.from_pretrained(
            None,
            config=kind.from_pretrained(view.root),
            state_dict={name: Stored(tensor) for name, tensor in view.tensors.items()},
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=attention_implementation(config),
            output_loading_info=True,
        )
    check_tensors(info, view.root, {*attentions, *live_names(model, attentions).values()})
    if model.config.is_encoder_decoder:
        raise NotStreamable("its decoder reads what its encoder made")
    return HollowModel(model, attentions, view, target)


def loaded_model(hollow: HollowModel, body: nn.Module) -> LoadedModel:
    """Return a hollow model in the form of a loaded one that runs `body`."""
    model = hollow.model
    name = str(model.dtype).removeprefix("torch.")
    alone = body is not model.base_model
    return LoadedModel(model, body, alone, hollow.device, name, implementation_of(model))


def bodies(model: Any) -> list[Any]:
    """Return what may be run, best first: the model without its head, its text decoder."""
    decoder = model.get_decoder()
    return [model.base_model] + ([] if decoder in (None, model.base_model) else [decoder])


def _decoder_layers(model: nn.Module, names: Iterable[str]) -> tuple[str, nn.ModuleList]:
    containers = set()
    for name in names:
        parts = name.split(".")
        containers.add(".".join(parts[: next(i for i, p in enumerate(parts) if p.isdigit())]))
    if len(containers) != 1:
        raise NotStreamable("its layers are not one list")
    container = containers.pop()
    layers = model.get_submodule(container)
    if not isinstance(layers, nn.ModuleList):
        raise NotStreamable(f"`{container}` is no list of modules")
    return container, layers


def _sources(model: Any, tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Return parameter name → the stored tensors it is made of, as transformers' loader maps them.

    A converter that makes several parameters counts under its first one.
    """
    from transformers import core_model_loading as core
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, core.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, core.WeightConverter)]
    known = model.state_dict()
    found: dict[str, dict[str, TensorInfo]] = {}
    for name in sorted(tensors, key=core.dot_natural_key):
        prefix = model.base_model_prefix
        target, _ = core.rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, _ = core.rename_source_key(name, [], [], prefix, known)
        found.setdefault(target, {})[name] = tensors[name]
    same: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(parameter), []).append(name)
    for tied in same.values():  # a tied parameter is stored under one of its names
        stored = next((found[name] for name in tied if name in found), {})
        for name in tied:
            found.setdefault(name, stored)
    return found


def _size(stored: Mapping[str, TensorInfo]) -> int:
    return sum(info.end - info.start for info in stored.values())


def _as_stored(parameter: Tensor, stored: Mapping[str, TensorInfo]) -> bool:
    return [info.shape for info in stored.values()] == [tuple(parameter.shape)]


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
