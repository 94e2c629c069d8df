"""Rules about files and index: what is written must be what a loader reads."""

from collections.abc import Iterator

from kvq.checks.context import SUFFIXES, Context, file_of, rule
from kvq.checks.findings import Finding


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
            )  # fmt: skip
    for tensor, file in sorted((view.weight_map or {}).items()):
        if file not in view.files:
            yield Finding(
                "index.missing_file", "error", f"the index names `{file}`, which does not exist",
                tensor=tensor, file=file, expected="the file", found="none",
            )  # fmt: skip
        elif tensor not in view.files[file].tensors:
            yield Finding(
                "index.missing_tensor", "error", f"`{file}` does not hold `{tensor}`",
                tensor=tensor, file=file, expected="the tensor", found="none",
            )  # fmt: skip
    for tensor in sorted(view.tensors):
        if view.weight_map is not None and tensor not in view.weight_map:
            yield Finding(
                "index.missing_entry", "error", f"the index does not list `{tensor}`",
                tensor=tensor, file=file_of(context, tensor), expected="an entry", found="none",
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
            )  # fmt: skip
    for name in view.files:
        if name.startswith("consolidated") and len(view.files) > 1:
            yield Finding(
                "files.consolidated", "error",
                f"vLLM reads `{name}` instead of the other shards: scales elsewhere become 1.0",
                file=name, expected="no consolidated file", found=name,
            )  # fmt: skip
    if "model.safetensors" in view.files and len(view.files) > 1:
        yield Finding(
            "files.single_and_shards", "error",
            "transformers reads only `model.safetensors` and never the other files",
            file="model.safetensors", expected="model-0000i-of-0000n.safetensors and an index",
            found=", ".join(view.files),
        )  # fmt: skip
