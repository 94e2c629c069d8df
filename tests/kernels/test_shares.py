"""What each program of decode attention has, computed by the kernel's own functions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.interpreter
TILE = 16
lengths = st.lists(st.sampled_from([0, 1, 15, 16, 17, 40, 100, 333, 2000]), min_size=1, max_size=70)


def pieces(seq_lens, shares, *, balanced, window=None, start=1, heads=(1, 1, 1)):
    """Rows of every piece that any program has, and slot and count of each request's pieces."""
    import triton

    from tests.kernels.share_kernels import COLUMNS, count, own

    batch = len(seq_lens)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    kv_heads, group, of_program = heads
    grid = kv_heads * -(-group // of_program) * (1 if balanced else batch)
    rows = torch.full((grid * shares, batch, COLUMNS.value), -7, dtype=torch.int32)
    common = {"BALANCED": max(triton.next_power_of_2(batch), 32) if balanced else 0,
              "WINDOW": window is not None, "TILE": TILE, "START": start}  # fmt: skip
    own[(grid, shares)](rows, lens, batch, window or 0, shares, MOST=batch, SPLIT=True,
                        KV_HEADS=kv_heads, GROUP=group, HEADS=of_program, **common)  # fmt: skip
    counts = torch.full((batch, 2), -7, dtype=torch.int32)
    count[(batch,)](counts, lens, batch, window or 0, shares, **common)
    return [row for row in rows.view(-1, COLUMNS.value).tolist() if row[0] != -7], counts.tolist()


def check(seq_lens, shares, *, balanced, window, start):
    rows, counts = pieces(seq_lens, shares, balanced=balanced, window=window, start=start)
    firsts = [max(n - window, 0) if window else 0 for n in seq_lens]
    line = sum(
        start + max(-(-n // TILE) - first // TILE, 1)
        for n, first in zip(seq_lens, firsts, strict=True)
    )
    slots = [row[5] for row in rows if row[7]]
    assert len(set(slots)) == len(slots)
    if balanced:
        assert all(row[7] for row in rows)
        assert max(slots) < shares + len(seq_lens)
    for request, seq_len in enumerate(seq_lens):
        own = sorted((row for row in rows if row[0] == request and row[7]), key=lambda row: row[2])
        slot, number = counts[request]
        assert [row[5] for row in own] == list(range(slot, slot + number))
        assert [row[6] for row in own] == [int(number == 1)] * number
        first = firsts[request]
        position = first // TILE * TILE
        for _, attended, begin, whole, end, *_ in own:
            assert (attended, begin) == (first, position)
            assert begin % TILE == whole % TILE == 0
            # tiles without a mask are whole and all attended to
            assert whole == begin if window else begin <= whole <= end < whole + TILE
            assert end > begin or seq_len == 0 or (balanced and shares > line)
            position = end
        assert position == seq_len


@settings(max_examples=40, deadline=None)
@given(lengths, st.integers(1, 40), st.sampled_from([None, 1, 50]), st.integers(1, 4))
def test_shares_hold_every_token_once(seq_lens, shares, window, start):
    check(seq_lens, shares, balanced=True, window=window, start=start)


@settings(max_examples=15, deadline=None)
@given(lengths, st.integers(1, 9), st.sampled_from([None, 1, 50]))
def test_splits_hold_every_token_once(seq_lens, splits, window):
    check(seq_lens[:9], splits, balanced=False, window=window, start=1)


def test_shares_are_equal():
    seq_lens = [TILE * 7 * n for n in (1, 30, 2, 0, 11, 3)]
    for shares in (1, 2, 5, 13):
        rows, _ = pieces(seq_lens, shares, balanced=True, start=2)
        sizes = [0] * shares
        for request, _, begin, _, end, slot, *_ in rows:
            # what a request costs besides its tiles is of its first piece's share
            sizes[slot - request] += -(-(end - begin) // TILE) + 2 * (begin == 0)
        # a share may end where a request costs and has no tile yet
        assert max(sizes) - min(sizes) <= 1 + 2 * 2, sizes


def test_equal_requests_are_not_cut_by_as_many_shares():
    for batch, splits in ((3, 1), (40, 2)):
        rows, counts = pieces([TILE * 8 - 3] * batch, batch * splits, balanced=True, start=1)
        assert len(rows) == batch * splits
        assert [number for _, number in counts] == [splits] * batch


def test_every_program_has_heads_of_its_own():
    for balanced in (True, False):
        rows, _ = pieces([40, 0], 2, balanced=balanced, heads=(3, 5, 4))
        heads = {(row[8], row[9]) for row in rows}
        assert heads == {(0, 3), (0, 4), (1, 8), (1, 9), (2, 13), (2, 14)}
