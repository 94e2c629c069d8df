"""The state of an unfinished calibration: written whole or not at all, or refused by name."""

import base64
import fcntl
import hashlib
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvq.calibration.amax import Observer
from kvq.checkpoint import CheckpointView
from kvq.errors import CheckpointError, InputError
from kvq.files import dump_json, read_json, shorten
from kvq.tensorfile import read_bytes

SCHEMA = 2
STATE_NAME = "progress.json"
LOCK_NAME = "lock"
_SHOWN = 3  # differences in one error
START_OVER = "start over with --overwrite instead of --resume"


@dataclass(frozen=True)
class State:
    """How far a run had come.

    Attributes:
        mode: `memory` or `streaming`.
        position: what the mode needs to go on.
        seen: of each attention path and quantizer, amax, float32 [heads], the batches that raised
            it, int64 [heads], the counted magnitudes, int64 [BINS], and how many tokens were seen.
    """

    mode: str
    identity: Mapping[str, Any]
    position: Mapping[str, Any]
    seen: Mapping[tuple[str, str], tuple[np.ndarray, np.ndarray, np.ndarray, int]]

    def restore(self, observer: Observer, device: torch.device) -> None:
        """Let an observer that has seen nothing go on from here."""
        for key, (amax, raised, counts, tokens) in self.seen.items():
            observer.amax[key] = torch.from_numpy(amax).to(device)
            observer.raised[key] = torch.from_numpy(raised).to(device)
            observer.counts[key] = torch.from_numpy(counts).to(device)
            observer.tokens[key] = tokens


def exists(folder: Path) -> bool:
    """Whether a folder holds the state of an unfinished run."""
    return (folder / STATE_NAME).is_file()


def write_state(
    folder: Path, mode: str, identity: Mapping[str, Any], position: Mapping[str, Any],
    observer: Observer,
) -> None:  # fmt: skip
    """Replace the state in one step; a process killed meanwhile leaves the old one."""
    seen = [
        [*key, _encoded(amax, "<f4"), _encoded(observer.raised[key], "<i8"),
         _encoded(observer.counts[key], "<i8"), observer.tokens[key]]
        for key, amax in sorted(observer.amax.items())
    ]  # fmt: skip
    state = {"schema": SCHEMA, "mode": mode, "identity": identity, "position": position,
             "seen": seen}  # fmt: skip
    text = dump_json({**state, "digest": _digest(state)})
    part = folder / f"{STATE_NAME}.part"
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        sync(file.fileno())
    part.replace(folder / STATE_NAME)
    sync_folder(folder)


def read_state(folder: Path) -> State:
    """Read the state of an unfinished run.

    Raises:
        CheckpointError: it is not whole, or not of this version.
    """
    path = folder / STATE_NAME
    try:
        found = read_json(path)
        digest = found.pop("digest", None)
        if digest != _digest(found):
            raise damaged(path, "its digest is another")
        if found["schema"] != SCHEMA:
            raise damaged(path, f"its schema is {found['schema']}, expected {SCHEMA}")
        seen = {
            (attention, quantizer): (
                _decoded(amax, "<f4"), _decoded(raised, "<i8"), _decoded(counts, "<i8"), tokens
            )
            for attention, quantizer, amax, raised, counts, tokens in found["seen"]
        }  # fmt: skip
        return State(found["mode"], found["identity"], found["position"], seen)
    except CheckpointError as error:
        if error.code == "progress.damaged":
            raise
        raise damaged(path, str(error)) from error
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise damaged(path, shorten(error)) from error


def damaged(path: Path, why: str) -> CheckpointError:
    """Return the error of a state that cannot be continued."""
    return CheckpointError(
        f"the progress in `{path}` is not whole: {why}; nothing of it is used",
        code="progress.damaged",
        hint=START_OVER,
    )


def check_identity(state: State, identity: Mapping[str, Any]) -> None:
    """Refuse to go on with other data, options, weights or versions, or in another mode.

    Raises:
        InputError: they differ; the first differences are named.
    """
    differences = list(_differences("", {**state.identity, "mode": state.mode}, identity))
    if differences:
        more = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise InputError(
            f"the progress is of another run: {'; '.join(differences[:_SHOWN])}{more}",
            code="progress.other_run",
            hint=f"run the command as it was, or {START_OVER}",
        )


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys()):
            inner = f"{name}.{key}" if name else str(key)
            yield from _differences(inner, before.get(key), now.get(key))
    elif before != now:
        yield f"`{name}` was {shorten(before)} and is {shorten(now)}"


def _encoded(values: torch.Tensor, dtype: str) -> str:
    data = values.cpu().numpy().astype(dtype).tobytes()
    return base64.b64encode(zlib.compress(data, 1)).decode()  # most counts are 0


def _decoded(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).copy()


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(state).encode()).hexdigest()


def weights_digest(view: CheckpointView) -> str:
    """Return a digest of all tensors' names, shapes and dtypes, and of samples of at most 1024.

    It tells other weights apart unless they differ between the samples alone.
    """
    digest = hashlib.sha256()
    names = sorted(view.tensors)
    for name in names:
        info = view.tensors[name]
        digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
    for name in names[:: max(1, len(names) // 1024)]:
        info = view.tensors[name]
        for part in range(4):
            digest.update(read_bytes(info, max(0, info.end - info.start - 256) * part // 3, 256))
    return digest.hexdigest()


class Folder:
    """A folder for the state of one run, held by one process at a time.

    Raises:
        InputError: another process runs into the same output folder, or it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(exist_ok=True)
            self._lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(
                f"cannot write into `{path.parent}`: {error.strerror}", code="output.read_only"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise InputError(
                f"another process calibrates with its progress in `{path}`",
                code="progress.locked",
                hint="wait for it, or give another -o",
            ) from error

    def clear(self) -> None:
        """Delete everything in it but the lock, the state first."""
        (self.path / STATE_NAME).unlink(missing_ok=True)
        for entry in self.path.iterdir():
            if entry.name != LOCK_NAME:
                entry.unlink()

    def close(self) -> None:
        """Let go of it; without a state in it, it is deleted."""
        if not exists(self.path):
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sync(descriptor: int) -> None:
    """Have what was written to a file on its disk."""
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on its disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
