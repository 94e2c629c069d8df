"""Calibration data: where rows come from, and how many of them become sequences."""

import hashlib
import itertools
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvq.calibration.batches import Sequence, pack
from kvq.calibration.builtin import Table, builtin_table
from kvq.calibration.rows import Tally, choose_columns, token_rows
from kvq.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
_HUB_ID = r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?"
_Opened = tuple[Mapping[str, Any], dict[str, str]]  # the splits, and what identifies them


@dataclass(frozen=True)
class DataOptions:
    """Which data to calibrate on and how to cut it."""

    dataset: str = "builtin"  # or a local file, a folder saved by datasets, a hub id
    split: str | None = None  # in the syntax of the datasets library, such as `train[:512]`
    text_column: str | None = None  # found by its name when None
    chat_template: bool | None = None  # None: used when there is a column of chats
    pack: bool = True  # join rows with EOS and cut full sequences; else one row per sequence
    seq_len: int = 2048
    num_samples: int = 512  # sequences, not rows
    seed: int = 0  # orders the built-in corpus; other data is read in its own order
    min_tokens: int = 0  # fewer are an error; with 0, few sequences are only a notice


@dataclass(frozen=True, eq=False)
class CalibrationData:
    """Sequences to run, where they come from, and what the user should be told."""

    sequences: tuple[Sequence, ...]
    identity: Mapping[str, Any]
    notices: tuple[str, ...]


def load(
    options: DataOptions,
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    max_length: int | None,
    vocab_size: int,
) -> CalibrationData:
    """Read the data, no more rows than the sequences need.

    Args:
        options: what to read.
        tokenizer: of transformers; None will do for rows of `input_ids`.
        max_length: the model's `max_position_embeddings`, if it has one.
        vocab_size: token ids must be below it.
    """
    _check_options(options, max_length)
    tally = Tally()
    with _opened(options) as table:
        kind, columns = choose_columns(table, options.text_column, options.chat_template)
        packed = options.pack and kind != "input_ids"
        rows = tally.count(token_rows(table, kind, columns, tokenizer), vocab_size)
        if packed:
            cut = pack(rows, _separator(tokenizer, vocab_size), options.seq_len)
        else:
            cut = tally.truncate(rows, options.seq_len)
        taken = map(np.array, itertools.islice(cut, options.num_samples))
        sequences = tuple(map(Sequence, taken))
        record: dict[str, Any] = {"source": dict(table.identity()), "split": table.split}
    _check_amount(sequences, tally, options, packed=packed)
    record |= {"kind": kind, "column": "+".join(columns), "chat_template": kind == "chat"}
    record |= {"packed": packed, "seq_len": options.seq_len, "seed": options.seed}
    record |= asdict(tally) | _amounts(sequences)
    return CalibrationData(sequences, record, tuple(_notices(record, options)))


def _amounts(sequences: tuple[Sequence, ...]) -> dict[str, Any]:
    digests = "".join(sorted(sequence.digest for sequence in sequences))
    return {
        "sequences": len(sequences),
        "tokens": sum(len(sequence) for sequence in sequences),
        "digest": hashlib.sha256(digests.encode("ascii")).hexdigest(),
    }


def _check_options(options: DataOptions, max_length: int | None) -> None:
    for flag, value, least in (
        ("--seq-len", options.seq_len, 1),
        ("--num-samples", options.num_samples, 1),
        ("--min-tokens", options.min_tokens, 0),
    ):
        if value < least:
            raise InputError(
                f"`{flag}` is {value}, expected at least {least}",
                code=f"data.{flag[2:].replace('-', '_')}",
                hint=f"leave `{flag}` out for its default",
            )
    if max_length is not None and options.seq_len > max_length:
        raise InputError(
            f"`--seq-len` is {options.seq_len}, and the model has {max_length} positions"
            " (`max_position_embeddings`)",
            code="data.seq_len",
            hint=f"use `--seq-len {max_length}` or less",
        )


def _separator(tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int) -> int:
    eos = getattr(tokenizer, "eos_token_id", None)
    if eos is None or eos >= vocab_size:
        found = "no EOS token" if eos is None else f"EOS {eos}, and the model {vocab_size} ids"
        raise InputError(
            f"the tokenizer has {found}: rows cannot be joined",
            code="data.no_eos",
            hint="use `--no-pack` for one row per sequence",
        )
    return int(eos)


def _check_amount(
    sequences: tuple[Sequence, ...], tally: Tally, options: DataOptions, *, packed: bool
) -> None:
    tokens = sum(len(sequence) for sequence in sequences)
    rows = f"{tally.rows_read} rows ({tally.rows_skipped_empty} empty)"
    if not sequences:
        needed = f", one packed sequence needs {options.seq_len}" if packed else ""
        shorter = "lower `--seq-len`, use `--no-pack`, or give more data"
        raise InputError(
            f"{rows} hold {tally.tokens_read} tokens{needed}",
            code="data.no_sequences",
            hint=shorter if packed else "name a column with content by `--text-column`",
        )
    if tokens < options.min_tokens:
        raise InputError(
            f"{len(sequences)} sequences hold {tokens} tokens, `--min-tokens` asks for"
            f" {options.min_tokens}",
            code="data.too_few_tokens",
            hint="give more data, raise `--num-samples`, or lower `--min-tokens`",
        )


def _notices(record: Mapping[str, Any], options: DataOptions) -> Iterator[str]:
    found, rows = record["sequences"], record["rows_read"]
    if record["source"]["type"] == "builtin":
        yield "The data is text of Python's standard library: name your own with `--dataset`."
    if found < options.num_samples:
        amount = f"{rows} rows hold {record['tokens_read']} tokens"
        yield f"{found} sequences of the {options.num_samples} asked for: {amount}."
    if cut := record["rows_truncated"]:
        yield f"{cut} of {rows} rows are longer than {options.seq_len} tokens and were cut."
    if empty := record["rows_skipped_empty"]:
        yield f"{empty} of {rows} rows are empty and were skipped."


@contextmanager
def _opened(options: DataOptions) -> Iterator[Table]:
    name, path = options.dataset, Path(options.dataset).expanduser()
    if name == "builtin":
        yield builtin_table(options.seed, options.split)
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
        split, rows = _take_split(datasets, splits, options.split, source["name"])
        columns = tuple(rows.column_names)
        yield Table(source["name"], split, columns, rows.select_columns, lambda: source)


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
