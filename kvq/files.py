"""Strict JSON in, canonical JSON out, and folders that appear whole or not at all."""

import ctypes
import json
import math
import os
import re
import reprlib
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvq.errors import CheckpointError, InputError

MARKER = ".kvq"  # an empty file in every folder that kvq wrote: --overwrite may replace it
MAX_JSON_BYTES = 64 << 20  # an index of 100 000 tensors is about 10 MB
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
MAX_DEPTH = 100  # of lists and objects in a file that is read whole


def parse_json(data: bytes, *, where: str) -> dict[str, Any]:
    """Parse one JSON object in UTF-8.

    Duplicate keys, numbers that are not finite, surrogates and other roots are errors.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = shorten(counts.most_common(1)[0][0])
            raise CheckpointError(f"{where} has the key {twice} twice", code="json.duplicate_key")
        return found

    def no_constant(literal: str) -> float:
        raise CheckpointError(f"{where} holds the number `{literal}`", code="json.nonfinite")

    def finite(literal: str) -> float:
        number = float(literal)
        return number if math.isfinite(number) else no_constant(literal[:40])

    try:
        text = data.decode("utf-8")
        parsed = json.loads(
            text, object_pairs_hook=unique, parse_constant=no_constant, parse_float=finite
        )
        if "\\u" in text:  # half of a pair of surrogates is no character
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}", code="json.invalid") from error
    if not isinstance(parsed, dict):
        kind = type(parsed).__name__
        raise CheckpointError(f"{where} holds a {kind}, expected an object", code="json.not_object")
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object from a file of at most 64 MiB."""
    try:
        size = regular_size(path)
        if size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"`{path.name}` has {size} bytes, expected at most {MAX_JSON_BYTES}",
                code="json.too_large",
            )
        found = parse_json(path.read_bytes(), where=f"`{path.name}`")
    except OSError as error:
        raise CheckpointError(
            f"cannot read `{path}`: {error.strerror}", code="file.unreadable"
        ) from error
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        values = [value.values() if isinstance(value, dict) else value for value in level]
        level = [x for inner in values for x in inner if isinstance(x, dict | list)]
    if level:
        raise CheckpointError(
            f"`{path.name}` is nested more than {MAX_DEPTH} levels deep", code="json.invalid"
        )
    return found


def regular_size(path: Path) -> int:
    """Return the size of a file, before it is opened: opening a FIFO would wait for a writer.

    Raises:
        CheckpointError: it is no regular file, nor a link to one.
        OSError: it cannot be reached.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"`{path}` is not a regular file", code="file.not_regular")
    return found.st_size


def shorten(value: Any) -> str:
    """Return the repr of a value of any size for an error message, without its middle."""
    return _SHORT.repr(value)


def dump_json(value: Any, *, sort: bool = True) -> str:
    """Return canonical JSON: sorted keys, two spaces, no NaN, one final newline.

    Without `sort` the keys keep their order, which means something in documents of other tools.
    """
    return json.dumps(value, indent=2, sort_keys=sort, allow_nan=False, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any, *, sort: bool = True) -> None:
    """Write canonical JSON; same value, same bytes."""
    path.write_text(dump_json(value, sort=sort), encoding="utf-8")


@contextmanager
def new_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield an empty sibling of `target` that takes its place when the block ends without error.

    The swap is one atomic exchange where the system has it, else two renames; a process killed
    between those two is repaired by `recover_folder` at the next start.

    Raises:
        InputError: `target` exists and `overwrite` is not set, or its parent does not exist.
    """
    check_target(target, overwrite=overwrite)
    work = target.with_name(f".{target.name}.kvq-{os.getpid()}.tmp")
    try:
        work.mkdir()
    except OSError as error:
        raise InputError(
            f"cannot write into `{target.parent}`: {error.strerror}", code="output.read_only"
        ) from error
    try:
        yield work
        (work / MARKER).touch()
        _sync(work)
        _swap(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_target(target: Path, *, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse a target that could not be created, or whose replacement would lose something.

    With `overwrite` only an empty folder or one that kvq wrote is replaced, and never one that is
    or holds an input of the same command.
    """
    if target.name in ("", ".", "..") or target.is_symlink():
        raise InputError(
            f"`{target}` cannot be an output folder",
            code="output.invalid",
            hint="give the name of a folder that is neither a link nor the current one",
        )
    given = list(inputs)
    for path in given + [link for folder in given for link in _links(folder)]:
        if path.resolve().is_relative_to(target.resolve()):
            raise InputError(
                f"the output `{target}` is or holds the input `{path}`",
                code="output.holds_input",
                hint="another -o",
            )
    if not target.parent.is_dir():
        raise InputError(
            f"the parent of `{target}` is not a folder",
            code="output.no_parent",
            hint=f"mkdir -p {target.parent}",
        )
    recover_folder(target)
    if target.exists() and not overwrite:
        raise InputError(
            f"`{target}` already exists",
            code="output.exists",
            hint="pass --overwrite to replace it, or another -o",
        )
    if target.exists() and not target.is_dir():
        raise InputError(f"`{target}` is a file, expected a folder", code="output.not_folder")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write into `{target.parent}`", code="output.read_only")
    if target.exists() and not (target / MARKER).is_file() and any(target.iterdir()):
        raise InputError(
            f"`{target}` was not written by kvq, so --overwrite does not replace it",
            code="output.foreign",
            hint="remove it yourself, or give another -o",
        )


def _links(folder: Path) -> list[Path]:
    """Return the symbolic links in a folder: what they point to is an input as well."""
    return [path for path in folder.iterdir() if path.is_symlink()] if folder.is_dir() else []


def recover_folder(target: Path) -> None:
    """Undo a swap that a kill cut in two, and delete what dead processes left beside `target`."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.kvq-(\d+)\.(tmp|old)")
    for sibling in target.parent.iterdir():
        match = pattern.fullmatch(sibling.name)
        if match is None or _alive(int(match[1])):
            continue
        if match[2] == "old" and not target.exists():
            sibling.rename(target)
        else:
            shutil.rmtree(sibling, ignore_errors=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # our own leftovers: this process holds no work folder at this point
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1):
            continue  # a link to a file that was there before
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _swap(work: Path, target: Path) -> None:
    if not target.exists():
        work.rename(target)
        return
    if _exchange(work, target):
        return
    old = target.with_name(f".{target.name}.kvq-{os.getpid()}.old")
    target.rename(old)
    work.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders atomically with Linux's renameat2; False where that is not possible."""
    at_fdcwd, rename_exchange = -100, 2
    renameat2: Callable[..., int] | None = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    paths = os.fsencode(first), os.fsencode(second)
    return renameat2(at_fdcwd, paths[0], at_fdcwd, paths[1], rename_exchange) == 0
