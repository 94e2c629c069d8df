"""Decode attention over rows that K and V share (MLA), in any page format, by 16-bit products.

Codes and block scales multiply to at most six significant bits, so dequantized tiles are exact in
bfloat16 and in float16; the tensor's own scale is applied to the products. The value part of a row
is two tiles, so that the accumulators stay within the tile sizes that tensor cores take at once.
"""

import triton
import triton.language as tl

from kvq.kernels.decode_half import query_rows
from kvq.kernels.shares import own_piece, own_share
from kvq.kernels.softmax import (
    NOTHING,
    advance,
    find_pages,
    logits,
    store_piece,
    weights_of,
)

SHIFT = tl.constexpr(8)  # P is at most 2**8, so that small weights are normal float16 numbers
E2M1_IN_HALF = tl.constexpr(2.0**14)  # what a code is short of when its bits are put in a float16


@triton.jit
def _rows(
    ptr, scales_ptr, base, offset, inside, FROM: tl.constexpr, WIDTH: tl.constexpr,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Dimensions FROM on of each token's row, [TILE, WIDTH] in DTYPE, zero past the row's end."""
    d = FROM + tl.arange(0, WIDTH)
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    CUT: tl.constexpr = MASKED or FROM + WIDTH > HEAD_DIM
    if FORMAT == "nvfp4":
        row = base + offset * HALF
        packed = tl.load(ptr + row[:, None] + (d % HALF)[None, :], mask=mask, other=0)
        packed = packed.to(tl.int16)
        low = ((packed & 0x70) << 5) | ((packed & 0x01) << 15)
        bits = tl.where((d < HALF)[None, :], low, (packed & 0x8E) << 8)
        values = bits.to(tl.float16, bitcast=True)
        scale_row = base + offset * (HALF // 8)
        scale_ptrs = scales_ptr + scale_row[:, None] + (d % HALF // 16 * 2 + d // HALF)[None, :]
        scales = tl.load(scale_ptrs, mask=mask, other=0.0).to(tl.float32)
        x = values.to(tl.float32) * (scales * E2M1_IN_HALF)
    else:
        pointers = ptr + tl.multiple_of(base + offset * HEAD_DIM, 16)[:, None] + d[None, :]
        if CUT:
            x = tl.load(pointers, mask=mask, other=0.0)
        else:
            x = tl.load(pointers)
        if FORMAT != "fp8_e4m3":
            # through registers: Triton 3.6 gives wrong products where one tile in shared memory
            # is an operand both as it is and transposed
            x = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
            )
    return x.to(DTYPE)


@triton.jit
def _tile(
    low_acc, high_acc, running_max, total, low_qt, high_qt, rest_qt, scale, slopes, softcap,
    first, start, seq_len, k_ptr, k_scales_ptr, table_ptr, table_stride, page_stride,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = low_qt.shape[0]
    REST: tl.constexpr = rest_qt.shape[0]
    DTYPE: tl.constexpr = low_qt.dtype
    position = start + tl.arange(0, TILE)
    # a page holds anything past the end, NaN too
    inside = (position >= first) & (position < seq_len)
    page, offset = find_pages(table_ptr, table_stride, start, inside, PAGE, TILE)
    base = page * page_stride
    low = _rows(k_ptr, k_scales_ptr, base, offset, inside, 0, WIDTH, FORMAT, HEAD_DIM, HALF,
                DTYPE, MASKED)  # fmt: skip
    high = _rows(k_ptr, k_scales_ptr, base, offset, inside, WIDTH, WIDTH, FORMAT, HEAD_DIM, HALF,
                 DTYPE, MASKED)  # fmt: skip
    rest = _rows(k_ptr, k_scales_ptr, base, offset, inside, 2 * WIDTH, REST, FORMAT, HEAD_DIM,
                 HALF, DTYPE, MASKED)  # fmt: skip
    products = tl.dot(rest, rest_qt, tl.dot(high, high_qt, tl.dot(low, low_qt)))
    x = logits(products, scale, softcap, slopes, position, first, seq_len, SOFTCAP, ALIBI, MASKED)
    running_max, factor = advance(x, running_max)
    p = weights_of(x, running_max, SHIFT)
    total = total * factor[None, :] + p
    weights = p.to(DTYPE)
    low_acc = tl.dot(tl.trans(low), weights, low_acc * factor[None, :])
    high_acc = tl.dot(tl.trans(high), weights, high_acc * factor[None, :])
    return low_acc, high_acc, running_max, total


@triton.jit
def _attend(
    request, piece, target, q_ptr, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
    slopes_ptr, sinks_ptr, out_ptr, stats_ptr, partial_ptr, q_strides, k_page_stride, v_page_stride,
    table_strides, out_strides, softmax_scale, softcap,
    NUM_HEADS: tl.constexpr, FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend from heads of one KV head to a piece of a request; V's arguments are not used."""
    heads = target[0]
    valid = heads >= 0
    seq_len, first, begin, whole, end = piece
    HEADS: tl.constexpr = heads.shape[0]
    WIDTH: tl.constexpr = VALUE_DIM // 2
    table_ptr += request * table_strides[0]
    row, at = q_ptr + request * q_strides[0], heads * q_strides[1]
    low_qt = query_rows(row, at, valid, q_strides[2], 0, WIDTH, WIDTH)
    high_qt = query_rows(row, at, valid, q_strides[2], WIDTH, VALUE_DIM, WIDTH)
    rest_qt = query_rows(row, at, valid, q_strides[2], VALUE_DIM, HEAD_DIM, REST)
    k_scale = tl.load(k_scale_ptr)
    scale = tl.zeros([HEADS], tl.float32) + k_scale * softmax_scale
    slopes = tl.load(slopes_ptr + heads, mask=valid, other=0.0) if ALIBI else scale

    low_acc = tl.zeros([WIDTH, HEADS], tl.float32)
    high_acc = tl.zeros([WIDTH, HEADS], tl.float32)
    running_max = tl.full([HEADS], NOTHING, tl.float32)
    total = tl.zeros([TILE, HEADS], tl.float32)
    k_scales_ptr = k_ptr
    if FORMAT == "nvfp4":
        k_scales_ptr = (k_ptr + PAGE * HALF).to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    for start in tl.range(begin, whole, TILE, num_stages=STAGES):
        low_acc, high_acc, running_max, total = _tile(
            low_acc, high_acc, running_max, total, low_qt, high_qt, rest_qt, scale, slopes,
            softcap, first, start, seq_len, k_ptr, k_scales_ptr, table_ptr, table_strides[1],
            k_page_stride, FORMAT, HEAD_DIM, HALF, PAGE, TILE, SOFTCAP, ALIBI, False,
        )  # fmt: skip
    for start in tl.range(whole, end, TILE, num_stages=1):
        low_acc, high_acc, running_max, total = _tile(
            low_acc, high_acc, running_max, total, low_qt, high_qt, rest_qt, scale, slopes,
            softcap, first, start, seq_len, k_ptr, k_scales_ptr, table_ptr, table_strides[1],
            k_page_stride, FORMAT, HEAD_DIM, HALF, PAGE, TILE, SOFTCAP, ALIBI, True,
        )  # fmt: skip
    total = tl.sum(total, 0)
    for part in tl.static_range(2):
        acc = low_acc if part == 0 else high_acc
        store_piece(
            acc, running_max, total, v_scale_ptr, request, target, out_ptr, out_strides,
            stats_ptr, partial_ptr, sinks_ptr, part * WIDTH, (part + 1) * WIDTH, NUM_HEADS,
            VALUE_DIM, SINKS, SHIFT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch_size", "shares"])
def decode_shared(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr, sinks_ptr,
    out_ptr, stats_ptr, partial_ptr, q_strides, k_strides, v_strides, table_strides, lens_stride,
    out_strides, k_scale_stride, v_scale_stride, softmax_scale, softcap, window, batch_size, shares,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
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
            FORMAT, HEAD_DIM, VALUE_DIM, HALF, REST, PAGE, TILE, STAGES, SOFTCAP, ALIBI, SINKS,
        )  # fmt: skip
