"""Decode attention over 16-bit pages that simulates quantized P and V; see `Simulation`.

It is launched twice, first for each split's largest logit, then for the rest, because P is rounded
relative to the maximum of the whole row. Codes, and codes times a block scale, have at most six
significant bits and lie in both 16-bit dtypes' normal range, so the products are those of the
dequantized numbers; the tensors' own scales are applied to their sum.
"""

import triton
import triton.language as tl

from kvq.kernels.decode_half import key_products, query_rows, rows
from kvq.kernels.numerics import (
    E2M1_MAX,
    largest,
    magnitude,
    nvfp4_block_scale,
    quantize_e4m3,
    quotient,
    round_e2m1,
    sign_bits,
    with_sign,
)
from kvq.kernels.shares import own_piece, own_share
from kvq.kernels.softmax import NOTHING, find_pages, logits, store_piece

SHIFT = tl.constexpr(0)
CHUNK = tl.constexpr(16)  # splits whose maxima are read at once


@triton.jit
def nvfp4_by_token(x, scale, BLOCK: tl.constexpr):
    """E2M1 values times block scales of x [TOKENS, WIDTH], float32, in blocks along tokens."""
    TOKENS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [TOKENS // BLOCK, BLOCK, WIDTH])
    block_scale = nvfp4_block_scale(largest(magnitude(x), 1), scale).to(tl.float32)[:, None, :]
    effective = block_scale * scale
    y = round_e2m1(quotient(x, effective, E2M1_MAX)) * block_scale
    return tl.reshape(with_sign(y, sign_bits(x, effective)), [TOKENS, WIDTH])


@triton.jit
def quantized(x, scale, QDQ: tl.constexpr, BLOCK: tl.constexpr):
    """What dequantizing x [TOKENS, WIDTH] multiplies by the scale, in x's dtype."""
    scale = tl.full([], scale, tl.float32)
    if QDQ == "fp8_e4m3":
        x = quantize_e4m3(x, scale).to(x.dtype)
    elif QDQ == "nvfp4":
        x = nvfp4_by_token(x, scale, BLOCK).to(x.dtype)
    return x


@triton.jit
def largest_logit(maxima_ptr, row, valid, num_splits):
    """Maximum over the splits, [HEADS]."""
    largest = tl.full(row.shape, NOTHING, tl.float32)
    for begin in range(0, num_splits, CHUNK):
        split = begin + tl.arange(0, CHUNK)
        offsets = (row * num_splits)[None, :] + split[:, None]
        inside = valid[None, :] & (split < num_splits)[:, None]
        maxima = tl.load(maxima_ptr + offsets, mask=inside, other=NOTHING)
        largest = tl.maximum(largest, tl.max(maxima, 0))
    return largest


@triton.jit
def decode_simulated(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr, sinks_ptr,
    out_ptr, stats_ptr, partial_ptr, q_strides, k_strides, v_strides, table_strides, lens_stride,
    out_strides, k_scale_stride, v_scale_stride, softmax_scale, softcap, window, batch_size, shares,
    maxima_ptr, p_scale, v_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, START: tl.constexpr, BALANCED: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, P_QDQ: tl.constexpr, V_QDQ: tl.constexpr,
    BLOCK: tl.constexpr, MAXIMA: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One split of HEADS query heads of one KV head of one request; MAXIMA: its largest logits."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    tl.static_assert(not BALANCED, "maxima are kept of a number of splits")
    request, _, place, kv_head, heads = own_share(
        lens_ptr, lens_stride, batch_size, window, shares, BALANCED, WINDOW, TILE, START, KV_HEADS,
        GROUP, HEADS,
    )  # fmt: skip
    piece, target, _ = own_piece(request, place, heads, lens_ptr, lens_stride, window, shares,
                                 SPLIT, BALANCED, WINDOW, TILE, START)  # fmt: skip
    seq_len, first, begin, _, end = piece
    valid = heads >= 0

    q_row, at = q_ptr + request * q_strides[0], heads * q_strides[1]
    qt = query_rows(q_row, at, valid, q_strides[2], 0, min(WIDTH, HEAD_DIM), WIDTH)
    rest_qt = qt
    if HEAD_DIM > WIDTH:
        rest_qt = query_rows(q_row, at, valid, q_strides[2], WIDTH, HEAD_DIM, REST)
    scale = tl.zeros([HEADS], tl.float32) + softmax_scale
    slopes = tl.load(slopes_ptr + heads, mask=valid, other=0.0) if ALIBI else scale
    stats_row = request * (KV_HEADS * GROUP) + heads
    table_ptr += request * table_strides[0]
    k_ptr += kv_head * k_strides[1]
    v_ptr += kv_head * v_strides[1]

    largest = tl.full([HEADS], NOTHING, tl.float32)
    if not MAXIMA:
        largest = largest_logit(maxima_ptr, stats_row, valid, shares)
    acc = tl.zeros([VALUE_WIDTH, HEADS], tl.float32)
    total = tl.zeros([TILE, HEADS], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        position = start + tl.arange(0, TILE)
        # a page holds anything past the end, NaN too
        inside = (position >= first) & (position < seq_len)
        page, offset = find_pages(table_ptr, table_strides[1], start, inside, PAGE, TILE)
        row = page * k_strides[0] + offset * HEAD_DIM
        products = key_products(k_ptr, row, inside, qt, rest_qt, HEAD_DIM, True)
        x = logits(products, scale, softcap, slopes, position, first, seq_len, SOFTCAP, ALIBI, True)
        if MAXIMA:
            largest = tl.maximum(largest, tl.max(x, 0))
        else:
            p = tl.exp2(x - largest[None, :])
            total += p
            row = page * v_strides[0] + offset * VALUE_DIM
            v = rows(v_ptr, row, inside, 0, VALUE_DIM, VALUE_WIDTH, True)
            v = quantized(v, v_scale, V_QDQ, BLOCK)
            acc = tl.dot(tl.trans(v), quantized(p.to(v.dtype), p_scale, P_QDQ, BLOCK), acc)
    if MAXIMA:
        tl.store(maxima_ptr + stats_row * shares + tl.program_id(1), largest, mask=valid)
    else:
        store_piece(
            acc * p_scale * v_scale, largest, tl.sum(total, 0), v_scale_ptr, request, target,
            out_ptr, out_strides, stats_ptr, partial_ptr, sinks_ptr, 0, VALUE_DIM,
            KV_HEADS * GROUP, VALUE_DIM, SINKS, SHIFT,
        )  # fmt: skip
