"""Apply an export plan: one new shard, everything else linked; whole or not at all."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvq.checkpoint import CheckpointView, open_checkpoint
from kvq.dialects import find
from kvq.errors import DialectError, InputError
from kvq.files import check_target, new_folder
from kvq.geometry import read_geometry
from kvq.pipeline.judge import write_documents
from kvq.pipeline.plan import ExportPlan
from kvq.pipeline.verify import EngineQuestion, verify
from kvq.tensorfile import copy_without, write_float32

LINKS = ("auto", "hard", "copy", "symbolic")


def check_output(target: Path, *, overwrite: bool, link: str, inputs: Iterable[Path]) -> None:
    """Refuse a target or link kind that `write_export` could not use.

    Beside it, leftovers of killed runs are cleaned up; nothing else is written.
    """
    if link not in LINKS:
        raise InputError(f"unknown --link `{link}`; known: {', '.join(LINKS)}", code="option.link")
    check_target(target, overwrite=overwrite, inputs=inputs)


def write_export(
    plan: ExportPlan, model: Path, target: Path, *, overwrite: bool, link: str,
    ask: EngineQuestion | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Apply a plan; returns notices about how shards were linked.

    Args:
        plan: what to write.
        model: the source.
        target: the folder to write.
        overwrite: replace an existing one.
        link: how shards come along.
        ask: the engines that were asked about the plan: what others make of it is no error.

    Raises:
        DialectError: what was written does not read back as planned, or does not verify.
        InputError: the file system refuses.
    """
    try:
        used = _apply(plan, model, target, overwrite=overwrite, link=link, ask=ask)
    except OSError as error:
        where = error.filename2 or error.filename or target
        raise InputError(
            f"cannot write `{where}`: {error.strerror}",
            code="output.write",
            hint="--link auto copies where links are not possible"
            if link in ("hard", "symbolic")
            else "free space, or give another -o",
        ) from error
    notices = {
        "hard": "weight shards are hard links: source and result share their bytes (--link copy "
        "to part)",
        "copy": "weight shards were copied: the file system takes no links from the source",
    }
    chosen = used - {"copy"} if link == "copy" else used
    return tuple(words for kind, words in notices.items() if kind in chosen)


def _apply(
    plan: ExportPlan, model: Path, target: Path, *, overwrite: bool, link: str,
    ask: EngineQuestion | None,
) -> set[str]:  # fmt: skip
    """Write the folder; returns the kinds of links that were made."""
    view = open_checkpoint(model)
    used: set[str] = set()
    with new_folder(target, overwrite=overwrite) as folder:
        for shard in plan.shards:
            if shard.drop:
                copy_without(view.files[shard.source], folder / shard.target, shard.drop)
            else:
                used.add(_place(model / shard.source, folder / shard.target, link))
        if plan.scale_shard is not None:
            write_float32(folder / plan.scale_shard, plan.tensors, plan.metadata)
        write_documents(plan, folder)
        for name in plan.side_files:
            shutil.copyfile(model / name, folder / name)
        _reread(folder, plan, ask)
    return used


def _place(source: Path, target: Path, link: str) -> str:
    real = source.resolve()
    if link == "symbolic":
        target.symlink_to(real)
        return "symbolic"
    if link == "auto" and _reflink(real, target):
        return "reflink"
    if link in ("auto", "hard"):
        try:
            os.link(real, target)
        except OSError:
            if link == "hard":
                raise
        else:
            return "hard"
    shutil.copyfile(real, target)
    return "copy"


def _reflink(source: Path, target: Path) -> bool:
    """Clone a file's blocks where the file system can (Linux FICLONE)."""
    try:
        import fcntl
    except ImportError:
        return False
    ficlone = 0x40049409
    with source.open("rb") as reader, target.open("wb") as writer:
        try:
            fcntl.ioctl(writer, ficlone, reader.fileno())
        except OSError:
            cloned = False
        else:
            cloned = True
    if not cloned:
        target.unlink()
    return cloned


def _reread(folder: Path, plan: ExportPlan, ask: EngineQuestion | None) -> None:
    """Open what was written, compare it with what was meant, and run every rule of verify."""
    view = open_checkpoint(folder)
    for name, meant in plan.tensors.items():
        if not np.array_equal(view.read(name), meant):
            raise DialectError(f"`{name}` reads back differently", code="export.reread")
    planned = plan.weight_map
    same = planned is None or set(view.tensors) == set(planned)
    if not same or view.config != plan.config:
        raise DialectError("what was written is not what was planned", code="export.reread")
    if plan.scale_shard is None:
        _check_bare(view, plan)
        return
    errors = [one for one in verify(folder, ask=ask).findings if one.severity == "error"]
    wrong = [one for one in errors if not one.code.startswith("engine.")]  # these were judged
    if wrong:
        raise DialectError(
            f"the result would not verify: {wrong[0].message} ({len(wrong)} findings in all)",
            code="export.verify",
        )


def _check_bare(view: CheckpointView, plan: ExportPlan) -> None:
    """Make sure that a stripped checkpoint has no scale left."""
    left = find(view, read_geometry(view.config, view.tensors)).all
    if left and plan.dialect is None:
        raise DialectError(f"`{left[0].tensor}` is still there", code="export.reread")
