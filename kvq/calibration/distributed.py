"""Several processes on one calibration: each runs whole batches of the plan, maxima are merged.

They are started by torchrun, which also ends all of them when one fails.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from kvq.calibration.amax import Key, Observer
from kvq.calibration.magnitudes import BINS
from kvq.errors import CalibrationError, InputError, KvqError

T = TypeVar("T")
_ERROR = "kvq/error/{}"  # by rank
_PATIENCE = timedelta(seconds=5)  # until the first process has failed too


@dataclass(frozen=True)
class Ranks:
    """This process among those of one calibration; alone by default."""

    rank: int = 0
    world: int = 1
    local: int = 0  # the rank among those of this machine
    local_world: int = 1  # how many there are on this machine

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    def own(self, plan: Sequence[T]) -> Sequence[T]:
        """Return the batches of the plan that this process runs.

        Raises:
            InputError: there are not enough for all processes.
        """
        if len(plan) < self.world:
            raise InputError(
                f"{self.world} processes share {len(plan)} batches: some would have nothing to do",
                code="ranks.too_many",
                hint="start fewer processes, or lower --batch-size",
            )
        return plan[self.rank :: self.world]

    def cuda_devices(self) -> range:
        """Return the CUDA devices of this process where those of a machine are shared out.

        Raises:
            InputError: there are not enough for all processes of this machine.
        """
        count = torch.cuda.device_count()
        own = range(
            count * self.local // self.local_world, count * (self.local + 1) // self.local_world
        )
        if count and not own:
            raise InputError(
                f"{self.local_world} processes share {count} CUDA devices: some would have none",
                code="ranks.devices",
                hint="start fewer processes on this machine",
            )
        return own

    def device(self, name: str, *, spread: bool = False) -> str:
        """Return the device of this process where `name` leaves the choice.

        With `spread`, the first one of those that its model is spread over.
        """
        if self.world > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.cuda_devices()[0] if spread else self.local}"
        return name


def ranks() -> Ranks:
    """Return what torchrun says about this process, in the variables that it sets."""
    try:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        found = Ranks() if world == 1 else Ranks(
            int(os.environ["RANK"]), world, int(os.environ["LOCAL_RANK"]),
            int(os.environ["LOCAL_WORLD_SIZE"]),
        )  # fmt: skip
    except (ValueError, KeyError):
        found = Ranks(-1)
    if not 0 <= found.rank < found.world:
        raise InputError(
            "WORLD_SIZE, RANK, LOCAL_RANK and LOCAL_WORLD_SIZE are not those that torchrun sets",
            code="ranks.environment",
            hint="start kvq by `torchrun --nproc-per-node N -m kvq calibrate …`, or unset them",
        )
    return found


@contextmanager
def connected(ours: Ranks, device: torch.device) -> Iterator[None]:
    """Connect the processes inside the block: by nccl on CUDA, by gloo elsewhere."""
    if ours.world == 1:
        yield
        return
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store, rank, world = next(rendezvous("env://", ours.rank, ours.world))
        backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backends, store=store, rank=rank, world_size=world)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the processes cannot reach each other: {error}",
            code="ranks.unreachable",
            hint="start kvq by `torchrun --nproc-per-node N -m kvq calibrate …`",
        ) from error
    try:
        yield
    except KvqError as error:
        error.repeated = _is_repeated(ours, store, error)
        raise
    except RuntimeError as error:  # perhaps of a collective whose other side has gone
        failed = [rank for rank in range(ours.world) if store.check([_ERROR.format(rank)])]
        if not failed:
            store.set(_ERROR.format(ours.rank), repr(error))
            raise
        other = CalibrationError(f"process {failed[0]} has failed", code="ranks.failed")
        other.repeated = True  # that one says why
        raise other from error
    except Exception as error:
        store.set(_ERROR.format(ours.rank), repr(error))
        raise
    finally:
        dist.destroy_process_group()


def _is_repeated(ours: Ranks, store: dist.Store, error: KvqError) -> bool:
    """Whether the first process fails with the same error, and says so."""
    mine = f"{error.code}: {error}"
    store.set(_ERROR.format(ours.rank), mine)
    if ours.first:
        return False
    try:
        store.wait([_ERROR.format(0)], _PATIENCE)
        return bool(store.get(_ERROR.format(0)).decode() == mine)
    except RuntimeError:  # it has not failed, or is gone
        return False


def check_same(ours: Ranks, what: Any) -> None:
    """Make sure that all processes calibrate the same.

    Raises:
        InputError: they do not; on every process.
    """
    if ours.world == 1:
        return
    found: list[Any] = [None] * ours.world
    dist.all_gather_object(found, what, group=dist.new_group(backend="gloo"))
    others = [rank for rank, other in enumerate(found) if other != found[0]]
    if others:
        raise InputError(
            f"process {others[0]} has other data, weights, options or versions than process 0",
            code="ranks.differ",
            hint="give all of them the same files and the same command",
        )


def first_maxima(
    ours: Ranks, observer: Observer, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maxima of all processes, and the batches that showed them first.

    Of batches that show the same maximum, the one with the lowest number counts: exact, and in any
    order. NaN counts as infinity, which is refused alike.

    Args:
        ours: this process.
        observer: what it has seen, which stays as it is.
        device: where the processes exchange it.

    Returns:
        float32 and int64 [heads of all that is expected, in its order]; 0 and the largest int64
        where no process has seen anything.
    """
    never = torch.iinfo(torch.int64).max
    sizes = {key: observer.heads(key) for key in observer.expected}
    mine = _joined(observer.amax, sizes, torch.zeros(1), device)
    mine.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    raised = _joined(observer.raised, sizes, torch.tensor([never]), device)
    amax = mine.clone()
    if ours.world > 1:
        dist.all_reduce(amax, dist.ReduceOp.MAX)
        raised[mine < amax] = never
        dist.all_reduce(raised, dist.ReduceOp.MIN)
    return amax, raised


def _joined(
    found: Mapping[Key, torch.Tensor], sizes: Mapping[Key, int], default: torch.Tensor,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """Return one tensor of what was found under each key, or as many of the default."""
    parts = (found.get(key, default.expand(size)) for key, size in sizes.items())
    return torch.cat([part.to(device) for part in parts])


def merge(ours: Ranks, observer: Observer, device: torch.device) -> None:
    """Give every process what all have seen: exact, and in any order."""
    if ours.world == 1:
        return
    keys = observer.expected
    amax, raised = first_maxima(ours, observer, device)
    counts = _joined(observer.counts, dict.fromkeys(keys, BINS), torch.tensor([0]), device)
    tokens = torch.tensor([observer.tokens.get(key, 0) for key in keys], device=device)
    dist.all_reduce(counts)
    dist.all_reduce(tokens)
    sizes = [observer.heads(key) for key in keys]
    parts = zip(keys, amax.split(sizes), raised.split(sizes), counts.split(BINS), tokens.tolist(),
                strict=True)  # fmt: skip
    for key, *merged, seen in parts:
        if seen:
            observer.amax[key], observer.raised[key], observer.counts[key] = merged
            observer.tokens[key] = seen


def furthest(ours: Ranks, number: int) -> int:
    """Return the largest of the numbers that the processes give."""
    found = torch.tensor(number)
    if ours.world > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


@contextmanager
def named_errors(ours: Ranks) -> Iterator[None]:
    """Say in an error which process it comes from, when there are several."""
    try:
        yield
    except KvqError as error:
        if ours.world > 1:
            error.args = (f"process {ours.rank}: {error}", *error.args[1:])
        raise
