"""Decode attention over NVFP4 pages on FP8 tensor cores, with no multiplication per cached number.

E2M1 becomes E4M3 by shifts (times 2**-6, exact). Of K, each block of 16 dimensions gets columns of
its own: q is zero outside the block, and one product gives every block's partial sum, to which the
block scales are applied. Of V, block scales are folded into P, again a column for each block; the
result keeps the rows of that block. Columns are (block / 2, head, block % 2), of two terms (block,
head, term): the order in which a thread holds all columns of a head.

P times a block scale is an E4M3 number, so V blocks with a small scale lose accuracy, which the
error over a whole head does not show: with two terms and a flat softmax over 8192 tokens, the
dimensions of a block of scale 10 are 0.14 % off, of scale 1 1.1 %, of scale 0.3 4 % (the largest
block of a tensor has about 75).
"""

import triton
import triton.language as tl

from kvq.kernels.nvfp4_tiles import (
    block_query,
    block_scales,
    block_weights,
    expand,
    own_block,
    row_tokens,
    scaled_sum,
)
from kvq.kernels.softmax import NOTHING, advance, find_pages, logits, split_range, store_split

# P times a block scale must stay within E4M3, so P itself stays below one
SHIFT = tl.constexpr(0)
CODE_SCALE = tl.constexpr(2.0**6)  # undoes the shift of E2M1 into E4M3


@triton.jit
def _tile(
    low_acc, high_acc, running_max, total, low_q, high_q, scale, slopes,
    softcap, first, start, seq_len, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, table_ptr,
    table_stride, k_page_stride, v_page_stride,
    K_HALF: tl.constexpr, V_HALF: tl.constexpr, K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, TERMS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = scale.shape[0]
    byte, v_byte = tl.arange(0, low_q.shape[0]), tl.arange(0, low_acc.shape[0])
    row_token, token = row_tokens(TILE, RUN), tl.arange(0, TILE)
    row_position = start + row_token
    inside = (row_position >= first) & (row_position < seq_len)
    page, offset = find_pages(table_ptr, table_stride, start, token, first, seq_len, PAGE, TILE)
    row_page, row_offset = find_pages(
        table_ptr, table_stride, start, row_token, first, seq_len, PAGE, TILE
    )
    k_row = row_page * k_page_stride + row_offset * K_HALF
    k_offsets = tl.multiple_of(k_row, 16)[:, None] + byte[None, :]
    if K_HALF == low_q.shape[0]:
        k = tl.load(k_ptr + k_offsets)
    else:
        k = tl.load(k_ptr + k_offsets, mask=(byte < K_HALF)[None, :], other=0)
    low, high = expand(k)
    k_scale_row = row_page * k_page_stride + row_offset * (K_HALF // 8)
    ptr = k_scales_ptr + k_scale_row
    low_products, high_products = tl.dot(low, low_q), tl.dot(high, high_q)
    low_scales, high_scales = block_scales(ptr, inside, K_HALF // 16, K_BLOCKS, MASKED)
    products = scaled_sum(low_products, low_scales, HEADS, K_BLOCKS, TERMS)
    products += scaled_sum(high_products, high_scales, HEADS, K_BLOCKS, TERMS)
    x = logits(products, scale, softcap, slopes, row_position, first, seq_len,
               SOFTCAP, ALIBI, MASKED)  # fmt: skip
    running_max, factor = advance(x, running_max)
    p = tl.exp2(x - (running_max - SHIFT)[None, :])
    total = total * factor[None, :] + p

    run: tl.constexpr = 16 if PAGE % TILE else TILE
    column = tl.max_contiguous(tl.multiple_of(page * v_page_stride + offset, run), run)
    v_offsets = column[None, :] + (v_byte * PAGE)[:, None]
    if V_HALF == low_acc.shape[0]:
        v = tl.load(v_ptr + v_offsets)
    else:
        v = tl.load(v_ptr + v_offsets, mask=(v_byte < V_HALF)[:, None], other=0)
    low, high = expand(v)
    ptr = v_scales_ptr + row_page * v_page_stride + row_offset * (V_HALF // 8)
    columns: tl.constexpr = V_BLOCKS * TERMS // 2
    factors = tl.broadcast_to(factor[None, :, None], [columns, HEADS, 2])
    factors = tl.reshape(factors, [columns * HEADS * 2])
    low_scales, high_scales = block_scales(ptr, inside, V_HALF // 16, V_BLOCKS, MASKED)
    low_weights = block_weights(p, low_scales, HEADS, V_BLOCKS, TERMS, RUN)
    high_weights = block_weights(p, high_scales, HEADS, V_BLOCKS, TERMS, RUN)
    low_acc = low_acc * factors[None, :] + tl.dot(low, low_weights, max_num_imprecise_acc=TILE)
    high_acc = high_acc * factors[None, :] + tl.dot(high, high_weights, max_num_imprecise_acc=TILE)
    return low_acc, high_acc, running_max, total


@triton.jit
def decode_nvfp4(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr, sinks_ptr,
    out_ptr, stats_ptr, partial_ptr, q_strides, k_strides, v_strides, table_strides, lens_stride,
    out_strides, k_scale_stride, v_scale_stride, softmax_scale, softcap, window,
    num_splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, K_HALF: tl.constexpr, V_HALF: tl.constexpr, K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
    TERMS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """One split of HEADS query heads of one KV head of one request."""
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    pid = tl.program_id(0).to(tl.int64)
    batch, kv_head = pid // (KV_HEADS * HEAD_BLOCKS), (pid // HEAD_BLOCKS) % KV_HEADS
    split = tl.program_id(1)
    member = (pid % HEAD_BLOCKS) * HEADS + tl.arange(0, HEADS)
    valid, heads = member < GROUP, kv_head * GROUP + member
    seq_len = tl.load(lens_ptr + batch * lens_stride).to(tl.int32)
    first, begin, end = split_range(seq_len, window, split, num_splits, WINDOW, TILE)

    K_BLOCKS: tl.constexpr = K_WIDTH // 16
    V_BLOCKS: tl.constexpr = V_WIDTH // 16
    low_q, high_q, q_scale = block_query(
        q_ptr + batch * q_strides[0], q_strides[2], heads * q_strides[1], valid,
        K_HALF, K_WIDTH, HEAD_DIM, K_BLOCKS, TERMS,
    )  # fmt: skip
    k_scale = tl.load(k_scale_ptr + kv_head * k_scale_stride) * CODE_SCALE
    scale = q_scale * (k_scale * softmax_scale)
    slopes = tl.load(slopes_ptr + heads, mask=valid, other=0.0) if ALIBI else scale

    low_acc = tl.zeros([V_WIDTH, V_BLOCKS * HEADS * TERMS], tl.float32)
    high_acc = tl.zeros([V_WIDTH, V_BLOCKS * HEADS * TERMS], tl.float32)
    running_max = tl.full([HEADS], NOTHING, tl.float32)
    total = tl.zeros([TILE, HEADS], tl.float32)
    table_ptr += batch * table_strides[0]
    k_ptr += kv_head * k_strides[1]
    v_ptr += kv_head * v_strides[1]
    k_scales_ptr = (k_ptr + PAGE * K_HALF).to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    v_scales_ptr = (v_ptr + PAGE * V_HALF).to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    whole = begin if WINDOW else begin + tl.maximum(end - begin, 0) // TILE * TILE
    for start in tl.range(begin, whole, TILE, num_stages=STAGES):
        low_acc, high_acc, running_max, total = _tile(
            low_acc, high_acc, running_max, total, low_q, high_q, scale,
            slopes, softcap, first, start, seq_len, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr,
            table_ptr, table_strides[1], k_strides[0], v_strides[0], K_HALF, V_HALF, K_BLOCKS,
            V_BLOCKS, PAGE, TILE, RUN, TERMS, SOFTCAP, ALIBI,
            False,
        )  # fmt: skip
    for start in tl.range(whole, end, TILE, num_stages=1):
        low_acc, high_acc, running_max, total = _tile(
            low_acc, high_acc, running_max, total, low_q, high_q, scale,
            slopes, softcap, first, start, seq_len, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr,
            table_ptr, table_strides[1], k_strides[0], v_strides[0], K_HALF, V_HALF, K_BLOCKS,
            V_BLOCKS, PAGE, TILE, RUN, TERMS, SOFTCAP, ALIBI,
            True,
        )  # fmt: skip
    v_scale = tl.load(v_scale_ptr + kv_head * v_scale_stride) * CODE_SCALE
    total = tl.sum(total, 0)
    for part in tl.static_range(2):
        acc = low_acc if part == 0 else high_acc
        result = own_block(acc, HEADS, V_BLOCKS, TERMS) * v_scale
        store_split(
            result, running_max, total, batch, heads, valid, split, num_splits, begin < end,
            out_ptr, out_strides, stats_ptr, partial_ptr, sinks_ptr, part * V_HALF,
            V_HALF if part == 0 else VALUE_DIM,
            KV_HEADS * GROUP, VALUE_DIM, SPLIT, SINKS, SHIFT,
        )  # fmt: skip
