"""Tiles of NVFP4 pages as operands of FP8 tensor cores; see `decode_nvfp4` for the idea."""

import triton
import triton.language as tl

from kvq.kernels.decode_fp8 import p_terms, query_scale, query_terms, sum_terms


@triton.jit
def expand(packed):
    """E4M3 of the low and of the high codes of each byte, times 2**-6."""
    low, high = tl.inline_asm_elementwise(
        """{ .reg .b32 t, u;
        shl.b32 t, $2, 2; and.b32 t, t, 0x8c8c8c8c; shr.b32 u, $2, 2; and.b32 u, u, 0x10101010;
        or.b32 $0, t, u; and.b32 $1, $2, 0x9c9c9c9c; }""",
        "=r,=r,r", [packed], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4,
    )  # fmt: skip
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def row_tokens(TILE: tl.constexpr, RUN: tl.constexpr):
    """Token of each row of the K tile: the RUN that a thread of the product holds in a row."""
    row = tl.arange(0, TILE)
    if RUN == 4:
        token = row // 16 % 4 * 32 + row % 8 * 4 + row // 8 % 2 * 2 + row // 64
    else:
        token = row // 16 * 16 + row % 8 * 2 + row // 8 % 2
    return token


@triton.jit
def in_order(x, RUN: tl.constexpr):
    """Rows of `_tokens` to rows of consecutive tokens, which splits and joins put in one word."""
    TILE: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    if RUN == 4:
        x = tl.permute(tl.reshape(x, [2, 4, 2, 8, COLUMNS]), (1, 3, 4, 2, 0))
        first, second = tl.split(x)  # [4, 8, COLUMNS, 2]
        first_even, first_odd = tl.split(first)
        second_even, second_odd = tl.split(second)
        x = tl.join(tl.join(first_even, first_odd), tl.join(second_even, second_odd))
        x = tl.permute(x, (0, 1, 3, 4, 2))
    else:
        x = tl.permute(tl.reshape(x, [TILE // 16, 2, 8, COLUMNS]), (0, 2, 3, 1))
        first, second = tl.split(x)
        x = tl.permute(tl.join(first, second), (0, 1, 3, 2))
    return tl.reshape(x, [TILE, COLUMNS])


@triton.jit
def scaled_sum(products, scales, HEADS: tl.constexpr, BLOCKS: tl.constexpr, TERMS: tl.constexpr):
    """Sum the columns of each head, times their block's scale [TILE, BLOCKS]."""
    TILE: tl.constexpr = products.shape[0]
    first, second = tl.split(tl.reshape(products, [TILE, BLOCKS * TERMS // 2, HEADS, 2]))
    if TERMS == 2:
        scaled = (first + second) * scales[:, :, None]
    else:
        even, odd = tl.split(tl.reshape(scales, [TILE, BLOCKS // 2, 2]))
        scaled = first * even[:, :, None] + second * odd[:, :, None]
    return tl.sum(scaled, 1)


@triton.jit
def block_weights(p, scales, HEADS: tl.constexpr, BLOCKS: tl.constexpr, TERMS: tl.constexpr,
             RUN: tl.constexpr):  # fmt: skip
    """P [TILE, HEADS] times block scales, as the E4M3 columns of half a row, tokens in order."""
    TILE: tl.constexpr = p.shape[0]
    if TERMS == 2:
        columns = p_terms(-p[:, None, :] * scales[:, :, None], TERMS)
    else:
        even, odd = tl.split(tl.reshape(scales, [TILE, BLOCKS // 2, 2]))
        columns = tl.join(p[:, None, :] * even[:, :, None], p[:, None, :] * odd[:, :, None])
    columns = tl.reshape(columns, [TILE, BLOCKS * HEADS * TERMS])
    return in_order(columns, RUN).to(tl.float8e4nv)


@triton.jit
def own_block(acc, HEADS: tl.constexpr, BLOCKS: tl.constexpr, TERMS: tl.constexpr):
    """Of [WIDTH, columns] the columns of each row's own block: [WIDTH, HEADS]."""
    WIDTH: tl.constexpr = acc.shape[0]
    block = tl.arange(0, WIDTH)[:, None] // 16
    first, second = tl.split(tl.reshape(acc, [WIDTH, BLOCKS * TERMS // 2, HEADS, 2]))
    pair = tl.arange(0, BLOCKS * TERMS // 2)[None, :]
    if TERMS == 2:
        own = sum_terms(first, second)
        own = tl.where((block == pair)[:, :, None], own, 0.0)
    else:
        own = tl.where((block == pair * 2)[:, :, None], first, 0.0)
        own += tl.where((block == pair * 2 + 1)[:, :, None], second, 0.0)
    return tl.sum(own, 1)


@triton.jit
def _half_scales(ptr, inside, SIZE: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr):
    """Block scales [TILE, BLOCKS] of half a row, zero past SIZE."""
    block = tl.arange(0, BLOCKS)
    if SIZE == BLOCKS and not MASKED:
        scales = tl.load(ptr[:, None] + block[None, :])
    else:
        wanted = inside[:, None] & (block < SIZE)[None, :]
        scales = tl.load(ptr[:, None] + block[None, :], mask=wanted, other=0.0)
    return scales.to(tl.float32)


@triton.jit
def _four(a, b, c, d):
    """Columns [TILE, 4] of four vectors."""
    x = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 2, 1))
    return tl.reshape(x, [a.shape[0], 4])


@triton.jit
def block_scales(ptr, inside, SIZE: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr):
    """Block scales [TILE, BLOCKS] of both halves; a page may hold NaN past the end."""
    if SIZE == 4:
        # all eight of a token in one word: a thread converts what it needs, and moves no bytes
        words = ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        if MASKED:
            packed = tl.load(words, mask=inside, other=0)
        else:
            packed = tl.load(words)
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            """{ .reg .b16 p, q, r, s, x, y; .reg .b32 t;
            mov.b64 {p, q, r, s}, $8;
            cvt.rn.f16x2.e4m3x2 t, p; mov.b32 {x, y}, t; cvt.f32.f16 $0, x; cvt.f32.f16 $1, y;
            cvt.rn.f16x2.e4m3x2 t, q; mov.b32 {x, y}, t; cvt.f32.f16 $2, x; cvt.f32.f16 $3, y;
            cvt.rn.f16x2.e4m3x2 t, r; mov.b32 {x, y}, t; cvt.f32.f16 $4, x; cvt.f32.f16 $5, y;
            cvt.rn.f16x2.e4m3x2 t, s; mov.b32 {x, y}, t; cvt.f32.f16 $6, x; cvt.f32.f16 $7, y; }""",
            "=f,=f,=f,=f,=f,=f,=f,=f,l", [packed], dtype=(tl.float32,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
        low, high = _four(a, b, c, d), _four(e, f, g, h)
    else:
        low = _half_scales(ptr, inside, SIZE, BLOCKS, MASKED)
        high = _half_scales(ptr + SIZE, inside, SIZE, BLOCKS, MASKED)
    return low, high


@triton.jit
def block_query(ptr, stride, heads, valid, HALF: tl.constexpr, WIDTH: tl.constexpr,
                HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, TERMS: tl.constexpr):  # fmt: skip
    """Columns of q for the low and the high half, zero outside their block, and its scale."""
    HEADS: tl.constexpr = heads.shape[0]
    COLUMNS: tl.constexpr = BLOCKS * HEADS * TERMS
    shape: tl.constexpr = [BLOCKS * TERMS // 2, HEADS, 2]
    pair = tl.arange(0, BLOCKS * TERMS // 2)[:, None, None]
    side = tl.arange(0, 2)[None, None, :]
    block = pair + side * 0 if TERMS == 2 else pair * 2 + side
    block = tl.reshape(tl.broadcast_to(block, shape), [COLUMNS])
    second = side if TERMS == 2 else side * 0
    second = tl.reshape(tl.broadcast_to(second, shape), [COLUMNS]) == 1
    at = tl.reshape(tl.broadcast_to(heads[None, :, None], shape), [COLUMNS])
    inside = tl.broadcast_to(valid[None, :, None].to(tl.int32), shape)
    inside = tl.reshape(inside, [COLUMNS]) == 1
    d = tl.arange(0, WIDTH)
    offsets = at[None, :] + (d * stride)[:, None]
    low = tl.load(ptr + offsets, mask=inside[None, :] & (d < HALF)[:, None], other=0.0)
    rest = inside[None, :] & (d < HEAD_DIM - HALF)[:, None]
    high = tl.load(ptr + offsets + HALF * stride, mask=rest, other=0.0)
    low, high = low.to(tl.float32), high.to(tl.float32)
    q_scale, inverse = query_scale(tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0)))
    own = (d[:, None] // 16) == block[None, :]
    low = query_terms(tl.where(own, low, 0.0), inverse, second)
    high = query_terms(tl.where(own, high, 0.0), inverse, second)
    return low, high, tl.max(tl.max(tl.reshape(q_scale, shape), 2), 0)
