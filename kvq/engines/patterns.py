"""Patterns that come from a checkpoint: a hostile one must not keep a reader busy.

Python's `re` backtracks, and has no limit. So what a pattern can cost is bounded from its text
before it runs, and what cannot be bounded is refused.
"""

import re
import warnings
from dataclasses import dataclass

MAX_LENGTH = 500  # characters; patterns of layers that are to be left out have about 20
MAX_STEPS = 10**9  # some 10 s if each of them were taken; real checkpoints stay far below
_QUANTIFIER = re.compile(r"[*+?]|\{\d*,?\d*\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_COMMENT = re.compile(r"\(\?(#|[a-zA-Z]*x)")  # a parenthesis in a comment opens nothing


class PatternError(Exception):
    """A pattern that is malformed, or whose cost has no useful bound; the text says why."""


@dataclass
class _Group:
    branches: int = 1
    has_choice: bool = False  # more than one way to match the same text


def cost(pattern: str) -> tuple[int, int]:
    """Return (factor, power): matching a name of n characters takes up to factor * n**power steps.

    Each repetition can start and end anywhere, each option and each branch doubles the ways. A
    repetition of something that has repetitions, options or branches itself has no such bound.

    Raises:
        PatternError: too long, or a repetition inside of one.
    """
    if len(pattern) > MAX_LENGTH:
        raise PatternError(f"a pattern of {len(pattern)} characters")
    if _COMMENT.search(pattern):
        raise PatternError(f"comments in `{pattern}`")
    factor, power, position = 1, 0, 0
    groups, closed = [_Group()], _Group()
    while position < len(pattern):
        character, step = pattern[position], 1
        is_atom = True
        if character == "\\":
            step = 2
            power += pattern[position + 1 : position + 2].isdigit()  # as long as its group was
        elif character == "[" and (found := _CLASS.match(pattern, position)):
            step = len(found[0])
        elif character == "(":
            groups.append(_Group())
            step = 2 if pattern.startswith("(?", position) else 1
            power += pattern.startswith("(?P=", position)
            is_atom = False
        elif character == "|":
            groups[-1].branches += 1
            is_atom = False
        elif character == ")" and len(groups) > 1:
            closed = groups.pop()
            closed.has_choice |= closed.branches > 1
            factor *= closed.branches
        quantifier = _QUANTIFIER.match(pattern, position + step) if is_atom else None
        inside = closed if character == ")" else _Group()
        if quantifier:
            step += len(quantifier[0]) + pattern.startswith(("?", "+"), quantifier.end())
            if quantifier[0] == "?":
                factor *= 2
            elif inside.has_choice:
                raise PatternError(f"a repetition inside of a repetition in `{pattern}`")
            else:
                power += 1
        groups[-1].has_choice |= quantifier is not None or inside.has_choice
        position += step
    return factor * groups[0].branches * max(1, len(pattern)), power


class Patterns:
    """Matches names against several patterns, from the start of the name, at a bounded cost."""

    def __init__(self, patterns: list[str]) -> None:
        """Compile the patterns.

        Raises:
            PatternError: one is malformed, or has no bound.
        """
        self._costs = [cost(pattern) for pattern in patterns]
        self._steps = 0
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of sets that look nested
                self._patterns = [re.compile(pattern) for pattern in patterns]
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(str(error)) from error

    def match(self, name: str) -> bool:
        """Whether any pattern matches the start of a name.

        Raises:
            PatternError: all names so far may have cost too much.
        """
        self._steps += sum(factor * len(name) ** power for factor, power in self._costs)
        if self._steps > MAX_STEPS:
            raise PatternError("patterns that may take too long for so many names")
        return any(pattern.match(name) for pattern in self._patterns)
