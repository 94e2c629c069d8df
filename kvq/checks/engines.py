"""What an engine's reading of a checkpoint means: every layer that it would not use as written."""

from collections.abc import Collection, Iterator

import ml_dtypes
import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.checks.engine_fixes import (
    EXPORT,
    default_fix,
    load_fix,
    unknown_fix,
    unquantized_fix,
    value_fix,
)
from kvq.checks.findings import Finding
from kvq.dialects.sglang_json import FILE_NAME, is_sglang_json
from kvq.engines.base import MISAPPLIED, EngineReading, LayerReading, SideReading
from kvq.errors import CheckpointError, KvqError
from kvq.files import read_json


def engine_findings(
    reading: EngineReading,
    view: CheckpointView,
    *,
    constant: bool = False,
    skipped: Collection[int] = (),
) -> Iterator[Finding]:
    """Yield what the engine would do otherwise than the checkpoint's scales say.

    Args:
        reading: which number the engine uses for each layer, and where it comes from.
        view: the checkpoint that was read.
        constant: scales of 1.0 were asked for, and that is recorded.
        skipped: layers that are recorded as to be left unquantized.
    """
    engine = f"{reading.engine} {reading.version}"
    if reading.error is not None:
        yield Finding(
            "engine.load", "error", f"{engine} fails to load this checkpoint: {reading.error}",
            expected="a checkpoint that loads", found=reading.error, fix=load_fix(reading),
        )  # fmt: skip
        return
    values = [x for layer in reading.layers if _quantized(layer.cache_dtype)
              for used in (layer.k, layer.v) if used.tensor for x in used.value or ()]  # fmt: skip
    if not constant and len(values) > 2 and set(values) == {1.0}:
        yield Finding(
            "engine.all_one", "error",
            f"all {len(values)} scales that {engine} reads are 1.0: this looks uncalibrated",
            expected="calibrated values", found="1.0", fix=EXPORT,
        )  # fmt: skip
    for layer in reading.layers:
        yield from _layer_findings(reading, layer, view, skipped)
    if reading.engine == "sglang":
        yield from _scales_json_findings(reading, view)


def _scales_json_findings(reading: EngineReading, view: CheckpointView) -> Iterator[Finding]:
    """Yield a file for SGLang's option with numbers for more or fewer GPUs than there are."""
    path = view.root / FILE_NAME
    try:
        document = read_json(path) if path.is_file() else {}
    except KvqError:
        return  # another rule says so
    ranks = document["kv_cache"]["scaling_factor"] if is_sglang_json(document) else None
    if isinstance(ranks, dict) and len(ranks) != reading.options.tp:
        yield Finding(
            "engine.scales_json", "error",
            f"`{FILE_NAME}` has numbers for {len(ranks)} GPUs, and there are "
            f"{reading.options.tp}: {reading.engine} {reading.version} uses 1.0 everywhere",
            file=FILE_NAME, expected=str(reading.options.tp), found=str(len(ranks)),
            fix=f"the same numbers under ranks 0 to {reading.options.tp - 1}",
        )  # fmt: skip


def _layer_findings(
    reading: EngineReading, layer: LayerReading, view: CheckpointView, skipped: Collection[int]
) -> Iterator[Finding]:
    engine = f"{reading.engine} {reading.version}"
    quantized = _quantized(layer.cache_dtype)
    for side, used in (("k", layer.k), ("v", layer.v)):
        if quantized or used.value is None:
            yield from _side_findings(reading, layer, side, used, view)
    yield from _query_findings(reading, layer, view)
    yield from _zero_point_findings(reading, layer, view)
    tensor = layer.k.tensor or layer.v.tensor
    if not quantized and layer.layer_idx not in skipped:
        asked = reading.options.skip_layers and _quantized(reading.cache_dtype)
        yield Finding(
            "engine.unquantized", "warning" if asked else "error",
            f"{engine} uses no scales for this layer's cache (`{layer.cache_dtype}`)",
            layer.layer_idx, tensor,
            expected="a cache with scales of the checkpoint", found=str(layer.cache_dtype),
            fix=unquantized_fix(reading, layer),
        )  # fmt: skip
    if quantized and layer.layer_idx in skipped:
        yield Finding(
            "engine.skip_layers", "warning",
            f"this layer is recorded as one to leave unquantized, and {engine} quantizes it: no "
            "checkpoint can say that",
            layer.layer_idx, tensor, expected="an unquantized cache",
            found=str(layer.cache_dtype),
            fix=f"--kv-cache-dtype-skip-layers {','.join(str(x) for x in sorted(skipped))}"
            if reading.engine == "vllm" else "serve with vLLM, which has an option for that",
        )  # fmt: skip
    if layer.cache_dtype == "fp8_e5m2" and tensor:
        yield Finding(
            "engine.e5m2", "error",
            f"{engine} applies this layer's scales to E5M2, and they were made for E4M3",
            layer.layer_idx, tensor, expected="fp8_e4m3", found="fp8_e5m2",
            fix="serve with --kv-cache-dtype fp8_e4m3",
        )  # fmt: skip


def _zero_point_findings(
    reading: EngineReading, layer: LayerReading, view: CheckpointView
) -> Iterator[Finding]:
    """Yield zero points that mean something, and are not used: no engine subtracts them."""
    names = [f"{layer.attention}.{side}_zero_point" for side in "kvq"]
    names += [f"{layer.attention}.{side}_proj.{side}_bias" for side in "kv"]  # ModelOpt's
    for name in names:
        if name in view.tensors and np.any(_stored(name, view) != 0):
            yield Finding(
                "engine.zero_point", "error",
                f"{reading.engine} {reading.version} does not subtract `{name}`, which is not 0",
                layer.layer_idx, name, expected="0", found="another number",
                fix="calibrate symmetrically: `kvq calibrate`, then `kvq export`",
            )  # fmt: skip


def _stored(name: str, view: CheckpointView) -> np.ndarray:
    """Return the numbers of a tensor; none where they are unreadable, of which others speak."""
    try:
        return view.read(name).astype(np.float64).ravel()
    except (CheckpointError, KeyError):  # the latter where the index hides it
        return np.zeros(0)


def _quantized(cache_dtype: str | None) -> bool:
    plain = ("auto", "bf16", "bfloat16", "float16", "float32")
    return cache_dtype not in plain and not str(cache_dtype).endswith("per_token_head")


def _side_findings(
    reading: EngineReading, layer: LayerReading, side: str, used: SideReading, view: CheckpointView
) -> Iterator[Finding]:
    engine = f"{reading.engine} {reading.version}"
    if used.value is None and used.reason.startswith("dynamic"):
        yield Finding(
            "engine.dynamic", "error", f"{engine} does not use the {side} scale: {used.reason}",
            layer.layer_idx, expected="a scale of the checkpoint", found="a dynamic one",
            fix="`dynamic: false` in `kv_cache_scheme`",
        )  # fmt: skip
        return
    if used.value is None:
        garbage = used.reason.startswith("uninitialised")
        yield Finding(
            "engine.unknown", "error" if garbage else "warning",
            f"what {engine} uses for {side} is not known: {used.reason}", layer.layer_idx,
            expected="a known value", found="unknown", fix=unknown_fix(reading, garbage=garbage),
        )  # fmt: skip
        return
    shown = ", ".join(f"{value:g}" for value in used.value)
    if used.tensor is None:
        if _quantized(layer.cache_dtype):
            yield Finding(
                "engine.default", "error", f"{engine} uses {side} {shown}: {used.reason}",
                layer.layer_idx, expected="a scale of the checkpoint", found=shown,
                fix=default_fix(reading, layer, side, used),
            )  # fmt: skip
        return
    if MISAPPLIED in used.reason:
        yield Finding(
            "engine.misapplied", "error", f"{engine} uses {side} {shown}: {used.reason}",
            layer.layer_idx, used.tensor, expected="a scale of what is cached", found=shown,
            fix="`kvq export --strip`: this class caches what no calibration observed",
        )  # fmt: skip
    yield from _value_findings(reading, layer, side, used, view)


def _value_findings(
    reading: EngineReading, layer: LayerReading, side: str, used: SideReading, view: CheckpointView
) -> Iterator[Finding]:
    """Yield a value that is not the one of its tensor."""
    assert used.tensor is not None
    assert used.value is not None
    shown = ", ".join(f"{value:g}" for value in used.value)
    stored = _stored(used.tensor, view)
    if not stored.size:
        return
    value = np.array(used.value, np.float64)
    if "doubled for gfx" in used.reason:
        value /= 2  # there a code means half the number, so the product is as written
    same = value.size == stored.size and np.array_equal(value, stored, equal_nan=True)
    copied = used.tensor.endswith(".v_scale" if side == "k" else ".k_scale")
    if copied or not same:
        rounded = not copied and value.size == stored.size and _rounded(value, stored)
        severity = "warning" if rounded else "error"
        yield Finding(
            "engine.value", severity,
            f"{reading.engine} {reading.version} uses {side} {shown}: {used.reason}",
            layer.layer_idx, used.tensor, expected=", ".join(f"{x:g}" for x in stored), found=shown,
            fix=value_fix(reading, used, copied=copied, rounded=rounded),
        )  # fmt: skip


def _query_findings(
    reading: EngineReading, layer: LayerReading, view: CheckpointView
) -> Iterator[Finding]:
    """Yield what becomes of a query's scale, where there is one."""
    used, paths = layer.q, (layer.attention, f"{layer.attention}.attn", f"{layer.attention}.q_proj")
    if used is None or used.value is None:
        return
    lost = [f"{path}.q_scale" for path in paths if f"{path}.q_scale" in view.tensors]
    if used.tensor is None and lost:
        yield Finding(
            "engine.query", "error",
            f"{reading.engine} {reading.version} does not read `{lost[0]}`: {used.reason}",
            layer.layer_idx, lost[0], expected="a scale that is read", found="1.0",
            fix=f"name it `{layer.attention}.q_scale`, beside compressed-tensors",
        )  # fmt: skip
    elif used.tensor is not None and "share a KV head" not in used.reason:
        yield from _value_findings(reading, layer, "q", used, view)


def _rounded(value: np.ndarray, stored: np.ndarray) -> bool:
    """Whether a value is the stored one in a 16-bit or 32-bit float."""
    with np.errstate(all="ignore"):
        return any(
            np.array_equal(value, stored.astype(np.float32).astype(dtype).astype(np.float64))
            for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)
        )
