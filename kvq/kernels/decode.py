"""Decode attention: one query token per request, over paged caches read as they are stored."""

from dataclasses import dataclass
from functools import cache
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
from kvq.kernels.decode_fp8 import SHIFT as FP8_SHIFT
from kvq.kernels.decode_fp8 import decode_fp8
from kvq.kernels.decode_half import SHIFT as HALF_SHIFT
from kvq.kernels.decode_half import decode_half
from kvq.kernels.decode_nvfp4 import decode_nvfp4
from kvq.kernels.decode_shared import SHIFT as SHARED_SHIFT
from kvq.kernels.decode_shared import decode_shared
from kvq.kernels.decode_simulated import SHIFT as SIMULATED_SHIFT
from kvq.kernels.decode_simulated import decode_simulated
from kvq.kernels.launch import check_device, multiprocessors, on_device, starts_early
from kvq.kernels.pages import BLOCK_SIZE, PageLayout, half
from kvq.kernels.simulation import Simulation
from kvq.kernels.softmax import combine_splits
from kvq.kernels.splits import choose_splits

_LEAST_COLUMNS = 16  # Hopper's tensor core instructions as Triton uses them
_MOST_HEADS = 16  # of one program
_BUSY = 1.2  # one-warp programs that keep a scheduler busy, by tests/kernels/test_splits.py's times
_COMBINED = 1024  # numbers that a warp of the combining kernel reads at once
_LEAST_WIDTH = 32  # dimensions that it reads of one split, a cache line


@dataclass(frozen=True)
class Plan:
    """Which kernel, its constants and launch options, and what `choose_splits` has to know."""

    kernel: Any
    constants: dict[str, Any]
    tile: int
    heads: int
    warps: int
    shift: float
    per_sm: int
    busy: float | None = None


def _power_of_two(size: int) -> int:
    return int(triton.next_power_of_2(size))


def _dimensions(layout: PageLayout) -> dict[str, Any]:
    return {
        "HEAD_DIM": layout.head_dim,
        "VALUE_DIM": layout.value_dim,
        "PAGE": layout.page_size,
    }


@cache
def plan(layout: PageLayout, group: int, variant: Variant) -> Plan:
    """Choose the kernel and its tile for a layout and a number of query heads per KV head."""
    heads = min(_power_of_two(group), _MOST_HEADS)
    terms = 1 if variant == "fast" else 2
    common = _dimensions(layout)
    if layout.kv_format is None or layout.shared:
        return _half_plan(layout, group, common)
    if layout.format == "nvfp4":
        return _nvfp4_plan(layout, heads, common)
    largest = max(layout.head_dim, layout.value_dim)
    tile = 128 if largest <= 128 else 64
    heads = max(heads, _LEAST_COLUMNS // terms)
    widths = {"WIDTH": _power_of_two(layout.head_dim),
              "VALUE_WIDTH": _power_of_two(layout.value_dim)}  # fmt: skip
    # the tensor core adds FP8 products in few bits: `exact` adds up every 32 in float32
    numerics = {"TERMS": terms, "IMPRECISE": 32 if variant == "exact" else None}
    constants = common | numerics | widths | {"CHUNK": layout.chunk, "STAGES": 3}
    return Plan(decode_fp8, constants, tile, heads, 4, FP8_SHIFT.value, 2)


def _nvfp4_plan(layout: PageLayout, heads: int, common: dict[str, Any]) -> Plan:
    """Programs of one warp, a multiple of four on a multiprocessor where registers allow it.

    Warps stay with one of its four schedulers: nine leave three of them waiting for the fourth.
    """
    k_half, v_half = half(layout.head_dim), half(layout.value_dim)
    k_width, v_width = _power_of_two(k_half), _power_of_two(v_half)
    wide = max(k_width, v_width) > 64
    heads = min(max(heads, 4), 8 if wide else 16)
    constants = common | {
        "K_HALF": k_half, "V_HALF": v_half, "K_WIDTH": k_width, "V_WIDTH": v_width, "STAGES": 3,
    }  # fmt: skip
    per_sm = 8
    if heads <= 8 and not wide:
        constants["maxnreg"] = 168  # of 65536, for 12 warps
        per_sm = 12
    return Plan(decode_nvfp4, constants, 32, heads, 1, 0, per_sm, _BUSY)


def _half_plan(layout: PageLayout, group: int, common: dict[str, Any]) -> Plan:
    heads = max(min(_power_of_two(group), _MOST_HEADS), _LEAST_COLUMNS)
    if layout.shared:
        value = layout.value_dim
        require(
            value == _power_of_two(value) and value <= 512,
            f"shared rows need a power of two up to 512 as v_head_dim, found {value}",
            "head_dim",
        )
        constants = common | {"FORMAT": layout.format, "HALF": half(layout.head_dim), "STAGES": 2,
                              "REST": max(_power_of_two(layout.head_dim - value), 16)}  # fmt: skip
        return Plan(decode_shared, constants, 64, heads, 8, SHARED_SHIFT.value, 1)
    width = _power_of_two(layout.head_dim)
    if layout.head_dim < width:
        width //= 2
    rest = max(_power_of_two(layout.head_dim - width), 16)
    constants = common | {"WIDTH": width, "REST": rest, "STAGES": 2 if width > 128 else 3,
                          "VALUE_WIDTH": _power_of_two(layout.value_dim)}  # fmt: skip
    return Plan(decode_half, constants, 64, heads, 4, HALF_SHIFT.value, 2)


@cache
def simulated_plan(layout: PageLayout, group: int) -> Plan:
    """Choose the constants of the kernel that simulates quantized P and V."""
    half_plan = _half_plan(layout, group, _dimensions(layout))
    constants = half_plan.constants | {"BLOCK": BLOCK_SIZE, "STAGES": 2}
    warps = 4 if max(layout.head_dim, layout.value_dim) <= 128 else 8
    shift = SIMULATED_SHIFT.value
    return Plan(decode_simulated, constants, 32, half_plan.heads, warps, shift, half_plan.per_sm)


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
    pages and with shared rows P is rounded to q's dtype, with NVFP4 pages q and P are to float16, P
    again when V's block scale multiplies it; there all variants are the same. With FP8 pages `fast`
    rounds q and P to E4M3 once, which costs up to 4e-2 (relative L2 on random data, more where few
    tokens have all the weight); `default` and `exact` hold each as a sum of two E4M3 numbers, up to
    3e-3; `exact` also sums q k in float32 at every 32nd product. P is rounded relative to a power
    of two at or above the running maximum. So small weights lose bits, which shows where the tokens
    of large ones have values near zero, as attention sinks may: in FP8 below 2**-14 of the largest,
    in float16 below 2**-22, with NVFP4 pages below 2**-21 after V's block scale. The number of
    splits changes results only by float32 rounding, by such weights and, rarely, by a P beside a
    rounding boundary.

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
        num_kv_splits: programs that share one request's tokens, 1 to 256; chosen by default.
        max_seq_len: a bound of `seq_lens` known on the host, for that choice; by default what
            `block_table` has room for.
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
    room = block_table.shape[1] * layout.page_size
    longest = min(room, max_seq_len or room, window or room)
    splits = num_kv_splits or _splits(chosen, q, layout, longest)
    scale = layout.head_dim**-0.5 if softmax_scale is None else softmax_scale
    with on_device(q):
        _launch(q, k_cache, v_cache, block_table, seq_lens, out, chosen, layout, k_scale, v_scale,
                sinks, alibi_slopes, splits, scale, softcap, window, simulate)  # fmt: skip
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


def _splits(chosen: Plan, q: Tensor, layout: PageLayout, longest: int) -> int:
    group = q.shape[1] // layout.num_kv_heads
    programs = q.shape[0] * layout.num_kv_heads * triton.cdiv(group, chosen.heads)
    return choose_splits(
        programs, triton.cdiv(longest, chosen.tile), multiprocessors(q.device),
        per_sm=chosen.per_sm, warps=chosen.warps, busy=chosen.busy,
    )  # fmt: skip


def _launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, block_table: Tensor, seq_lens: Tensor,
    out: Tensor, chosen: Plan, layout: PageLayout, k_scale: Scale, v_scale: Scale,
    sinks: Tensor | None, slopes: Tensor | None, splits: int, softmax_scale: float,
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
    stats = partial = out
    if splits > 1:
        stats = torch.empty(batch * heads * splits * 2, dtype=torch.float32, device=q.device)
        size = batch * heads * splits * layout.value_dim
        partial = torch.empty(size, dtype=torch.float32, device=q.device)
    if layout.format == "fp8_e4m3":
        k_cache, v_cache = (x.view(torch.float8_e4m3fn) for x in (k_cache, v_cache))
    programs = batch * layout.num_kv_heads * triton.cdiv(group, chosen.heads)
    dependent = splits > 1 and starts_early(q.device)
    passes: list[dict[str, Any]] = [{}]
    if simulate is not None:
        maxima = torch.empty(batch * heads * splits, dtype=torch.float32, device=q.device)
        scales = {"p_scale": simulate.p_scale, "v_scale": simulate.v_scale, "maxima_ptr": maxima}
        passes = [scales | {"MAXIMA": True, "P_QDQ": None, "V_QDQ": None},
                  scales | {"MAXIMA": False, "P_QDQ": simulate.p, "V_QDQ": simulate.v}]  # fmt: skip
    for own in passes:
        chosen.kernel[(programs, splits)](
            q, k_cache, v_cache, block_table, seq_lens, k_scales, v_scales, slopes, sinks,
            out, stats, partial, q.stride(), k_cache.stride()[:2], v_cache.stride()[:2],
            block_table.stride(), seq_lens.stride(0), out.stride(), k_scales.stride(0),
            v_scales.stride(0), softmax_scale, softcap or 1.0, window or 0, splits,
            KV_HEADS=layout.num_kv_heads, GROUP=group, HEADS=chosen.heads, TILE=chosen.tile,
            SPLIT=splits > 1, SOFTCAP=softcap is not None, ALIBI=slopes is not None,
            WINDOW=window is not None, SINKS=sinks is not None, num_warps=chosen.warps,
            DEPENDENT=dependent, **own, **chosen.constants,
        )  # fmt: skip
    if splits > 1:
        padded = max(_power_of_two(splits), 4)
        width = min(_power_of_two(layout.value_dim), max(_COMBINED // padded, _LEAST_WIDTH))
        combine_splits[(batch * heads, triton.cdiv(layout.value_dim, width))](
            out, out.stride(), stats, partial, sinks, splits, HEADS=heads, SIZE=layout.value_dim,
            WIDTH=width, PADDED=padded, SINKS=sinks is not None, SHIFT=chosen.shift,
            DEPENDENT=dependent, num_warps=max(padded * width // _COMBINED, 1),
            **({"launch_pdl": True} if dependent else {}),
        )  # fmt: skip
