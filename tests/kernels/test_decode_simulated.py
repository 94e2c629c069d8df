"""Simulated quantization of P and V in the decode kernel, against the twin."""

import math
import os

import pytest
import torch

from kvq.errors import InputError
from kvq.kernels.pages import PageLayout
from kvq.kernels.simulation import Simulation
from tests.kernels.cases import LAYOUTS, Case, no_synchronisation

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
ALL = pytest.mark.parametrize(
    "simulate",
    [
        Simulation(p="fp8_e4m3"),
        Simulation(p="nvfp4"),
        Simulation(v="nvfp4"),
        Simulation(p="fp8_e4m3", v="nvfp4", p_amax=0.4, v_amax=3.0),
        Simulation(p="nvfp4", v="nvfp4", p_amax=0.4, v_amax=3.0),
    ],
    ids=["p-fp8", "p-nvfp4", "v-nvfp4", "p-fp8-v-nvfp4", "p-nvfp4-v-nvfp4"],
)
# Nearly all of the error is the output's rounding, up to 2**-8 in bfloat16, which a request of one
# token may reach in all its rows. Where exp2 or a logit is off by units in float32's last place, a
# P next to a rounding boundary falls on its other side: a few in 100,000, each of which moves its
# row by up to a step of the format.
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
ROWS_BEYOND = 0.05
STEP = 0.5


def attend(case, simulate, **options):
    from kvq.kernels.decode import decode_attention

    shape = (*case.q.shape[:2], case.layout.value_dim)
    out = torch.full(shape, math.nan, dtype=case.q.dtype, device=DEVICE)
    arguments = {"layout": case.layout, "simulate": simulate, "out": out}
    return decode_attention(*case.arguments, **arguments, **options)


def check(case, simulate, *, expected=None, out=None, **options):
    if expected is None:
        expected = case.expected(simulate=simulate, **options)
    if out is None:
        out = attend(case, simulate, **options)
    assert bool(out.isfinite().all())
    error, norm = (out.double() - expected).norm(dim=2), expected.norm(dim=2)
    assert bool((error[norm == 0] == 0).all())
    error = error[norm > 0] / norm[norm > 0]
    beyond = int((error > BOUNDS[case.q.dtype]).sum())
    assert beyond <= max(1, ROWS_BEYOND * len(error)), (beyond, case.seed)
    assert float(error.max()) <= STEP, case.seed


@pytest.mark.interpreter
@ALL
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_the_twins_result(name, simulate):
    heads, longest = (1, 79) if DEVICE == "cpu" else (2, 1300)
    case = Case(PageLayout(name, 16, heads, 64), [1, 0, 17, longest], device=DEVICE)
    check(case, simulate)
    check(case, simulate, num_kv_splits=2)


@pytest.mark.interpreter
@ALL
def test_options(simulate):
    case = Case(PageLayout("bfloat16", 32, 1, 64), [1, 0, 75], 2, device=DEVICE)
    sinks = torch.randn(2, device=DEVICE) * 3
    slopes = torch.rand(2, device=DEVICE) / 50
    together = {"softcap": 5.0, "window": 50, "sinks": sinks, "alibi_slopes": slopes}
    for options in ({"window": 21, "sinks": sinks}, together):
        check(case, simulate, num_kv_splits=2, **options)


@pytest.mark.interpreter
@ALL
def test_splits_change_the_order_of_sums_only(simulate):
    lengths = [120, 33] if DEVICE == "cpu" else [5000, 77]
    case = Case(PageLayout("float16", 64, 1, 64), lengths, 2, device=DEVICE, peak=2.0)
    expected = attend(case, simulate, num_kv_splits=1)
    for splits in (3,) if DEVICE == "cpu" else (2, 7, 32, 256):
        out = attend(case, simulate, num_kv_splits=splits)
        # one unit in the last place of the output; a P rounded otherwise would move more of them
        difference = (out.double() - expected.double()).abs()
        assert bool((difference <= 2.0**-10 * expected.double().abs() + 1e-6).all()), case.seed
        assert float((difference > 0).double().mean()) < 0.08, case.seed


@ALL
@pytest.mark.parametrize("sizes", [(80,), (96,), (128,), (192, 128), (256,)], ids=str)
def test_head_sizes_and_ragged_lengths(simulate, sizes):
    lengths = [1, 0, 16, 17, 333, 1024, 2048, 5]
    check(Case(PageLayout("bfloat16", 64, 2, *sizes), lengths, device=DEVICE), simulate)


@ALL
def test_pages_and_groups(simulate):
    for page_size, group in ((16, 1), (48, 3), (128, 8), (256, 20)):
        layout = PageLayout("bfloat16", page_size, 2, 128)
        check(Case(layout, [700, 33], group, device=DEVICE), simulate)


@pytest.mark.interpreter
def test_a_block_of_v_counts_only_attended_tokens():
    simulate = Simulation(v="nvfp4")
    case = Case(PageLayout("bfloat16", 16, 1, 64), [40], 1, seed=7, device=DEVICE)
    expected = attend(case, simulate, window=20)
    head = case.v_cache[case.table[0, 1], 0].view(16, 64)
    head[:4] = 1e6  # tokens 16 to 19, before the window's first block ends
    assert torch.equal(attend(case, simulate, window=20), expected)
    assert not torch.equal(attend(case, simulate, window=21), expected)


@pytest.mark.interpreter
def test_a_nan_stays_visible_in_its_block():
    case = Case(PageLayout("bfloat16", 16, 2, 64), [40], 1, device=DEVICE)
    case.v_cache[case.table[0, 1], 0].view(16, 64)[3, 5] = math.nan
    out = attend(case, Simulation(v="nvfp4"))
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[0, 0, 5] = True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.interpreter
def test_quantized_and_shared_pages_are_refused():
    for name in ("fp8", "nvfp4", "mla-bfloat16"):
        case = Case(LAYOUTS[name], [3], device=DEVICE)
        with pytest.raises(InputError) as error:
            attend(case, Simulation(p="nvfp4"), **case.scales)
        assert error.value.code == "kernel.simulation"


@ALL
def test_a_cuda_graph_follows_its_inputs_and_nothing_synchronises(simulate):
    from kvq.kernels.decode import decode_attention

    case = Case(PageLayout("bfloat16", 64, 2, 128), [500, 64], device=DEVICE)
    out = torch.empty_like(case.q)
    options = {"layout": case.layout, "simulate": simulate, "num_kv_splits": 3, "out": out}
    decode_attention(*case.arguments, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(*case.arguments, **options)
    case.q.normal_()
    case.seq_lens.copy_(torch.tensor([333, 1]))
    with no_synchronisation():
        graph.replay()
        attend(case, simulate)
    check(case, simulate, out=out)


def test_a_cache_beyond_int32():
    layout = PageLayout("bfloat16", 64, 8, 128)
    simulate = Simulation(p="nvfp4", v="nvfp4")
    case = Case(layout, [200, 100], device=DEVICE)
    expected = case.expected(simulate=simulate)
    num_pages = 2**31 // (8 * layout.k_elements) + 1
    shape = (num_pages + case.num_pages, 8, layout.k_elements)
    for side in ("k_cache", "v_cache"):
        large = torch.full(shape, math.nan, dtype=torch.bfloat16, device=DEVICE)
        large[num_pages:] = getattr(case, side)
        setattr(case, side, large)
    case.table = torch.where(case.table < num_pages, case.table + num_pages, case.table)
    for splits in (1, 2):
        check(case, simulate, expected=expected, num_kv_splits=splits)
