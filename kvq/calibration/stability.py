"""When a run may end early: the second half of what it has seen changed nothing."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from kvq.calibration.amax import Observer
from kvq.calibration.distributed import Ranks, first_maxima
from kvq.errors import CalibrationError, first_line

PARTS = 16  # a plan has so many boundaries, counted from 0
FIRST_PART = 4  # no run ends before it
LEAST_BATCHES = 8  # nor after fewer


def boundaries(tokens: Sequence[int], min_tokens: int) -> tuple[int, ...]:
    """Return after how many batches of a plan a run may end: each 1/16 of it, from 1/4 on.

    Args:
        tokens: how many each batch of the plan has.
        min_tokens: fewer are never enough.
    """
    seen = list(accumulate(tokens, initial=0))
    parts = {len(tokens) * part // PARTS for part in range(FIRST_PART, PARTS)}
    return tuple(b for b in sorted(parts) if b >= LEAST_BATCHES and seen[b] >= min_tokens)


def stable(ours: Ranks, observer: Observer, batches: int) -> bool:
    """Whether the second half of the batches so far raised no maximum of any head.

    All processes have to ask, once they have run their own of these batches; they get the same
    answer, and the same as one process that runs all.

    Raises:
        CalibrationError: another process has ended.
    """
    try:  # on the CPU: gloo fails at once where nccl waits for a process that has ended
        _, raised = first_maxima(ours, observer, torch.device("cpu"))
    except RuntimeError as error:
        if ours.world == 1:
            raise
        raise CalibrationError(
            f"the processes cannot agree after {batches} batches: {first_line(error)}",
            code="ranks.lost",
            hint="see what the others have printed; the same command with --resume goes on",
        ) from error
    return 2 * int(raised.max()) < batches
