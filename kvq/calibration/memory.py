"""How much memory there is, and how much a model's weights take of it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvq.checkpoint import CheckpointView
from kvq.tensorfile import BITS

FULL = 0.9  # a model fits if its weights take no more than this part of the available memory
_WIDTHS = {"float32": 32, "bfloat16": 16, "float16": 16}


def available_bytes(device: torch.device) -> int:
    """Return how many bytes a device, or this process, may still take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [_available_of_machine(), _available_of_group()]
    return min((size for size in found if size is not None), default=1 << 62)


def weight_bytes(view: CheckpointView, dtype: str) -> int:
    """Return the size of a checkpoint's tensors, floats as `dtype`, or as stored with `auto`.

    What compressed-tensors packs is unpacked before it runs, to the dtype that the model runs in;
    what `fp8` has quantized, where transformers finds no device that multiplies FP8.
    """
    bits = 0
    method = (view.quantization_config or {}).get("quant_method")
    unpacks = method == "compressed-tensors"
    multiplies = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    widens = method == "fp8" and not multiplies
    groups = [group for group in view.config_groups.values() if _num_bits(group)]
    width = _WIDTHS.get(_wanted(view, dtype), 16)
    for info in view.tensors.values():
        stored = BITS[info.dtype]
        module, _, leaf = info.name.rpartition(".")
        if unpacks and leaf in _PACKED and info.dtype in _PACKED_DTYPES:
            bits += info.numel * stored // _packed_bits(groups, module) * width
            continue
        if widens and info.dtype == "F8_E4M3":
            stored = width
        is_float = info.dtype in ("F32", "F16", "BF16", "F64")
        bits += info.numel * (_WIDTHS.get(dtype, stored) if is_float else stored)
    return bits // 8


_PACKED = ("weight_packed", "weight")
_PACKED_DTYPES = ("I32", "U8", "I8", "F8_E4M3")


def _wanted(view: CheckpointView, dtype: str) -> str:
    """Return the dtype that a model is loaded in; of `auto`, the one that its config says."""
    text = view.config.get("text_config")
    configs = [view.config, text if isinstance(text, dict) else {}]
    said = [config.get(key) for config in configs for key in ("dtype", "torch_dtype")]
    return dtype if dtype != "auto" else next((str(one) for one in said if one), dtype)


def _packed_bits(groups: Sequence[Mapping[str, Any]], module: str) -> int:
    """Return the bits of a weight of a module: of the group that names it, else the fewest."""
    named = [group for group in groups if _names(group, module)]
    return min((_num_bits(group) for group in named or groups), default=16)


def _num_bits(group: Mapping[str, Any]) -> int:
    weights = group.get("weights")
    found = weights.get("num_bits") if isinstance(weights, dict) else None
    return found if isinstance(found, int) and found > 0 else 0


def _names(group: Mapping[str, Any], module: str) -> bool:
    """Whether a target of a group is a module's name, or an expression (`re:`) that matches it."""
    targets = group.get("targets")
    for target in targets if isinstance(targets, list) else []:
        try:
            if target == module or (str(target).startswith("re:") and re.match(target[3:], module)):
                return True
        except re.error:
            continue
    return False


def _available_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), None)


def _available_of_group(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what is left of the control group's limit, if it has one (version 2)."""
    try:
        limit = (root / "memory.max").read_text().strip()
        if not limit.isdigit():
            return None
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
