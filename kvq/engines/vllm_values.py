"""What vLLM makes of the numbers: rounding, shapes, missing and odd values.

Sources, in vLLM 0.32: `model_executor/layers/quantization/kv_cache.py` (BaseKVCacheMethod),
`compressed_tensors/compressed_tensors.py` (CompressedTensorsKVCacheMethod), `config/model.py`
(_resolve_auto_dtype), `transformers_utils/model_arch_config_convertor.py` (get_torch_dtype).
"""

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from kvq.checkpoint import CheckpointView
from kvq.engines.base import SideReading
from kvq.engines.vllm_config import LoadError
from kvq.geometry import text_config
from kvq.tensorfile import TensorInfo, read_tensor

BFLOAT16, FLOAT16 = "bfloat16", "float16"
_NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")  # model types
_DTYPES: dict[str, Any] = {BFLOAT16: ml_dtypes.bfloat16, FLOAT16: np.float16}
# dtype in a safetensors header → bits of exponent and mantissa (integers: none and all)
_BITS = {
    "F64": (11, 52), "F32": (8, 23), "F16": (5, 10), "BF16": (8, 7), "F8_E4M3": (4, 3),
    "F8_E5M2": (5, 2), "U8": (0, 8), "I8": (0, 7), "I16": (0, 15), "I32": (0, 31), "I64": (0, 63),
    "BOOL": (0, 1),
}  # fmt: skip
NO_QUERY = "default 1.0: no tensor is read; matters where the backend quantizes queries"
# ROCm GPUs whose FP8 has no negative zero: there a code means half the number.
FNUZ_PLATFORMS = ("gfx940", "gfx941", "gfx942")


def model_dtype(view: CheckpointView) -> str | None:
    """Return the dtype that vLLM runs the model in; None where its choice is not determined."""
    text = text_config(view.config)
    for config in (
        view.config,
        text,
        *(_sub(view, k) for k in ("vision_config", "encoder_config")),
    ):
        declared = config.get("dtype") or config.get("torch_dtype")
        if declared is not None:
            break
    else:
        declared = _common_dtype(view)
        if declared is None:
            return None
    is_half = str(declared).removeprefix("torch.") in (FLOAT16, "half")
    return FLOAT16 if is_half and view.config.get("model_type") not in _NO_FLOAT16 else BFLOAT16


def _sub(view: CheckpointView, key: str) -> dict[str, Any]:
    found = view.config.get(key)
    return found if isinstance(found, dict) else {}


def _common_dtype(view: CheckpointView) -> str | None:
    """Return `float16` if most dtypes of the file fit in it, another word if not, None in a tie."""
    found = {info.dtype for file in view.files.values() for info in file.tensors.values()}
    known = [dtype for dtype in sorted(found) if dtype in _BITS]
    scores = {dtype: sum(_fits(other, dtype) for other in known) for dtype in known}
    best = [dtype for dtype in known if scores[dtype] == max(scores.values())]
    if best == ["F16"]:
        return FLOAT16
    return "other" if "F16" not in best else None


def _fits(small: str, large: str) -> bool:
    (exponent, mantissa), (to_exponent, to_mantissa) = _BITS[small], _BITS[large]
    if to_exponent == 0 and exponent:
        return False
    return exponent <= to_exponent and mantissa <= to_mantissa + (to_exponent > 0)


@dataclass(frozen=True)
class Heads:
    """Query and KV heads of the model as config.json has them, of one layer, and the GPUs."""

    total: int
    total_kv: int
    kv: int
    tp: int
    has_groups: bool


def load_base(info: TensorInfo, dtype: str | None) -> SideReading:
    """Return a scale as BaseKVCacheMethod's parameters take it: one number of the model's dtype.

    Raises:
        LoadError: not one number.
    """
    if info.numel != 1:
        raise LoadError(
            f"ValueError: KV-cache scale expects a scalar weight, got shape {info.shape}"
        )
    exact = float(read_tensor(info).ravel()[0])
    if dtype is None:
        reason = "rounded to the model's dtype, which config.json does not name"
        return SideReading(None, info.name, reason)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        value = float(np.float32(exact).astype(_DTYPES[dtype]))
    reason = "" if value == exact else f"rounded to {dtype}, the model's dtype"
    return SideReading((value,), info.name, reason)


def load_ct(info: TensorInfo, heads: Heads | None, side: str) -> SideReading:
    """Return a scale as the parameters of compressed-tensors take it, in float32.

    Raises:
        LoadError: a shape that vLLM does not take.
    """
    if heads is None:
        if info.numel != 1:
            shape = list(info.shape)
            raise LoadError(
                f"AssertionError: Attempted to load weight (torch.Size({shape})) into parameter "
                "(torch.Size([1]))"
            )
        return SideReading(_float32(info), info.name, "")
    if side == "q":
        return _query_per_head(info, heads)
    parts = [_head_slice(rank, info.numel, heads) for rank in range(heads.tp)]
    return _per_rank(_float32(info), info, heads, parts)


def _per_rank(
    values: tuple[float, ...], info: TensorInfo, heads: Heads, parts: list[tuple[int, int]]
) -> SideReading:
    """Return the values that the KV heads of all ranks get from a tensor's numbers."""
    found: list[float] = []
    for start, length in dict.fromkeys(parts):
        one = values[start : start + length]
        if len(one) not in (1, heads.kv):
            raise LoadError(
                f"RuntimeError: The size of tensor a ({heads.kv}) must match the size of tensor b "
                f"({len(one)}) at non-singleton dimension 0"
            )
        found += one * (heads.kv // len(one))
    total = heads.kv * len(dict.fromkeys(parts))
    reason = ""
    if len(values) == 1 and total > 1:
        reason = f"one number, used for all {total} KV heads"
    elif len(values) > total:
        reason = f"the first {total} of {len(values)} numbers"
    return SideReading(tuple(found), info.name, reason)


def _float32(info: TensorInfo) -> tuple[float, ...]:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return tuple(float(v) for v in read_tensor(info).ravel().astype(np.float32))


def _query_per_head(info: TensorInfo, heads: Heads) -> SideReading:
    """Return the scales of queries: per KV head, the largest of the query heads that share it."""
    if not heads.has_groups:
        raise LoadError("TypeError: unsupported operand type(s) for //: 'NoneType' and 'NoneType'")
    group = heads.total // heads.total_kv
    if info.numel % group:
        raise LoadError(
            f"RuntimeError: shape '[-1, {group}]' is invalid for input of size {info.numel}"
        )
    values = np.array(_float32(info), np.float32).reshape(-1, group).max(axis=1)
    parts = [_head_slice(rank, len(values), heads) for rank in range(heads.tp)]
    reading = _per_rank(tuple(map(float, values)), info, heads, parts)
    if group == 1:
        return reading
    return with_reason(reading, f"the largest of each {group} query heads that share a KV head")


def _head_slice(rank: int, numel: int, heads: Heads) -> tuple[int, int]:
    """Return where the heads of one rank start in the tensor, and how many there are."""
    if heads.has_groups and heads.kv * heads.tp == heads.total_kv:
        return rank * heads.kv, heads.kv
    if heads.kv != 1:
        raise LoadError("AssertionError: ")
    if not heads.has_groups:
        raise LoadError("TypeError: unsupported operand type(s) for //: 'int' and 'NoneType'")
    replicas = heads.tp // heads.total_kv
    if replicas == 0:
        raise LoadError("ZeroDivisionError: integer division or modulo by zero")
    return rank // replicas, 1


def process_base(
    k: SideReading | None, v: SideReading | None, cache_dtype: str, platform: str
) -> tuple[SideReading, SideReading]:
    """Return what BaseKVCacheMethod puts to use after all tensors are there.

    Raises:
        LoadError: a combination of values that it refuses.
    """
    if cache_dtype.endswith("per_token_head"):
        return _both(f"1.0: `{cache_dtype}` computes a scale for each token and head", k, v)
    if not cache_dtype.startswith(("fp8", "nvfp4")):
        return _both("1.0: the cache is not quantized", k, v)
    if k is None and v is None:
        return default(""), default("")
    k, v = k or _MISSING, v or _MISSING
    if k.value is None or v.value is None:
        return k, v
    k_value, v_value = k.value[0], v.value[0]
    if k_value > 0 and v_value > 0:
        return _doubled(k, platform), _doubled(v, platform)
    if k_value < 0 and v_value < 0:
        return _both("default 1.0: negative, which stands for no scale", k, v)
    if not k_value > 0:
        raise LoadError("AssertionError: ")
    what = "no v scale" if v is _MISSING else f"the v scale is {v_value}, not above zero"
    v = SideReading(k.value, k.tensor, f"copied from k: {what}")
    return _doubled(k, platform), _doubled(v, platform)


def process_query(q: SideReading | None, cache_dtype: str, platform: str) -> SideReading:
    """Return the scale of queries that BaseKVCacheMethod puts to use."""
    if cache_dtype.endswith("per_token_head"):
        return default(f"1.0: `{cache_dtype}` computes its scales", q.tensor if q else None)
    if q is None:
        return default(NO_QUERY)
    if q.value is not None and not q.value[0] > 0:
        return default("default 1.0: not above zero, which stands for no scale", q.tensor)
    return _doubled(q, platform)


_MISSING = SideReading((-1.0,), None, "")


def default(reason: str, tensor: str | None = None) -> SideReading:
    """Return the 1.0 that a layer starts with."""
    return SideReading((1.0,), tensor, reason)


def _both(
    reason: str, k: SideReading | None, v: SideReading | None
) -> tuple[SideReading, SideReading]:
    k, v = (
        default(reason) if side is None or side.tensor is None else default(reason, side.tensor)
        for side in (k, v)
    )
    return k, v


def _doubled(side: SideReading, platform: str) -> SideReading:
    if platform not in FNUZ_PLATFORMS or side.value is None:
        return side
    doubled = replace(side, value=tuple(2 * value for value in side.value))
    return with_reason(doubled, f"doubled for {platform}")


def with_reason(side: SideReading, reason: str) -> SideReading:
    """Return a side with one reason more."""
    return replace(side, reason="; ".join(part for part in (side.reason, reason) if part))


def unknown(reason: str) -> SideReading:
    """Return a side of which nothing is known."""
    return SideReading(None, None, reason)
