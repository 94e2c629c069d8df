"""How many splits a decode launch gets when the caller does not say."""

import math
from functools import lru_cache

_SCHEDULERS = 4  # of a multiprocessor; each issues one warp's instruction at a time
# in tiles, from the times of FP8, NVFP4 and 16-bit pages on an H200, which tests/kernels holds
_START = 1.0  # reading q and the first tile
_COMBINE = 1.0  # a second launch
_EACH = 0.02  # reading one more partial result


@lru_cache(maxsize=4096)
def choose_splits(
    programs: int,
    tiles: int,
    multiprocessors: int,
    *,
    per_sm: int = 1,
    warps: int = 4,
    busy: float | None = None,
    most: int = 128,
) -> int:
    """Return the number of splits with the least estimated time.

    Programs take whole rounds, in each of which every one reads its split's tiles. A round takes
    longer the more warps share a scheduler of the busiest multiprocessor, from `busy` on.

    Args:
        programs: of one split.
        tiles: KV tiles of the longest request.
        multiprocessors: of the device.
        per_sm: programs that a multiprocessor runs at once.
        warps: of a program.
        busy: warps that keep a scheduler busy; as many as there are at once by default, for
            programs that wait for memory.
        most: upper limit.
    """
    tiles = max(tiles, 1)
    full = math.ceil(per_sm * warps / _SCHEDULERS)
    best, least = 1, math.inf
    for splits in range(1, min(tiles, most) + 1):
        per_split = math.ceil(tiles / splits)
        if math.ceil(tiles / per_split) != splits:
            continue  # the last splits would be empty
        on_one = math.ceil(programs * splits / multiprocessors)
        rounds = math.ceil(on_one / per_sm)
        share = full if rounds > 1 else math.ceil(on_one * warps / _SCHEDULERS)
        cost = (per_split + _START) * rounds * max(1.0, share / (busy or full))
        cost += _COMBINE + _EACH * splits if splits > 1 else 0
        if cost < least:
            best, least = splits, cost
    return best
