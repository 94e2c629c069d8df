"""Decode attention over NVFP4 pages by float16 products, which hold every number of a page exactly.

Shifts turn codes into float16. K's are multiplied by their block scales, two at a time; V's block
scales are multiplied into P, which has fewer numbers. A program is one warp with a softmax of its
own, so that warps wait for no one. Up to four heads a tile of K has two tokens in a row, whose
products with q are two columns for each head.
"""

import triton
import triton.language as tl

from kvq.kernels.nvfp4_tiles import (
    add_values,
    key_tile,
    query_tiles,
    repeat,
    repeat_columns,
    value_tile,
)
from kvq.kernels.shares import own_piece, own_share
from kvq.kernels.softmax import (
    NOTHING,
    advance,
    attended_runs,
    logits,
    run_pages,
    runs,
    store_piece,
    weights_of,
)

SHIFT = tl.constexpr(7)  # P is at most 2**7, and times a block scale a float16 number
# its square is what `expand` leaves numbers short of, too much for one scale at float32's end
CODE_ROOT = tl.constexpr(2.0**7)


@triton.jit
def _weights(p, COPIES: tl.constexpr):
    """P [TILE, HEADS] as float16, of the first and of the second token of each pair."""
    ROWS: tl.constexpr = p.shape[0] // 2
    HEADS: tl.constexpr = p.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(p, [ROWS, 2, HEADS]), (0, 2, 1)))
    first, second = first.to(tl.float16), second.to(tl.float16)
    return repeat_columns(first, COPIES), repeat_columns(second, COPIES)


@triton.jit
def _tile(
    low_acc, high_acc, running_max, total, query, scale, slopes, softcap, first, start, seq_len,
    k_ptr, v_ptr, page, k_page_stride, v_page_stride,
    K_HALF: tl.constexpr, V_HALF: tl.constexpr, V_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = scale.shape[0]
    COPIES: tl.constexpr = low_acc.shape[2] // HEADS
    RUN: tl.constexpr = TILE // page.shape[0]
    _, slot = runs(start, PAGE, TILE)
    if RUN == TILE:  # numbers are cheaper than tensors of one
        page, slot = tl.sum(page, 0), tl.sum(slot, 0)
    else:
        page, slot = page[:, None], slot[:, None]
    page = page.to(tl.uint32).to(tl.int64)  # without a sign, so that one product is enough
    position = tl.reshape(start + tl.arange(0, TILE), [TILE // COPIES, COPIES])
    inside = (position >= first) & (position < seq_len)
    K_WIDTH: tl.constexpr = 2 * query[0].shape[0] // COPIES
    a, b, c, d = key_tile(k_ptr + page * k_page_stride, slot, inside, K_HALF, K_WIDTH, PAGE, RUN,
                          MASKED)  # fmt: skip
    # two sums, since each product waits for the one before in its sum
    products = tl.dot(b, query[1], tl.dot(a, query[0])) + tl.dot(d, query[3], tl.dot(c, query[2]))
    # V before the softmax, whose steps wait for each other
    position = start + 2 * tl.arange(0, TILE // 2)
    inside = (position >= first) & (position < seq_len)
    second_inside = (position + 1 >= first) & (position + 1 < seq_len)
    v = value_tile(v_ptr + page * v_page_stride, slot, inside, second_inside, V_HALF, V_WIDTH, PAGE,
                   RUN, MASKED)  # fmt: skip

    products = tl.permute(tl.reshape(products, [TILE // COPIES, HEADS, COPIES]), (0, 2, 1))
    x = logits(tl.reshape(products, [TILE, HEADS]), scale, softcap, slopes,
               start + tl.arange(0, TILE), first, seq_len, SOFTCAP, ALIBI, MASKED)  # fmt: skip
    new_max, factor = advance(x, running_max)
    p = weights_of(x, new_max, SHIFT)
    total = total * factor[None, :] + p
    first_p, second_p = _weights(p, COPIES)
    if tl.max((new_max > running_max).to(tl.int32), 0) > 0:  # which is rare
        factors = repeat(factor, COPIES)[None, None, :]
        low_acc *= factors
        high_acc *= factors
    low_acc, high_acc = add_values(low_acc, high_acc, v, first_p, second_p)
    return low_acc, high_acc, new_max, total


@triton.jit
def _attend(
    request, piece, target, q_ptr, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
    slopes_ptr, sinks_ptr, out_ptr, stats_ptr, partial_ptr, q_strides, k_page_stride, v_page_stride,
    table_strides, out_strides, softmax_scale, softcap,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, K_HALF: tl.constexpr,
    V_HALF: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend from heads of one KV head to a piece of a request."""
    heads = target[0]
    valid = heads >= 0
    seq_len, first, begin, whole, end = piece
    HEADS: tl.constexpr = heads.shape[0]
    table_ptr += request * table_strides[0]
    page = run_pages(table_ptr, table_strides[1], begin, begin < whole, PAGE, TILE)

    COPIES: tl.constexpr = 1 if HEADS >= 8 else 2  # a product has at least eight columns
    query, q_scale = query_tiles(
        q_ptr + request * q_strides[0], q_strides[2], heads * q_strides[1], valid, K_HALF, K_WIDTH,
        HEAD_DIM, COPIES,
    )  # fmt: skip
    scale = (q_scale * CODE_ROOT) * (tl.load(k_scale_ptr) * (softmax_scale * CODE_ROOT))
    slopes = tl.load(slopes_ptr + heads, mask=valid, other=0.0) if ALIBI else scale

    low_acc = tl.zeros([V_WIDTH // 16, 16, COPIES * HEADS], tl.float32)
    high_acc = tl.zeros_like(low_acc)
    running_max = tl.full([HEADS], NOTHING, tl.float32)
    total = tl.zeros([TILE, HEADS], tl.float32)
    for start in tl.range(begin, whole, TILE, num_stages=STAGES):
        after = start + TILE
        next_page = run_pages(table_ptr, table_strides[1], after, after < whole, PAGE, TILE)
        low_acc, high_acc, running_max, total = _tile(
            low_acc, high_acc, running_max, total, query, scale, slopes, softcap, first, start,
            seq_len, k_ptr, v_ptr, page, k_page_stride, v_page_stride, K_HALF, V_HALF, V_WIDTH,
            PAGE, TILE, SOFTCAP, ALIBI, False,
        )  # fmt: skip
        page = next_page
    for start in tl.range(whole, end, TILE, num_stages=1):
        attended = attended_runs(start, first, seq_len, page.shape[0], TILE)
        page = run_pages(table_ptr, table_strides[1], start, attended, PAGE, TILE)
        low_acc, high_acc, running_max, total = _tile(
            low_acc, high_acc, running_max, total, query, scale, slopes, softcap, first, start,
            seq_len, k_ptr, v_ptr, page, k_page_stride, v_page_stride, K_HALF, V_HALF, V_WIDTH,
            PAGE, TILE, SOFTCAP, ALIBI, True,
        )  # fmt: skip
    total = tl.sum(total, 0)
    for part in tl.static_range(2):
        acc = tl.reshape(low_acc if part == 0 else high_acc, [V_WIDTH, HEADS * COPIES])
        if COPIES > 1:
            acc, _ = tl.split(tl.reshape(acc, [V_WIDTH, HEADS, COPIES]))
        store_piece(
            acc * (CODE_ROOT * CODE_ROOT), running_max, total, v_scale_ptr, request, target,
            out_ptr, out_strides, stats_ptr, partial_ptr, sinks_ptr, part * V_HALF,
            V_HALF if part == 0 else VALUE_DIM, NUM_HEADS, VALUE_DIM, SINKS, SHIFT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch_size", "shares"])
def decode_nvfp4(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr, sinks_ptr,
    out_ptr, stats_ptr, partial_ptr, q_strides, k_strides, v_strides, table_strides, lens_stride,
    out_strides, k_scale_stride, v_scale_stride, softmax_scale, softcap, window, batch_size, shares,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, K_HALF: tl.constexpr, V_HALF: tl.constexpr, K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, START: tl.constexpr,
    BALANCED: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend from HEADS query heads of one KV head to a share of the tokens."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    begin, past, place, kv_head, heads = own_share(
        lens_ptr, lens_stride, batch_size, window, shares, BALANCED, WINDOW, TILE, START, KV_HEADS,
        GROUP, HEADS,
    )  # fmt: skip
    for request in tl.range(begin, past, num_stages=1):
        piece, target, place = own_piece(request, place, heads, lens_ptr, lens_stride, window,
                                         shares, SPLIT, BALANCED, WINDOW, TILE, START)  # fmt: skip
        _attend(
            tl.full([], request, tl.int64), piece, target, q_ptr,
            k_ptr + kv_head * k_strides[1], v_ptr + kv_head * v_strides[1], table_ptr,
            k_scale_ptr + kv_head * k_scale_stride, v_scale_ptr + kv_head * v_scale_stride,
            slopes_ptr, sinks_ptr, out_ptr, stats_ptr, partial_ptr, q_strides, k_strides[0],
            v_strides[0], table_strides, out_strides, softmax_scale, softcap, KV_HEADS * GROUP,
            HEAD_DIM, VALUE_DIM, K_HALF, V_HALF, K_WIDTH, V_WIDTH, PAGE, TILE, STAGES, SOFTCAP,
            ALIBI, SINKS,
        )  # fmt: skip
