"""Naive twins of the kernels: same names, same arguments, plain torch, any device."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvq import reference
from kvq.formats import E4M3, NVFP4_KV, KVFormat
from kvq.kernels.checks import (
    Scale,
    Variant,
    check_append,
    check_caches,
    check_options,
    check_query,
    check_simulation,
    head_scale,
)
from kvq.kernels.pages import BLOCK_SIZE, PageLayout, blocks, half
from kvq.kernels.simulation import P_FORMATS, V_FORMATS, Simulation


def quantize_dequantize(
    x: Tensor, fmt: KVFormat, *, scale: Scale, out: Tensor | None = None
) -> Tensor:
    """Return `x` rounded to the format, in x's dtype; see `kvq.reference.quantize_dequantize`."""
    result = reference.quantize_dequantize(x, fmt, scale=scale)
    return result if out is None else out.copy_(result)


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
    """Write new tokens into the pages; see `kvq.kernels.pack.append_kv`."""
    check_caches(k_cache, v_cache, layout)
    check_append(k, v, slot_mapping, layout, k_cache)
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    page, offset = slots // layout.page_size, slots % layout.page_size
    _write(k[written], k_cache, page, offset, layout, k_scale, "k_scale")
    if v is not None:
        assert v_cache is not None
        _write(v[written], v_cache, page, offset, layout, v_scale, "v_scale")


def _write(
    x: Tensor,  # [tokens, num_kv_heads, size]
    cache: Tensor,
    page: Tensor,
    offset: Tensor,
    layout: PageLayout,
    scale: Scale,
    name: str,
) -> None:
    fmt = layout.kv_format
    scales = head_scale(scale, layout.num_kv_heads, fmt, name, x)
    size = x.shape[-1]
    at = (page, slice(None), offset // layout.chunk, offset % layout.chunk)
    if fmt is None:
        _rows(cache, layout, 0, size, by_token=True)[at] = x
        return
    q = reference.quantize(x, fmt, scale=scales[:, None])
    by_token = name == "k_scale"
    if q.block_scales is None:
        _rows(cache, layout, 0, size, by_token=by_token)[at] = q.codes
        return
    codes = F.pad(q.codes, (0, 2 * half(size) - size))
    packed = _interleave(codes[..., : half(size)], codes[..., half(size) :])
    _rows(cache, layout, 0, half(size), by_token=by_token)[at] = packed
    block_scales = F.pad(q.block_scales, (0, blocks(size) - q.block_scales.shape[-1]))
    for side, part in enumerate(block_scales.chunk(2, -1)):
        _block_scales(cache, layout, size, by_token=by_token)[side][at] = part


def _interleave(low: Tensor, high: Tensor) -> Tensor:
    """Bytes of two E2M1 codes: `S e e m E E M s` of `s e e m` and `S E E M`."""
    return (high & 8) << 4 | (low & 7) << 4 | (high & 7) << 1 | low >> 3


def _separate(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `_interleave`."""
    return packed << 3 & 8 | packed >> 4 & 7, packed >> 4 & 8 | packed >> 1 & 7


def _rows(cache: Tensor, layout: PageLayout, begin: int, size: int, *, by_token: bool) -> Tensor:
    """View part of every page as [num_pages, num_kv_heads, chunks, chunk, size]."""
    part = cache[:, :, begin : begin + layout.page_size * size]
    if by_token:
        return part.unflatten(-1, (-1, layout.chunk, size))
    return part.unflatten(-1, (-1, size, layout.chunk)).transpose(-1, -2)


def _block_scales(
    cache: Tensor, layout: PageLayout, size: int, *, by_token: bool
) -> tuple[Tensor, Tensor]:
    """View the block scales of every page, of the low half and of the high half of a row."""
    begin, pairs = layout.page_size * half(size), blocks(size) // 2
    part = cache[:, :, begin : begin + layout.page_size * 2 * pairs].unflatten(-1, (-1, 2))
    return tuple(_rows(x, layout, 0, pairs, by_token=by_token) for x in part.unbind(-1))


def gather_kv(
    k_cache: Tensor,
    v_cache: Tensor | None,
    pages: Tensor,
    seq_len: int,
    *,
    layout: PageLayout,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> tuple[Tensor, Tensor]:
    """Return one request's K `[seq_len, num_kv_heads, head_dim]` and V in float32.

    Args:
        k_cache: K pages.
        v_cache: V pages; None if shared.
        pages: the request's row of the block table.
        seq_len: tokens of the request.
        layout: of both caches.
        k_scale: as in `append_kv`.
        v_scale: as in `append_kv`.
    """
    check_caches(k_cache, v_cache, layout)
    pages = pages[: math.ceil(seq_len / layout.page_size)].long()
    k = _read(k_cache[pages], layout.head_dim, layout, k_scale, "k_scale")[:seq_len]
    if v_cache is None:
        return k, k[..., : layout.value_dim]
    return k, _read(v_cache[pages], layout.value_dim, layout, v_scale, "v_scale")[:seq_len]


def _read(pages: Tensor, size: int, layout: PageLayout, scale: Scale, name: str) -> Tensor:
    fmt = layout.kv_format
    scales = head_scale(scale, layout.num_kv_heads, fmt, name, pages)
    by_token = fmt is None or name == "k_scale"
    width = half(size) if layout.format == "nvfp4" else size
    codes = _rows(pages, layout, 0, width, by_token=by_token)
    codes = codes.permute(0, 2, 3, 1, 4).flatten(0, 2)  # [tokens, num_kv_heads, width]
    if fmt is None:
        return codes.float()
    block_scales = None
    if fmt.block_size is not None:
        codes = torch.cat(_separate(codes), -1)[..., :size]
        block_scales = torch.cat(_block_scales(pages, layout, size, by_token=by_token), -1)
        block_scales = block_scales.permute(0, 2, 3, 1, 4).flatten(0, 2)[..., : size // BLOCK_SIZE]
    return reference.dequantize(
        reference.Quantized(codes, block_scales, scales[:, None]), fmt, torch.float32
    )


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: PageLayout,
    k_scale: Scale = None,
    v_scale: Scale = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    num_kv_splits: int | None = None,
    max_seq_len: int | None = None,
    variant: Variant = "default",
    simulate: Simulation | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend in float64 over the dequantized pages; see `kvq.kernels.decode.decode_attention`.

    Splits, the length bound and the variant are checked and change nothing. What is simulated is
    rounded at the same points as in the kernel. Returns float64, or `out` in its own dtype.
    """
    check_caches(k_cache, v_cache, layout)
    vectors = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    check_query(q, k_cache, block_table, seq_lens, layout, vectors)
    check_options(softcap, window, num_kv_splits, variant)
    check_simulation(simulate, layout)
    scale = layout.head_dim**-0.5 if softmax_scale is None else softmax_scale
    result = torch.zeros(*q.shape[:2], layout.value_dim, dtype=torch.float64, device=q.device)
    for request, seq_len in enumerate(seq_lens.tolist()):
        if seq_len <= 0:
            continue
        k, v = gather_kv(
            k_cache, v_cache, block_table[request], seq_len,
            layout=layout, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        groups = q.shape[1] // layout.num_kv_heads
        k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
        logits = torch.einsum("hd,thd->ht", q[request].double(), k) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        distance = torch.arange(seq_len, device=q.device) - (seq_len - 1)
        if alibi_slopes is not None:
            logits = logits + alibi_slopes.double()[:, None] * distance
        if window is not None:
            logits = logits.masked_fill(distance <= -window, -math.inf)
            # 0 * NaN outside the window must not count
            v = v.masked_fill((distance <= -window)[:, None, None], 0.0)
        largest = logits.amax(1, keepdim=True)
        p = torch.exp(logits - largest)
        total = p.sum(1, keepdim=True)
        if sinks is not None:
            total += torch.exp(sinks.double()[:, None] - largest)
        if simulate is not None:
            p, v = _simulated(p.float().to(q.dtype), v, simulate)
        result[request] = torch.einsum("ht,thd->hd", p, v) / total
    return result if out is None else out.copy_(result)


def _simulated(p: Tensor, v: Tensor, simulate: Simulation) -> tuple[Tensor, Tensor]:
    """Round P `[num_heads, tokens]` and V `[tokens, num_heads, v_head_dim]`; returns float64."""
    p = p.float()
    if simulate.p is not None:
        p = quantize_dequantize(p, P_FORMATS[simulate.p], scale=simulate.p_scale)
    if simulate.v is not None:
        by_token = v.float().movedim(0, -1)
        by_token = quantize_dequantize(by_token, V_FORMATS[simulate.v], scale=simulate.v_scale)
        v = by_token.movedim(-1, 0)
    return p.double(), v.double()


assert NVFP4_KV.block_scale == E4M3
