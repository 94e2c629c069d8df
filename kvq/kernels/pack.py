"""Write new K and V into paged caches, bit-equal to `kvq.kernels.reference.append_kv`."""

import triton
import triton.language as tl
from torch import Tensor

from kvq.kernels.checks import Scale, check_append, check_caches, head_scale
from kvq.kernels.launch import check_device, on_device
from kvq.kernels.numerics import (
    E2M1_MAX,
    encode_e2m1,
    magnitude_bits,
    nvfp4_block_scale,
    quantize_e4m3,
    quotient,
    sign_bits,
)
from kvq.kernels.pages import BLOCK_SIZE, PageLayout, half

_ELEMENTS = 8192  # of one program


@triton.jit
def _store(cache_ptr, page, offset, x, written, PAGE: tl.constexpr, SIZE: tl.constexpr,
           BY_TOKEN: tl.constexpr):  # fmt: skip
    """Store x [TOKENS, WIDTH] as rows of SIZE elements, or as columns of a page."""
    width = tl.arange(0, x.shape[1])
    mask = written[:, None] & (width < SIZE)[None, :]
    if BY_TOKEN:
        tl.store(cache_ptr + (page + offset * SIZE)[:, None] + width[None, :], x, mask=mask)
    else:
        # with tokens as the first dimension Triton gives a warp 32 tokens, one run of bytes if
        # their slots are
        tl.store(cache_ptr + (page + offset)[:, None] + (width * PAGE)[None, :], x, mask=mask)


@triton.jit
def _half_codes(x, scale, BLOCK: tl.constexpr):
    """Codes [TOKENS, WIDTH] and block scales [TOKENS, WIDTH / BLOCK] of half a row."""
    TOKENS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [TOKENS, WIDTH // BLOCK, BLOCK])
    block_scale = nvfp4_block_scale(tl.max(magnitude_bits(x), 2), scale)
    effective = (block_scale.to(tl.float32) * scale)[:, :, None]
    codes = encode_e2m1(quotient(x, effective, E2M1_MAX), sign_bits(x, effective))
    return tl.reshape(codes, [TOKENS, WIDTH]), block_scale.to(tl.uint8, bitcast=True)


@triton.jit
def _append(
    x_ptr, cache_ptr, slots, head, tokens, scale_ptr,
    x_strides, cache_strides, scale_stride,
    FORMAT: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Write K or V of a block of tokens of one head."""
    written = slots >= 0
    page = (slots // PAGE) * cache_strides[0] + head * cache_strides[1]
    offset = slots % PAGE
    width = tl.arange(0, WIDTH)
    row = tokens * x_strides[0] + head * x_strides[1]
    x_offsets = row[:, None] + (width * x_strides[2])[None, :]
    if FORMAT == "nvfp4":
        scale = tl.load(scale_ptr + head * scale_stride)
        low = tl.load(x_ptr + x_offsets, mask=written[:, None] & (width < HALF)[None, :], other=0.0)
        rest = written[:, None] & (width < SIZE - HALF)[None, :]
        high = tl.load(x_ptr + x_offsets + HALF * x_strides[2], mask=rest, other=0.0)
        low_codes, low_scales = _half_codes(low.to(tl.float32), scale, BLOCK)
        high_codes, high_scales = _half_codes(high.to(tl.float32), scale, BLOCK)
        first = ((low_codes & 8) << 2) | ((low_codes & 4) << 4) | (low_codes & 3)
        codes = (first | ((high_codes & 8) << 4) | ((high_codes & 7) << 2)).to(tl.uint8)
        _store(cache_ptr, page, offset, codes, written, PAGE, HALF, BY_TOKEN)
        block = tl.arange(0, WIDTH // BLOCK)
        BLOCKS: tl.constexpr = HALF // BLOCK
        at = (page + PAGE * HALF + offset * (2 * BLOCKS))[:, None] + block[None, :]
        inside = written[:, None] & (block < BLOCKS)[None, :]
        tl.store(cache_ptr + at, low_scales, mask=inside)
        tl.store(cache_ptr + at + BLOCKS, high_scales, mask=inside)
    else:
        x = tl.load(x_ptr + x_offsets, mask=written[:, None] & (width < SIZE)[None, :], other=0.0)
        if FORMAT == "fp8_e4m3":
            x = x.to(tl.float32)
            scale = tl.load(scale_ptr + head * scale_stride)
            x = quantize_e4m3(x, scale, False).to(tl.uint8, bitcast=True)
        _store(cache_ptr, page, offset, x, written, PAGE, SIZE, BY_TOKEN)


@triton.jit
def _append_kv(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr, num_tokens,
    k_strides, v_strides, k_cache_strides, v_cache_strides, slot_stride, k_scale_stride,
    v_scale_stride,
    FORMAT: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, K_HALF: tl.constexpr,
    V_HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    inside = tokens < num_tokens
    slots = tl.load(slot_ptr + tokens * slot_stride, mask=inside, other=-1).to(tl.int64)
    if tl.program_id(2) == 0:
        _append(
            k_ptr, k_cache_ptr, slots, head, tokens, k_scale_ptr, k_strides,
            k_cache_strides, k_scale_stride, FORMAT, PAGE, K_SIZE, K_WIDTH, K_HALF, BLOCK, True,
        )  # fmt: skip
    elif V_SIZE > 0:
        BY_TOKEN: tl.constexpr = FORMAT != "nvfp4" and FORMAT != "fp8_e4m3"
        _append(
            v_ptr, v_cache_ptr, slots, head, tokens, v_scale_ptr, v_strides,
            v_cache_strides, v_scale_stride, FORMAT, PAGE, V_SIZE, V_WIDTH, V_HALF, BLOCK, BY_TOKEN,
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
    divide = 2 if layout.format == "nvfp4" else 1
    k_width = triton.next_power_of_2(half(layout.head_dim) * 2 // divide)
    v_width = triton.next_power_of_2(half(size) * 2 // divide)
    tokens = min(triton.next_power_of_2(k.shape[0]), max(_ELEMENTS // k_width // divide, 16))
    grid = (triton.cdiv(k.shape[0], tokens), heads, 1 if v is None else 2)
    with on_device(k):
        _append_kv[grid](
            k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales, k.shape[0],
            k.stride(), (0, 0, 0) if v is None else v.stride(), k_cache.stride()[:2],
            (0, 0) if v_cache is None else v_cache.stride()[:2], slot_mapping.stride(0),
            k_scales.stride(0), v_scales.stride(0),
            FORMAT=layout.format, PAGE=layout.page_size, TOKENS=tokens, K_SIZE=layout.head_dim,
            V_SIZE=0 if v is None else size, K_WIDTH=k_width, V_WIDTH=v_width,
            K_HALF=half(layout.head_dim), V_HALF=half(size), BLOCK=BLOCK_SIZE, num_warps=8,
        )  # fmt: skip
