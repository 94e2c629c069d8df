"""The parts of decode attention that do not depend on how the cache is stored."""

import triton
import triton.language as tl

from kvq.kernels.shares import pieces_of

LOG2E = tl.constexpr(1.4426950408889634)
# the first maximum, below every logit; not -inf, so that differences are never NaN
NOTHING = tl.constexpr(-1e30)


@triton.jit
def runs(start, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Entry of the page table and slot in that page where each run of a tile begins, [RUNS].

    A run is as many tokens as share a page wherever the tile begins, a power of two.
    """
    RUN: tl.constexpr = TILE if PAGE % TILE == 0 else PAGE & -PAGE
    run = tl.arange(0, TILE // RUN)
    begin = (start + run * RUN).to(tl.uint32)  # numbers without a sign divide in a shift
    slot = run * 0 if PAGE == RUN else (begin % PAGE).to(tl.int32)
    return (begin // PAGE).to(tl.int32), slot


@triton.jit
def attended_runs(start, first, seq_len, RUNS: tl.constexpr, TILE: tl.constexpr):
    """Whether each run of a tile holds a token that is attended to."""
    RUN: tl.constexpr = TILE // RUNS
    begin = start + tl.arange(0, RUNS) * RUN
    return (begin + RUN > first) & (begin < seq_len)


@triton.jit
def run_pages(table_ptr, stride, start, wanted, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Page of each run of a tile, [RUNS]; entries that are not wanted are not read.

    The next tile's are asked for before this tile is read, so that no tile waits for its pages.
    """
    entry, _ = runs(start, PAGE, TILE)
    return tl.load(table_ptr + entry * stride, mask=wanted, other=0)


@triton.jit
def run_rows(page, page_stride, start, SIZE: tl.constexpr, PAGE: tl.constexpr,
             TILE: tl.constexpr):  # fmt: skip
    """Where each token's row of SIZE elements begins in a cache of token rows, [TILE]."""
    RUN: tl.constexpr = TILE // page.shape[0]
    _, slot = runs(start, PAGE, TILE)
    begin = page.to(tl.int64) * page_stride + slot * SIZE
    row = begin[:, None] + (tl.arange(0, RUN) * SIZE)[None, :]
    return tl.multiple_of(tl.reshape(row, [TILE]), 16)  # here: a call's result keeps no hint


@triton.jit
def find_pages(table_ptr, stride, start, inside, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Page, one for the tile or one for each token, and slot in it of the tokens from start on.

    Entries of the table of tokens that are not `inside` [TILE] are not followed.
    """
    token = tl.arange(0, TILE)
    if PAGE % TILE == 0:
        page = tl.load(table_ptr + start // PAGE * stride)
        slot = start % PAGE + token
    else:
        position = start + token
        page = tl.load(table_ptr + position // PAGE * stride, mask=inside, other=0)
        slot = position % PAGE
    return page.to(tl.int64), slot


@triton.jit
def logits(products, scale, softcap, slopes, position, first, seq_len,
           SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Logits [TOKENS, HEADS] in powers of two, from the products with q."""
    if not SOFTCAP and not ALIBI:
        x = products * (scale * LOG2E)[None, :]
    else:
        x = products * scale[None, :]
        if SOFTCAP:
            x = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E / softcap))))
        if ALIBI:
            x += slopes[None, :] * (position - (seq_len - 1)).to(tl.float32)[:, None]
        x *= LOG2E
    if MASKED:
        # less than NOTHING, so that a weight is zero even where no other logit is above that
        x = tl.where(((position >= first) & (position < seq_len))[:, None], x, float("-inf"))
    return x


@triton.jit
def advance(x, running_max):
    """New running maximum of each head, and what the sums so far are multiplied by.

    The maximum is rounded up to a whole power of two: sums of any split then differ by exact
    factors, and rounding P to a float format does not depend on the split.
    """
    new_max = tl.maximum(running_max, tl.ceil(tl.max(x, 0)))
    return new_max, tl.exp2(running_max - new_max)


@triton.jit
def weights_of(x, running_max, SHIFT: tl.constexpr):
    """P [TILE, HEADS] times 2**SHIFT and not above that.

    The shift comes last: where logits are so large that their differences are rounded, these are
    still not above zero.
    """
    return tl.exp2((x - running_max[None, :]) + SHIFT)


@triton.jit
def with_sink(total, running_max, heads, valid, sinks_ptr, SHIFT: tl.constexpr):
    """Add each head's sink, a logit without a value, to the sum of weights."""
    sink = tl.load(sinks_ptr + heads, mask=valid, other=0.0)
    return total + tl.exp2(sink * LOG2E - running_max + SHIFT)


@triton.jit
def store_piece(
    acc, running_max, total, v_scale_ptr, request, target, out_ptr, out_strides, stats_ptr,
    partial_ptr, sinks_ptr, FROM: tl.constexpr, TO: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, SINKS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Store dimensions FROM to TO of acc [WIDTH, HEADS], as output or as what to combine."""
    heads, slot, alone, filled, empty = target
    valid, width = heads >= 0, FROM + tl.arange(0, acc.shape[0])
    inside = valid[None, :] & (width < TO)[:, None]
    if alone:
        if SINKS:
            total = with_sink(total, running_max, heads, valid, sinks_ptr, SHIFT)
        # without tokens there is nothing to divide; with some, weights that are all zero are NaN
        result = acc / tl.where(empty, 1.0, total)[None, :] * tl.load(v_scale_ptr)
        offsets = request * out_strides[0] + heads * out_strides[1]
        offsets = offsets[None, :] + (width * out_strides[2])[:, None]
        tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        row = slot.to(tl.int64) * HEADS + heads
        tl.store(stats_ptr + row * 2, running_max, mask=valid & filled)
        tl.store(stats_ptr + row * 2 + 1, total, mask=valid & filled)
        offsets = (row * SIZE)[None, :] + width[:, None]
        tl.store(partial_ptr + offsets, acc, mask=inside & filled)


@triton.jit(do_not_specialize=["batch_size", "shares"])
def combine_pieces(
    out_ptr, out_strides, stats_ptr, partial_ptr, v_scale_ptr, v_scale_stride, sinks_ptr, lens_ptr,
    lens_stride, batch_size, window, shares,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, BALANCED: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    START: tl.constexpr, SINKS: tl.constexpr, SHIFT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Merge WIDTH dimensions of the pieces of one query head, PADDED of them at once.

    Where DEPENDENT, programs start while the pieces are computed, and wait for them here.
    """
    row = tl.program_id(0).to(tl.int64)
    request, head = row // HEADS, row % HEADS
    slot, count = pieces_of(request, lens_ptr, lens_stride, batch_size, window, shares, BALANCED,
                            WINDOW, TILE, START)  # fmt: skip
    v_scale = tl.load(v_scale_ptr + head // GROUP * v_scale_stride)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if count > 1:
        width = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        largest, total = tl.full([], NOTHING, tl.float32), tl.zeros([], tl.float32)
        acc = tl.zeros([WIDTH], tl.float32)
        for start in range(0, count, PADDED):
            piece = start + tl.arange(0, PADDED)
            inside = piece < count
            rows = (slot + piece).to(tl.int64) * HEADS + head
            offsets = (rows * SIZE)[:, None] + width[None, :]
            parts = tl.load(partial_ptr + offsets, mask=inside[:, None] & (width < SIZE)[None, :],
                            other=0.0)  # fmt: skip
            maxima = tl.load(stats_ptr + rows * 2, mask=inside, other=NOTHING)
            totals = tl.load(stats_ptr + rows * 2 + 1, mask=inside, other=0.0)
            new_largest = tl.maximum(largest, tl.max(maxima, 0))
            weights, factor = tl.exp2(maxima - new_largest), tl.exp2(largest - new_largest)
            largest = new_largest
            total = total * factor + tl.sum(totals * weights, 0)
            acc = acc * factor + tl.sum(parts * weights[:, None], 0)
        if SINKS:
            total += tl.exp2(tl.load(sinks_ptr + head) * LOG2E - largest + SHIFT)
        offsets = request * out_strides[0] + head * out_strides[1] + width * out_strides[2]
        result = (acc / total * v_scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offsets, result, mask=width < SIZE)
