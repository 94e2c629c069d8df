"""A verification report as text: for people, for GitHub, and as JUnit's XML."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvq.checks.findings import Finding, Report
    from kvq.engines.base import EngineReading


@dataclass(frozen=True)
class _Group:
    """Findings that say the same of several layers, in their order."""

    findings: "list[Finding]"

    @property
    def layers(self) -> list[int]:
        return [one.layer_idx for one in self.findings if one.layer_idx is not None]

    @property
    def alike(self) -> bool:
        """Whether they say it in the same words, numbers included."""
        return len({_unplaced(one) for one in self.findings}) == 1


def lines(found: "Report", *, github: bool, strict: bool) -> Iterator[str]:
    """Yield one line for each kind of finding and each engine, and the verdict."""
    for group in _groups(found.findings):
        line = _line(group)
        yield _github(group.findings[0], line) if github else line
    errors = sum(f.severity == "error" for f in found.findings)
    warnings = len(found.findings) - errors
    for reading in found.readings:
        yield _reading_line(reading)
    verdict = "holds" if found.ok(strict=strict) else "does not hold"
    yield (
        f"{verdict}: {errors} errors, {warnings} warnings; "
        f"{found.checks} rules over {found.layers} layers"
    )


def _reading_line(reading: "EngineReading") -> str:
    used = sum(side.tensor is not None for layer in reading.layers for side in (layer.k, layer.v))
    return (
        f"{reading.engine} {reading.version}, {reading.options}: "
        f"cache {reading.cache_dtype or 'unknown'}, {used} of {2 * len(reading.layers)} scales "
        "from the checkpoint"
    )


def _groups(findings: "Iterable[Finding]") -> list[_Group]:
    """Return findings of which only layer, tensor and numbers differ together."""
    groups: dict[Finding, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_masked(finding), []).append(finding)
    return [_Group(group) for group in groups.values()]


_NUMBER = re.compile(r"(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?(?![\w])")
_INDEX = re.compile(r"(?<=[.-])\d+(?=[.`-])")  # in the name of a tensor or file
_NUMBERS = re.compile(r"#(, #)+")


def _masked(finding: "Finding") -> "Finding":
    """Return a finding without what tells layers apart."""

    def mask(text: str | None) -> str | None:
        if text is None:
            return None
        if finding.tensor:
            text = text.replace(finding.tensor, "#")
        return _NUMBERS.sub("#", _INDEX.sub("#", _NUMBER.sub("#", text)))

    return replace(
        _unplaced(finding), message=mask(finding.message) or "", file=mask(finding.file),
        expected=mask(finding.expected), found=mask(finding.found), fix=mask(finding.fix),
    )  # fmt: skip


def _unplaced(finding: "Finding") -> "Finding":
    return replace(finding, layer_idx=None, tensor=None)


def _line(group: _Group) -> str:
    """Return one line: all layers, and one of them in full where their numbers differ."""
    first, where = group.findings[0], _layers(group.layers)
    if group.alike:
        return _human(first, f"{where}: " if where else "")
    deviations = [_deviation(finding) for finding in group.findings]
    where = where or f"{len(group.findings)} times"
    if first.severity == "warning" and None not in deviations:
        largest = max(value for value in deviations if value is not None)
        first = group.findings[deviations.index(largest)]
        where += f", off by at most {100 * largest:.2g} %"
    several = len({*group.layers}) > 1
    place = f"{_layers([first.layer_idx])}: " if several and first.layer_idx is not None else ""
    others = len({finding.fix for finding in group.findings}) > 1
    return _human(first, f"{where}, e.g. {place}") + (", and so for the others" if others else "")


def _deviation(finding: "Finding") -> float | None:
    """Return how far the found numbers are from those expected, at most; None for other texts."""
    expected, found = (_floats(text) for text in (finding.expected, finding.found))
    if not expected or len(expected) != len(found) or not all(expected):
        return None
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def _floats(text: str | None) -> list[float]:
    try:
        return [float(part) for part in (text or "").strip("[]").split(",")]
    except ValueError:
        return []


def _layers(numbers: Sequence[int]) -> str:
    """Return `layer 3` or `layers 0-2, 7`, nothing for none."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number in (ranges[-1][1], ranges[-1][1] + 1):
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    many = len(shown) > 1 or "-" in "".join(shown)
    return f"layer{'s' if many else ''} {', '.join(shown)}" if shown else ""


def _human(finding: "Finding", where: str) -> str:
    detail = ""
    if finding.expected or finding.found:
        detail = f" (expected {finding.expected}, found {finding.found})"
    file = f" in {finding.file}" if finding.file else ""
    fix = f"; fix: {finding.fix}" if finding.fix else ""
    return f"{finding.severity} [{finding.code}] {where}{finding.message}{file}{detail}{fix}"


def _github(finding: "Finding", line: str) -> str:
    escaped = line.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{finding.severity} title={finding.code}::{escaped}"


def junit(found: "Report", *, strict: bool) -> str:
    """Return a test case for each finding; a warning is a failure under `strict` alone."""
    from xml.etree import ElementTree

    failures = sum(one.severity == "error" or strict for one in found.findings)
    suite = ElementTree.Element(
        "testsuite", name="kvq verify", tests=str(max(1, len(found.findings))),
        failures=str(failures),
    )  # fmt: skip
    for finding in found.findings:
        case = ElementTree.SubElement(
            suite, "testcase", classname=finding.code, name=finding.tensor or finding.code
        )
        line = _line(_Group([finding]))
        if finding.severity == "error" or strict:
            ElementTree.SubElement(case, "failure", message=line)
        else:
            ElementTree.SubElement(case, "system-out").text = line
    if not found.findings:
        ElementTree.SubElement(suite, "testcase", classname="kvq", name="verify")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)
