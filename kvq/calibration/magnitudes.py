"""How magnitudes are distributed: counts by bit pattern, which add up in any order."""

import numpy as np
import torch
from torch import Tensor

# A magnitude's bin is the exponent and the first 4 bits of the mantissa of its float32: bins are
# 1/16 of a power of two wide, so that the middle of one is at most 3.1 % off what it counts.
BINS = 1 << 12
_SHIFT = 31 - 12
_INFINITY = 0xFF << 4  # its bin counts NaN too, whose other bits are not the same on every device
TOKENS = 32  # counted of a sequence, evenly spaced: so many, and up to twice as many


def sampled(seq_len: int) -> slice:
    """Return the positions of a sequence that are counted: a function of its length alone.

    A short one is counted whole; of a longer one the first position, where attention sinks sit,
    is left out.
    """
    stride = max(1, seq_len // TOKENS)
    return slice(stride // 2, None, stride)


def count_magnitudes(states: Tensor) -> Tensor:
    """Return how many magnitudes of the sampled tokens fall into each bin.

    Args:
        states: [batch, heads, seq_len, head_size], any strides.

    Returns:
        integers [BINS] on the device of the states, which is not waited for.
    """
    sample = states[:, :, sampled(states.shape[2])].float()
    bins = (sample.view(torch.int32) >> _SHIFT) & (BINS - 1)  # the mask takes the sign away
    bins.clamp_(max=_INFINITY)
    if bins.device.type == "cpu":
        return torch.bincount(bins.flatten(), minlength=BINS)
    return torch.histc(bins, BINS, 0, BINS)  # bincount looks at the largest first, and waits


def percentile_99_9(counts: np.ndarray) -> float:
    """Return the magnitude that 99.9 % do not exceed: the middle of the bin that holds it.

    Args:
        counts: integers [BINS], not all 0.
    """
    up_to = np.cumsum(counts, dtype=np.int64)
    rank = -(-999 * int(up_to[-1]) // 1000)  # rounded up
    found = int(np.searchsorted(up_to, rank))
    low, high = (np.array([found, found + 1], np.uint32) << _SHIFT).view(np.float32).tolist()
    return float(low + high) / 2 if low else 0.0
