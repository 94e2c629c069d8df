"""Named configurations: an ordered list of wildcard entries, later ones win.

To add one, add a line to `CONFIGS`. The quantizers of MLA (`kv_c`, `k_pe`) are named outright,
since a pattern such as `*[kv]_bmm_quantizer` does not match them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from kvq.errors import InputError
from kvq.formats import E4M3
from kvq.quantizers import QuantizerConfig

KV = ("*k_bmm_quantizer", "*v_bmm_quantizer", "*kv_c_bmm_quantizer", "*k_pe_bmm_quantizer")
Q = ("*q_bmm_quantizer",)


@dataclass(frozen=True)
class QuantizerEntry:
    """Quantizers whose name matches any pattern get `config`; None disables them."""

    patterns: tuple[str, ...]
    config: QuantizerConfig | None

    def matches(self, name: str) -> bool:
        """Whether a full quantizer name matches one of the patterns."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def to_json(self) -> dict[str, Any]:
        """Return the plain form stored in a calibration's config.json."""
        config = None if self.config is None else self.config.to_json()
        return {"quantizer_name": list(self.patterns), "config": config}


QuantConfig = tuple[QuantizerEntry, ...]


def _kv(
    format: str, granularity: str = "tensor", constant_amax: float | None = None
) -> QuantConfig:
    return (QuantizerEntry(KV, QuantizerConfig(format, granularity, constant_amax)),)


def _attention(format: str, granularity: str = "tensor") -> QuantConfig:
    return (QuantizerEntry(KV + Q, QuantizerConfig(format, granularity)),)


CONFIGS: dict[str, QuantConfig] = {
    "FP8_KV_CFG": _kv("fp8_e4m3"),
    "FP8_PER_HEAD_KV_CFG": _kv("fp8_e4m3", "head"),
    "FP8_CAST_KV_CFG": _kv("fp8_e4m3", constant_amax=E4M3.max),
    "NVFP4_KV_CFG": _kv("nvfp4"),
    "NVFP4_CAST_KV_CFG": _kv("nvfp4", constant_amax=E4M3.max),
    "INT8_KV_CFG": _kv("int8"),
    "INT8_PER_HEAD_KV_CFG": _kv("int8", "head"),
    "FP8_ATTN_CFG": _attention("fp8_e4m3"),
    "FP8_PER_HEAD_ATTN_CFG": _attention("fp8_e4m3", "head"),
}


def get_config(name: str) -> QuantConfig:
    """Return a named configuration.

    Raises:
        InputError: unknown name; the message lists all names.
    """
    if name not in CONFIGS:
        near = get_close_matches(name.upper(), CONFIGS, n=1)
        raise InputError(
            f"unknown configuration `{name}`; known: {', '.join(CONFIGS)}",
            code="config.unknown",
            hint=f"did you mean `{near[0]}`?" if near else None,
        )
    return CONFIGS[name]


def with_granularity(entries: QuantConfig, granularity: str) -> QuantConfig:
    """Return the same entries with another granularity."""
    return tuple(
        replace(entry, config=entry.config and replace(entry.config, granularity=granularity))
        for entry in entries
    )


def resolve(entries: QuantConfig, names: Iterable[str]) -> dict[str, QuantizerConfig | None]:
    """Map each quantizer name to its configuration; what no entry matches is disabled.

    Raises:
        InputError: an entry matches no quantizer of the model.
    """
    resolved: dict[str, QuantizerConfig | None] = dict.fromkeys(names)
    for entry in entries:
        matched = [name for name in resolved if entry.matches(name)]
        if not matched:
            raise InputError(
                f"the entry {', '.join(f'`{p}`' for p in entry.patterns)} matches none of the "
                f"model's {len(resolved)} quantizers",
                code="config.no_match",
                hint=f"quantizers are named like `{next(iter(resolved), '(none)')}`",
            )
        resolved.update(dict.fromkeys(matched, entry.config))
    return resolved
