"""What a rule finds, and the report of all of them."""

from dataclasses import asdict, dataclass
from typing import Any

from kvq.engines.base import EngineReading
from kvq.engines.document import to_document
from kvq.errors import CheckpointError


@dataclass(frozen=True)
class Finding:
    """One thing wrong (`error`) or doubtful (`warning`); `code` is stable, the text is not.

    `fix` is the smallest change that would make it right, where there is one.
    """

    code: str
    severity: str
    message: str
    layer_idx: int | None = None
    tensor: str | None = None
    file: str | None = None
    expected: str | None = None
    found: str | None = None
    fix: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plain form."""
        return asdict(self)


@dataclass(frozen=True)
class Report:
    """All findings of a verification, and how many checks ran."""

    findings: tuple[Finding, ...]
    checks: int
    layers: int
    readings: tuple[EngineReading, ...] = ()

    def __post_init__(self) -> None:
        if self.checks == 0:
            raise CheckpointError(
                "0 checks ran: the checkpoint has no layer that keeps keys and values",
                code="verify.no_checks",
            )

    def ok(self, *, strict: bool = False) -> bool:
        """Whether nothing is wrong; `strict` counts warnings too."""
        return not any(f.severity == "error" or strict for f in self.findings)

    def to_json(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the document of `verify --report json`."""
        return {
            "schema": 1,
            "command": "verify",
            "ok": self.ok(strict=strict),
            "checks": self.checks,
            "layers": self.layers,
            "findings": [finding.to_json() for finding in self.findings],
            "engines": [to_document(reading) for reading in self.readings],
        }


def shortened(values: list[float] | None) -> str:
    """Return numbers as a finding shows them."""
    if values is None:
        return "none"
    return repr(values[0]) if len(values) == 1 else repr(values)
