"""Decode attention over 16-bit pages."""

import triton
import triton.language as tl

from kvq.kernels.shares import own_piece, own_share
from kvq.kernels.softmax import (
    NOTHING,
    advance,
    attended_runs,
    logits,
    run_pages,
    run_rows,
    store_piece,
    weights_of,
)

SHIFT = tl.constexpr(8)  # P is at most 2**8, so that small weights are normal float16 numbers


@triton.jit
def rows(ptr, row, inside, FROM: tl.constexpr, TO: tl.constexpr, WIDTH: tl.constexpr,
         MASKED: tl.constexpr):  # fmt: skip
    """Dimensions FROM to TO of each token's row, [TILE, WIDTH], zero past TO."""
    d = FROM + tl.arange(0, WIDTH)
    pointers = ptr + tl.multiple_of(row, 16)[:, None] + d[None, :]
    if MASKED or TO - FROM < WIDTH:
        x = tl.load(pointers, mask=inside[:, None] & (d < TO)[None, :], other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def key_products(k_ptr, row, inside, qt, rest_qt, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Products of each token's K with q, [TILE, HEADS]."""
    WIDTH: tl.constexpr = qt.shape[0]
    products = tl.dot(rows(k_ptr, row, inside, 0, min(WIDTH, HEAD_DIM), WIDTH, MASKED), qt)
    if HEAD_DIM > WIDTH:
        rest = rows(k_ptr, row, inside, WIDTH, HEAD_DIM, rest_qt.shape[0], MASKED)
        products = tl.dot(rest, rest_qt, products)
    return products


@triton.jit
def _tile(
    acc, running_max, total, qt, rest_qt, scale, slopes, softcap, first, start, seq_len,
    k_ptr, v_ptr, page, k_page_stride, v_page_stride,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, TILE)
    position = start + token
    # a page holds anything past the end, NaN too
    inside = (position >= first) & (position < seq_len)
    # without a mask all tokens are inside, but widths may still be cut
    inside = inside if MASKED else position >= 0
    row = run_rows(page, k_page_stride, start, HEAD_DIM, PAGE, TILE)
    products = key_products(k_ptr, row, inside, qt, rest_qt, HEAD_DIM, MASKED)
    x = logits(products, scale, softcap, slopes, position, first, seq_len, SOFTCAP, ALIBI, MASKED)
    running_max, factor = advance(x, running_max)
    p = weights_of(x, running_max, SHIFT)
    total = total * factor[None, :] + p
    row = run_rows(page, v_page_stride, start, VALUE_DIM, PAGE, TILE)
    v = rows(v_ptr, row, inside, 0, VALUE_DIM, acc.shape[0], MASKED)
    acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * factor[None, :])
    return acc, running_max, total


@triton.jit
def query_rows(
    ptr, heads, valid, stride, FROM: tl.constexpr, TO: tl.constexpr, WIDTH: tl.constexpr
):
    """Dimensions FROM to TO of q, [WIDTH, HEADS]."""
    d = FROM + tl.arange(0, WIDTH)
    offsets = heads[None, :] + (d * stride)[:, None]
    return tl.load(ptr + offsets, mask=valid[None, :] & (d < TO)[:, None], other=0.0)


@triton.jit
def _attend(
    request, piece, target, q_ptr, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
    slopes_ptr, sinks_ptr, out_ptr, stats_ptr, partial_ptr, q_strides, k_page_stride, v_page_stride,
    table_strides, out_strides, softmax_scale, softcap,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, VALUE_WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Attend from heads of one KV head to a piece of a request."""
    heads = target[0]
    valid = heads >= 0
    HEADS: tl.constexpr = heads.shape[0]
    seq_len, first, begin, whole, end = piece
    table_ptr += request * table_strides[0]
    page = run_pages(table_ptr, table_strides[1], begin, begin < whole, PAGE, TILE)

    row = q_ptr + request * q_strides[0]
    at = heads * q_strides[1]
    qt = query_rows(row, at, valid, q_strides[2], 0, min(WIDTH, HEAD_DIM), WIDTH)
    rest_qt = qt
    if HEAD_DIM > WIDTH:
        rest_qt = query_rows(row, at, valid, q_strides[2], WIDTH, HEAD_DIM, REST)
    scale = tl.zeros([HEADS], tl.float32) + tl.load(k_scale_ptr) * softmax_scale
    slopes = tl.load(slopes_ptr + heads, mask=valid, other=0.0) if ALIBI else scale

    acc = tl.zeros([VALUE_WIDTH, HEADS], tl.float32)
    running_max = tl.full([HEADS], NOTHING, tl.float32)
    total = tl.zeros([TILE, HEADS], tl.float32)
    for start in tl.range(begin, whole, TILE, num_stages=STAGES):
        after = start + TILE
        next_page = run_pages(table_ptr, table_strides[1], after, after < whole, PAGE, TILE)
        acc, running_max, total = _tile(
            acc, running_max, total, qt, rest_qt, scale, slopes, softcap, first, start, seq_len,
            k_ptr, v_ptr, page, k_page_stride, v_page_stride,
            HEAD_DIM, VALUE_DIM, PAGE, TILE, SOFTCAP, ALIBI, False,
        )  # fmt: skip
        page = next_page
    for start in tl.range(whole, end, TILE, num_stages=1):
        attended = attended_runs(start, first, seq_len, page.shape[0], TILE)
        page = run_pages(table_ptr, table_strides[1], start, attended, PAGE, TILE)
        acc, running_max, total = _tile(
            acc, running_max, total, qt, rest_qt, scale, slopes, softcap, first, start, seq_len,
            k_ptr, v_ptr, page, k_page_stride, v_page_stride,
            HEAD_DIM, VALUE_DIM, PAGE, TILE, SOFTCAP, ALIBI, True,
        )  # fmt: skip
    store_piece(
        acc, running_max, tl.sum(total, 0), v_scale_ptr, request, target, out_ptr,
        out_strides, stats_ptr, partial_ptr, sinks_ptr, 0, VALUE_DIM, NUM_HEADS, VALUE_DIM, SINKS,
        SHIFT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch_size", "shares"])
def decode_half(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr, sinks_ptr,
    out_ptr, stats_ptr, partial_ptr, q_strides, k_strides, v_strides, table_strides, lens_stride,
    out_strides, k_scale_stride, v_scale_stride, softmax_scale, softcap, window, batch_size, shares,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, START: tl.constexpr, BALANCED: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, DEPENDENT: tl.constexpr,
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
            HEAD_DIM, VALUE_DIM, WIDTH, REST, VALUE_WIDTH, PAGE, TILE, STAGES, SOFTCAP, ALIBI,
            SINKS,
        )  # fmt: skip
