"""What kvq says of a checkpoint on the command line, and checkpoints that engines could load."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines.variant import Variant
from tests.engines.variants import VARIANTS, write


@dataclass(frozen=True)
class Answer:
    """The exit code of `verify`, and its findings."""

    code: int
    findings: list[dict[str, Any]]

    @property
    def codes(self) -> set[str]:
        return {finding["code"] for finding in self.findings}

    @property
    def errors(self) -> set[str]:
        return {finding["code"] for finding in self.findings if finding["severity"] == "error"}

    def one(self, code: str) -> Mapping[str, Any]:
        """The first finding with this code; the lowest layer's where layers have it."""
        return next(finding for finding in self.findings if finding["code"] == code)


@pytest.fixture
def verify(kvq) -> Callable[..., Answer]:
    """Run `kvq verify --json`, with an engine or none."""

    def call(folder: Path, engine: str | None = None, *options: object) -> Answer:
        asked = ["--engine", engine] if engine else []
        result = kvq("verify", folder, *asked, *options, "--json")
        assert result.code in (0, 1), result.out
        return Answer(result.code, result.json["findings"])

    return call


@pytest.fixture
def reading(kvq) -> Callable[..., dict[str, Any]]:
    """Run `kvq inspect --engine … --json` for one engine."""

    def call(folder: Path, engine: str, *options: object) -> dict[str, Any]:
        result = kvq("inspect", folder, "--engine", engine, *options, "--json")
        assert result.code == 0, result.out
        return result.json["engines"][0]

    return call


@pytest.fixture
def variant(tmp_path, monkeypatch) -> Callable[..., Path]:
    """Write a checkpoint with whole weights; arguments are those of `Variant`."""
    made: list[Path] = []

    def call(*arguments: Any, **options: Any) -> Path:
        made.append(tmp_path / f"variant-{len(made)}")
        monkeypatch.setitem(VARIANTS, "report", Variant(*arguments, **options))
        write("report", made[-1])
        return made[-1]

    return call
