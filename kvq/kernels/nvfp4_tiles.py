"""Tiles of NVFP4 pages as float16 operands of tensor cores; see `decode_nvfp4` for the idea.

Words of several bytes are loaded as integers. A function here takes a word apart into one tensor
for each number of it that is of another kind, of the word's own shape, so that nothing moves
between threads.
"""

import triton
import triton.language as tl

from kvq.kernels.decode_fp8 import query_scale
from kvq.kernels.pages import PAGE_MULTIPLE

CHUNK = tl.constexpr(PAGE_MULTIPLE)  # tokens of which V's bytes lie side by side


@triton.jit
def expand(pairs):
    """Float16 of two bytes' codes times 2**-14: low of both, high of both.

    A code's bits are those of a float16 that is 2**14 smaller; the byte's high code lies where
    float16 has them.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 low, s, t, u;
        shr.b32 t, $4, 3; shl.b32 s, $4, 7; lop3.b32 low, t, s, 0x0e0e0e0e, 0xe4;
        shl.b32 t, low, 8; shl.b32 u, $4, 8; and.b32 $3, $4, 0x8e008e00;
        and.b32 $2, u, 0x8e008e00; and.b32 $1, low, 0x8e008e00; and.b32 $0, t, 0x8e008e00; }""",
        "=r,=r,=r,=r,r", [pairs], dtype=(tl.float16,) * 4, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def product(x, y):
    """Multiply float16, two in one instruction."""
    return tl.inline_asm_elementwise("mul.f16x2 $0, $1, $2;", "=r,r,r", [x, y],
                                     dtype=tl.float16, is_pure=True, pack=2)  # fmt: skip


@triton.jit
def token_scales(words):
    """Float16 of two block scales, low and high, in an int16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.f16x2.e4m3x2 t, $2; mov.b32 {$0, $1}, t; }",
        "=h,=h,h", [words], dtype=(tl.float16,) * 2, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def pair_scales(words):
    """Float16 of a block's scales for two tokens in an int32: low of both, high of both."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 first, second; .reg .b16 a, b, c, d;
        prmt.b32 first, $4, $5, 0x5140; prmt.b32 second, $4, $5, 0x7362;
        mov.b32 {a, b}, first; mov.b32 {c, d}, second;
        cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, c;
        cvt.rn.f16x2.e4m3x2 $2, b; cvt.rn.f16x2.e4m3x2 $3, d; }""",
        "=r,=r,=r,=r,r,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def repeat(x, TIMES: tl.constexpr):
    """Repeat each element of x [SIZE]: [SIZE * TIMES]."""
    SIZE: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(x[:, None], [SIZE, TIMES]), [SIZE * TIMES])


@triton.jit
def repeat_columns(x, TIMES: tl.constexpr):
    """Repeat each column of x [ROWS, COLUMNS]: [ROWS, COLUMNS * TIMES]."""
    shape: tl.constexpr = [x.shape[0], x.shape[1], TIMES]
    return tl.reshape(tl.broadcast_to(x[:, :, None], shape), [shape[0], shape[1] * TIMES])


@triton.jit
def _words(ptr, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Pointers to words, [SIZE], of pointers to bytes of each run of a tile."""
    return tl.reshape(ptr, [SIZE]).to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def key_tile(page_ptr, slot, inside, HALF: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
             RUN: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """K of TOKENS tokens in each row, from each run's page and slot; see `expand` for its parts.

    Columns of a part are every second dimension of one token, then of the next. Of other tokens
    than those `inside` [ROWS, TOKENS], scales are zero.
    """
    ROWS: tl.constexpr = inside.shape[0]
    TOKENS: tl.constexpr = inside.shape[1]
    UNITS: tl.constexpr = WIDTH // 2  # of two bytes; each token's
    row = TOKENS * tl.arange(0, RUN // TOKENS)[None, :]
    codes_ptr = _words((page_ptr + slot * HALF) + row * HALF, ROWS, tl.int16)[:, None]
    codes_ptr = tl.multiple_of(codes_ptr, [16, 16])
    scales_ptr = (page_ptr + PAGE * HALF + slot * (HALF // 8)) + row * (HALF // 8)
    scales_ptr = _words(scales_ptr, ROWS, tl.int16)[:, None]
    if HALF % 64 == 0:
        scales_ptr = tl.multiple_of(scales_ptr, [8 * TOKENS, 8 * TOKENS])
    unit, block = tl.arange(0, TOKENS * UNITS), tl.arange(0, TOKENS * UNITS // 8)
    if HALF == WIDTH and not MASKED:
        codes, words = tl.load(codes_ptr + unit[None, :]), tl.load(scales_ptr + block[None, :])
    else:
        codes_ptr += (unit // UNITS * (HALF // 2) + unit % UNITS)[None, :]
        codes = tl.load(codes_ptr, mask=(unit % UNITS < HALF // 2)[None, :], other=0)
        own = (block % (UNITS // 8) < HALF // 16)[None, :]
        if MASKED:
            # a page holds anything past the end, NaN too
            own &= repeat_columns(inside, UNITS // 8)
        scales_ptr += (block // (UNITS // 8) * (HALF // 16) + block % (UNITS // 8))[None, :]
        words = tl.load(scales_ptr, mask=own, other=0)
    low, high = token_scales(words)
    low, high = repeat_columns(low, 8), repeat_columns(high, 8)
    a, b, c, d = expand(codes)
    return product(a, low), product(b, low), product(c, high), product(d, high)


@triton.jit
def value_tile(page_ptr, slot, first_inside, second_inside, HALF: tl.constexpr,
               WIDTH: tl.constexpr, PAGE: tl.constexpr, RUN: tl.constexpr,
               MASKED: tl.constexpr):  # fmt: skip
    """V without its scales, and these, of pairs of tokens, from the page and slot of each run.

    A row of V [WIDTH // 16, 16, PAIRS] is a byte; see `expand` for the parts.
    """
    PAIRS: tl.constexpr = first_inside.shape[0]
    CHUNKS: tl.constexpr = 2 * PAIRS // CHUNK
    chunk, token = tl.arange(0, RUN // CHUNK)[None, :], 2 * tl.arange(0, RUN // 2)[None, :]
    codes_ptr = (page_ptr + slot * HALF) + chunk * (HALF * CHUNK)
    codes_ptr = tl.multiple_of(_words(codes_ptr, CHUNKS, tl.int16)[:, None, None], [16, 16, 16])
    scales_ptr = page_ptr + PAGE * HALF + slot * (HALF // 8)
    scales_ptr += token // CHUNK * (HALF * CHUNK // 8) + token % CHUNK * 2
    scales_ptr = _words(scales_ptr, PAIRS, tl.int32)[None, :]
    scales_ptr = tl.max_contiguous(tl.multiple_of(scales_ptr, [1, 16]), [1, 8])
    block = tl.arange(0, WIDTH // 16)
    # the bytes of a block and a chunk lie side by side
    codes_ptr += (block * (8 * CHUNK))[None, :, None] + tl.arange(0, 8 * CHUNK)[None, None, :]
    scales_ptr += (block * (CHUNK // 2))[:, None]
    if HALF == WIDTH:
        codes, words = tl.load(codes_ptr), tl.load(scales_ptr)
    else:
        own = block < HALF // 16
        codes = tl.load(codes_ptr, mask=own[None, :, None], other=0)
        words = tl.load(scales_ptr, mask=own[:, None], other=0)
    if MASKED:
        words &= (tl.where(first_inside, 0xFFFF, 0) | tl.where(second_inside, -0x10000, 0))[None, :]
    codes = tl.permute(tl.reshape(codes, [CHUNKS, WIDTH // 16, 16, CHUNK // 2]), (1, 2, 0, 3))
    a, b, c, d = expand(tl.reshape(codes, [WIDTH // 16, 16, PAIRS]))
    return a, b, c, d, words[:, :, None]


@triton.jit
def add_values(low_acc, high_acc, v, first, second):
    """Add V, of `value_tile`, times P [PAIRS, HEADS] of the first and second tokens to the sums."""
    low_first, low_second, high_first, high_second = pair_scales(v[4])
    low_acc = tl.dot(v[0], product(first[None], low_first), low_acc)
    low_acc = tl.dot(v[1], product(second[None], low_second), low_acc)
    high_acc = tl.dot(v[2], product(first[None], high_first), high_acc)
    high_acc = tl.dot(v[3], product(second[None], high_second), high_acc)
    return low_acc, high_acc


@triton.jit
def _query_part(ptr, stride, heads, valid, inverse, FIRST: tl.constexpr, END: tl.constexpr,
                UNITS: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    row, column = tl.arange(0, TOKENS * UNITS), tl.arange(0, TOKENS * heads.shape[0])
    d = FIRST + row % UNITS * 2
    own = repeat(valid.to(tl.int32), TOKENS)[None, :] == 1
    inside = own & ((row // UNITS)[:, None] == (column % TOKENS)[None, :]) & (d < END)[:, None]
    q = tl.load(ptr + repeat(heads, TOKENS)[None, :] + (d * stride)[:, None], mask=inside,
                other=0.0)  # fmt: skip
    return (q.to(tl.float32) * repeat(inverse, TOKENS)[None, :]).to(tl.float16)


@triton.jit
def query_tiles(ptr, stride, heads, valid, HALF: tl.constexpr, WIDTH: tl.constexpr,
                HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Operands [.., TOKENS * HEADS] for the parts of a K tile, and the scale that q is short of.

    Each of a head's columns meets one of a row's tokens and is zero for the others.
    """
    d = tl.arange(0, 2 * WIDTH)
    inside = valid[None, :] & (d < HEAD_DIM)[:, None]
    q = tl.load(ptr + heads[None, :] + (d * stride)[:, None], mask=inside, other=0.0)
    scale, inverse = query_scale(tl.max(tl.abs(q.to(tl.float32)), 0))
    UNITS: tl.constexpr = WIDTH // 2
    a = _query_part(ptr, stride, heads, valid, inverse, 0, HALF, UNITS, TOKENS)
    b = _query_part(ptr, stride, heads, valid, inverse, 1, HALF, UNITS, TOKENS)
    c = _query_part(ptr, stride, heads, valid, inverse, HALF, HEAD_DIM, UNITS, TOKENS)
    d = _query_part(ptr, stride, heads, valid, inverse, HALF + 1, HEAD_DIM, UNITS, TOKENS)
    return (a, b, c, d), scale
