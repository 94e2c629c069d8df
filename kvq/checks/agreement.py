"""What several engines' readings of one checkpoint say of each other."""

from collections.abc import Iterator, Sequence

from kvq.checks.findings import Finding
from kvq.engines.base import EngineReading

_SAME = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "nvfp4": "nvfp4", "int8": "int8"}


def agreement_findings(readings: Sequence[EngineReading]) -> Iterator[Finding]:
    """Yield where engines quantize the cache to different formats: scales are made for one."""
    chosen = {
        f"{reading.engine} {reading.version}": _SAME[reading.cache_dtype]
        for reading in readings
        if reading.error is None and reading.cache_dtype in _SAME
    }
    if len(set(chosen.values())) > 1:
        words = ", ".join(f"{engine} to {dtype}" for engine, dtype in chosen.items())
        yield Finding(
            "engine.disagree", "error",
            f"engines quantize this cache to different formats: {words}",
            expected="one format", found=", ".join(chosen.values()),
            fix="declare the same in config.json and hf_quant_config.json",
        )  # fmt: skip
