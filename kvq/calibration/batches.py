"""Token sequences, and batches of equal length as a pure function of them."""

import collections
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvq.errors import InputError


@dataclass(frozen=True, eq=False)
class Sequence:
    """One calibration sequence, never padded; anything numpy reads as integers makes one.

    Of an encoder-decoder model, `token_ids` is what the encoder reads, `decoder_ids` what the
    decoder is fed.
    """

    token_ids: NDArray[np.int64]  # [seq_len], read-only
    decoder_ids: NDArray[np.int64] | None = None  # [decoder_len], read-only
    digest: str = field(init=False)  # sha256 of the ids as little-endian int64

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for name in ("token_ids", "decoder_ids"):
            given = getattr(self, name)
            if given is None:
                continue
            ids = np.array(given, dtype=np.int64)
            assert ids.ndim == 1
            ids.flags.writeable = False
            object.__setattr__(self, name, ids)
            if name == "decoder_ids":
                digest.update(b"decoder")
            digest.update(ids.astype("<i8").tobytes())
        object.__setattr__(self, "digest", digest.hexdigest())

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens that the encoder, or the only stack, reads; tokens that the decoder is fed."""
        return len(self.token_ids), 0 if self.decoder_ids is None else len(self.decoder_ids)

    def __len__(self) -> int:
        return sum(self.lengths)


def pack(rows: Iterable[list[int]], separator: int, seq_len: int) -> Iterator[list[int]]:
    """Join rows with the separator and cut full sequences; a remainder is dropped.

    A row that already ends with the separator gets no second one. No row is asked for
    before the sequences of the rows so far are taken.
    """
    buffer: list[int] = []
    last: int | None = None
    for row in rows:
        if last is not None and last != separator:
            buffer.append(separator)
        buffer += row
        last = row[-1] if row else last
        end = len(buffer) - len(buffer) % seq_len
        for start in range(0, end, seq_len):
            yield buffer[start : start + seq_len]
        del buffer[:end]


def plan_batches(sequences: Sequences[Sequence], batch_size: int) -> tuple[tuple[int, ...], ...]:
    """Group sequences of equal length, longest first.

    The indices refer to `sequences`; which sequences share a batch, and the order of the
    batches, depends on lengths, digests and the batch size only.
    """
    if batch_size < 1:
        raise InputError(
            f"`--batch-size` is {batch_size}, expected at least 1",
            code="data.batch_size",
            hint="give a positive number or `auto`",
        )
    lengths = [sequence.lengths for sequence in sequences]
    order = sorted(
        range(len(sequences)),
        key=lambda i: (-lengths[i][0], -lengths[i][1], sequences[i].digest),
    )
    groups = [list(g) for _, g in itertools.groupby(order, key=lambda i: lengths[i])]
    starts = [(group, at) for group in groups for at in range(0, len(group), batch_size)]
    return tuple(tuple(group[at : at + batch_size]) for group, at in starts)


def describe_plan(sequences: Sequences[Sequence], batch_size: int) -> dict[str, object]:
    """Return the plan's JSON record, the same for any order of the sequences."""
    plan = plan_batches(sequences, batch_size)
    lines = (" ".join(sequences[index].digest for index in batch) for batch in plan)
    lengths = collections.Counter(sequence.lengths for sequence in sequences)
    return {
        "batch_size": batch_size,
        "batches": len(plan),
        "sequences": len(sequences),
        "lengths": {
            f"{one}+{other}" if other else str(one): lengths[one, other]
            for one, other in sorted(lengths, reverse=True)
        },
        "digest": hashlib.sha256("\n".join(lines).encode("ascii")).hexdigest(),
    }
