"""Which tokens of which requests a program of decode attention has.

A request is attended to in pieces, one for each program that has some of its tiles. Where the
caller gives a number of splits, every request is cut into as many pieces; else (BALANCED) the tiles
of all requests are one line that is cut into equal shares, so that programs end together whatever
the lengths. A share's first and last piece may be parts of requests, and between them are whole
ones. Where the line is shorter than the shares are many, some pieces are empty, which count as
others do. Every program computes this from `seq_lens`, so that nothing is planned on the host.

A piece has its own place among the partial results, its slot: in a line of shares every piece goes
on by one request or by one share, so that the sum of both numbers is one.
"""

import triton
import triton.language as tl


@triton.jit
def attended_tiles(seq_len, window, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Tile of the first attended position, and the number of tiles from there on."""
    first_tile = tl.maximum(seq_len - window, 0) // TILE if WINDOW else 0
    return first_tile, tl.cdiv(seq_len, TILE) - first_tile


@triton.jit
def _costs(lens_ptr, lens_stride, batch_size, window, REQUESTS: tl.constexpr,
           WINDOW: tl.constexpr, TILE: tl.constexpr, START: tl.constexpr):  # fmt: skip
    """Length in the line of each request, [REQUESTS], 0 past the last."""
    request = tl.arange(0, REQUESTS)
    inside = request < batch_size
    seq_len = tl.load(lens_ptr + request.to(tl.int64) * lens_stride, mask=inside, other=0)
    _, tiles = attended_tiles(seq_len.to(tl.int32), window, WINDOW, TILE)
    return tl.where(inside, tl.maximum(tiles, 1) + START, 0)


@triton.jit
def _begin(total, share, shares):
    """Where a share begins in a line of this length, `share * total // shares`."""
    share, shares = share.to(tl.uint32), shares.to(tl.uint32)
    each = total.to(tl.uint32) // shares
    # no product of two numbers below 2**16 overflows
    return (share * each + share * (total.to(tl.uint32) - each * shares) // shares).to(tl.int32)


@triton.jit
def _share_of(place, total, shares):
    """The last share that begins at a place or before it."""
    return (((place + 1).to(tl.int64) * shares - 1) // total).to(tl.int32)


@triton.jit
def own_share(
    lens_ptr, lens_stride, batch_size, window, shares, BALANCED: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, START: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program's requests, its place in their line, its KV head, and its query heads [HEADS].

    The requests are given as the first and the one past the last, the place as where the share
    begins and ends, from the first request's begin on. A query head is -1 where there is none.
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    pid = tl.program_id(0).to(tl.int64)
    kv_head = (pid // HEAD_BLOCKS) % KV_HEADS
    member = (pid % HEAD_BLOCKS) * HEADS + tl.arange(0, HEADS)
    heads = tl.where(member < GROUP, kv_head * GROUP + member, -1)
    if BALANCED:
        cost = _costs(lens_ptr, lens_stride, batch_size, window, BALANCED, WINDOW, TILE, START)
        ends = tl.cumsum(cost, 0)
        total, share = tl.sum(cost, 0), tl.program_id(1)
        begin, end = _begin(total, share, shares), _begin(total, share + 1, shares)
        first = tl.sum((ends <= begin).to(tl.int32), 0)
        # a share that ends before a request's first tile has none of it
        past = tl.sum((ends - cost + START < end).to(tl.int32), 0)
        at = tl.max(tl.where(ends <= begin, ends, 0), 0)
        begin, end = begin - at, end - at
    else:
        first = pid // (KV_HEADS * HEAD_BLOCKS)
        past, begin, end = first + 1, 0, 0
    return first, past, (begin, end), kv_head, heads


@triton.jit
def own_piece(
    request, place, heads, lens_ptr, lens_stride, window, shares, SPLIT: tl.constexpr,
    BALANCED: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """What a program attends to of a request, where that goes, and its place for the next one.

    The first is the request's length and its first attended position, where the piece begins, where
    its tiles begin to need a mask, and where it ends. The second is the query heads, the piece's
    slot, whether it is all of the request, whether there is any of it, and whether the request is
    empty.
    """
    begin, end = place
    share = tl.program_id(1)
    seq_len = tl.load(lens_ptr + request * lens_stride).to(tl.int32)
    first_tile, tiles = attended_tiles(seq_len, window, WINDOW, TILE)
    tiles = tl.maximum(tiles, 1)  # an empty request has one without tokens
    if BALANCED:
        from_tile, to_tile = tl.maximum(begin - START, 0), tl.minimum(end - START, tiles)
        slot = request + share
        begin, end = 0, end - START - tiles  # later requests of the share begin in it
        filled = True
    else:
        each = tl.cdiv(tiles, shares)
        from_tile, to_tile = share * each, tl.minimum(share * each + each, tiles)
        slot, filled = request * shares + share, from_tile < tiles
    first = tl.maximum(seq_len - window, 0) if WINDOW else 0
    piece_begin = (first_tile + from_tile) * TILE
    piece_end = tl.minimum((first_tile + to_tile) * TILE, seq_len)
    whole = piece_begin
    if not WINDOW:
        whole += tl.maximum(piece_end - piece_begin, 0) // TILE * TILE
    alone = (from_tile == 0) & (to_tile == tiles) if SPLIT else True
    # always so; else offsets of heads are kept in registers for all requests
    heads = tl.where(seq_len > -(2**31), heads, -1)
    piece = (seq_len, first, piece_begin, whole, piece_end)
    return piece, (heads, slot, alone, filled, seq_len <= 0), (begin, end)


@triton.jit
def pieces_of(
    request, lens_ptr, lens_stride, batch_size, window, shares, BALANCED: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """Slot of the first piece of a request, and the number of pieces; see `own_piece`."""
    seq_len = tl.load(lens_ptr + request * lens_stride).to(tl.int32)
    _, tiles = attended_tiles(seq_len, window, WINDOW, TILE)
    tiles = tl.maximum(tiles, 1)
    if BALANCED:
        cost = _costs(lens_ptr, lens_stride, batch_size, window, BALANCED, WINDOW, TILE, START)
        total = tl.sum(cost, 0)
        at = tl.sum(tl.where(tl.arange(0, BALANCED) < request, cost, 0), 0) + START
        first = _share_of(at, total, shares)
        slot, count = request + first, _share_of(at + tiles - 1, total, shares) - first + 1
    else:
        slot, count = request * shares, tl.cdiv(tiles, tl.cdiv(tiles, shares))
    return slot, count
