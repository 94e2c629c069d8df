"""The one place that writes to the terminal: answers on stdout, everything else on stderr."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from kvq import reporting
from kvq.errors import KvqError

if TYPE_CHECKING:
    from kvq.checks.findings import Report
    from kvq.engines.base import EngineReading
    from kvq.pipeline.inspection import Inspection, LayerRow


def answer(text: str) -> None:
    """Write plain text to stdout; control characters, which a checkpoint may hold, are escaped."""
    sys.stdout.write(_CONTROL.sub(lambda found: repr(found[0])[1:-1], text) + "\n")


_CONTROL = re.compile(r"[^\t\n -~\u00a0-\U0010ffff]")


def document(value: Any) -> None:
    """Write exactly one JSON document to stdout."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def note(text: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(text + "\n")


def warning(text: str) -> None:
    """Write one warning to stderr."""
    _styled(sys.stderr, "warning", "yellow", text)


def error(failure: KvqError) -> None:
    """Write an error and what to do next."""
    _styled(sys.stderr, "error", "red", str(failure))
    if failure.hint:
        sys.stderr.write(f"\nhint: {failure.hint}\n")


def error_document(failure: KvqError) -> None:
    """Write an error as the JSON document of a failed command."""
    detail = {"code": failure.code, "message": str(failure), "hint": failure.hint}
    document({"schema": 1, "ok": None, "error": detail})


def _styled(stream: TextIO, word: str, color: str, text: str) -> None:
    if stream.isatty() and not os.environ.get("NO_COLOR"):
        from rich.console import Console
        from rich.text import Text

        line = Text.assemble((f"{word}: ", f"bold {color}"), text)
        Console(file=stream, highlight=False).print(line)
    else:
        stream.write(f"{word}: {text}\n")


_WORDS = ("flags", "tensor", "reason")  # columns of text


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table to stdout: fitted to a terminal, never cut in a pipe."""
    rows = [list(row) for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        shown = Table(box=None, pad_edge=False)
        for column in columns:
            shown.add_column(column, justify="left" if column in _WORDS else "right")
        for row in rows:
            shown.add_row(*row)
        Console(no_color=bool(os.environ.get("NO_COLOR"))).print(shown)
        return
    widths = [max(len(row[i]) for row in [list(columns), *rows]) for i in range(len(columns))]
    for row in [list(columns), *rows]:
        cells = (
            cell.ljust(width) if column in _WORDS else cell.rjust(width)
            for column, cell, width in zip(columns, row, widths, strict=True)
        )
        answer("  ".join(cells).rstrip())


def layer_table(shown: "Inspection") -> None:
    """Write the per-layer table: amax, scale, tokens, flags.

    Of a calibration also at which part of the plan each amax was raised last, and how many times
    the 99.9th percentile of the magnitudes it is.
    """
    sides = [side for side in ("q", "k", "v") if any(side in row.scale or side in row.amax
                                                     for row in shown.rows)]  # fmt: skip
    columns: dict[str, Callable[[LayerRow, str], str]] = {
        "{} amax": lambda row, side: f"{row.amax[side]:.4f}" if side in row.amax else "-",
        "{} scale": lambda row, side: _scale_cell(row.scale.get(side, ())),
    }
    if shown.kind == "calibration":
        columns["{} raised"] = lambda row, side: _part(row.raised.get(side), shown.batches)
        columns["{}/p99.9"] = lambda row, side: _ratio(row.spread.get(side))
    rows = [
        [str(row.layer_idx), *(cell(row, side) for cell in columns.values() for side in sides),
         "-" if row.tokens is None else str(row.tokens), "; ".join(row.flags)]
        for row in shown.rows
    ]  # fmt: skip
    names = [column.format(side) for column in columns for side in sides]
    table(["layer", *names, "tokens", "flags"], rows)


def engine_table(reading: "EngineReading") -> None:
    """Write which number an engine uses for each layer, and why."""
    answer(f"{reading.engine} {reading.version}, {reading.options}:")
    if reading.error is not None:
        answer(f"  fails to load: {reading.error}")
    rows = [
        [str(layer.layer_idx), layer.cache_dtype or "unknown", side, _scale_cell(used.value or ()),
         used.tensor or "-", used.reason]
        for layer in reading.layers
        for side, used in (("k", layer.k), ("v", layer.v), ("q", layer.q))
        if used is not None
    ]  # fmt: skip
    if rows:
        table(["layer", "cache", "side", "value", "tensor", "reason"], rows)
    for text in reading.notes:
        answer(f"  {text}")


def _scale_cell(values: tuple[float, ...]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.6g}"
    return f"[{min(values):.6g}, {max(values):.6g}]({len(values)})"


def _part(raised: int | None, batches: int | None) -> str:
    return "-" if raised is None or batches is None else f"{100 * raised / batches:.0f}%"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


class Progress:
    """Progress of a calibration: a bar on a terminal, else one plain line every ~10 %."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._tenth = 0

    def __enter__(self) -> Callable[[int, int, float], None]:
        if sys.stderr.isatty() and not os.environ.get("KVQ_NO_PROGRESS"):
            from rich.console import Console
            from rich.progress import Progress as Bar
            from rich.progress import TextColumn, TimeRemainingColumn

            self._bar = Bar(
                *Bar.get_default_columns()[:-1], TimeRemainingColumn(),
                TextColumn("{task.fields[speed]}"), console=Console(stderr=True),
            )  # fmt: skip
            self._bar.start()
        return self.update

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int, seconds: float) -> None:
        """Show `done` of `total` tokens after `seconds`."""
        speed = f"{done / max(seconds, 1e-9):.0f} tok/s"
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("calibrating", total=total, speed=speed)
            self._bar.update(self._task, completed=done, speed=speed)
        elif 10 * done // total > self._tenth:
            self._tenth = 10 * done // total
            left = seconds * (total - done) / done
            note(f"calibrating {done}/{total} tokens, {speed}, {left:.0f} s left")


def report(found: "Report", *, form: str, strict: bool) -> None:
    """Write a verification report in one of its four forms."""
    if form == "json":
        document(found.to_json(strict=strict))
    elif form == "junit":
        answer(reporting.junit(found, strict=strict))
    else:
        for line in reporting.lines(found, github=form == "github", strict=strict):
            answer(line)
