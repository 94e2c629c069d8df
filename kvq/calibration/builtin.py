"""The built-in corpus: prose and code from the running interpreter's standard library."""

import ast
import hashlib
import inspect
import os
import platform
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.errors import InputError

_SKIPPED = {
    "__pycache__",
    "dist-packages",
    "encodings",  # tables of code points, not text
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
}
_GENERATED = ("_sysconfigdata", "sitecustomize", "usercustomize")  # differ from machine to machine
_LONGEST = 65_536  # characters; one long module must not crowd out the others
_SHORTEST = 200

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Table:
    """Rows to read, with the real names that errors list."""

    name: str
    split: str | None
    columns: tuple[str, ...]
    rows: Callable[[tuple[str, ...]], Iterable[Mapping[str, Any]]]  # of these columns
    identity: Callable[[], Mapping[str, Any]]  # asked for after reading

    def first(self, column: str) -> object:
        """Return the column's first value that is not null, or None."""
        values = (row[column] for row in self.rows((column,)))
        return next((value for value in values if value not in (None, "", [])), None)


class BuiltinCorpus:
    """Documents in an order that depends on the seed only."""

    def __init__(self, seed: int, root: Path | None = None) -> None:
        self._seed = seed
        self._root = root or Path(sysconfig.get_paths()["stdlib"])
        self._drawn: list[str] = []

    def __iter__(self) -> Iterator[dict[str, str]]:
        self._drawn = []
        for path in self._modules():
            for text in _documents(path):
                self._drawn.append(hashlib.sha256(text.encode()).hexdigest())
                yield {"text": text}

    def identity(self) -> dict[str, object]:
        """Name the interpreter and the documents drawn so far."""
        return {
            "type": "builtin",
            "name": "builtin",
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "documents": len(self._drawn),
            "corpus_digest": hashlib.sha256("".join(sorted(self._drawn)).encode()).hexdigest(),
        }

    def _modules(self) -> list[Path]:
        names = sorted(_module_names(self._root), key=lambda name: _rank(self._seed, name))
        if not names:
            raise InputError(
                "the built-in corpus is empty: this Python's standard library has no source files",
                code="data.builtin",
                hint="name your own data with `--dataset`",
            )
        return [self._root / name for name in names]


def builtin_table(seed: int, split: str | None) -> Table:
    """Return the corpus as a table of one column, `text`."""
    if split is not None:
        raise InputError(
            f"`--split` is `{split}`, and the built-in corpus has no splits",
            code="data.builtin_split",
            hint="leave `--split` out, or name your own data with `--dataset`",
        )
    corpus = BuiltinCorpus(seed)
    return Table("builtin", None, ("text",), lambda columns: corpus, corpus.identity)


def _rank(seed: int, name: str) -> bytes:
    # random.shuffle may change between interpreters, a hash does not
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


def _module_names(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIPPED and not f.startswith("config-")]
        for file in files:
            if file.endswith(".py") and not file.startswith(_GENERATED):
                yield (Path(folder) / file).relative_to(root).as_posix()


def _documents(path: Path) -> Iterator[str]:
    """Yield a module's docstrings as one document and the rest of its source as another."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            module = ast.parse(source)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return
    lines: list[str | None] = list(source.split("\n"))
    prose = []
    for node in _docstrings(module):
        prose.append(inspect.cleandoc(str(node.value)))
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        alone = not (lines[first] or "")[: node.col_offset].strip()
        if alone:
            lines[first:last] = [None] * (last - first)
    code = "\n".join(line for line in lines if line is not None)
    for text in ("\n\n".join(prose), code):
        if len(text) >= _SHORTEST:
            yield text[:_LONGEST]


def _docstrings(module: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(module):
        if isinstance(node, _Documented) and node.body:
            match node.body[0]:
                case ast.Expr(value=ast.Constant(value=str()) as docstring):
                    yield docstring
