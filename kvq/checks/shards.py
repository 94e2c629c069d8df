"""Rules about files and index: what is written must be what a loader reads."""

from collections.abc import Iterator

from kvq.checkpoint import INDEX_NAME
from kvq.checks.context import SUFFIXES, Context, file_of, rule
from kvq.checks.findings import Finding
from kvq.engines.vllm_classes import renamed_tower


@rule()
def index_agrees(context: Context) -> Iterator[Finding]:
    """Index, files and tensors say the same."""
    view = context.view
    for name in view.unindexed_files:
        held = [t for t in view.files[name].tensors if t.endswith(SUFFIXES)]
        if held:
            yield Finding(
                "index.unindexed", "error",
                f"`{name}` holds {len(held)} scales, but the index does not name it: not loaded",
                tensor=held[0], file=name, expected="an index entry", found="none",
                fix=f"add its tensors to `weight_map` of {INDEX_NAME}",
            )  # fmt: skip
    for tensor, file in sorted((view.weight_map or {}).items()):
        if file not in view.files:
            yield Finding(
                "index.missing_file", "error", f"the index names `{file}`, which does not exist",
                tensor=tensor, file=file, expected="the file", found="none",
                fix="fetch the file, or take its entries out of the index",
            )  # fmt: skip
        elif tensor not in view.files[file].tensors:
            yield Finding(
                "index.missing_tensor", "error", f"`{file}` does not hold `{tensor}`",
                tensor=tensor, file=file, expected="the tensor", found="none",
                fix="fetch the checkpoint again, or correct the entry",
            )  # fmt: skip
    for tensor in sorted(view.tensors):
        if view.weight_map is not None and tensor not in view.weight_map:
            yield Finding(
                "index.missing_entry", "error", f"the index does not list `{tensor}`",
                tensor=tensor, file=file_of(context, tensor), expected="an entry", found="none",
                fix=f"add it to `weight_map` of {INDEX_NAME}",
            )  # fmt: skip


@rule()
def one_place_per_scale(context: Context) -> Iterator[Finding]:
    """No scale lies in two files, and nothing hides the shards from a loader."""
    view = context.view
    for tensor, files in sorted(view.duplicates.items()):
        if tensor.endswith(SUFFIXES):
            yield Finding(
                "scale.duplicate", "error", f"`{tensor}` lies in {len(files)} files",
                tensor=tensor, file=files[-1], expected="one file", found=", ".join(files),
                fix="`kvq export --strip`, then `kvq export` with the model's calibration",
            )  # fmt: skip
    for name in view.files:
        if name.startswith("consolidated") and len(view.files) > 1:
            yield Finding(
                "files.consolidated", "error",
                f"vLLM reads `{name}` instead of the other shards: scales elsewhere become 1.0",
                file=name, expected="no consolidated file", found=name,
                fix="remove it, with its index: the other shards hold the same weights",
            )  # fmt: skip
    if "model.safetensors" in view.files and len(view.files) > 1:
        yield Finding(
            "files.single_and_shards", "error",
            "transformers reads only `model.safetensors` and never the other files",
            file="model.safetensors", expected="model-0000i-of-0000n.safetensors and an index",
            found=", ".join(view.files),
            fix="rename it to model-00001-of-00002.safetensors, the other to model-00002-of-..., "
            "and list both in an index: `kvq export` does",
        )  # fmt: skip


@rule(spelling=True)
def total_size_is_right(context: Context) -> Iterator[Finding]:
    """The index's sum of bytes, which no engine reads, but tools that fetch checkpoints do."""
    declared = context.view.total_size
    if declared is None:
        return
    loaded = sum(info.end - info.start for info in context.view.tensors.values())
    held = sum(info.end - info.start for file in context.view.files.values()
               for info in file.tensors.values())  # fmt: skip
    if declared not in (loaded, held):
        yield Finding(
            "index.total_size", "warning",
            f"the index says {declared!r} bytes, and the tensors have {loaded}; no engine minds",
            file=INDEX_NAME, expected=str(loaded), found=repr(declared),
            fix=f"`total_size`: {loaded}",
        )  # fmt: skip


@rule(spelling=True)
def tower_names_are_the_original_ones(context: Context) -> Iterator[Finding]:
    """A save by transformers 5 has Gemma 3 under names that vLLM's class does not have."""
    renamed = renamed_tower(context.view)
    if renamed:
        yield Finding(
            "files.renamed", "warning",
            f"`{renamed}` is a name under which transformers 5 saved this model: vLLM fails on it",
            tensor=renamed, file=file_of(context, renamed), expected="vision_tower.vision_model.",
            found=renamed, fix="`kvq export` from the original files, which it keeps as they are",
        )  # fmt: skip
