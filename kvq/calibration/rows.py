"""From the rows of a table to token ids: tokens as they are, chats through the template, text."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvq.calibration.builtin import Table
from kvq.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_COLUMNS = ("messages", "conversations", "conversation")
TEXT_COLUMNS = (
    ("text",),
    ("content",),
    ("article",),
    ("document",),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("prompt",),
)
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_CHUNK = 64  # rows per tokenizer call, at most
_TODAY = datetime(2024, 7, 26)  # templates that print the date print the same one every day


@dataclass
class Tally:
    """What happened to the rows that were read."""

    rows_read: int = 0
    rows_skipped_empty: int = 0
    rows_truncated: int = 0
    tokens_read: int = 0

    def count(
        self, rows: Iterable[list[int]], vocab_size: int, *, keep: bool = False
    ) -> Iterator[list[int]]:
        """Count the rows, check their ids and, unless told to `keep` them, leave out empty ones."""
        for row in rows:
            _check_ids(row, vocab_size, f"row {self.rows_read}")
            self.rows_read += 1
            self.rows_skipped_empty += not row
            self.tokens_read += len(row)
            if row or keep:
                yield row

    def truncate(self, rows: Iterable[list[int]], seq_len: int) -> Iterator[list[int]]:
        """Cut every row to `seq_len` and count those that are longer."""
        for row in rows:
            self.rows_truncated += len(row) > seq_len
            yield row[:seq_len]


def _check_ids(row: list[int], vocab_size: int, where: str) -> None:
    if row and not 0 <= min(row) <= max(row) < vocab_size:
        bad = next(token for token in row if not 0 <= token < vocab_size)
        raise InputError(
            f"{where} has the token id {bad}, expected 0 to {vocab_size - 1}",
            code="data.token_id",
            hint="use the tokenizer of this model, for `input_ids` too",
        )


def choose_columns(
    table: Table, text_column: str | None, chat_template: bool | None
) -> tuple[str, tuple[str, ...]]:
    """Return the kind of the rows (`input_ids`, `chat` or `text`) and the columns to read."""
    listed = ", ".join(f"`{column}`" for column in table.columns)
    if text_column is not None and text_column not in table.columns:
        raise InputError(
            f"`{table.name}` has no column `{text_column}`, its columns are {listed}",
            code="data.no_column",
            hint="name one of them with `--text-column`",
        )
    candidates = CHAT_COLUMNS if text_column is None else (text_column,)
    chats = [c for c in candidates if c in table.columns and _is_chat(table.first(c))]
    if chat_template is True and not chats:
        raise InputError(
            f"`--chat-template` needs a column of chats, `{table.name}` has {listed}",
            code="data.no_chat_column",
            hint="rename the column of chats to `messages`, or leave `--chat-template` out",
        )
    if text_column is None and "input_ids" in table.columns and chat_template is not True:
        return "input_ids", ("input_ids",)
    if chats and chat_template is not False:
        return "chat", (chats[0],)
    if text_column is not None:
        return "text", (text_column,)
    for group in TEXT_COLUMNS:
        if set(group) <= set(table.columns) and all(_is_text(table.first(c)) for c in group):
            return "text", group
    raise _no_column(table.name, listed, chats)


def _no_column(name: str, listed: str, chats: list[str]) -> InputError:
    if chats:
        return InputError(
            f"`--no-chat-template` rules out the chats in `{chats[0]}`, and `{name}` has no column"
            f" of text: its columns are {listed}",
            code="data.chat_column",
            hint="leave `--no-chat-template` out, or name a column of text with `--text-column`",
        )
    return InputError(
        f"`{name}` has no column of text, chats or `input_ids`, its columns are {listed}",
        code="data.no_text_column",
        hint="name the column to read with `--text-column`",
    )


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def token_rows(
    table: Table, kind: str, columns: tuple[str, ...],
    tokenizer: "PreTrainedTokenizerBase | None", *, target: bool = False,
) -> Iterator[list[int]]:  # fmt: skip
    """Return one list of token ids per row, an empty one for an empty row.

    With `target`, text is tokenized as a translation model's answer is.
    """
    read: Callable[[Any, str], Any] = {"input_ids": _input_ids, "chat": _messages}.get(kind, _text)
    label = f"of `{'+'.join(columns)}` in `{table.name}`"
    rows = (
        read([row[c] for c in columns], f"row {i} {label}")
        for i, row in enumerate(table.rows(columns))
    )
    if kind == "input_ids":
        return rows
    if tokenizer is None:
        raise InputError(
            f"`{table.name}` holds {kind} rows, and the model has no tokenizer",
            code="data.no_tokenizer",
            hint="add the tokenizer's files to the model folder, or give rows of `input_ids`",
        )
    if kind == "text":
        return _tokenized(rows, tokenizer, add_special_tokens=True, target=target)
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            f"`{columns[0]}` of `{table.name}` holds chats, and the tokenizer has no chat template",
            code="data.no_chat_template",
            hint="name a column of text with `--text-column`, or use `--no-chat-template`",
        )
    texts = (_render(row, f"row {i} {label}", tokenizer) for i, row in enumerate(rows))
    return _tokenized(texts, tokenizer, add_special_tokens=False)  # the template wrote them


def target_rows(
    table: Table, column: str, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int
) -> Iterator[list[int]]:
    """Return the token ids of what the decoder answers, row by row; integers are ids already."""
    if column not in table.columns:
        listed = ", ".join(f"`{known}`" for known in table.columns)
        raise InputError(
            f"`{table.name}` has no column `{column}`, its columns are {listed}",
            code="data.no_column",
            hint="name one of them with `--target-column`",
        )
    kind = "input_ids" if isinstance(table.first(column), list) else "text"
    for i, row in enumerate(token_rows(table, kind, (column,), tokenizer, target=True)):
        _check_ids(row, vocab_size, f"`{column}` of row {i}")
        yield row


def _input_ids(values: list[Any], where: str) -> list[int]:
    token_ids = [] if values[0] is None else values[0]
    bad = [t for t in token_ids if type(t) is not int] if isinstance(token_ids, list) else [values]
    if bad:
        raise _bad_row(where, bad[0], "a list of integers", "data.input_ids")
    return list(token_ids)


def _text(values: list[Any], where: str) -> str:
    for value in values:
        if not _is_text(value):
            raise _bad_row(where, value, "text")
    text = "\n".join(value for value in values if value)
    return text if text.strip() else ""


def _messages(values: list[Any], where: str) -> list[dict[str, Any]]:
    chat = [] if values[0] is None else values[0]
    if not isinstance(chat, list) or not all(isinstance(message, Mapping) for message in chat):
        raise _bad_row(where, chat, "a list of messages")
    messages = []
    for message in chat:
        role = message.get("role") or message.get("from")
        content = message.get("content")
        content = message.get("value") if content is None else content
        if not isinstance(role, str):
            raise _bad_row(where, dict(message), "`role` and `content` (or `from` and `value`)")
        extra = {key: value for key, value in message.items() if value is not None}
        role = _ROLES.get(role, role)
        messages.append(extra | {"role": role, "content": "" if content is None else content})
    silent = all(isinstance(m["content"], str) and not m["content"].strip() for m in messages)
    return [] if silent else messages


def _bad_row(where: str, value: object, expected: str, code: str = "data.row") -> InputError:
    found = repr(value)
    found = found if len(found) <= 60 else f"{found[:57]}..."
    return InputError(
        f"{where} holds {type(value).__name__} `{found}`, expected {expected}",
        code=code,
        hint="correct the row, or name another column with `--text-column`",
    )


def _render(messages: list[Any], where: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    if not messages:
        return ""
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, strftime_now=_TODAY.strftime)
        )
    except Exception as error:  # a template is a program, it may raise anything
        raise InputError(
            f"the chat template refuses {where}: {error}",
            code="data.chat_template",
            hint="correct the row, or read a column of text with `--text-column`",
        ) from error


def _tokenized(
    texts: Iterable[str], tokenizer: "PreTrainedTokenizerBase", *, add_special_tokens: bool,
    target: bool = False,
) -> Iterator[list[int]]:  # fmt: skip
    texts, size = iter(texts), 1
    while chunk := list(itertools.islice(texts, size)):
        size = min(2 * size, _CHUNK)  # small at first: a few rows may be all that is needed
        kept = [text for text in chunk if text]
        encoded: Iterator[list[int]] = iter(())
        if kept:
            options = {"padding": False, "truncation": False, "verbose": False}
            texts_as = {"text_target": kept} if target else {"text": kept}
            batch = tokenizer(**texts_as, add_special_tokens=add_special_tokens, **options)
            encoded = iter(batch["input_ids"])
        yield from (next(encoded) if text else [] for text in chunk)
