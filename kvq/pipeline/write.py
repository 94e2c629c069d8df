"""Apply an export plan: one new shard, everything else linked; whole or not at all."""

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kvq.checkpoint import CONFIG_NAME, INDEX_NAME, open_checkpoint
from kvq.checks.engines import engine_findings
from kvq.engines import get_engine
from kvq.engines.base import EngineOptions
from kvq.errors import DialectError, InputError
from kvq.files import check_target, new_folder, write_json
from kvq.geometry import read_geometry
from kvq.pipeline.export import ExportPlan
from kvq.pipeline.verify import verify
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
    engines: Sequence[str] = ("vllm",), allow_unread: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    """Apply a plan; returns notices about how shards were linked, and what engines would not read.

    Args:
        plan: what to write.
        model: the source.
        target: the folder to write.
        overwrite: replace an existing one.
        link: how shards come along.
        engines: who must use the scales as written, as predicted from the result's files.
        allow_unread: write even what one of them would not.

    Raises:
        DialectError: what was written does not read back as planned, does not verify, or would not
            be used as written.
    """
    view = open_checkpoint(model)
    used: set[str] = set()
    with new_folder(target, overwrite=overwrite) as folder:
        for shard in plan.shards:
            if shard.drop:
                copy_without(view.files[shard.source], folder / shard.target, shard.drop)
            else:
                used.add(_place(model / shard.source, folder / shard.target, link))
        write_float32(folder / plan.scale_shard, plan.tensors, plan.metadata)
        index = {"metadata": {"total_size": plan.total_size}, "weight_map": dict(plan.weight_map)}
        write_json(folder / INDEX_NAME, index)
        write_json(folder / CONFIG_NAME, plan.config)
        for name in plan.side_files:
            shutil.copyfile(model / name, folder / name)
        _reread(folder, plan)
        unread = _unread(folder, plan, engines, allow_unread=allow_unread)
    aliased = (
        "weight shards are hard links: source and result share their bytes (--link copy to part)"
    )
    return unread + ((aliased,) if "hard" in used else ())


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


def _unread(
    folder: Path, plan: ExportPlan, engines: Sequence[str], *, allow_unread: bool
) -> tuple[str, ...]:
    """Return what engines would do otherwise than written; refuse it unless allowed."""
    view = open_checkpoint(folder)
    geometry = read_geometry(view.config, view.tensors)
    statuses = {s for layer in plan.scales.layers for s in layer.provenance.values()}
    notices = []
    for name in engines:
        reading = get_engine(name).read(view, geometry, EngineOptions())
        found = engine_findings(reading, view, constant=statuses == {"constant"})
        wrong = [finding for finding in found if finding.severity == "error"]
        if not wrong:
            continue
        layer = "" if wrong[0].layer_idx is None else f"layer {wrong[0].layer_idx}: "
        message = f"{layer}{wrong[0].message} ({len(wrong)} findings in all)"
        if not allow_unread:
            raise DialectError(
                message,
                code="export.unread",
                hint="--allow-unread writes the scales nevertheless; --for names another engine",
            )
        notices.append(message)
    return tuple(notices)


def _reread(folder: Path, plan: ExportPlan) -> None:
    """Open what was written, compare it with what was meant, and run every rule of verify."""
    view = open_checkpoint(folder)
    for name, meant in plan.tensors.items():
        if not np.array_equal(view.read(name), meant):
            raise DialectError(f"`{name}` reads back differently", code="export.reread")
    if set(view.tensors) != set(plan.weight_map) or view.config != plan.config:
        raise DialectError("what was written is not what was planned", code="export.reread")
    wrong = [finding for finding in verify(folder).findings if finding.severity == "error"]
    if wrong:
        raise DialectError(
            f"the result would not verify: {wrong[0].message} ({len(wrong)} findings in all)",
            code="export.verify",
        )
