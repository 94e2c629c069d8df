"""How many splits a decode launch gets when the caller does not say."""

import math
from functools import lru_cache


@lru_cache(maxsize=4096)
def choose_splits(programs: int, tiles: int, slots: int, *, most: int = 128) -> int:
    """Return the number of splits with the least estimated time.

    The device runs `slots` programs at once, so `programs * splits` of them take a whole number of
    rounds of one split's tiles each. A split costs some tiles of its own: its start, and its share
    of the combining.

    Args:
        programs: of one split.
        tiles: KV tiles of the longest request.
        slots: programs the device holds at once.
        most: upper limit.
    """
    tiles = max(tiles, 1)
    best, least = 1, math.inf
    for splits in range(1, min(tiles, most) + 1):
        per_split = math.ceil(tiles / splits)
        if math.ceil(tiles / per_split) != splits:
            continue  # the last splits would be empty
        rounds = math.ceil(programs * splits / slots)
        cost = rounds * (per_split + _START) + (_COMBINE + _EACH * splits if splits > 1 else 0)
        if cost < least:
            best, least = splits, cost
    return best


_START = 2.0  # in tiles: filling the pipeline, reading q
_COMBINE = 2.0  # a second launch
_EACH = 0.05  # reading one more partial result
