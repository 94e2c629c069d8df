"""How the weights and the scales are spread over files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvq.tensorfile import header_bytes
from tests.engines.tensors import DTYPES, Tensors

Layout = Callable[[Path, Tensors, Tensors], None]
INDEX = "model.safetensors.index.json"


def save(path: Path, tensors: Tensors) -> None:
    """Write tensors in the order given."""
    entries, position = {}, 0
    for name, array in tensors.items():
        offsets = [position, position + array.nbytes]
        position = offsets[1]
        entries[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape),
                         "data_offsets": offsets}  # fmt: skip
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(header_bytes(entries, {"format": "pt"}) + data)


def write_index(folder: Path, files: Mapping[str, Any]) -> None:
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def shards(*, hide: str = "", missing: bool = False, order: int = 1) -> Layout:
    """Two shards and an index that lacks the scale `file`, or their `names`, or names a third."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        first, second = (f"model-{i:05}-of-00002.safetensors" for i in (1, 2)[::order])
        save(folder / first, weights)
        save(folder / second, extra)
        files = {first: weights, second: extra}
        if hide == "file":
            del files[second]
        if hide == "names":
            files[second] = {"placeholder": None}
        if missing:
            files["model-00003-of-00003.safetensors"] = {"placeholder": None}
        write_index(folder, files)

    return layout


def single(folder: Path, weights: Tensors, extra: Tensors) -> None:
    """One file."""
    save(folder / "model.safetensors", weights | extra)


def scales_first(folder: Path, weights: Tensors, extra: Tensors) -> None:
    """One file with the scales before the weights."""
    save(folder / "model.safetensors", extra | weights)


def beside(name: str, *, index: tuple[str, ...] = ()) -> Layout:
    """model.safetensors, and the scales in a file of this name; an index may list either."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        files = {"model.safetensors": weights, name: extra}
        for file, tensors in files.items():
            save(folder / file, tensors)
        if index:
            write_index(folder, {file: files[file] for file in index})

    return layout


def twice(*, order: int, index: bool = True) -> Layout:
    """The scales in two shards, with other values in the one that the index does not name."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        first, second = (f"model-{i:05}-of-00002.safetensors" for i in (1, 2))
        other = {name: (array * 10).astype(array.dtype) for name, array in extra.items()}
        one, two = (extra, other)[::order]
        save(folder / first, weights | one)
        save(folder / second, two)
        if index:
            named = first if order == 1 else second
            files: dict[str, Any] = {first: weights, second: {"placeholder": None}}
            files[named] = {**files[named], **extra}
            write_index(folder, files)

    return layout


def consolidated(*, whole: bool) -> Layout:
    """model.safetensors with everything, next to a Mistral-style file with or without scales."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        save(folder / "model.safetensors", weights | extra)
        save(folder / "consolidated.safetensors", weights | (extra if whole else {}))

    return layout


def spellings_apart(order: int) -> Layout:
    """Names of projections in one shard, the others in another."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        projected = {name: array for name, array in extra.items() if "_proj." in name}
        others = {name: array for name, array in extra.items() if name not in projected}
        shards(order=order)(folder, weights | projected, others)

    return layout


def natural_order(folder: Path, weights: Tensors, extra: Tensors) -> None:
    """The scales twice, in shards that sort otherwise by letter than by number."""
    for number, factor in ((2, 10), (10, 1)):
        scaled = {name: (array * factor).astype(array.dtype) for name, array in extra.items()}
        save(folder / f"model-{number}-of-10.safetensors", weights | scaled)


def with_index(content: Any) -> Layout:
    """One file with everything, and an index of this content."""

    def layout(folder: Path, weights: Tensors, extra: Tensors) -> None:
        single(folder, weights, extra)
        (folder / INDEX).write_text(json.dumps(content))

    return layout


def resaved(folder: Path, weights: Tensors, extra: Tensors) -> None:
    """Names as transformers 5 saves a multimodal model: without `vision_model.`, under `model.`."""
    renamed = {}
    for name, array in weights.items():
        short = name.replace("vision_tower.vision_model.", "vision_tower.")
        if short.startswith("language_model.model."):
            short = f"model.language_model.{short.removeprefix('language_model.model.')}"
        elif short.startswith(("vision_tower", "multi_modal")):
            short = f"model.{short}"
        renamed[short] = array
    single(folder, renamed, extra)


LAYOUTS: dict[str, Layout] = {
    "natural-order": natural_order,
    "index-empty": with_index({"weight_map": {}}),
    "index-without-map": with_index({"metadata": {}}),
    "index-of-single-file": with_index({"weight_map": {"placeholder": "model.safetensors"}}),
    "scales-first": scales_first,
    "two-shards": shards(),
    "scales-in-first-shard": shards(order=-1),
    "unindexed-shard": shards(hide="file"),
    "unindexed-names": shards(hide="names"),
    "missing-shard": shards(missing=True),
    "same-name-index-first": twice(order=1),
    "same-name-index-second": twice(order=-1),
    "same-name-no-index": twice(order=1, index=False),
    "same-name-no-index-other": twice(order=-1, index=False),
    "consolidated-without-scales": consolidated(whole=False),
    "consolidated-with-scales": consolidated(whole=True),
    "extra-file": beside("kv_scales.safetensors"),
    "extra-file-index-both": beside(
        "kv_scales.safetensors", index=("model.safetensors", "kv_scales.safetensors")),
    "extra-file-index-model": beside("kv_scales.safetensors", index=("model.safetensors",)),
    "extra-file-index-scales": beside("kv_scales.safetensors", index=("kv_scales.safetensors",)),
    "extra-file-other-suffix": beside("kv_scales.st"),
}  # fmt: skip
