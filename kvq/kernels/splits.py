"""Among how many programs a decode launch shares the tokens when the caller does not say."""

import math
from dataclasses import dataclass
from functools import lru_cache

_SCHEDULERS = 4  # of a multiprocessor; each issues one warp's instruction at a time
# in tiles, from the times of FP8, NVFP4 and 16-bit pages on an H200, which tests/kernels holds
_START = 1.0  # reading q and the first tile
_COMBINE = 1.0  # a second launch
_EACH = 0.02  # reading one more partial result
# of which one program reads all lengths; more make so many programs that they balance by themselves
_MOST_REQUESTS = 4096
_MOST_SHARES = 2**16 - 1  # a grid's second size, and what programs compute their shares with


@dataclass(frozen=True)
class Shares:
    """How tokens are shared: in `number` splits of each request, or of all if `balanced`."""

    number: int
    balanced: bool


@dataclass(frozen=True)
class Room:
    """The programs that a device runs at once.

    Attributes:
        multiprocessors: of the device.
        per_sm: programs that a multiprocessor runs at once.
        warps: of a program.
        busy: warps that keep a scheduler busy; as many as there are at once by default, for
            programs that wait for memory.
    """

    multiprocessors: int
    per_sm: int = 1
    warps: int = 4
    busy: float | None = None

    def time(self, tiles: float, programs: int) -> float:
        """Estimated time, in tiles, of programs that read so many tiles each.

        Programs take whole rounds. A round takes longer the more warps share a scheduler of the
        busiest multiprocessor, from `busy` on.
        """
        full = math.ceil(self.per_sm * self.warps / _SCHEDULERS)
        on_one = math.ceil(programs / self.multiprocessors)
        rounds = math.ceil(on_one / self.per_sm)
        share = full if rounds > 1 else math.ceil(on_one * self.warps / _SCHEDULERS)
        return (tiles + _START) * rounds * max(1.0, share / (self.busy or full))


@lru_cache(maxsize=4096)
def choose_splits(programs: int, tiles: int, room: Room, most: int = 128) -> int:
    """Return the number of splits of each request with the least estimated time.

    Args:
        programs: of one split.
        tiles: KV tiles of the longest request.
        room: of the device.
        most: upper limit.
    """
    tiles = max(tiles, 1)
    best, least = 1, math.inf
    for splits in range(1, min(tiles, most) + 1):
        per_split = math.ceil(tiles / splits)
        if math.ceil(tiles / per_split) != splits:
            continue  # the last splits would be empty
        time = room.time(per_split, programs * splits)
        time += _COMBINE + _EACH * splits if splits > 1 else 0
        if time < least:
            best, least = splits, time
    return best


@lru_cache(maxsize=4096)
def choose_shares(requests: int, programs: int, tiles: int, room: Room) -> Shares:
    """Share the tokens of a batch whose lengths are not known on the host.

    One request is split, as are more than programs can look at. Else programs share the tokens
    evenly: as many as would split requests of equal length, whose ends then cut no share; or as
    many as the device has room for, if that takes less time although every end cuts a share.

    Args:
        requests: of the batch.
        programs: of one share, for all heads.
        tiles: KV tiles of the longest request.
        room: of the device.
    """
    if requests == 1 or requests > _MOST_REQUESTS:
        return Shares(choose_splits(requests * programs, tiles, room), balanced=False)
    splits = choose_splits(requests * programs, tiles, room, min(128, _MOST_SHARES // requests))
    aligned = room.time(math.ceil(tiles / splits), requests * programs * splits) + _EACH * splits
    number = max(room.per_sm * room.multiprocessors // programs, 1)
    pieces = 1 + requests / number
    each = tiles * requests / number + 2 * _START * requests / number
    filled = room.time(each, number * programs) + _EACH * pieces
    return Shares(number if filled < aligned else requests * splits, balanced=True)
