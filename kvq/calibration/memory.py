"""How much memory there is, and how much a model's weights take of it."""

from pathlib import Path

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

    What compressed-tensors packs is unpacked before it runs, to 16 bits a weight.
    """
    bits, unpacked = 0, _unpacking(view)
    for info in view.tensors.values():
        stored = BITS[info.dtype]
        if unpacked and info.name.endswith(_PACKED) and info.dtype in _PACKED_DTYPES:
            bits += int(info.numel * stored * unpacked)
            continue
        is_float = info.dtype in ("F32", "F16", "BF16", "F64")
        bits += info.numel * (_WIDTHS.get(dtype, stored) if is_float else stored)
    return bits // 8


_PACKED = (".weight_packed", ".weight")
_PACKED_DTYPES = ("I32", "U8", "I8", "F8_E4M3")


def _unpacking(view: CheckpointView) -> float | None:
    """Return how much larger unpacked weights are, if transformers unpacks them."""
    if (view.quantization_config or {}).get("quant_method") != "compressed-tensors":
        return None
    weights = [group.get("weights") or {} for group in view.config_groups.values()]
    return 16 / min((count for w in weights if (count := w.get("num_bits"))), default=16)


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
