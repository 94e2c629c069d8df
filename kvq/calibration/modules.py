"""Attention modules of a live model, and its module tree, under the checkpoint's names."""

import itertools
import re
from collections.abc import Sequence

from torch import nn

from kvq.errors import UnsupportedModelError
from kvq.geometry import KEY_PROJECTIONS, is_text_path
from kvq.state import Module


def attention_modules(model: nn.Module, attentions: Sequence[str]) -> dict[str, nn.Module]:
    """Return attention path → module; a checkpoint's prefix may differ from the model's.

    Raises:
        UnsupportedModelError: a path of the checkpoint is no module of the model, or several.
    """
    live = dict(model.named_modules(remove_duplicate=False))
    return {path: live[name] for path, name in live_names(model, attentions).items()}


def live_names(model: nn.Module, attentions: Sequence[str]) -> dict[str, str]:
    """Return attention path of the checkpoint → path in the model."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    exact = set(names)
    found = {}
    for path in attentions:
        if path in exact:
            found[path] = path
            continue
        tail = re.sub(r"^(?:.*?\.)?(?=\d+(?:\.|$))", "", path)  # from the layer number on
        near = [name for name in names if f".{name}".endswith(f".{tail}") and is_text_path(name)]
        longest = max((_common_tail(path, name) for name in near), default=0)
        near = [name for name in near if _common_tail(path, name) == longest]
        near = near or _only_attention_of_layer(names, path)
        if len(near) != 1:
            raise UnsupportedModelError(
                f"`{path}` is {'no module' if not near else 'not one module'} of "
                f"`{type(model).__name__}` as transformers builds it",
                code="model.paths",
            )
        found[path] = near[0]
    return found


def _only_attention_of_layer(names: list[str], path: str) -> list[str]:
    """Return the modules of the layer of `path` that hold a key projection.

    transformers may load a checkpoint into a class of other module names (Exaone into Llama).
    """
    layer = _layer_number(path)
    holders = {name.rpartition(".")[0] for name in names
               if name.rpartition(".")[2] in KEY_PROJECTIONS}  # fmt: skip
    return sorted(n for n in holders if is_text_path(n) and _layer_number(n) == layer)


def _layer_number(path: str) -> str | None:
    return next((part for part in path.split(".") if part.isdigit()), None)


def _common_tail(one: str, other: str) -> int:
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def module_list(model: nn.Module, attentions: Sequence[str]) -> tuple[Module, ...]:
    """Return the module tree as plain data, under the paths of the checkpoint's tensor names.

    Where the checkpoint's prefix differs from the model's, the decoder is shown under the
    checkpoint's; a checkpoint of the bare decoder (`h.0…`) is shown from its decoder on.
    """
    live = live_names(model, attentions)
    path, name = next(iter(live.items()))
    while path and name and path.rpartition(".")[2] == name.rpartition(".")[2]:
        path, name = path.rpartition(".")[0], name.rpartition(".")[0]
    modules = []
    for found, module in model.named_modules():
        inside = found == name or found.startswith(f"{name}.") or not name
        if inside:
            shown = ".".join(filter(None, [path, found[len(name) :].lstrip(".")]))
        elif not path:
            continue  # not part of a bare decoder's checkpoint
        else:
            shown = found
        modules.append(Module(shown, type(module).__name__, module.extra_repr()))
    return tuple(modules)
