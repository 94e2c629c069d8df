import pytest
import torch

from kvq.kernels.pages import PageLayout
from tests.kernels.cases import BOUNDS, LAYOUTS, Case, no_synchronisation, relative_error

pytestmark = pytest.mark.gpu
FORMATS = pytest.mark.parametrize("name", ["bfloat16", "fp8_e4m3", "nvfp4"])
VARIANTS = pytest.mark.parametrize("variant", list(BOUNDS))
MOVED = {"fast": 1e-2, "default": 2e-3, "exact": 2e-3}  # by the number of splits
RAGGED = [1, 0, 16, 17, 333, 1024, 2048, 5]


def attend(case, out=None, **options):
    from kvq.kernels.decode import decode_attention

    if out is None:
        shape = (*case.q.shape[:2], case.layout.value_dim)
        out = torch.full(shape, float("nan"), dtype=case.q.dtype, device="cuda")
    result = decode_attention(
        *case.arguments, layout=case.layout, **case.scales, out=out, **options
    )
    assert result is out
    return out


def check(case, *, variant="default", bound=None, **options):
    error = relative_error(attend(case, variant=variant, **options), case.expected(**options))
    assert error <= (bound or case.bound(variant)), (error, case.seed)


@FORMATS
@VARIANTS
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_sizes_and_ragged_lengths(name, variant, head_dim):
    case = Case(PageLayout(name, 64, 2, head_dim), RAGGED, device="cuda")
    check(case, variant=variant)
    check(case, variant=variant, num_kv_splits=3)


@FORMATS
@pytest.mark.parametrize("lengths", [[1] * 3 + [9000], [2000, 0] * 20, list(range(300))], ids=len)
@pytest.mark.parametrize("window", [None, 200, 2**40])
def test_batches_of_any_size_and_lengths(name, lengths, window):
    case = Case(PageLayout(name, 32, 2, 64), lengths, device="cuda")
    sinks = torch.randn(8, device="cuda")
    expected = attend(case, window=window, sinks=sinks, num_kv_splits=1)
    assert relative_error(attend(case, window=window, sinks=sinks), expected) <= 5e-3
    case = Case(PageLayout(name, 32, 2, 64), lengths[:40], device="cuda")
    check(case, window=window, sinks=sinks)


@FORMATS
@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 96, 128, 192, 256])
def test_page_sizes(name, page_size):
    case = Case(PageLayout(name, page_size, 2, 128), RAGGED, device="cuda")
    check(case)
    check(case, num_kv_splits=4)


@FORMATS
@VARIANTS
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16, 20])
def test_query_heads_of_a_kv_head(name, variant, group):
    check(Case(PageLayout(name, 64, 3, 128), [200, 700], group, device="cuda"), variant=variant)


@FORMATS
@VARIANTS
def test_peaked_attention(name, variant):
    # logits of q times 8 spread over tens, so that few tokens hold all the weight
    case = Case(PageLayout(name, 64, 2, 128), [4096], device="cuda", peak=8.0)
    check(case, variant=variant, bound=max(1e-2, 3.5 * case.bound(variant)))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [16, 64])
def test_shared_rows(name, heads, page_size):
    layout = PageLayout(name, page_size, 1, 576, 512, shared=True)
    case = Case(layout, [1, 0, 40, 64, 100, 700], heads, device="cuda")
    check(case, softmax_scale=192**-0.5)
    check(case, softmax_scale=192**-0.5, num_kv_splits=5)


def test_value_size_of_its_own():
    for name in ("bfloat16", "fp8_e4m3", "nvfp4"):
        check(Case(PageLayout(name, 32, 2, 192, 128), [7, 300], device="cuda"))


@FORMATS
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_options_alone_and_together(name, page_size, splits):
    case = Case(PageLayout(name, page_size, 2, 128), [1, 0, 50, 400, 1500], device="cuda")
    sinks = torch.randn(8, device="cuda") * 3
    slopes = torch.rand(8, device="cuda") / 50
    every = [{"softcap": 2.0}, {"window": 1}, {"window": 130}, {"sinks": sinks},
             {"alibi_slopes": slopes}]  # fmt: skip
    together = {"softcap": 5.0, "window": 700, "sinks": sinks, "alibi_slopes": slopes}
    for options in [*every, together]:
        check(case, num_kv_splits=splits, **options)


@FORMATS
@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_pages_before_the_window_are_not_read(name, page_size):
    case = Case(PageLayout(name, page_size, 2, 128), [500, 64], device="cuda")
    expected = case.expected(window=40)
    case.table[0, : (500 - 40) // page_size] = 2**31 - 1
    case.table[1, : (64 - 40) // page_size] = -(2**31)
    for splits in (1, 2, None):
        out = attend(case, window=40, num_kv_splits=splits)
        assert relative_error(out, expected) <= 1.5 * BOUNDS["default"]


@FORMATS
@VARIANTS
def test_the_number_of_splits_changes_rounding_only(name, variant):
    case = Case(PageLayout(name, 64, 2, 128), [5000, 77], device="cuda", dtype=torch.float16)
    reference = attend(case, num_kv_splits=1, variant=variant)
    for splits in (2, 7, 16, 33, 256):
        out = attend(case, num_kv_splits=splits, variant=variant)
        # the output dtype's own rounding; a quantized P beside a rounding boundary, which falls on
        # its other side when float32's last place moves, shows in few rows and moves them little
        ulp = 2.0**-10 if name != "bfloat16" else 2.0**-7
        error = (out.double() - reference.double()).abs()
        beyond = (error > ulp * reference.double().abs() + 1e-5).any(-1)
        few = 0 if name == "bfloat16" else beyond.numel() // 8
        assert int(beyond.sum()) <= few, (splits, case.seed)
        assert relative_error(out, reference) <= MOVED[variant], (splits, case.seed)


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mla-fp8", "mla-nvfp4"])
def test_scales_at_the_end_of_float32(name):
    case = Case(LAYOUTS[name], [1, 0, 17, 2000], device="cuda")
    case.rescale(122)
    for splits in (1, 2):
        check(case, num_kv_splits=splits)


def test_float16_queries():
    for name in ("float16", "fp8_e4m3", "nvfp4"):
        check(Case(PageLayout(name, 32, 2, 128), [9, 700], device="cuda", dtype=torch.float16))


@FORMATS
def test_strides_of_every_tensor(name):
    case = Case(PageLayout(name, 64, 2, 128), [90, 300, 10], device="cuda")
    expected = case.expected()
    case.q = torch.cat((case.q, case.q), 2)[..., :128].transpose(0, 1).contiguous().transpose(0, 1)
    case.table = torch.stack((case.table, case.table * 0 - 1), 2)[..., 0]
    case.seq_lens = torch.stack((case.seq_lens, case.seq_lens * 0), 1)[:, 0]
    case.k_cache, case.v_cache = (
        torch.stack((cache, torch.full_like(cache, 127)), 1)[:, 0]
        for cache in (case.k_cache, case.v_cache)
    )
    out = torch.full((3, 128, 8), float("nan"), dtype=case.q.dtype, device="cuda").transpose(1, 2)
    for splits in (1, 2):
        attend(case, out=out.fill_(float("nan")), num_kv_splits=splits)
        assert relative_error(out, expected) <= 1.5 * BOUNDS["default"]


@FORMATS
@pytest.mark.parametrize("splits", [3, None])
def test_a_cuda_graph_follows_its_inputs_and_nothing_synchronises(name, splits):
    from kvq.kernels.pack import append_kv

    case = Case(PageLayout(name, 64, 2, 128), [500, 64], device="cuda")
    out = torch.empty_like(case.q)
    attend(case, out=out, num_kv_splits=splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_kv(case.k, case.v, case.k_cache, case.v_cache, case.slots, layout=case.layout,
                  **case.scales)  # fmt: skip
        attend(case, out=out, num_kv_splits=splits)
    case.q.normal_()
    case.seq_lens.copy_(torch.tensor([333, 1]))
    case.k.normal_()
    with no_synchronisation():
        graph.replay()
        attend(case)
    assert relative_error(out, case.expected()) <= 1.5 * BOUNDS["default"]


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_a_cache_beyond_int32(name):
    layout = PageLayout(name, 64, 8, 128)
    case = Case(layout, [200, 100], device="cuda")
    expected = case.expected()
    num_pages = 2**31 // (8 * layout.k_elements) + 1
    shape = (num_pages + case.num_pages, 8, layout.k_elements)
    for side in ("k_cache", "v_cache"):
        large = torch.empty(shape, dtype=torch.uint8, device="cuda")
        large[num_pages:] = getattr(case, side)
        setattr(case, side, large)
    case.table = torch.where(case.table < num_pages, case.table + num_pages, case.table)
    for splits in (1, 2):
        assert (
            relative_error(attend(case, num_kv_splits=splits), expected) <= 1.5 * BOUNDS["default"]
        )


def test_nan_in_the_cache_is_not_hidden():
    for name in ("bfloat16", "fp8_e4m3", "nvfp4"):
        case = Case(PageLayout(name, 64, 2, 128), [100], device="cuda")
        case.v_cache[case.table[0, 0], 0] = float("nan") if name == "bfloat16" else 127
        out = attend(case)
        assert bool(out[0, :4].isnan().any())
        assert not bool(out[0, 4:].isnan().any())


def test_no_requests():
    case = Case(PageLayout("fp8_e4m3", 64, 2, 128), [100], device="cuda")
    case.q, case.table, case.seq_lens = case.q[:0], case.table[:0], case.seq_lens[:0]
    assert attend(case).shape == (0, 8, 128)


@FORMATS
def test_small_case_for_a_memory_checker(name):
    case = Case(PageLayout(name, 16, 1, 64), [1, 0, 33], 2, device="cuda")
    check(case, num_kv_splits=2)
    check(case, num_kv_splits=1, window=20)
