"""A model without weights: built by transformers as ever, filled and emptied layer by layer."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

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
from kvq.calibration.streaming.deferred import Deferred, Making
from kvq.calibration.streaming.errors import NotStreamable
from kvq.calibration.streaming.stored import Reader, Rows
from kvq.checkpoint import CheckpointView
from kvq.geometry import is_text_path


@dataclass(frozen=True)
class _Slot:
    """Where a module keeps a tensor."""

    name: str  # in the whole model
    module: nn.Module
    kept: dict[str, Any]  # the module's parameters, or its buffers
    key: str

    @property
    def tensor(self) -> Tensor:
        return self.kept[self.key]


class HollowModel:
    """A model on the meta device, with what it takes to fill any part of it from its checkpoint.

    Attributes:
        model: the whole model; its parameters are on the meta device, its other buffers filled.
        layers: the decoder's layers.
        device: where parts are filled.
    """

    def __init__(self, model: Any, attentions: Sequence[str], device: torch.device) -> None:
        self.model, self.device = model, device
        self.reader = Reader(device)
        self._weights = _take_weights(model)
        names = list(live_names(model, attentions).values())
        self._container, self.layers = _decoder_layers(model, names)
        for slot in _slots(model):
            if slot.tensor.device.type != "meta":
                slot.kept[slot.key] = slot.tensor.to(device)
        modules = [module for layer in self.layers for module in layer.modules()]
        self._meta = {id(m): (dict(m._parameters), dict(m._buffers)) for m in modules}
        if len(self._meta) != len(modules):
            raise NotStreamable("its layers share modules")

    def layer_bytes(self, number: int) -> int:
        """Return how many bytes the weights of a layer take in memory."""
        tensors = {id(slot.tensor): slot.tensor for slot in _slots(self.layers[number])}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def fill_outside(self, body: nn.Module, tokens: Tensor) -> None:
        """Fill what `body` has outside of its layers; of embeddings, only the rows in use.

        Args:
            body: what is run.
            tokens: all token ids in use, sorted and unique.
        """
        prefix = next(name for name, module in self.model.named_modules() if module is body)
        wanted = []
        for slot in _slots(body, prefix):
            inside = slot.name.startswith(f"{self._container}.")
            if inside or not is_text_path(slot.name) or slot.tensor.device.type != "meta":
                continue
            weight = self._weights.get(slot.tensor)
            if isinstance(slot.module, nn.Embedding) and weight is not None and weight.stored:
                rows = Rows.of(slot.tensor, weight.stored, self.reader)
                if tokens.numel() and int(tokens[-1]) < rows.place.numel():
                    rows.want(tokens.to(self.device))
                slot.kept[slot.key] = rows
            elif weight is not None and not slot.name.endswith("lm_head.weight"):
                wanted.append(slot)
        self._fill(wanted)

    def fill(self, number: int) -> None:
        """Read the weights of a layer.

        Raises:
            NotStreamable: some of them are not stored.
        """
        layer = f"{self._container}.{number}"
        slots = [s for s in _slots(self.layers[number], layer) if s.tensor.device.type == "meta"]
        absent = [slot.name for slot in slots if slot.tensor not in self._weights]
        if absent:
            raise NotStreamable(f"`{absent[0]}` is not stored")
        self._fill(slots)

    def empty(self, number: int) -> None:
        """Let go of the weights of a layer."""
        for module in self.layers[number].modules():
            if id(module) not in self._meta:
                raise NotStreamable(f"layer {number} exchanges its modules while it runs")
            parameters, buffers = self._meta[id(module)]
            module._parameters.update(parameters)
            module._buffers.update(buffers)

    def _fill(self, slots: Iterable[_Slot]) -> None:
        slots_of: dict[int, list[_Slot]] = {}  # tied ones together
        for slot in slots:
            slots_of.setdefault(id(slot.tensor), []).append(slot)
        weights = [self._weights[tied[0].tensor] for tied in slots_of.values()]
        made = Making(self.reader).make(weights)
        for tied, tensor in zip(slots_of.values(), made, strict=True):
            is_parameter = isinstance(tied[0].tensor, nn.Parameter)
            filled = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            for slot in tied:
                slot.kept[slot.key] = filled


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
            state_dict={name: Deferred.of(info) for name, info in view.tensors.items()},
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=attention_implementation(config),
            output_loading_info=True,
        )
    check_tensors(info, view.root, {*attentions, *live_names(model, attentions).values()})
    if model.config.is_encoder_decoder:
        raise NotStreamable("its decoder reads what its encoder made")
    return HollowModel(model, attentions, target)


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


def _slots(module: nn.Module, prefix: str = "") -> Iterator[_Slot]:
    for name, inner in module.named_modules(prefix=prefix):
        for kept in (inner._parameters, inner._buffers):
            for key in [key for key, tensor in kept.items() if tensor is not None]:
                yield _Slot(f"{name}.{key}" if name else key, inner, kept, key)


def _take_weights(model: nn.Module) -> WeakTensorKeyDictionary:
    """Exchange the deferred weights of a model for plain tensors on the meta device.

    Returns the weights by these tensors; what is tied stays so.
    """
    plain: dict[int, Tensor] = {}
    weights = WeakTensorKeyDictionary()
    for slot in _slots(model):
        weight = slot.tensor
        if not isinstance(weight, Deferred):
            continue
        if id(weight) not in plain:
            meta = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            is_parameter = slot.kept is slot.module._parameters
            plain[id(weight)] = nn.Parameter(meta, requires_grad=False) if is_parameter else meta
        slot.kept[slot.key] = plain[id(weight)]
        weights[plain[id(weight)]] = weight
    return weights
