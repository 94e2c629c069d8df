"""Which kernel attends over a layout, with what tile and constants."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import triton

from kvq.kernels.checks import Variant, require
from kvq.kernels.decode_fp8 import SHIFT as FP8_SHIFT
from kvq.kernels.decode_fp8 import decode_fp8
from kvq.kernels.decode_half import SHIFT as HALF_SHIFT
from kvq.kernels.decode_half import decode_half
from kvq.kernels.decode_nvfp4 import SHIFT as NVFP4_SHIFT
from kvq.kernels.decode_nvfp4 import decode_nvfp4
from kvq.kernels.decode_shared import SHIFT as SHARED_SHIFT
from kvq.kernels.decode_shared import decode_shared
from kvq.kernels.decode_simulated import SHIFT as SIMULATED_SHIFT
from kvq.kernels.decode_simulated import decode_simulated
from kvq.kernels.pages import BLOCK_SIZE, PageLayout, half
from kvq.kernels.splits import Room

_LEAST_COLUMNS = 16  # Hopper's tensor core instructions as Triton uses them
_MOST_HEADS = 16  # of one program
_BUSY = 1.2  # one-warp programs that keep a scheduler busy, by tests/kernels/test_splits.py's times


@dataclass(frozen=True)
class Plan:
    """Which kernel, and what a launch has to know of it.

    Attributes:
        kernel: of one share.
        constants: its own constants and launch options.
        tile: tokens that a program reads at once.
        heads: query heads of a program.
        warps: of a program.
        shift: its P are as many powers of two too large.
        per_sm, busy: see `Room`.
        start: tiles that it could read while it begins with a request.
    """

    kernel: Any
    constants: dict[str, Any]
    tile: int
    heads: int
    warps: int
    shift: float
    per_sm: int
    busy: float | None = None
    start: int = 2

    def programs(self, num_heads: int, num_kv_heads: int) -> int:
        """Programs of one share, for all heads."""
        return num_kv_heads * int(triton.cdiv(num_heads // num_kv_heads, self.heads))

    def room(self, multiprocessors: int) -> Room:
        """What a device with so many multiprocessors runs at once."""
        return Room(multiprocessors, self.per_sm, self.warps, self.busy)


def power_of_two(size: int) -> int:
    """The next power of two that is not smaller."""
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
    heads = min(power_of_two(group), _MOST_HEADS)
    terms = 1 if variant == "fast" else 2
    common = _dimensions(layout)
    if layout.kv_format is None or layout.shared:
        return _half_plan(layout, group, common)
    if layout.format == "nvfp4":
        return _nvfp4_plan(layout, heads, common)
    largest = max(layout.head_dim, layout.value_dim)
    tile = 128 if largest <= 128 else 64
    heads = max(heads, _LEAST_COLUMNS // terms)
    widths = {"WIDTH": power_of_two(layout.head_dim),
              "VALUE_WIDTH": power_of_two(layout.value_dim)}  # fmt: skip
    # the tensor core adds FP8 products in few bits: `exact` adds up every 32 in float32
    numerics = {"TERMS": terms, "IMPRECISE": 32 if variant == "exact" else None}
    constants = common | numerics | widths | {"CHUNK": layout.chunk, "STAGES": 3}
    return Plan(decode_fp8, constants, tile, heads, 4, FP8_SHIFT.value, 2)


def _nvfp4_plan(layout: PageLayout, heads: int, common: dict[str, Any]) -> Plan:
    """Programs of one warp, a multiple of four on a multiprocessor where registers allow it.

    Warps stay with one of its four schedulers: nine leave three of them waiting for the fourth.
    """
    k_half, v_half = half(layout.head_dim), half(layout.value_dim)
    k_width, v_width = power_of_two(k_half), power_of_two(v_half)
    wide = max(k_width, v_width) > 64
    heads = min(max(heads, 4), 8 if wide else 16)
    constants = common | {
        "K_HALF": k_half, "V_HALF": v_half, "K_WIDTH": k_width, "V_WIDTH": v_width, "STAGES": 3,
    }  # fmt: skip
    per_sm = 8
    if heads <= 8 and not wide:
        constants["maxnreg"] = 168  # of 65536, for 12 warps
        per_sm = 12
    return Plan(decode_nvfp4, constants, 32, heads, 1, NVFP4_SHIFT.value, per_sm, _BUSY, 4)


def _half_plan(layout: PageLayout, group: int, common: dict[str, Any]) -> Plan:
    heads = max(min(power_of_two(group), _MOST_HEADS), _LEAST_COLUMNS)
    if layout.shared:
        value = layout.value_dim
        require(
            value == power_of_two(value) and value <= 512,
            f"shared rows need a power of two up to 512 as v_head_dim, found {value}",
            "head_dim",
        )
        constants = common | {"FORMAT": layout.format, "HALF": half(layout.head_dim), "STAGES": 2,
                              "REST": max(power_of_two(layout.head_dim - value), 16)}  # fmt: skip
        return Plan(decode_shared, constants, 64, heads, 8, SHARED_SHIFT.value, 1)
    width = power_of_two(layout.head_dim)
    if layout.head_dim < width:
        width //= 2
    rest = max(power_of_two(layout.head_dim - width), 16)
    constants = common | {"WIDTH": width, "REST": rest, "STAGES": 2 if width > 128 else 3,
                          "VALUE_WIDTH": power_of_two(layout.value_dim)}  # fmt: skip
    return Plan(decode_half, constants, 64, heads, 4, HALF_SHIFT.value, 2)


@cache
def simulated_plan(layout: PageLayout, group: int) -> Plan:
    """Choose the constants of the kernel that simulates quantized P and V."""
    half_plan = _half_plan(layout, group, _dimensions(layout))
    constants = half_plan.constants | {"BLOCK": BLOCK_SIZE, "STAGES": 2}
    warps = 4 if max(layout.head_dim, layout.value_dim) <= 128 else 8
    shift = SIMULATED_SHIFT.value
    return Plan(decode_simulated, constants, 32, half_plan.heads, warps, shift, half_plan.per_sm)
