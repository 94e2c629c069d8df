"""The module tree, printed in the form of PyTorch's own repr."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvq.quantizers import QuantizerConfig, describe
from kvq.state import Calibration, Module


@dataclass
class _Node:
    class_name: str = "Module"  # of a node that is in the tensor names only
    attributes: str = ""
    children: dict[str, "_Node"] = field(default_factory=dict)


def calibration_tree(calibration: Calibration) -> str:
    """Return the whole tree of a calibration, from the classes it recorded."""
    lines = {
        f"{layer.attention}.{quantizer}": describe(
            calibration.quantizers.get(f"{layer.attention}.{quantizer}"),
            layer.amax.get(quantizer),
        )
        for layer in calibration.layers
        for quantizer in layer.quantizers
    }
    return render_tree(calibration.modules, lines)


def attention_lines(
    attention: str,
    names: Iterable[str],
    quantizers: Mapping[str, tuple[QuantizerConfig, np.ndarray]],
) -> dict[str, str]:
    """Return quantizer path → line for one attention module; absent ones are disabled.

    Args:
        attention: the module's path.
        names: the module's quantizers.
        quantizers: those that are enabled, with their amax.
    """
    return {f"{attention}.{name}": describe(*quantizers.get(name, (None, None))) for name in names}


def render_tree(modules: Iterable[Module], quantizers: Mapping[str, str]) -> str:
    """Render modules and, below their attention modules, the quantizers' lines.

    Args:
        modules: in the order of `named_modules`; the root has the path "".
        quantizers: full quantizer path → printed line. An attention module that has some is
            printed with the prefix `Quant`.
    """
    root = _Node()
    for module in modules:
        node = _find(root, module.path)
        node.class_name, node.attributes = module.class_name, module.attributes
    for path, line in quantizers.items():
        parent, _, name = path.rpartition(".")
        owner = _find(root, parent)
        if not owner.class_name.startswith("Quant"):
            owner.class_name = f"Quant{owner.class_name}"
        owner.children[name] = _Node(line)
    return _render(root)


def _find(root: _Node, path: str) -> _Node:
    node = root
    for part in filter(None, path.split(".")):
        node = node.children.setdefault(part, _Node())
    return node


def _render(node: _Node) -> str:
    if node.class_name.endswith(")"):  # a quantizer's line is complete
        return node.class_name
    body = node.attributes.splitlines() if node.children else []
    for name, child in node.children.items():
        first, *rest = f"({name}): {_render(child)}".splitlines()
        body += [first, *rest]
    if not body:
        return f"{node.class_name}({node.attributes})"
    inner = "\n".join(f"  {line}" for line in body)
    return f"{node.class_name}(\n{inner}\n)"
