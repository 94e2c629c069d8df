"""Which linear layers vLLM quantizes, and so which tensors beside their weights it can load.

Sources, in vLLM 0.32: `model_executor/layers/quantization/{auto_awq,modelopt,fp8}.py` and
`compressed_tensors/compressed_tensors.py`.
"""

import re
from collections.abc import Mapping
from fnmatch import translate
from typing import Any

from kvq.checkpoint import CheckpointView
from kvq.engines.patterns import PatternError, Patterns
from kvq.engines.vllm_config import AWQ, CT, MIXED, MODELOPT, NotModelledError, Quantization
from kvq.engines.vllm_names import is_expert, is_linear_scale

_FLOATS = ("F16", "BF16", "F32")


class QuantizedLinears:
    """Says of a linear layer, by its path in the checkpoint, whether vLLM quantizes it.

    Where that cannot be said from the config alone it says yes.
    """

    def __init__(self, view: CheckpointView, quantization: Quantization) -> None:
        method, config = quantization.method, quantization.config
        groups = (config.get("config_groups") or {}) if method == CT else {}
        self._none = method is None or (
            method == CT and not any(group.get("targets") for group in groups.values())
        )
        excluded = _excluded(quantization)
        if method in AWQ and not excluded:
            excluded = _unquantized_by_dtype(view)
        self._exact = frozenset(excluded if method in (CT, "fp8") else ())
        self._patterns = _patterns(method, excluded)
        self._names = _names(method, excluded)

    def leave_over(self, name: str) -> bool:
        """Whether a tensor is of a quantized linear layer, but vLLM's layer is not quantized."""
        return is_linear_scale(name) and not is_expert(name) and name.rpartition(".")[0] not in self

    def __contains__(self, path: str) -> bool:
        if self._none or path in self._exact:
            return False
        if self._names is not None and self._names.match(path):
            return False
        try:
            return not self._patterns.match(path)
        except PatternError as error:
            raise NotModelledError(f"the excluded layers: {error}") from error


def _patterns(method: str | None, excluded: tuple[str, ...]) -> Patterns:
    """Return patterns of the paths that the excluded names match otherwise than exactly."""
    parts: list[str] = []
    if method == CT:
        parts = [name.removeprefix("re:") for name in excluded if name.startswith("re:")]
    try:
        return Patterns(parts)
    except PatternError as error:
        raise NotModelledError(f"a pattern of the excluded layers: {error}") from error


def _names(method: str | None, excluded: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return one pattern of the paths that have an excluded name in them."""
    if method not in AWQ and method not in MODELOPT:
        return None
    parts = [f".*{re.escape(name)}" for name in excluded]
    parts += [translate(name) for name in excluded if method in MODELOPT]
    return re.compile("|".join(f"(?:{part})" for part in parts)) if parts else None


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("quantization", config)
    return inner if isinstance(inner, Mapping) else {}


def _excluded(quantization: Quantization) -> tuple[str, ...]:
    config = quantization.config
    names: Any
    if quantization.method == MIXED:
        names = None
    elif quantization.method in MODELOPT:
        key = "exclude_modules" if "quantization" in config else "ignore"
        names = _inner(config).get(key)
    elif quantization.method == CT:
        names = config.get("ignore")
    else:
        names = config.get("modules_to_not_convert") or config.get("ignored_layers")
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def _unquantized_by_dtype(view: CheckpointView) -> tuple[str, ...]:
    """Return the modules with only float tensors, which AWQ leaves alone, and all named alike.

    The names count wherever they occur in a layer's path: a scale at an attention module makes
    all linear layers inside of it count as unquantized.
    """
    modules: dict[str, bool] = {}
    for file in view.files.values():
        for name, info in file.tensors.items():
            module = name.rpartition(".")[0]
            modules[module] = modules.get(module, True) and info.dtype in _FLOATS
    return tuple(sorted(module for module, floats in modules.items() if floats and module))
