"""A lazy view of a checkpoint folder: config, headers and index; nothing in it is executed."""

import gc
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import CheckpointError
from kvq.files import read_json, shorten
from kvq.geometry import is_key_or_value_weight
from kvq.tensorfile import TensorFile, TensorInfo, read_bytes, read_header, read_tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
MAX_NAME = 1000  # characters

_CONVERT = {
    ".bin": "kvq reads safetensors only; convert with transformers: "
    "`AutoModelForCausalLM.from_pretrained(PATH).save_pretrained(OUT)`",
    ".gguf": "kvq reads safetensors only; convert with transformers: "
    "`AutoModelForCausalLM.from_pretrained(PATH, gguf_file=FILE)`, then save_pretrained(OUT)",
}


@dataclass(frozen=True)
class CheckpointView:
    """Everything a checkpoint's files say, read from headers and JSON only.

    `tensors` maps each name to where engines load it from: the shard the index names, else the
    last file in natural order that holds it. `duplicates` lists names held by several files.
    `total_size` is what the index says of it, of whatever type.
    """

    root: Path
    config: Mapping[str, Any]
    files: Mapping[str, TensorFile]
    weight_map: Mapping[str, str] | None = None
    duplicates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    total_size: Any = None

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Each tensor name and its place."""
        found: dict[str, TensorInfo] = {}
        for file in self.loaded_files:
            found.update(self.files[file].tensors)
        return found

    @cached_property
    def loaded_files(self) -> tuple[str, ...]:
        """File names that loaders read: those of the index, or all when there is none."""
        if self.weight_map is None:
            return tuple(self.files)
        named = set(self.weight_map.values())
        return tuple(name for name in self.files if name in named)

    @property
    def unindexed_files(self) -> tuple[str, ...]:
        """Safetensors files that the index does not name, so that no loader reads them."""
        loaded = set(self.loaded_files)
        return tuple(name for name in self.files if name not in loaded)

    @property
    def quantization_config_place(self) -> str | None:
        """Where config.json declares its quantization, in the order in which vLLM looks."""
        text = self.config.get("text_config")
        nested = text if isinstance(text, dict) else {}
        if self.config.get("quantization_config") is not None:
            return "quantization_config"
        if nested.get("quantization_config") is not None:
            return "text_config.quantization_config"
        return "compression_config" if self.config.get("compression_config") is not None else None

    @property
    def quantization_config(self) -> Mapping[str, Any] | None:
        """The quantization configuration that engines use, if any.

        Raises:
            CheckpointError: it is not an object.
        """
        place = self.quantization_config_place
        if place is None:
            return None
        found: Any = self.config
        for key in place.split("."):
            found = found[key]
        if not isinstance(found, dict):
            raise CheckpointError(
                f"`{place}` in config.json is a {type(found).__name__}, expected an object",
                code="checkpoint.quantization_config",
            )
        return found

    @property
    def config_groups(self) -> Mapping[str, Any]:
        """The groups of the quantization configuration; malformed ones are left out."""
        groups = (self.quantization_config or {}).get("config_groups")
        groups = groups if isinstance(groups, dict) else {}
        return {name: group for name, group in groups.items() if isinstance(group, dict)}

    @property
    def kv_cache_scheme(self) -> Mapping[str, Any]:
        """The declared cache scheme, empty if there is none or it is not an object."""
        scheme = (self.quantization_config or {}).get("kv_cache_scheme")
        return scheme if isinstance(scheme, dict) else {}

    def read(self, name: str) -> np.ndarray:
        """Return a small tensor's values."""
        return read_tensor(self.tensors[name])


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key under which shard 10 comes after shard 9."""
    parts = enumerate(re.split(r"([0-9]+)", name))
    numbers = ((i % 2, part.lstrip("0") if i % 2 else part) for i, part in parts)
    return [(len(part) if is_number else 0, part) for is_number, part in numbers]


def open_checkpoint(path: Path) -> CheckpointView:
    """Open a checkpoint folder, or a single `.safetensors` file without its config.

    Raises:
        CheckpointError: not a checkpoint, or one of its files cannot be trusted.
    """
    try:
        if path.is_file() and path.suffix == ".safetensors":
            return _view(path.parent, {}, [path], None)
        if path.is_file():
            raise _not_a_checkpoint(path, [path.name])
        if not path.is_dir():
            raise CheckpointError(f"`{path}` does not exist", code="checkpoint.missing")
        names = [file.name for file in path.iterdir() if _is_usable(file)]
    except OSError as error:
        raise CheckpointError(
            f"cannot read `{path}`: {error.strerror}", code="file.unreadable"
        ) from error
    shards = sorted((name for name in names if _is_shard(name)), key=natural_key)
    if not shards:
        raise _not_a_checkpoint(path, names)
    if CONFIG_NAME not in names:
        raise CheckpointError(f"`{path}` has no config.json", code="checkpoint.no_config")
    weight_map, total_size = _index(path) if INDEX_NAME in names else (None, None)
    config = read_json(path / CONFIG_NAME)
    view = _view(path, config, [path / name for name in shards], weight_map)
    return replace(view, total_size=total_size)


def _is_usable(file: Path) -> bool:
    """Whether an entry of the folder is a file; what only has a file's name is an error."""
    if file.is_file():
        return True
    if _is_shard(file.name) or file.name in (CONFIG_NAME, INDEX_NAME):
        raise CheckpointError(
            f"`{file}` is not a regular file, nor a link to one",
            code="file.not_regular",
            hint="fetch the checkpoint again" if file.is_symlink() else None,
        )
    return False


def _is_shard(name: str) -> bool:
    return name.endswith(".safetensors") and not _is_adapter(name)


def _is_adapter(name: str) -> bool:
    return name.startswith("adapter_")


def _not_a_checkpoint(path: Path, names: list[str]) -> CheckpointError:
    hints = [hint for suffix, hint in _CONVERT.items() if any(n.endswith(suffix) for n in names)]
    if any(_is_adapter(name) for name in names):
        hints = [
            "this is a LoRA adapter; merge it into its base model first (peft merge_and_unload)"
        ]
    return CheckpointError(
        f"`{path}` holds no safetensors weights",
        code="checkpoint.no_safetensors",
        hint=hints[0] if hints else "expected config.json and *.safetensors",
    )


def _index(root: Path) -> tuple[dict[str, str], Any]:
    """Return the index's map of tensors to files, and the size that it states."""
    index = read_json(root / INDEX_NAME)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"`{INDEX_NAME}` has no `weight_map`", code="index.no_weight_map")
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(
                f"`{INDEX_NAME}` names {shorten(file)}, which lies outside the folder",
                code="index.path",
            )
    _check_names([*weight_map, *set(weight_map.values())], INDEX_NAME)
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None


def _view(
    root: Path, config: dict[str, Any], shards: list[Path], weight_map: dict[str, str] | None
) -> CheckpointView:
    _check_names([shard.name for shard in shards], root.name)
    collecting = gc.isenabled()
    gc.disable()  # all that is read stays; looking for cycles in it takes long
    try:
        files = {shard.name: read_header(shard) for shard in shards}
    finally:
        if collecting:
            gc.enable()
    for name, file in files.items():
        _check_names(file.tensors, name)
    holders: dict[str, list[str]] = {}
    for name, file in files.items():
        for tensor in file.tensors:
            holders.setdefault(tensor, []).append(name)
    duplicates = {name: tuple(held) for name, held in holders.items() if len(held) > 1}
    return CheckpointView(root, config, files, weight_map, duplicates)


def _check_names(names: Iterable[str], where: str) -> None:
    """Refuse names that no model has, and that would disturb a terminal or a report."""
    for name in names:
        if not name.isprintable() or len(name) > MAX_NAME:
            raise CheckpointError(
                f"{shorten(name)} in {shorten(where)} is not a name: it has control characters, "
                f"or more than {MAX_NAME} characters",
                code="checkpoint.name",
            )


_SAMPLE_BYTES, _SAMPLES = 256, 16


def weight_fingerprint(view: CheckpointView) -> str:
    """Return a digest of the K/V projections: names, shapes, dtypes and 16 samples of each.

    It survives re-sharding and costs a few kilobytes of reading per layer. Weights that differ
    only between the samples are not told apart; training and merging move all of them.
    """
    infos = (view.tensors[name] for name in sorted(filter(is_key_or_value_weight, view.tensors)))
    return fingerprint(
        (info.name, info.dtype, info.shape, info.end - info.start, partial(read_bytes, info))
        for info in infos
    )


Weight = tuple[str, str, tuple[int, ...], int, Callable[[int, int], bytes]]


def fingerprint(weights: Iterable[Weight]) -> str:
    """Return the digest of weights in sorted order: name, dtype, shape, size, reader of bytes."""
    digest = hashlib.sha256()
    for name, dtype, shape, size, read in weights:
        digest.update(f"{name} {dtype} {tuple(shape)}\n".encode())
        for i in range(_SAMPLES):
            digest.update(read(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1), _SAMPLE_BYTES))
    return digest.hexdigest()


def config_digest(config: Mapping[str, Any]) -> str:
    """Return a digest of config.json without its quantization and bookkeeping keys."""
    from kvq.files import dump_json

    bookkeeping = ("quantization_config", "transformers_version", "_name_or_path")
    kept = {key: value for key, value in config.items() if key not in bookkeeping}
    return hashlib.sha256(dump_json(kept).encode()).hexdigest()
