"""Which files and tensors vLLM reads, in which order, and what becomes of each scale tensor.

Sources, in vLLM 0.32: `model_executor/model_loader/weight_utils.py` (files and their order),
`model_executor/layers/quantization/base_config.py`, `fp8.py`, `quark/quark.py` (renaming),
`model_executor/models/utils.py` (WeightsMapper, AutoWeightsLoader), `model_executor/layers/
linear.py` (the fused linear layers' load_weights).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

from kvq.checkpoint import CheckpointView, natural_key
from kvq.engines.vllm_classes import Inner, Loader, ModelClass
from kvq.engines.vllm_config import LoadError, NotModelledError
from kvq.errors import KvqError
from kvq.files import read_json
from kvq.tensorfile import TensorInfo

CONSOLIDATED, CONSOLIDATED_INDEX = (
    "consolidated*.safetensors",
    "consolidated.safetensors.index.json",
)

# Renaming by every quantization config, in this order; each works on the result of the one before.
_CACHE_SCALES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\.kv_scale$", ".attn.k_scale"),
        (r"\.self_attn\.[kv]_proj\.([kv])_scale$", r".self_attn.attn.\1_scale"),
        (r"\.self_attn\.qk(?:qk)?v_proj\.([kv])_scale$", r".self_attn.attn.\1_scale"),
        (r"\.mixer\.[kv]_proj\.([kv])_scale$", r".mixer.attn.\1_scale"),
        (r"\.self_attn\.q\.scale$", ".self_attn.attn.q_scale"),
        (r"\.self_attn\.([kv])_cache\.scale$", r".self_attn.attn.\1_scale"),
        (r"(?<!\.attn)\.([qkv])_scale$", r".attn.\1_scale"),
        (r"(?<!\.attn)\.([qkv])_zero_point$", r".attn.\1_zero_point"),
    )
)
_OUTPUT_SCALES = {  # of the methods fp8 and quark
    ".k_proj.output_scale": ".attn.k_scale",
    ".v_proj.output_scale": ".attn.v_scale",
    ".q_proj.output_scale": ".attn.q_scale",
    ".self_attn.prob_output_scale": ".self_attn.attn.prob_scale",
}
_STACKED = {
    ".q_proj": ".qkv_proj", ".k_proj": ".qkv_proj", ".v_proj": ".qkv_proj",
    ".gate_proj": ".gate_up_proj", ".up_proj": ".gate_up_proj",
}  # fmt: skip
_FUSED = {
    "qkv_proj": "QKVParallelLinear", "c_attn": "QKVParallelLinear", "qkv": "QKVParallelLinear",
    "Wqkv": "QKVParallelLinear", "query_key_value": "QKVParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear",
}  # fmt: skip
IGNORED = tuple(f".{side}_{kind}" for side in "qkv" for kind in ("scale", "zero_point"))

# Tensors that are, or are meant to be, scales of attention; and those of quantized linear layers.
_SCALE = re.compile(
    r"(^|\.)_?(q|k|v|kv|key|value|prob)_(scale|zero_point)\w*$"
    r"|\.prob_output_scale$|\.[qkv]_proj\.(scale|output_scale|[qkv]_bias)$"
    r"|\.[kv]_cache\.\w+$|\.self_attn\.q\.scale$"
)
_LINEAR = re.compile(
    r"\.(weight_(scale|packed|shape|zero_point|global_scale)\w*|input_(scale|global_scale)\w*"
    r"|qweight|qzeros|scales)$"
)


def is_scale(name: str) -> bool:
    """Whether a tensor is, or is meant to be, a scale or zero point of attention."""
    leaf = name[name.rfind(".") + 1 :]
    if leaf.startswith("weight") and "_cache." not in name:
        return False  # most tensors of a large checkpoint, without a search
    return bool(_SCALE.search(name))


def is_linear_scale(name: str) -> bool:
    """Whether a tensor belongs to a quantized linear layer, beside or instead of its weight."""
    return not name.endswith(".weight") and bool(_LINEAR.search(name))


def is_expert(name: str) -> bool:
    """Whether a tensor is of one expert of many: their loader is another, and meets no scale."""
    return ".experts." in name


def files_read(view: CheckpointView) -> tuple[str, ...]:
    """Return the names of the files that vLLM reads, in its order.

    Raises:
        LoadError: the index names no file, or one that is not there.
    """
    names: Sequence[str] = [name for name in view.files if fnmatch(name, CONSOLIDATED)]
    weight_map: Mapping[str, str] | None = None
    if not names:
        names, weight_map = list(view.files), view.weight_map
    elif (view.root / CONSOLIDATED_INDEX).is_file():
        weight_map = _consolidated_index(view)
    if weight_map is not None:
        named = set(weight_map.values())
        missing = sorted(named - set(names))
        if missing:
            files = ", ".join(repr(name) for name in missing)
            raise LoadError(
                f"FileNotFoundError: Weight files referenced in index but missing: {{{files}}}"
            )
        names = [name for name in names if name in named]
    if not names:
        raise LoadError(f"RuntimeError: Cannot find any model weights with `{view.root.name}`")
    return tuple(sorted(names, key=natural_key))


def _consolidated_index(view: CheckpointView) -> Mapping[str, str]:
    try:
        weight_map = read_json(view.root / CONSOLIDATED_INDEX).get("weight_map")
    except KvqError as error:
        raise NotModelledError(str(error)) from error
    if not isinstance(weight_map, dict):
        raise LoadError("KeyError: 'weight_map'")
    return weight_map


def stream(view: CheckpointView, files: Sequence[str]) -> Iterator[TensorInfo]:
    """Yield the tensors in the order in which they are loaded; a name may come twice."""
    for file in files:
        tensors = view.files[file].tensors
        yield from (tensors[name] for name in sorted(tensors))


def rename(
    name: str,
    method: str | None,
    *,
    parts: Sequence[tuple[str, str]] = (),
    prefixes: Sequence[tuple[str, str]] = (),
    stacked: bool = False,
) -> str:
    """Return a name as one level of vLLM's loaders renames it."""
    if method is not None and name.endswith(("scale", "zero_point")):
        for pattern, replacement in _CACHE_SCALES:
            name = pattern.sub(replacement, name)
    for part, replacement in parts:
        name = name.replace(part, replacement, 1)
    if stacked:
        for part, replacement in _STACKED.items():
            name = name.replace(part, replacement, 1)
    for prefix, replacement in prefixes:
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
    if method in ("fp8", "quark"):
        for suffix, replacement in _OUTPUT_SCALES.items():
            if name.endswith(suffix):
                name = name.removesuffix(suffix) + replacement
    return name


@dataclass
class Modules:
    """The modules and parameters of vLLM's model, under its own names.

    They are those that the checkpoint's other tensors imply, and what attention layers add.
    """

    cls: ModelClass
    name: str
    method: str | None
    inner: tuple[Inner, ...]
    paths: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for inner in self.inner:
            self.add_module(inner.path)

    def add_tensor(self, name: str) -> None:
        """Take the module of an ordinary tensor, and its parameter, for granted."""
        path = "".join(self._split(name)[1:])
        self.add_module(path.rpartition(".")[0])
        if not is_linear_scale(path):
            self.parameters.add(path)

    def add_module(self, path: str) -> None:
        """Add a module and all that it lies in."""
        while path and path not in self.paths:
            self.paths.add(path)
            path = path.rpartition(".")[0]

    def add_encoder_attention(self) -> None:
        """Add the module `attn` that attention has in towers, too."""
        for inner in self.inner:
            if not inner.quantized:
                for path in [p for p in self.paths if p.endswith(".qkv_proj")]:
                    if path.startswith(f"{inner.path}."):
                        self.add_module(f"{path.rpartition('.')[0]}.attn")

    def engine_path(self, path: str) -> str:
        """Return vLLM's path of a module of the checkpoint."""
        return "".join(self._split(f"{path}.weight")[1:]).removesuffix(".weight")

    def _split(self, name: str) -> tuple[Inner, str, str]:
        """Return the loader that meets a tensor last, its path with a dot, and the name there."""
        if self.cls.base and not name.startswith(self.cls.bases):
            name = self.cls.base + name
        method = self.method if self.cls.quantized else None
        name = rename(
            name,
            method,
            parts=self.cls.parts,
            prefixes=self.cls.prefixes,
            stacked=self.cls.stacked and not self.inner,
        )
        for inner in self.inner:
            if name.startswith(f"{inner.path}."):
                rest = name.removeprefix(f"{inner.path}.")
                if self.cls.loader is Loader.AUTO:
                    method = method if inner.quantized else None
                    rest = rename(rest, method, stacked=self.cls.stacked)
                return inner, f"{inner.path}.", rest
        return Inner("", self.name, method is not None), "", name

    def find(self, name: str) -> str | None:
        """Return the parameter that a tensor is loaded into; None if it is dropped silently.

        Raises:
            LoadError: vLLM ends with this tensor.
        """
        loader, above, rest = self._split(name)
        if rest.endswith(".g_idx") and loader.quantized and self.method is not None:
            return None
        if loader.path and self.cls.loader is not Loader.AUTO:
            return self._find_in_table(above, rest)
        return self._walk(loader, above, rest)

    def _find_in_table(self, above: str, rest: str) -> str | None:
        if above + rest in self.parameters:
            return above + rest
        remapped = (*IGNORED, ".kv_scale", ".q.scale", ".k_cache.scale", ".v_cache.scale")
        if rest.endswith(".bias") or (self.cls.loader is Loader.REMAP and rest.endswith(remapped)):
            return None
        raise LoadError(f"KeyError: {rest!r}")

    def _walk(self, loader: Inner, above: str, rest: str) -> str | None:
        parts = rest.split(".")
        ignored = (".bias", *(IGNORED if self.method and loader.quantized else ()))
        at = above.removesuffix(".")
        for i, part in enumerate(parts):
            module, at = at, f"{at}.{part}" if at else part
            here = ".".join(parts[: i + 1])
            linear = _FUSED.get(module.rpartition(".")[2]) if self.cls.fused else None
            if at in self.parameters and i == len(parts) - 1:
                return at
            if linear and i < len(parts) - 1:
                raise LoadError(f"AttributeError: {linear} has no attribute `{part}`")
            if linear:
                raise LoadError(f"AttributeError: '{linear}' object has no attribute 'data'")
            if at in self.parameters:
                raise LoadError(
                    f"ValueError: Attempted to load nested weight {rest!r} into a single "
                    f"parameter {here!r}"
                )
            if at in self.paths:
                continue
            if here.endswith(ignored):
                return None
            raise LoadError(
                f"ValueError: There is no module or parameter named {here!r} in {loader.name}."
            )
        return None
