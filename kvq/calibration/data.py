"""Calibration data: where rows come from, and how many of them become sequences."""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvq.calibration.batches import Sequence, pack
from kvq.calibration.rows import Tally, choose_columns, target_rows, token_rows
from kvq.calibration.sources import open_table
from kvq.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DataOptions:
    """Which data to calibrate on and how to cut it."""

    dataset: str = "builtin"  # or a local file, a folder saved by datasets, a hub id
    split: str | None = None  # in the syntax of the datasets library, such as `train[:512]`
    text_column: str | None = None  # found by its name when None
    target_column: str | None = None  # what an encoder-decoder model answers
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
    decoder_start: int | None = None,
) -> CalibrationData:
    """Read the data, no more rows than the sequences need.

    Args:
        options: what to read.
        tokenizer: of transformers; None will do for rows of `input_ids`.
        max_length: the model's `max_position_embeddings`, if it has one.
        vocab_size: token ids must be below it.
        decoder_start: of an encoder-decoder model, the token its decoder starts with. Each row
            then is a pair: the encoder reads the text column, the decoder the target column.
    """
    _check_options(options, max_length, pairs=decoder_start is not None)
    tally = Tally()
    with open_table(options.dataset, options.split, options.seed) as table:
        kind, columns = choose_columns(table, options.text_column, options.chat_template)
        rows = token_rows(table, kind, columns, tokenizer)
        packed = options.pack and kind != "input_ids" and options.target_column is None
        found: Iterator[Sequence]
        if options.target_column is not None and decoder_start is not None:
            sources = tally.count(rows, vocab_size, keep=True)
            targets = target_rows(table, options.target_column, tokenizer, vocab_size)
            found = _pairs(tally, sources, targets, decoder_start, options.seq_len)
        elif packed:
            separator = _separator(tokenizer, vocab_size)
            cut = pack(tally.count(rows, vocab_size), separator, options.seq_len)
            found = (Sequence(np.array(ids)) for ids in cut)
        else:
            cut = tally.truncate(tally.count(rows, vocab_size), options.seq_len)
            found = (Sequence(np.array(ids)) for ids in cut)
        sequences = tuple(itertools.islice(found, options.num_samples))
        record: dict[str, Any] = {"source": dict(table.identity()), "split": table.split}
    _check_amount(sequences, tally, options, packed=packed)
    record |= {"kind": kind, "column": "+".join(columns), "chat_template": kind == "chat"}
    if options.target_column is not None:
        record["target_column"] = options.target_column
    record |= {"packed": packed, "seq_len": options.seq_len, "seed": options.seed}
    record |= asdict(tally) | _amounts(sequences)
    return CalibrationData(sequences, record, tuple(_notices(record, options)))


def _pairs(
    tally: Tally, sources: Iterator[list[int]], targets: Iterator[list[int]], decoder_start: int,
    seq_len: int,
) -> Iterator[Sequence]:  # fmt: skip
    """Yield pairs as a decoder is fed when it answers: its start token, then all but the last."""
    for source, target in zip(sources, targets, strict=True):
        if not source or not target:
            tally.rows_skipped_empty += bool(source)  # an empty source was counted
            continue
        tally.rows_truncated += max(len(source), len(target)) > seq_len
        decoder_ids = [decoder_start, *target[: seq_len - 1]][: max(len(target), 1)]
        yield Sequence(np.array(source[:seq_len]), np.array(decoder_ids))


def _amounts(sequences: tuple[Sequence, ...]) -> dict[str, Any]:
    digests = "".join(sorted(sequence.digest for sequence in sequences))
    return {
        "sequences": len(sequences),
        "tokens": sum(len(sequence) for sequence in sequences),
        "digest": hashlib.sha256(digests.encode("ascii")).hexdigest(),
    }


def _check_options(options: DataOptions, max_length: int | None, *, pairs: bool) -> None:
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
    if pairs and options.target_column is None:
        raise InputError(
            "an encoder-decoder model needs pairs: what its encoder reads and what its decoder "
            "answers",
            code="data.no_target",
            hint="name data with `--dataset` and its columns with `--text-column` and "
            "`--target-column`",
        )
    if not pairs and options.target_column is not None:
        raise InputError(
            "`--target-column` is for encoder-decoder models, this model has no encoder",
            code="data.target",
            hint="leave `--target-column` out",
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
