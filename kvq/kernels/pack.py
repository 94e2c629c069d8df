"""Write new K and V into paged caches, bit-equal to `kvq.kernels.reference.append_kv`.

A thread has 16 dimensions of one token, in NVFP4 pages of each half: a block, and the bytes that
both give. Where a page is token-contiguous neighbouring threads have neighbouring tokens, whose
bytes in a chunk are one run if their slots are, wherever it begins. Two programs that write parts
of the same 32 bytes take longer than one that writes them all. So many tokens of V are written to
FP8 pages in windows that begin and end where 32 bytes do.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.checks import Scale, check_append, check_caches, head_scale
from kvq.kernels.launch import check_device, on_device
from kvq.kernels.numerics import quantize_e4m3
from kvq.kernels.nvfp4_codes import has_limits, page_bytes, short_page_bytes
from kvq.kernels.pages import BLOCK_SIZE, PageLayout, half
from kvq.kernels.pairs import pair_numbers, pair_words

_TOKENS = 32  # of a tile, as many as a warp has threads
_TILES = 2  # of a window, whose program waits once for the slots that say where it begins
_MANY = 1024  # tiles of all heads, about as many as an H200 has room for at a time
_MOST_THREADS = 256
_REGISTERS = 48  # of a thread: as many as 16-bit x needs in NVFP4 pages, and no more
PIECE = tl.constexpr(BLOCK_SIZE)


@triton.jit
def _load(x_ptr, offsets, stride, piece, PIECES: tl.constexpr, GIVEN: tl.constexpr):
    """Load a piece of each item in two parts, each what a thread loads at once of 16-bit x.

    Pieces from GIVEN on, of PIECES, are zero.
    """
    PART: tl.constexpr = PIECE // 2
    pointers = x_ptr + offsets[:, None] + (tl.arange(0, PART) * stride)[None, :]
    if GIVEN == PIECES:
        first = tl.load(pointers)
        second = tl.load(pointers + PART * stride)
    else:
        mask = (piece < GIVEN)[:, None]
        first = tl.load(pointers, mask=mask, other=0.0)
        second = tl.load(pointers + PART * stride, mask=mask, other=0.0)
    return first, second


@triton.jit
def _store(page_ptrs, offset, piece, first, second, mask, SIZE: tl.constexpr, CHUNK: tl.constexpr,
           BY_TOKEN: tl.constexpr):  # fmt: skip
    """Store a piece of each item in its row of SIZE elements, or in its column of a chunk."""
    x = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), [first.shape[0], PIECE])
    d = tl.arange(0, PIECE)[None, :]
    if BY_TOKEN:
        page_ptrs += offset * SIZE + piece * PIECE
    else:
        page_ptrs += offset // CHUNK * (CHUNK * SIZE) + offset % CHUNK + piece * (PIECE * CHUNK)
        d *= CHUNK
    tl.store(page_ptrs[:, None] + d, x, mask=mask[:, None])


@triton.jit
def _append_nvfp4(
    low, high, page_ptrs, offset, piece, inside, scale, DTYPE: tl.constexpr, LIMITS: tl.constexpr,
    SIZE: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Write a piece of each half of a head, both in two parts; SIZE bytes are a token's."""
    if LIMITS:
        low_scales, high_scales, first, second = short_page_bytes(low, high, scale, DTYPE)
    else:
        SHORT: tl.constexpr = DTYPE != tl.float32
        if SHORT:
            low = pair_numbers(low[0], DTYPE), pair_numbers(low[1], DTYPE)
            high = pair_numbers(high[0], DTYPE), pair_numbers(high[1], DTYPE)
        low_scales, high_scales, first, second = page_bytes(low, high, scale, SHORT)
    _store(page_ptrs, offset, piece, first, second, inside, SIZE, CHUNK, BY_TOKEN)
    BLOCKS: tl.constexpr = SIZE // PIECE
    if BY_TOKEN:
        pair = offset * BLOCKS + piece
    else:
        pair = offset // CHUNK * (CHUNK * BLOCKS) + piece * CHUNK + offset % CHUNK
    block_ptrs = page_ptrs + PAGE * SIZE + 2 * pair
    tl.store(block_ptrs, low_scales.to(tl.uint8, bitcast=True), mask=inside)
    tl.store(block_ptrs + 1, high_scales.to(tl.uint8, bitcast=True), mask=inside)


@triton.jit
def _append(
    x_ptr, cache_ptr, slot_ptr, scale_ptr, begin, num_tokens, x_strides, page_stride, slot_stride,
    FORMAT: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
    PIECES: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Write K or V of a tile of tokens of one head; an item is a piece of a token."""
    item = tl.arange(0, TOKENS * PIECES)
    if BY_TOKEN:
        token, piece = item // PIECES, item % PIECES
    else:
        token, piece = item % TOKENS, item // TOKENS
    given = tl.minimum(num_tokens - begin, TOKENS).to(tl.int32)
    inside = token < given
    token = tl.minimum(token, given - 1).to(tl.int64)  # so that loads need no mask
    slot = tl.load(slot_ptr + (begin + token) * slot_stride)
    inside &= slot >= 0
    # what a negative slot gives is not used, and numbers without a sign divide in a shift
    slot = slot.to(tl.uint64)
    page_ptrs = cache_ptr + (slot // PAGE).to(tl.int64) * page_stride
    offset = (slot % PAGE).to(tl.int32)
    x_ptr += begin * x_strides[0]
    x_offsets = token * x_strides[0] + (piece * PIECE).to(tl.int64) * x_strides[2]
    # x is read without waiting for the slots, of padding too
    if FORMAT == "nvfp4":
        LOW: tl.constexpr = HALF // PIECE
        low = _load(x_ptr, x_offsets, x_strides[2], piece, PIECES, LOW)
        x_offsets += HALF * x_strides[2]
        high = _load(x_ptr, x_offsets, x_strides[2], piece, PIECES, (SIZE - HALF) // PIECE)
        if LOW != PIECES:
            inside &= piece < LOW
        DTYPE: tl.constexpr = x_ptr.dtype.element_ty
        SHORT: tl.constexpr = DTYPE != tl.float32
        if SHORT:
            low = pair_words(low[0]), pair_words(low[1])
            high = pair_words(high[0]), pair_words(high[1])
        scale = tl.load(scale_ptr)
        # a branch, since few scales have no limits; before it all of x is asked for
        if has_limits(scale, DTYPE):
            _append_nvfp4(low, high, page_ptrs, offset, piece, inside, scale, DTYPE, SHORT, HALF,
                          PAGE, CHUNK, BY_TOKEN)  # fmt: skip
        else:
            _append_nvfp4(low, high, page_ptrs, offset, piece, inside, scale, DTYPE, False, HALF,
                          PAGE, CHUNK, BY_TOKEN)  # fmt: skip
    elif FORMAT == "fp8_e4m3":
        first, second = _load(x_ptr, x_offsets, x_strides[2], piece, PIECES, SIZE // PIECE)
        if SIZE // PIECE != PIECES:
            inside &= piece < SIZE // PIECE
        scale = tl.load(scale_ptr)
        first = quantize_e4m3(first, scale).to(tl.uint8, bitcast=True)
        second = quantize_e4m3(second, scale).to(tl.uint8, bitcast=True)
        _store(page_ptrs, offset, piece, first, second, inside, SIZE, CHUNK, BY_TOKEN)
    else:
        inside = (inside & (piece < SIZE // PIECE))[:, None]
        d = tl.arange(0, PIECE)[None, :]
        x = tl.load((x_ptr + x_offsets)[:, None] + d * x_strides[2], mask=inside, other=0.0)
        row_ptrs = page_ptrs + offset * SIZE + piece * PIECE
        tl.store(row_ptrs[:, None] + d, x, mask=inside)


@triton.jit
def _boundary(slot_ptr, slot_stride, first, num_tokens, ALIGN: tl.constexpr):
    """Where a window of V begins, and the one before it ends.

    It is the next token from first on whose slot is a multiple of ALIGN, if slots go on by one, and
    first if the next slot does not. Both windows find it from the same two slots, less than ALIGN
    after first, which is less than a window: whatever the slots, a token lies in one window.
    """
    inside = (first > 0) & (first + 1 < num_tokens)
    slot_ptr += first * slot_stride
    slot = tl.load(slot_ptr, mask=inside, other=0).to(tl.int32)
    is_run = tl.load(slot_ptr + slot_stride, mask=inside, other=0).to(tl.int32) == slot + 1
    return tl.minimum(first + tl.where(is_run, -slot & (ALIGN - 1), 0), num_tokens)


@triton.jit
def _append_kv(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr, num_tokens,
    k_strides, v_strides, k_cache_strides, v_cache_strides, slot_stride, k_scale_stride,
    v_scale_stride,
    FORMAT: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr,
    SIDES: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, ALIGN: tl.constexpr,
    K_PIECES: tl.constexpr, V_PIECES: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    K_HALF: tl.constexpr, V_HALF: tl.constexpr,
):  # fmt: skip
    """Write a tile of K, or a tile or a window of TILES of V, of one head."""
    PARTS: tl.constexpr = TILES + SIDES - 1
    # neighbouring programs have the heads of the same tokens, which lie side by side
    pid = tl.program_id(0)
    head = (pid % HEADS).to(tl.int64)
    part = pid // HEADS % PARTS
    begin = (pid // (HEADS * PARTS)).to(tl.int64) * (TILES * TOKENS)
    if part < TILES:
        begin += part * TOKENS
        if (begin < num_tokens) | (TILES == 1):
            _append(
                k_ptr + head * k_strides[1], k_cache_ptr + head * k_cache_strides[1], slot_ptr,
                k_scale_ptr + head * k_scale_stride, begin, num_tokens, k_strides,
                k_cache_strides[0], slot_stride, FORMAT, PAGE, CHUNK, TOKENS, K_PIECES, K_SIZE,
                K_HALF, True,
            )  # fmt: skip
    elif SIDES == 2:
        v_ptr += head * v_strides[1]
        v_cache_ptr += head * v_cache_strides[1]
        v_scale_ptr += head * v_scale_stride
        if TILES == 1:
            BY_TOKEN: tl.constexpr = FORMAT != "nvfp4" and FORMAT != "fp8_e4m3"
            _append(
                v_ptr, v_cache_ptr, slot_ptr, v_scale_ptr, begin, num_tokens, v_strides,
                v_cache_strides[0], slot_stride, FORMAT, PAGE, CHUNK, TOKENS, V_PIECES, V_SIZE,
                V_HALF, BY_TOKEN,
            )  # fmt: skip
        else:
            end = _boundary(slot_ptr, slot_stride, begin + TILES * TOKENS, num_tokens, ALIGN)
            begin = _boundary(slot_ptr, slot_stride, begin, num_tokens, ALIGN)
            while begin < end:
                _append(
                    v_ptr, v_cache_ptr, slot_ptr, v_scale_ptr, begin, end, v_strides,
                    v_cache_strides[0], slot_stride, FORMAT, PAGE, CHUNK, TOKENS, V_PIECES, V_SIZE,
                    V_HALF, False,
                )  # fmt: skip
                begin += TOKENS


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
    many = triton.cdiv(k.shape[0], tokens) * heads >= _MANY
    tiles = _TILES if many and layout.format == "fp8_e4m3" and v is not None else 1
    programs = triton.cdiv(k.shape[0], tokens * tiles) * heads * (tiles + sides - 1)
    registers = _REGISTERS if layout.format == "nvfp4" and k.dtype != torch.float32 else None
    with on_device(k):
        _append_kv[(programs,)](
            k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales, k.shape[0],
            k.stride(), (0, 0, 0) if v is None else v.stride(), k_cache.stride()[:2],
            (0, 0) if v_cache is None else v_cache.stride()[:2], slot_mapping.stride(0),
            k_scales.stride(0), v_scales.stride(0),
            FORMAT=layout.format, PAGE=layout.page_size, CHUNK=layout.chunk, HEADS=heads,
            SIDES=sides, TOKENS=tokens, TILES=tiles, ALIGN=math.gcd(layout.chunk, tokens),
            K_PIECES=k_pieces, V_PIECES=v_pieces, K_SIZE=layout.head_dim, V_SIZE=size,
            K_HALF=half(layout.head_dim), V_HALF=half(size),
            num_warps=max(tokens * pieces // 32, 1), maxnreg=registers,
        )  # fmt: skip
