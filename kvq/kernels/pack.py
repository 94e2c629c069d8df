"""Write new K and V into paged caches, bit-equal to `kvq.kernels.reference.append_kv`.

A thread has 16 dimensions of one token, in NVFP4 pages of each half: a block, and the bytes that
both give. Where a page is token-contiguous neighbouring threads have neighbouring tokens, whose
bytes are one run if their slots are, wherever in a page it begins.
"""

import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.checks import Scale, check_append, check_caches, head_scale
from kvq.kernels.launch import check_device, on_device
from kvq.kernels.numerics import (
    E2M1_MAX,
    encode_e2m1,
    float_bits,
    larger,
    largest,
    magnitude,
    nvfp4_block_scale,
    quantize_e4m3,
    quotient,
)
from kvq.kernels.pages import BLOCK_SIZE, PageLayout, half

_TOKENS = 32  # of a program, as many as a warp has threads
_MOST_THREADS = 256
PIECE = tl.constexpr(BLOCK_SIZE)


@triton.jit
def _load(x_ptr, offsets, stride, mask):
    """Load a piece of each item in two parts, each what a thread loads at once of 16-bit x."""
    PART: tl.constexpr = PIECE // 2
    pointers = x_ptr + offsets[:, None] + (tl.arange(0, PART) * stride)[None, :]
    first = tl.load(pointers, mask=mask[:, None], other=0.0)
    return first, tl.load(pointers + PART * stride, mask=mask[:, None], other=0.0)


@triton.jit
def _store(cache_ptr, page, offset, piece, first, second, mask, SIZE: tl.constexpr,
           CHUNK: tl.constexpr, BY_TOKEN: tl.constexpr):  # fmt: skip
    """Store a piece of each item in its row of SIZE elements, or in its column of a chunk."""
    x = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), [first.shape[0], PIECE])
    d = (piece * PIECE)[:, None] + tl.arange(0, PIECE)[None, :]
    if BY_TOKEN:
        tl.store(cache_ptr + (page + offset * SIZE)[:, None] + d, x, mask=mask[:, None])
    else:
        column = page + offset // CHUNK * (CHUNK * SIZE) + offset % CHUNK
        tl.store(cache_ptr + column[:, None] + d * CHUNK, x, mask=mask[:, None])


@triton.jit
def _block_scales(first, second, scale):
    """Codes of the block scales [ITEMS], and the effective scales [ITEMS, 1]."""
    amax = largest(larger(magnitude(first), magnitude(second)), 1)
    block_scale = nvfp4_block_scale(amax, scale)
    effective = (block_scale.to(tl.float32) * scale)[:, None]
    return block_scale.to(tl.uint8, bitcast=True), effective


@triton.jit
def _nvfp4_bytes(low, high, low_scale, high_scale):
    """Bytes `S e e m E E M s` of the codes `s e e m` of low and `S E E M` of high."""
    first = encode_e2m1(quotient(low, low_scale, E2M1_MAX))
    second = encode_e2m1(quotient(high, high_scale, E2M1_MAX))
    codes = ((first << 4) & 0x70) | ((second << 1) & 0x0E)
    signs = ((float_bits(low) >> 31) & 0x01) | ((float_bits(high) >> 24) & 0x80)
    # a scale of zero makes all codes zero, without signs
    signed = tl.where(low_scale == 0.0, 0, 0x01) | tl.where(high_scale == 0.0, 0, 0x80)
    return (codes | (signs & signed)).to(tl.uint8)


@triton.jit
def _append(
    x_ptr, cache_ptr, slot_ptr, scale_ptr, begin, num_tokens, x_strides, page_stride, slot_stride,
    FORMAT: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
    PIECES: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Write K or V of a block of tokens of one head; an item is a piece of a token."""
    item = tl.arange(0, TOKENS * PIECES)
    if BY_TOKEN:
        token, piece = begin + item // PIECES, item % PIECES
    else:
        token, piece = begin + item % TOKENS, item // TOKENS
    given = token < num_tokens
    slot = tl.load(slot_ptr + token * slot_stride, mask=given, other=-1).to(tl.int64)
    page, offset = slot // PAGE * page_stride, slot % PAGE
    x_offsets = token * x_strides[0] + piece * PIECE * x_strides[2]
    # x is read without waiting for the slots, of padding too
    if FORMAT == "nvfp4":
        inside = (slot >= 0) & (piece < HALF // PIECE)
        low0, low1 = _load(x_ptr, x_offsets, x_strides[2], given & (piece < HALF // PIECE))
        x_offsets += HALF * x_strides[2]
        rest = given & (piece < (SIZE - HALF) // PIECE)
        high0, high1 = _load(x_ptr, x_offsets, x_strides[2], rest)
        scale = tl.load(scale_ptr)
        low_codes, low_scale = _block_scales(low0, low1, scale)
        high_codes, high_scale = _block_scales(high0, high1, scale)
        first = _nvfp4_bytes(low0, high0, low_scale, high_scale)
        second = _nvfp4_bytes(low1, high1, low_scale, high_scale)
        _store(cache_ptr, page, offset, piece, first, second, inside, HALF, CHUNK, BY_TOKEN)
        BLOCKS: tl.constexpr = HALF // PIECE
        if BY_TOKEN:
            pair = offset * BLOCKS + piece
        else:
            pair = offset // CHUNK * (CHUNK * BLOCKS) + piece * CHUNK + offset % CHUNK
        block_ptrs = cache_ptr + page + PAGE * HALF + 2 * pair
        tl.store(block_ptrs, low_codes, mask=inside)
        tl.store(block_ptrs + 1, high_codes, mask=inside)
    elif FORMAT == "fp8_e4m3":
        inside = (slot >= 0) & (piece < SIZE // PIECE)
        first, second = _load(x_ptr, x_offsets, x_strides[2], given & (piece < SIZE // PIECE))
        scale = tl.load(scale_ptr)
        first = quantize_e4m3(first, scale).to(tl.uint8, bitcast=True)
        second = quantize_e4m3(second, scale).to(tl.uint8, bitcast=True)
        _store(cache_ptr, page, offset, piece, first, second, inside, SIZE, CHUNK, BY_TOKEN)
    else:
        d = tl.arange(0, PIECE)[None, :]
        inside = ((slot >= 0) & (piece < SIZE // PIECE))[:, None]
        x = tl.load(x_ptr + x_offsets[:, None] + d * x_strides[2], mask=inside, other=0.0)
        row = page + offset * SIZE + piece * PIECE
        tl.store(cache_ptr + row[:, None] + d, x, mask=inside)


@triton.jit
def _append_kv(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr, num_tokens,
    k_strides, v_strides, k_cache_strides, v_cache_strides, slot_stride, k_scale_stride,
    v_scale_stride,
    FORMAT: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr,
    SIDES: tl.constexpr, TOKENS: tl.constexpr, K_PIECES: tl.constexpr, V_PIECES: tl.constexpr,
    K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_HALF: tl.constexpr, V_HALF: tl.constexpr,
):  # fmt: skip
    # neighbouring programs have the heads of the same tokens, which lie side by side
    pid = tl.program_id(0).to(tl.int64)
    head, begin = pid % HEADS, pid // (HEADS * SIDES) * TOKENS
    if pid // HEADS % SIDES == 0:
        _append(
            k_ptr + head * k_strides[1], k_cache_ptr + head * k_cache_strides[1], slot_ptr,
            k_scale_ptr + head * k_scale_stride, begin, num_tokens, k_strides, k_cache_strides[0],
            slot_stride, FORMAT, PAGE, CHUNK, TOKENS, K_PIECES, K_SIZE, K_HALF, True,
        )  # fmt: skip
    elif SIDES == 2:
        BY_TOKEN: tl.constexpr = FORMAT != "nvfp4" and FORMAT != "fp8_e4m3"
        _append(
            v_ptr + head * v_strides[1], v_cache_ptr + head * v_cache_strides[1], slot_ptr,
            v_scale_ptr + head * v_scale_stride, begin, num_tokens, v_strides, v_cache_strides[0],
            slot_stride, FORMAT, PAGE, CHUNK, TOKENS, V_PIECES, V_SIZE, V_HALF, BY_TOKEN,
        )  # fmt: skip


def append_kv(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    layout: PageLayout,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Quantize new tokens and write them into their pages, in one launch.

    Bytes of other tokens are not touched. Values are not read on the host: in FP8 pages a NaN stays
    NaN, in NVFP4 pages its block gets a NaN scale.

    Args:
        k: `[num_tokens, num_kv_heads, head_dim]` bfloat16, float16 or float32, any strides.
        v: `[num_tokens, num_kv_heads, v_head_dim]`; None if the layout is shared.
        k_cache: `[num_pages, num_kv_heads, layout.k_elements]`.
        v_cache: `[num_pages, num_kv_heads, layout.v_elements]`; None if shared.
        slot_mapping: `[num_tokens]` int32 or int64, `page * page_size + offset`; negative slots
            are padding and skipped, no two tokens may have the same.
        layout: of both caches.
        k_scale: dequantization multiplier, a number or float32 of 1 or `num_kv_heads` values;
            None for 16-bit pages.
        v_scale: likewise; not used if shared.

    Raises:
        InputError: `kernel.cache`, `kernel.tokens`, `kernel.scale`, `kernel.indices`,
            `kernel.device`.
    """
    check_caches(k_cache, v_cache, layout)
    check_append(k, v, slot_mapping, layout, k_cache)
    check_device(k, "k")
    heads, fmt, size = layout.num_kv_heads, layout.kv_format, layout.value_dim
    k_scales = head_scale(k_scale, heads, fmt, "k_scale", k)
    v_scales = k_scales if v is None else head_scale(v_scale, heads, fmt, "v_scale", k)
    if k.shape[0] == 0:
        return
    halves = 2 if layout.format == "nvfp4" else 1
    k_pieces, v_pieces = (
        int(triton.next_power_of_2(triton.cdiv(x, halves * BLOCK_SIZE)))
        for x in (layout.head_dim, size)
    )
    pieces = max(k_pieces, v_pieces)
    tokens = min(_TOKENS, max(_MOST_THREADS // pieces, 1))
    sides = 1 if v is None else 2
    with on_device(k):
        _append_kv[(triton.cdiv(k.shape[0], tokens) * heads * sides,)](
            k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales, k.shape[0],
            k.stride(), (0, 0, 0) if v is None else v.stride(), k_cache.stride()[:2],
            (0, 0) if v_cache is None else v_cache.stride()[:2], slot_mapping.stride(0),
            k_scales.stride(0), v_scales.stride(0),
            FORMAT=layout.format, PAGE=layout.page_size, CHUNK=layout.chunk, HEADS=heads,
            SIDES=sides, TOKENS=tokens,
            K_PIECES=k_pieces, V_PIECES=v_pieces, K_SIZE=layout.head_dim, V_SIZE=size,
            K_HALF=half(layout.head_dim), V_HALF=half(size),
            num_warps=max(tokens * pieces // 32, 1),
        )  # fmt: skip
