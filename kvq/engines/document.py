"""An engine's reading as JSON: numbers that JSON does not have are text."""

import math
from dataclasses import asdict
from typing import Any

from kvq.engines.base import EngineReading


def to_document(reading: EngineReading) -> dict[str, Any]:
    """Return the plain form of a reading."""
    plain: dict[str, Any] = _plain(asdict(reading))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
