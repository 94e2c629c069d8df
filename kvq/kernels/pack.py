"""Write new K and V into paged caches, bit-equal to `kvq.kernels.reference.append_kv`.

A thread has 16 dimensions of one token, in NVFP4 pages of each half: a block, and the bytes that
both give. Where a page is token-contiguous neighbouring threads have neighbouring tokens, whose
bytes are one run if their slots are, wherever in a page it begins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.checks import Scale, check_append, check_caches, head_scale
from kvq.kernels.launch import check_device, on_device
from kvq.kernels.numerics import (
    E2M1_MAX,
    SHORT_SCALE_MAX,
    SHORT_SCALE_MIN,
    inverse_power,
    larger,
    largest,
    magnitude,
    nvfp4_block_scale,
    quantize_e4m3,
    quotient,
    reciprocal_terms,
    round_e2m1,
    short_quotient,
    sign_bits,
    with_sign,
)
from kvq.kernels.pages import BLOCK_SIZE, PageLayout, half

_TOKENS = 32  # of a program, as many as a warp has threads
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
def _block_scales(first, second, scale):
    """E4M3 block scales [ITEMS], and the effective scales [ITEMS, 1]."""
    amax = largest(larger(magnitude(first), magnitude(second)), 1)
    block_scale = nvfp4_block_scale(amax, scale, first.dtype != tl.float32)
    return block_scale, (block_scale.to(tl.float32) * scale)[:, None]


@triton.jit
def _words(x):
    """Each four bytes of [ITEMS, N], the first lowest, as one int32 of [ITEMS, N // 4]."""
    N: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x.to(tl.int32), [x.shape[0], N // 2, 2]))
    even, odd = tl.split(tl.reshape(even | (odd << 8), [x.shape[0], N // 4, 2]))
    return even | (odd << 16)


@triton.jit
def _bytes(x):
    """Undo `_words`."""
    shifts = (tl.arange(0, 4) * 8)[None, None, :]
    return tl.reshape((x[:, :, None] >> shifts).to(tl.uint8), [x.shape[0], 4 * x.shape[1]])


@triton.jit
def _codes(x, effective, unit):
    """E2M1 codes `s e e m` of x / effective, as words of bytes `s 0 0 0 e e m 0`.

    These are the E5M2 codes of 2**-14 of their numbers: one instruction makes two of them.
    """
    if x.dtype == tl.float32:
        y = quotient(x, effective, E2M1_MAX)
    else:
        reciprocal, rest = reciprocal_terms(effective * unit)
        y = short_quotient(x.to(tl.float32) * unit, reciprocal, rest, E2M1_MAX)
    y = with_sign(round_e2m1(y, 2**-14), sign_bits(x, effective))
    return _words(y.to(tl.float8e5).to(tl.uint8, bitcast=True))


@triton.jit
def _interleave(low, high):
    """Bytes `S e e m E E M s` of words of `s 0 0 0 e e m 0` and `S 0 0 0 E E M 0`."""
    word = (high & ~0x70707070) | ((low << 3) & 0x70707070)
    return _bytes((word & ~0x01010101) | ((low >> 7) & 0x01010101))


@triton.jit
def _append_nvfp4(
    low, high, page_ptrs, offset, piece, inside, scale, unit, SIZE: tl.constexpr,
    PAGE: tl.constexpr, CHUNK: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Write a piece of each half of a head, both in two parts; SIZE bytes are a token's.

    16-bit x and the scales are multiplied by unit, a power of two, before they are divided.
    """
    low_codes, low_scale = _block_scales(low[0], low[1], scale)
    high_codes, high_scale = _block_scales(high[0], high[1], scale)
    first = _interleave(_codes(low[0], low_scale, unit), _codes(high[0], high_scale, unit))
    second = _interleave(_codes(low[1], low_scale, unit), _codes(high[1], high_scale, unit))
    _store(page_ptrs, offset, piece, first, second, inside, SIZE, CHUNK, BY_TOKEN)
    BLOCKS: tl.constexpr = SIZE // PIECE
    if BY_TOKEN:
        pair = offset * BLOCKS + piece
    else:
        pair = offset // CHUNK * (CHUNK * BLOCKS) + piece * CHUNK + offset % CHUNK
    block_ptrs = page_ptrs + PAGE * SIZE + 2 * pair
    tl.store(block_ptrs, low_codes.to(tl.uint8, bitcast=True), mask=inside)
    tl.store(block_ptrs + 1, high_codes.to(tl.uint8, bitcast=True), mask=inside)


@triton.jit
def _append(
    x_ptr, cache_ptr, slot_ptr, scale_ptr, begin, num_tokens, x_strides, page_stride, slot_stride,
    FORMAT: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
    PIECES: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Write K or V of a block of tokens of one head; an item is a piece of a token."""
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
        scale = tl.load(scale_ptr)
        # a branch, since few scales need a unit; before it all of x is asked for
        if (scale >= SHORT_SCALE_MIN) & (scale <= SHORT_SCALE_MAX):
            _append_nvfp4(low, high, page_ptrs, offset, piece, inside, scale, 1.0, HALF, PAGE,
                          CHUNK, BY_TOKEN)  # fmt: skip
        else:
            _append_nvfp4(low, high, page_ptrs, offset, piece, inside, scale, inverse_power(scale),
                          HALF, PAGE, CHUNK, BY_TOKEN)  # fmt: skip
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
    registers = _REGISTERS if layout.format == "nvfp4" and k.dtype != torch.float32 else None
    with on_device(k):
        _append_kv[(triton.cdiv(k.shape[0], tokens) * heads * sides,)](
            k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales, k.shape[0],
            k.stride(), (0, 0, 0) if v is None else v.stride(), k_cache.stride()[:2],
            (0, 0) if v_cache is None else v_cache.stride()[:2], slot_mapping.stride(0),
            k_scales.stride(0), v_scales.stride(0),
            FORMAT=layout.format, PAGE=layout.page_size, CHUNK=layout.chunk, HEADS=heads,
            SIDES=sides, TOKENS=tokens, K_PIECES=k_pieces, V_PIECES=v_pieces,
            K_SIZE=layout.head_dim, V_SIZE=size, K_HALF=half(layout.head_dim), V_HALF=half(size),
            num_warps=max(tokens * pieces // 32, 1), maxnreg=registers,
        )  # fmt: skip
