"""Decode attention over FP8 pages: K and V go from memory to the tensor cores as they are.

The KV tile is the wide operand of both products, `S = K q^T` and `O = V P^T`. With TERMS 2 q and P
are sums of two E4M3 numbers, in neighbouring columns of the same product. Where a tile covers
several pages, V's tokens of a dimension come side by side on the way to registers.
"""

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
    runs,
    store_piece,
    weights_of,
)

SHIFT = tl.constexpr(8)  # P is at most 2**8, so that small weights are normal numbers
P_REST = tl.constexpr(8.0)  # the first term of P is truncated, which leaves less than 32
E4M3_NORMAL = tl.constexpr(2.0**-6)  # the smallest normal number
LEADING_BITS = tl.constexpr(-0x100000)  # sign, exponent and three bits of mantissa of a float32


@triton.jit
def p_terms(x, TERMS: tl.constexpr):
    """Split x [..., HEADS], zero or below, into E4M3 terms along a new last axis.

    With one term it is x, with two the leading bits of x and what is left of -x. They are still
    float32: cast after reshaping, a reshaped E4M3 operand is what Triton 3.6 fails to lay out.
    """
    if TERMS == 2:
        leading = (x.to(tl.int32, bitcast=True) & LEADING_BITS).to(tl.float32, bitcast=True)
        # where E4M3 is subnormal the rest, which is larger, holds x better than both
        leading = tl.where(x > -E4M3_NORMAL, 0.0, leading)
        x = tl.join(leading, (leading - x) * P_REST)
    return x


@triton.jit
def sum_terms(leading, rest):
    """Take products with both terms of P together; the first has its sign changed."""
    return rest * (1.0 / P_REST) - leading


@triton.jit
def query_scale(amax):
    """Power of two that q is divided by, so that bfloat16 numbers are exactly two E4M3 terms.

    The largest magnitude comes to [128, 256); returned with its reciprocal, for amax [...]. That of
    infinity is zero: q then has NaN, where casts would saturate it.
    """
    exponent = amax.to(tl.int32, bitcast=True) >> 23
    finite = exponent < 255
    exponent = tl.where(exponent == 0, 127, tl.maximum(exponent, 8)) - 7
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return scale, (tl.where(finite, 254 - exponent, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def query_terms(q, inverse, second):
    """Turn q [WIDTH, COLUMNS] into E4M3, or where `second` what that leaves."""
    scaled = q * inverse[None, :]
    leading = scaled.to(tl.float8e4nv).to(tl.float32)
    return tl.where(second[None, :], scaled - leading, leading).to(tl.float8e4nv)


@triton.jit
def _tile(
    acc, running_max, total, qt, scale, slopes, softcap, first, start, seq_len,
    k_ptr, v_ptr, page, k_page_stride, v_page_stride,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, TERMS: tl.constexpr, IMPRECISE: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = acc.shape[0]
    HEADS: tl.constexpr = scale.shape[0]
    RUNS: tl.constexpr = page.shape[0]
    RUN: tl.constexpr = TILE // RUNS
    position = start + tl.arange(0, TILE)
    d, dv, token = tl.arange(0, qt.shape[0]), tl.arange(0, WIDTH), tl.arange(0, RUN)
    k_row = run_rows(page, k_page_stride, start, HEAD_DIM, PAGE, TILE)
    if HEAD_DIM == qt.shape[0]:
        k = tl.load(k_ptr + k_row[:, None] + d[None, :])
    else:
        k = tl.load(k_ptr + k_row[:, None] + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
    products = tl.dot(k, qt, max_num_imprecise_acc=IMPRECISE)
    if TERMS == 2:
        leading, rest = tl.split(tl.reshape(products, [TILE, HEADS, TERMS]))
        products = leading + rest
    x = logits(products, scale, softcap, slopes, position, first, seq_len, SOFTCAP, ALIBI, MASKED)
    running_max, factor = advance(x, running_max)
    p = weights_of(x, running_max, SHIFT)
    total = total * factor[None, :] + p
    # a row is one run's tokens of one dimension, so that neighbouring threads read one page
    _, slot = runs(start, PAGE, TILE)
    offset = slot // CHUNK * (CHUNK * VALUE_DIM) + slot % CHUNK
    v_row = (page.to(tl.int64) * v_page_stride + offset)[:, None] + (dv * CHUNK)[None, :]
    v_row = tl.multiple_of(tl.reshape(v_row, [RUNS * WIDTH]), 16)
    v_ptrs = v_ptr + v_row[:, None] + token[None, :]
    if MASKED or VALUE_DIM < WIDTH:
        wanted = (dv < VALUE_DIM)[None, :]
        if MASKED:
            wanted = wanted & attended_runs(start, first, seq_len, RUNS, TILE)[:, None]
        wanted = tl.reshape(tl.broadcast_to(wanted, [RUNS, WIDTH]), [RUNS * WIDTH])
        v = tl.load(v_ptrs, mask=wanted[:, None], other=0.0)
    else:
        v = tl.load(v_ptrs)
    if RUNS > 1:  # else V stays in shared memory
        v = tl.permute(tl.reshape(v, [RUNS, WIDTH, RUN]), (1, 0, 2))
        v = tl.reshape(v, [WIDTH, TILE])
    if MASKED:
        # a page holds anything past the end, NaN too
        inside = (position >= first) & (position < seq_len)
        bits = v.to(tl.uint8, bitcast=True)
        v = tl.where(inside[None, :], bits, 0).to(tl.float8e4nv, bitcast=True)
    weights = tl.reshape(p_terms(-p, TERMS), [TILE, HEADS * TERMS]).to(tl.float8e4nv)
    factors = tl.reshape(tl.broadcast_to(factor[:, None], [HEADS, TERMS]), [HEADS * TERMS])
    # a fresh product for each tile: long sums are float32, not the tensor core's own
    acc = acc * factors[None, :] + tl.dot(v, weights, max_num_imprecise_acc=TILE)
    return acc, running_max, total


@triton.jit
def _attend(
    request, piece, target, q_ptr, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
    slopes_ptr, sinks_ptr, out_ptr, stats_ptr, partial_ptr, q_strides, k_page_stride, v_page_stride,
    table_strides, out_strides, softmax_scale, softcap,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    TERMS: tl.constexpr, IMPRECISE: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend from heads of one KV head to a piece of a request."""
    heads = target[0]
    valid = heads >= 0
    HEADS: tl.constexpr = heads.shape[0]
    seq_len, first, begin, whole, end = piece
    table_ptr += request * table_strides[0]
    page = run_pages(table_ptr, table_strides[1], begin, begin < whole, PAGE, TILE)

    column, d = tl.arange(0, HEADS * TERMS), tl.arange(0, WIDTH)
    columns = tl.reshape(tl.broadcast_to(heads[:, None], [HEADS, TERMS]), [HEADS * TERMS])
    q_offsets = request * q_strides[0] + columns * q_strides[1]
    q_offsets = q_offsets[None, :] + (d * q_strides[2])[:, None]
    q_inside = (columns >= 0)[None, :] & (d < HEAD_DIM)[:, None]
    q = tl.load(q_ptr + q_offsets, mask=q_inside, other=0.0).to(tl.float32)
    q_scale, inverse = query_scale(tl.max(tl.abs(q), 0))
    qt = query_terms(q, inverse, column % TERMS == 1)
    scale = tl.max(tl.reshape(q_scale, [HEADS, TERMS]), 1) * (tl.load(k_scale_ptr) * softmax_scale)
    slopes = tl.load(slopes_ptr + heads, mask=valid, other=0.0) if ALIBI else scale

    acc = tl.zeros([VALUE_WIDTH, HEADS * TERMS], tl.float32)
    running_max = tl.full([HEADS], NOTHING, tl.float32)
    total = tl.zeros([TILE, HEADS], tl.float32)
    for start in tl.range(begin, whole, TILE, num_stages=STAGES):
        after = start + TILE
        next_page = run_pages(table_ptr, table_strides[1], after, after < whole, PAGE, TILE)
        acc, running_max, total = _tile(
            acc, running_max, total, qt, scale, slopes, softcap, first, start, seq_len,
            k_ptr, v_ptr, page, k_page_stride, v_page_stride,
            HEAD_DIM, VALUE_DIM, PAGE, CHUNK, TILE, TERMS, IMPRECISE, SOFTCAP, ALIBI, False,
        )  # fmt: skip
        page = next_page
    for start in tl.range(whole, end, TILE, num_stages=1):
        attended = attended_runs(start, first, seq_len, page.shape[0], TILE)
        page = run_pages(table_ptr, table_strides[1], start, attended, PAGE, TILE)
        acc, running_max, total = _tile(
            acc, running_max, total, qt, scale, slopes, softcap, first, start, seq_len,
            k_ptr, v_ptr, page, k_page_stride, v_page_stride,
            HEAD_DIM, VALUE_DIM, PAGE, CHUNK, TILE, TERMS, IMPRECISE, SOFTCAP, ALIBI, True,
        )  # fmt: skip
    result = -acc
    if TERMS == 2:
        leading, rest = tl.split(tl.reshape(acc, [VALUE_WIDTH, HEADS, TERMS]))
        result = sum_terms(leading, rest)
    store_piece(
        result, running_max, tl.sum(total, 0), v_scale_ptr, request, target, out_ptr, out_strides,
        stats_ptr, partial_ptr, sinks_ptr, 0, VALUE_DIM, NUM_HEADS, VALUE_DIM, SINKS, SHIFT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch_size", "shares"])
def decode_fp8(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr, sinks_ptr,
    out_ptr, stats_ptr, partial_ptr, q_strides, k_strides, v_strides, table_strides, lens_stride,
    out_strides, k_scale_stride, v_scale_stride, softmax_scale, softcap, window, batch_size, shares,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, START: tl.constexpr, TERMS: tl.constexpr,
    IMPRECISE: tl.constexpr, BALANCED: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
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
            HEAD_DIM, VALUE_DIM, WIDTH, VALUE_WIDTH, PAGE, CHUNK, TILE, TERMS, IMPRECISE, STAGES,
            SOFTCAP, ALIBI, SINKS,
        )  # fmt: skip
