"""Kernels that write down what `kvq.kernels.shares` computes."""

import triton
import triton.language as tl

from kvq.kernels.shares import own_piece, own_share, pieces_of

COLUMNS = tl.constexpr(10)


@triton.jit
def own(out_ptr, lens_ptr, batch_size, window, shares, MOST: tl.constexpr,
        BALANCED: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
        START: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
        HEADS: tl.constexpr):  # fmt: skip
    """A row of every piece of a program, in MOST rows of its own."""
    program = tl.program_id(0) * shares + tl.program_id(1)
    out_ptr += program * MOST * COLUMNS
    first, past, place, kv_head, heads = own_share(
        lens_ptr, 1, batch_size, window, shares, BALANCED, WINDOW, TILE, START, KV_HEADS,
        GROUP, HEADS,
    )  # fmt: skip
    for request in tl.range(first, past, num_stages=1):
        piece, target, place = own_piece(
            request, place, heads, lens_ptr, 1, window, shares, SPLIT, BALANCED, WINDOW, TILE,
            START,
        )  # fmt: skip
        _, attended, begin, whole, end = piece
        heads, slot, alone, filled, _ = target
        tl.store(out_ptr + 0, request)
        tl.store(out_ptr + 1, attended)
        tl.store(out_ptr + 2, begin)
        tl.store(out_ptr + 3, whole)
        tl.store(out_ptr + 4, end)
        tl.store(out_ptr + 5, slot)
        tl.store(out_ptr + 6, alone)
        tl.store(out_ptr + 7, filled)
        tl.store(out_ptr + 8, kv_head)
        tl.store(out_ptr + 9, tl.max(heads, 0))
        out_ptr += COLUMNS


@triton.jit
def count(out_ptr, lens_ptr, batch_size, window, shares, BALANCED: tl.constexpr,
          WINDOW: tl.constexpr, TILE: tl.constexpr, START: tl.constexpr):  # fmt: skip
    """Slot and number of a request's pieces."""
    request = tl.program_id(0)
    slot, number = pieces_of(request, lens_ptr, 1, batch_size, window, shares, BALANCED,
                             WINDOW, TILE, START)  # fmt: skip
    tl.store(out_ptr + request * 2, slot)
    tl.store(out_ptr + request * 2 + 1, number)
