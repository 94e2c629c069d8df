"""Where kernels run: on CUDA, or on the CPU if Triton's interpreter is on, which is for tests."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
from torch import Tensor

from kvq.kernels.checks import require

# read once, as `triton.jit` does when it decorates a kernel
INTERPRETED = bool(triton.knobs.runtime.interpret)


def check_device(x: Tensor, name: str) -> None:
    """Refuse a tensor that kernels cannot reach (`kernel.device`)."""
    wanted = "cpu" if INTERPRETED else "cuda"
    require(x.device.type == wanted, f"{name} is on {x.device}, expected {wanted}", "device")


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on the device of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; the interpreter runs one program at a time."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it runs, to wait for it where it must.

    CUDA's programmatic dependent launch, from compute capability 9.0 on.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
