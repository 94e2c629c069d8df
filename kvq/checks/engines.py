"""What an engine's reading of a checkpoint means: every layer that it would not use as written."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.checks.findings import Finding
from kvq.engines.base import EngineReading, LayerReading, SideReading
from kvq.errors import CheckpointError


def engine_findings(
    reading: EngineReading, view: CheckpointView, *, constant: bool = False
) -> Iterator[Finding]:
    """Yield what the engine would do otherwise than the checkpoint's scales say.

    Args:
        reading: which number the engine uses for each layer, and where it comes from.
        view: the checkpoint that was read.
        constant: scales of 1.0 were asked for, and that is recorded.
    """
    engine = f"{reading.engine} {reading.version}"
    if reading.error is not None:
        yield Finding(
            "engine.load", "error", f"{engine} fails to load this checkpoint: {reading.error}",
            expected="a checkpoint that loads", found=reading.error, fix=_fix_of_load(reading),
        )  # fmt: skip
        return
    values = [x for layer in reading.layers for used in (layer.k, layer.v) if used.tensor
              for x in used.value or ()]  # fmt: skip
    if not constant and len(values) > 2 and set(values) == {1.0}:
        yield Finding(
            "engine.all_one", "error",
            f"all {len(values)} scales that {engine} reads are 1.0: this looks uncalibrated",
            expected="calibrated values", found="1.0",
        )  # fmt: skip
    for layer in reading.layers:
        for side, used in (("k", layer.k), ("v", layer.v)):
            yield from _side_findings(engine, layer, side, used, view)
        yield from _query_findings(engine, layer, view)
        if not _quantized(layer.cache_dtype):
            yield Finding(
                "engine.unquantized", "error",
                f"{engine} uses no scales for this layer's cache (`{layer.cache_dtype}`)",
                layer.layer_idx, layer.k.tensor or layer.v.tensor,
                expected="a cache with scales of the checkpoint", found=str(layer.cache_dtype),
            )  # fmt: skip


def _fix_of_load(reading: EngineReading) -> str | None:
    if reading.options.kv_cache_dtype == "fp8_e5m2":
        return "--kv-cache-dtype fp8_e4m3, which the scales are for; or a checkpoint without them"
    return None


def _quantized(cache_dtype: str | None) -> bool:
    plain = ("auto", "bfloat16", "float16", "float32")
    return cache_dtype not in plain and not str(cache_dtype).endswith("per_token_head")


def _side_findings(
    engine: str, layer: LayerReading, side: str, used: SideReading, view: CheckpointView
) -> Iterator[Finding]:
    if used.value is None:
        garbage = used.reason.startswith("uninitialised")
        yield Finding(
            "engine.unknown", "error" if garbage else "warning",
            f"what {engine} uses for {side} is not known: {used.reason}", layer.layer_idx,
            expected="a known value", found="unknown",
        )  # fmt: skip
        return
    shown = ", ".join(f"{value:g}" for value in used.value)
    if used.tensor is None:
        if _quantized(layer.cache_dtype):
            yield Finding(
                "engine.default", "error", f"{engine} uses {side} {shown}: {used.reason}",
                layer.layer_idx, expected="a scale of the checkpoint", found=shown,
            )  # fmt: skip
        return
    yield from _value_findings(engine, layer, side, used, view)


def _value_findings(
    engine: str, layer: LayerReading, side: str, used: SideReading, view: CheckpointView
) -> Iterator[Finding]:
    """Yield a value that is not the one of its tensor."""
    assert used.tensor is not None
    assert used.value is not None
    shown = ", ".join(f"{value:g}" for value in used.value)
    try:
        stored = view.read(used.tensor).astype(np.float64).ravel()
    except (CheckpointError, KeyError):
        return  # unreadable, or hidden by the index: another rule says so
    value = np.array(used.value, np.float64)
    if "doubled for gfx" in used.reason:
        value /= 2  # there a code means half the number, so the product is as written
    same = value.size == stored.size and np.array_equal(value, stored, equal_nan=True)
    copied = used.tensor.endswith(".v_scale" if side == "k" else ".k_scale")
    if copied or not same:
        rounded = not copied and value.size == stored.size and _rounded(value, stored)
        severity = "warning" if rounded else "error"
        yield Finding(
            "engine.value", severity, f"{engine} uses {side} {shown}: {used.reason}",
            layer.layer_idx, used.tensor, expected=", ".join(f"{x:g}" for x in stored), found=shown,
        )  # fmt: skip


def _query_findings(engine: str, layer: LayerReading, view: CheckpointView) -> Iterator[Finding]:
    """Yield what becomes of a query's scale, where there is one."""
    used, paths = layer.q, (layer.attention, f"{layer.attention}.attn", f"{layer.attention}.q_proj")
    if used is None or used.value is None:
        return
    lost = [f"{path}.q_scale" for path in paths if f"{path}.q_scale" in view.tensors]
    if used.tensor is None and lost:
        yield Finding(
            "engine.query", "error", f"{engine} does not read `{lost[0]}`: {used.reason}",
            layer.layer_idx, lost[0], expected="a scale that is read", found="1.0",
        )  # fmt: skip
    elif used.tensor is not None and "share a KV head" not in used.reason:
        yield from _value_findings(engine, layer, "q", used, view)


def _rounded(value: np.ndarray, stored: np.ndarray) -> bool:
    """Whether a value is the stored one in a 16-bit or 32-bit float."""
    with np.errstate(all="ignore"):
        return any(
            np.array_equal(value, stored.astype(np.float32).astype(dtype).astype(np.float64))
            for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)
        )
