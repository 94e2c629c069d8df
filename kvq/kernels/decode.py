"""Decode attention: one query token per request, over paged caches read as they are stored."""

from typing import Any

import torch
import triton
from torch import Tensor

from kvq.kernels.checks import (
    Scale,
    Variant,
    check_caches,
    check_options,
    check_query,
    check_simulation,
    head_scale,
    require,
)
from kvq.kernels.launch import check_device, multiprocessors, on_device, starts_early
from kvq.kernels.pages import PageLayout
from kvq.kernels.plans import Plan, plan, power_of_two, simulated_plan
from kvq.kernels.simulation import Simulation
from kvq.kernels.softmax import combine_pieces
from kvq.kernels.splits import Shares, choose_shares, choose_splits

_COMBINED = 1024  # numbers that a warp of the combining kernel reads at once
_LEAST_WIDTH = 32  # dimensions that it reads of one piece, a cache line
_LEAST_PIECES, _MOST_PIECES = 4, 256  # of one request, that it reads at once
_LEAST_REQUESTS = 32  # a warp's threads
_INT32_MAX = torch.iinfo(torch.int32).max


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
    """Attend from one query token per request, the last of its sequence, over the paged cache.

    The softmax runs in float32; how q and P enter the tensor cores is the variant. With 16-bit
    pages and shared rows P is rounded to q's dtype, with NVFP4 pages q and P are to float16, P
    again when V's block scale multiplies it; there all variants are the same. With FP8 pages `fast`
    rounds q and P to E4M3 once, which costs about 4e-2 (relative L2 on random data, more where few
    tokens weigh); `default` and `exact` hold each as two E4M3 terms, up to 3e-3 (q in bfloat16 to
    2**-17 of its largest, in float16 to 2**-9); `exact` also sums q k in float32 every 32 products.
    P is rounded relative to a power of two at or above the running maximum. So small weights lose
    bits, seen where large ones meet values near zero, as in attention sinks: in FP8 below 2**-14 of
    the largest, in float16 below 2**-22, with NVFP4 pages below 2**-21 after V's block scale. The
    number of splits changes results by float32 rounding, such weights and P near a boundary.

    Nothing is read on the host, so a call can be captured in a CUDA graph. Values past a request's
    end or before its window are never used, nor table entries of pages that hold only those.

    Args:
        q: `[batch, num_heads, head_dim]` bfloat16 or float16, any strides.
        k_cache: `[num_pages, num_kv_heads, layout.k_elements]`.
        v_cache: `[num_pages, num_kv_heads, layout.v_elements]`; None if shared.
        block_table: `[batch, max_pages]` int32 or int64, the pages of each request in order.
        seq_lens: `[batch]` int32 or int64, tokens with the query's own, zero or more; that
            `block_table` lists as many is not checked. An empty request gives zeros.
        layout: of both caches.
        k_scale: as in `kvq.kernels.pack.append_kv`.
        v_scale: likewise of V; if shared, `k_scale` serves both.
        softmax_scale: multiplies q k; `head_dim ** -0.5` by default.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        window: attend to the last `window` tokens only, the query's own included.
        sinks: float32 `[num_heads]`, logits that join the softmax's sum without a value.
        alibi_slopes: float32 `[num_heads]`, times the (negative) distance to the query.
        num_kv_splits: programs that share each request's tokens, 1 to 256. By default programs
            have equal shares of all tokens, so that a result depends on the other lengths by such
            rounding; one request, more than 4096 and `simulate` get a number that is chosen.
        max_seq_len: a bound of `seq_lens` known on the host, for the choice of how many programs;
            by default what `block_table` has room for.
        variant: `fast`, `default` or `exact`.
        simulate: round P or V to number formats, over 16-bit pages that are not shared.
        out: `[batch, num_heads, v_head_dim]` of q's dtype, any strides.

    Raises:
        InputError: a precondition does not hold (`kernel.*`).
    """
    check_caches(k_cache, v_cache, layout)
    vectors = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    check_query(q, k_cache, block_table, seq_lens, layout, vectors)
    check_options(softcap, window, num_kv_splits, variant)
    check_simulation(simulate, layout)
    check_device(q, "q")
    out = _output(q, layout, out)
    if q.shape[0] == 0:
        return out
    group = q.shape[1] // layout.num_kv_heads
    chosen = plan(layout, group, variant) if simulate is None else simulated_plan(layout, group)
    bounds = (block_table.shape[1] * layout.page_size, max_seq_len, window)
    shares = _shares(chosen, q, layout, bounds, num_kv_splits, simulate is None)
    scale = layout.head_dim**-0.5 if softmax_scale is None else softmax_scale
    with on_device(q):
        _launch(q, k_cache, v_cache, block_table, seq_lens, out, chosen, layout, k_scale, v_scale,
                sinks, alibi_slopes, shares, scale, softcap, window, simulate)  # fmt: skip
    return out


def _output(q: Tensor, layout: PageLayout, out: Tensor | None) -> Tensor:
    shape = (*q.shape[:2], layout.value_dim)
    if out is None:
        return torch.empty(shape, dtype=q.dtype, device=q.device)
    require(
        tuple(out.shape) == shape and out.dtype == q.dtype and out.device == q.device,
        f"out is {out.dtype} {tuple(out.shape)}, expected {q.dtype} {shape}",
        "out",
    )
    return out


def _shares(
    chosen: Plan, q: Tensor, layout: PageLayout, bounds: tuple[int | None, ...], given: int | None,
    balanced: bool,
) -> Shares:  # fmt: skip
    if given is not None:
        return Shares(given, balanced=False)
    batch, programs = q.shape[0], chosen.programs(q.shape[1], layout.num_kv_heads)
    longest = min(bound for bound in bounds if bound is not None)
    tiles, room = triton.cdiv(longest, chosen.tile), chosen.room(multiprocessors(q.device))
    if balanced:
        return choose_shares(batch, programs, tiles, room)
    return Shares(choose_splits(batch * programs, tiles, room), balanced=False)


def _launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, block_table: Tensor, seq_lens: Tensor,
    out: Tensor, chosen: Plan, layout: PageLayout, k_scale: Scale, v_scale: Scale,
    sinks: Tensor | None, slopes: Tensor | None, shares: Shares, softmax_scale: float,
    softcap: float | None, window: int | None, simulate: Simulation | None,
) -> None:  # fmt: skip
    k_scales = head_scale(k_scale, layout.num_kv_heads, layout.kv_format, "k_scale", q)
    v_scales = k_scales
    if v_cache is None:
        v_cache = k_cache
    else:
        v_scales = head_scale(v_scale, layout.num_kv_heads, layout.kv_format, "v_scale", q)
    batch, heads = q.shape[:2]
    group = heads // layout.num_kv_heads
    attended = min(window or 0, _INT32_MAX)  # programs count tokens in int32
    # a piece more for each end of a request that cuts a share
    pieces = shares.number + batch if shares.balanced else shares.number * batch
    split = shares.balanced or shares.number > 1
    stats = partial = out
    if split:
        floats = {"dtype": torch.float32, "device": q.device}
        stats = torch.empty(pieces * heads * 2, **floats)
        partial = torch.empty(pieces * heads * layout.value_dim, **floats)
    if layout.format == "fp8_e4m3":
        k_cache, v_cache = (x.view(torch.float8_e4m3fn) for x in (k_cache, v_cache))
    programs = chosen.programs(heads, layout.num_kv_heads) * (1 if shares.balanced else batch)
    common = {"TILE": chosen.tile, "START": chosen.start, "WINDOW": window is not None,
              "BALANCED": max(power_of_two(batch), _LEAST_REQUESTS) if shares.balanced else 0,
              "DEPENDENT": split and starts_early(q.device)}  # fmt: skip
    passes: list[dict[str, Any]] = [{}]
    if simulate is not None:
        maxima = torch.empty(batch * heads * shares.number, dtype=torch.float32, device=q.device)
        scales = {"p_scale": simulate.p_scale, "v_scale": simulate.v_scale, "maxima_ptr": maxima}
        passes = [scales | {"MAXIMA": True, "P_QDQ": None, "V_QDQ": None},
                  scales | {"MAXIMA": False, "P_QDQ": simulate.p, "V_QDQ": simulate.v}]  # fmt: skip
    for own in passes:
        chosen.kernel[(programs, shares.number)](
            q, k_cache, v_cache, block_table, seq_lens, k_scales, v_scales, slopes, sinks,
            out, stats, partial, q.stride(), k_cache.stride()[:2], v_cache.stride()[:2],
            block_table.stride(), seq_lens.stride(0), out.stride(), k_scales.stride(0),
            v_scales.stride(0), softmax_scale, softcap or 1.0, attended, batch, shares.number,
            KV_HEADS=layout.num_kv_heads, GROUP=group, HEADS=chosen.heads, SPLIT=split,
            SOFTCAP=softcap is not None, ALIBI=slopes is not None, SINKS=sinks is not None,
            num_warps=chosen.warps, **common, **own, **chosen.constants,
        )  # fmt: skip
    if split:
        padded = power_of_two(triton.cdiv(pieces, batch))
        padded = min(max(padded, _LEAST_PIECES), _MOST_PIECES)
        width = min(power_of_two(layout.value_dim), max(_COMBINED // padded, _LEAST_WIDTH))
        early = {"launch_pdl": True} if common["DEPENDENT"] else {}
        combine_pieces[(batch * heads, triton.cdiv(layout.value_dim, width))](
            out, out.stride(), stats, partial, v_scales, v_scales.stride(0), sinks, seq_lens,
            seq_lens.stride(0), batch, attended, shares.number, HEADS=heads, GROUP=group,
            SIZE=layout.value_dim, WIDTH=width, PADDED=padded, SINKS=sinks is not None,
            SHIFT=chosen.shift, num_warps=max(padded * width // _COMBINED, 1), **common, **early,
        )  # fmt: skip
