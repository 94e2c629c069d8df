import math

import pytest
import torch

from kvq.kernels import reference
from kvq.kernels.pages import PageLayout
from tests.kernels.cases import LAYOUTS, Case, poisoned

pytestmark = pytest.mark.gpu
ALL = pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=list(LAYOUTS))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def same_bytes(caches, expected):
    return all(
        (a is None and b is None) or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(caches, expected, strict=True)
    )


@ALL
@DTYPES
def test_every_byte_is_the_twins(layout, dtype):
    from kvq.kernels.pack import append_kv

    case = Case(layout, [1, 0, 37, 200, 64], device="cuda", dtype=dtype)
    caches = poisoned(layout, case.num_pages, "cuda")
    append_kv(case.k, case.v, *caches, case.slots, layout=layout, **case.scales)
    assert same_bytes(caches, (case.k_cache, case.v_cache)), case.seed


@ALL
def test_padding_is_skipped_and_neighbours_are_untouched(layout):
    from kvq.kernels.pack import append_kv

    case = Case(layout, [40, 9], device="cuda")
    slots = case.slots.clone().to(torch.int32)
    slots[torch.randperm(49)[:20]] = -1
    caches, expected = (poisoned(layout, case.num_pages, "cuda") for _ in range(2))
    for call, target in ((append_kv, caches), (reference.append_kv, expected)):
        call(case.k, case.v, *target, slots, layout=layout, **case.scales)
    assert same_bytes(caches, expected), case.seed


@pytest.mark.parametrize("many", [0, 2**31], ids=["windows", "tiles"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["bfloat16", "fp8_e4m3", "nvfp4"])
def test_slots_that_begin_anywhere_in_a_page_and_in_any_order(name, head_dim, many, monkeypatch):
    from kvq.kernels.pack import append_kv

    monkeypatch.setattr("kvq.kernels.pack._MANY", many)
    layout = PageLayout(name, 32, 3, head_dim)
    case = Case(layout, [200, 3, 131], device="cuda")
    for slots in (case.slots.flip(0), case.slots[torch.randperm(334)], case.slots.roll(7)):
        caches, expected = (poisoned(layout, case.num_pages, "cuda") for _ in range(2))
        for call, target in ((append_kv, caches), (reference.append_kv, expected)):
            call(case.k, case.v, *target, slots, layout=layout, **case.scales)
        assert same_bytes(caches, expected), case.seed


@ALL
def test_strided_tokens_and_interleaved_caches(layout, monkeypatch):
    from kvq.kernels.pack import append_kv

    monkeypatch.setattr("kvq.kernels.pack._MANY", 0)
    case = Case(layout, [30, 103], device="cuda")
    heads, size = layout.num_kv_heads, layout.head_dim
    wide = torch.zeros(133, heads, 3 * size, dtype=case.k.dtype, device="cuda")
    k = wide[..., size : 2 * size]
    k.copy_(case.k)
    v = case.v if case.v is None else case.v.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    caches = poisoned(layout, 2 * case.num_pages, "cuda")
    caches = tuple(None if cache is None else cache[::2] for cache in caches)
    slots = case.slots.repeat_interleave(2)[::2]
    append_kv(k, v, *caches, slots, layout=layout, **case.scales)
    caches = tuple(None if cache is None else cache.contiguous() for cache in caches)
    assert same_bytes(caches, (case.k_cache, case.v_cache)), case.seed


def test_a_nan_gives_its_nvfp4_block_a_nan_scale():
    from kvq.kernels.pack import append_kv

    layout = LAYOUTS["nvfp4"]
    case = Case(layout, [5], device="cuda")
    case.k[3, 1, 20] = math.nan
    caches = poisoned(layout, case.num_pages, "cuda")
    append_kv(case.k, case.v, *caches, case.slots, layout=layout, **case.scales)
    k, v = reference.gather_kv(*caches, case.table[0], 5, layout=layout, **case.scales)
    expected = torch.zeros_like(k, dtype=torch.bool)
    expected[3, 1, 16:32] = True
    assert torch.equal(k.isnan(), expected)
    assert not v.isnan().any()


def test_values_beyond_the_formats_saturate():
    from kvq.kernels.pack import append_kv

    for name in ("fp8", "nvfp4"):
        case = Case(LAYOUTS[name], [16], device="cuda", dtype=torch.float32)
        case.k[torch.rand_like(case.k) < 0.2] = math.inf
        case.v *= 1e30
        caches, expected = (poisoned(case.layout, case.num_pages, "cuda") for _ in range(2))
        for call, target in ((append_kv, caches), (reference.append_kv, expected)):
            call(case.k, case.v, *target, case.slots, layout=case.layout, **case.scales)
        assert same_bytes(caches, expected), case.seed


@pytest.mark.parametrize("scale", [1e-3, 0.1, 16.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_infinity_in_a_block_of_16_bit_numbers(dtype, scale):
    from kvq.kernels.pack import append_kv

    case = Case(LAYOUTS["nvfp4"], [64], device="cuda", dtype=dtype)
    for x, amax in ((case.k, 10.0), (case.v, 6e4)):
        x.copy_((x.float() * amax / x.float().abs().amax()).to(dtype))
        x[torch.rand_like(x.float()) < 0.05] = -math.inf
    caches, expected = (poisoned(case.layout, case.num_pages, "cuda") for _ in range(2))
    for call, target in ((append_kv, caches), (reference.append_kv, expected)):
        call(case.k, case.v, *target, case.slots, layout=case.layout, k_scale=scale, v_scale=scale)
    assert same_bytes(caches, expected), case.seed


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_offsets_beyond_int32(name):
    from kvq.kernels.pack import append_kv

    layout = PageLayout(name, 16, 8, 128)
    num_pages = 2**31 // (8 * layout.k_elements) + 2
    shape = (num_pages, 8, layout.k_elements)
    caches = [torch.empty(shape, dtype=torch.uint8, device="cuda") for _ in range(2)]
    small = poisoned(layout, 2, "cuda")
    k, v = torch.randn(2, 32, 8, 128, device="cuda")
    slots = torch.arange(32, device="cuda")
    append_kv(k, v, *caches, slots + (num_pages - 2) * 16, layout=layout, k_scale=0.01, v_scale=0.1)
    reference.append_kv(k, v, *small, slots, layout=layout, k_scale=0.01, v_scale=0.1)
    assert same_bytes([cache[-2:].contiguous() for cache in caches], small)


@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_many_requests_of_many_lengths(page_size):
    from kvq.kernels.pack import append_kv

    layout = PageLayout("fp8_e4m3", page_size, 8, 128)
    case = Case(layout, torch.randint(1, 1000, (12,)).tolist() + [1000] * 5, device="cuda")
    caches = poisoned(layout, case.num_pages, "cuda")
    append_kv(case.k, case.v, *caches, case.slots, layout=layout, **case.scales)
    assert same_bytes(caches, (case.k_cache, case.v_cache)), case.seed


def test_no_tokens():
    from kvq.kernels.pack import append_kv

    case = Case(LAYOUTS["fp8"], [3], device="cuda")
    before = case.k_cache.clone()
    append_kv(case.k[:0], case.v[:0], case.k_cache, case.v_cache, case.slots[:0],
              layout=case.layout, **case.scales)  # fmt: skip
    assert torch.equal(case.k_cache, before)
