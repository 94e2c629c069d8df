"""Where rows come from: the built-in corpus, local files, saved folders, the hub."""

import hashlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvq.calibration.builtin import Table, builtin_table
from kvq.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from datasets import Dataset

READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
_HUB_ID = r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?"
_Opened = tuple[Mapping[str, Any], dict[str, str]]  # the splits, and what identifies them


@contextmanager
def open_table(name: str, split: str | None, seed: int) -> Iterator[Table]:
    """Open a data set for reading; temporary files are gone afterwards.

    Args:
        name: `builtin`, a local file, a folder saved by datasets, or a hub id.
        split: in the syntax of the datasets library.
        seed: orders the built-in corpus.

    Raises:
        InputError: nothing there, or nothing that can be read.
    """
    path = Path(name).expanduser()
    if name == "builtin":
        yield builtin_table(seed, split)
        return
    known = path.suffix.lower() in READERS or (path.suffix and "/" not in name)
    if not path.exists() and (known or path.is_absolute() or not re.fullmatch(_HUB_ID, name)):
        raise InputError(
            f"`{name}` does not exist",
            code="data.no_file",
            hint="check the path, or name a hub id or `builtin` with `--dataset`",
        )
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"reading `{name}` needs the datasets library",
            code="dependency.datasets",
            hint='`pip install "kvq[calibrate]"`, or use `--dataset builtin`',
        ) from error
    with tempfile.TemporaryDirectory(prefix="kvq-data-") as cache, _quiet(datasets):
        if path.is_dir():
            splits, source = _folder(datasets, path)
        elif path.exists():
            splits, source = _file(datasets, path, Path(cache))
        else:
            splits, source = _hub(datasets, name)
        taken, rows = _take_split(datasets, splits, split, source["name"])
        columns = tuple(rows.column_names)
        yield Table(source["name"], taken, columns, rows.select_columns, lambda: source)


@contextmanager
def _quiet(datasets: ModuleType) -> Iterator[None]:
    logging, config = datasets.utils.logging, datasets.config
    shown = not datasets.are_progress_bars_disabled()
    verbosity, counted_downloads = logging.get_verbosity(), config.HF_UPDATE_DOWNLOAD_COUNTS
    if shown:
        datasets.disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else a local file asks the network first
    try:
        yield
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS = counted_downloads
        logging.set_verbosity(verbosity)
        if shown:
            datasets.enable_progress_bars()


def _file(datasets: ModuleType, path: Path, cache: Path) -> _Opened:
    kind = READERS.get(path.suffix.lower())
    if kind is None:
        raise InputError(
            f"`{path.name}` is of no known type, expected {', '.join(READERS)}",
            code="data.file_type",
            hint="convert the file, or rename it to what it is",
        )
    with _read_as(f"`{path.name}` cannot be read as {kind}", "data.unreadable", "correct the file"):
        content = _sha256(path)
        if kind == "text":
            documents = re.split(r"\n\s*\n", path.read_text(encoding="utf-8-sig").strip())
            splits = {"train": datasets.Dataset.from_dict({"text": list(filter(None, documents))})}
        else:
            link = cache / f"data{path.suffix.lower()}"  # datasets reads a path as a glob pattern
            link.symlink_to(path.resolve())
            splits = datasets.load_dataset(kind, data_files=str(link), cache_dir=str(cache))
    return splits, {"type": "file", "name": path.name, "sha256": content}


def _folder(datasets: ModuleType, path: Path) -> _Opened:
    name = path.resolve().name
    hint = f"name one file in it ({', '.join(READERS)}), or write it with `save_to_disk`"
    with _read_as(f"folder `{name}` is no data set saved by datasets", "data.folder", hint):
        saved = datasets.load_from_disk(str(path))
        parts = " ".join(_sha256(part) for part in sorted(path.rglob("*.arrow")))
    splits = saved if isinstance(saved, Mapping) else {"train": saved}
    content = hashlib.sha256(parts.encode("ascii")).hexdigest()
    return splits, {"type": "folder", "name": name, "sha256": content}


def _hub(datasets: ModuleType, name: str) -> _Opened:
    hint = f"name a local file ({', '.join(READERS)}), a saved folder, or `builtin`"
    message = f"`{name}` is no local file, and the hub does not give it"
    with _read_as(message, "data.unreachable", hint):
        return datasets.load_dataset(name), {"type": "hub", "name": name}


@contextmanager
def _read_as(message: str, code: str, hint: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # every reader and every http library has errors of its own
        generating = type(error).__name__ == "DatasetGenerationError"  # says nothing by itself
        reason = str(error.__cause__ if generating else error).split("\n")[0].rstrip(". ")
        reason = reason or f"nothing in it ({type(error).__name__})"
        raise InputError(f"{message}: {reason}", code=code, hint=hint) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _take_split(
    datasets: ModuleType, splits: Mapping[str, Any], split: str | None, name: str
) -> "tuple[str, Dataset]":
    listed = ", ".join(f"`{known}`" for known in splits)
    only = next(iter(splits)) if len(splits) == 1 else "train"
    chosen = only if split is None else split
    lengths = {known: len(rows) for known, rows in splits.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(chosen).to_absolute(lengths)
    except ValueError as error:
        reason = str(error).split(". ")[0].rstrip(".")
        raise InputError(
            f"`{name}` has the splits {listed}, and `{chosen}` gives none of them: {reason}",
            code="data.split",
            hint=f"name one as in `--split {next(iter(splits))}[:512]`",
        ) from error
    taken = [splits[p.splitname].select(range(p.from_, p.to)) for p in parts if p.to > p.from_]
    if not taken:
        raise InputError(
            f"`--split` `{chosen}` of `{name}` has no rows, the splits have {lengths}",
            code="data.empty_split",
            hint="widen the slice, or name another split with `--split`",
        )
    return chosen, datasets.concatenate_datasets(taken)
