"""Kernels on the CPU, under Triton's interpreter as `interpreter.faithful` corrects it.

Left out is what the interpreter cannot run: decode attention over shared 16-bit rows, whose kernel
holds inline PTX. The order of sums and `exp2` are NumPy's, so that decode attention is compared
with the twin within its bound, as on the GPU; all else bit by bit.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvq.formats import FP8_E4M3, INT8, MXFP4, MXFP8, NVFP4, NVFP4_KV
from kvq.kernels import reference
from kvq.kernels.pages import PageLayout
from tests.kernels.cases import LAYOUTS, Case, poisoned, relative_error

pytestmark = pytest.mark.interpreter
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
FORMATS = (FP8_E4M3, INT8, NVFP4, NVFP4_KV, MXFP8, MXFP4)
DECODED = [
    ("bfloat16", "default"),
    ("float16", "default"),
    ("fp8", "fast"),
    ("fp8", "default"),
    ("fp8-odd", "exact"),
    ("fp8-value", "default"),
    ("fp8-page", "fast"),
    ("fp8-chunk", "default"),
    ("nvfp4", "default"),
    ("nvfp4-odd", "exact"),
    ("nvfp4-chunk", "fast"),
    ("mla-fp8", "default"),
    ("mla-nvfp4", "default"),
]


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_the_corrected_fma_rounds_once():
    from tests.kernels.interpreter import fma

    generator = np.random.default_rng()
    x, y = generator.standard_normal((2, 100_000)).astype(np.float32)
    near = (-x * y).astype(np.float32)  # cancels all but the product's rounding
    exact = x.astype(np.float64) * y + near  # fits in float64
    assert np.array_equal(fma(x, y, near), exact.astype(np.float32))
    # halfway between two float32 numbers but for a part that float64 would round away
    half, tiny = np.float32([1 + 2**-12]), np.float32([2.0**-80])
    assert fma(half, half, tiny)[0] == np.float32(1 + 2**-11 + 2**-23)
    assert fma(half, half, -tiny)[0] == np.float32(1 + 2**-11)


def test_the_corrected_casts_are_those_of_torch():
    import triton.language as tl

    from tests.kernels.interpreter import convert

    x = torch.randint(-(2**31), 2**31, (1 << 16,), dtype=torch.int64).to(torch.int32)
    x = x.view(torch.float32)
    bfloat16 = convert(x.numpy(), tl.float32, tl.bfloat16, None).view(ml_dtypes.bfloat16)
    expected = x.bfloat16().float().numpy()
    assert np.array_equal(bfloat16.astype(np.float32), expected, equal_nan=True)
    inside = x[x.abs() <= 448]
    codes = convert(inside.numpy(), tl.float32, tl.float8e4nv, None)
    assert np.array_equal(codes, inside.to(torch.float8_e4m3fn).view(torch.uint8).numpy())


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@DTYPES
def test_quantize_dequantize_is_the_twins(fmt, dtype):
    from kvq.kernels.qdq import quantize_dequantize

    def check(x, scale):
        if fmt.scale_divisor is None:
            scale = None
        out = torch.full_like(x, math.nan)
        quantize_dequantize(x, fmt, scale=scale, out=out)
        assert same_bytes(out, reference.quantize_dequantize(x, fmt, scale=scale))

    if dtype == torch.float32:
        x = torch.randint(-(2**31), 2**31, (1 << 13,), dtype=torch.int64).to(torch.int32)
    else:
        x = torch.randint(-(2**15), 2**15, (1 << 13,)).to(torch.int16)
    x = x.view(dtype)
    x = x[~x.isnan()]
    x = x[: len(x) // 32 * 32].view(-1, 32)
    for scale in (0.0123, 2.0**-9, 2.0**100):
        check(x, scale)
    # ties, and a scale for each head with strides of its own
    ties = (torch.randint(-40, 40, (8, 4, 80)) / 2).to(dtype)
    check(ties, 1.0)
    check(ties.transpose(0, 1)[:, ::3], torch.rand(4, 1, 1) + 0.01)


@pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_every_byte_of_a_page_is_the_twins(layout):
    from kvq.kernels.pack import append_kv

    case = Case(layout, [1, 0, 37, 20])
    case.slots[torch.randperm(58)[:9]] = -1
    caches, expected = (poisoned(layout, case.num_pages) for _ in range(2))
    for call, target in ((append_kv, caches), (reference.append_kv, expected)):
        call(case.k, case.v, *target, case.slots, layout=layout, **case.scales)
    for cache, wanted in zip(caches, expected, strict=True):
        assert cache is None or same_bytes(cache, wanted), case.seed


@pytest.mark.parametrize("scale", [0.1, 16.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_infinity_in_a_block_of_16_bit_numbers(dtype, scale):
    from kvq.kernels.pack import append_kv

    layout = PageLayout("nvfp4", 16, 1, 32)
    k, v = torch.randn(2, 32, 1, 32).mul(1e4).clamp(-6e4, 6e4).to(dtype)
    k[torch.rand(k.shape) < 0.05] = -math.inf
    caches, expected = (poisoned(layout, 2) for _ in range(2))
    for call, target in ((append_kv, caches), (reference.append_kv, expected)):
        call(k, v, *target, torch.arange(32), layout=layout, k_scale=scale, v_scale=scale)
    assert all(same_bytes(a, b) for a, b in zip(caches, expected, strict=True))


RUNS = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 63)), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(RUNS, st.sampled_from([16, 32, 48, 64, 96, 256]), st.sampled_from([16, 256]), st.randoms())
def test_windows_leave_no_token_out_whatever_the_slots_are(runs, page_size, size, random):
    from kvq.kernels import pack

    layout = PageLayout("fp8_e4m3", page_size, 1, 16, size)
    free = random.sample(range(64), 64)
    slots = []
    for length, offset in runs:  # an offset other than 0 goes on in the request's last page
        places = range(offset % page_size, offset % page_size + length)
        pages = [free.pop() for _ in range(places[-1] // page_size + 1)]
        slots += [pages[i // page_size] * page_size + i % page_size for i in places]
    if random.random() < 0.3:
        random.shuffle(slots)
    slots = torch.tensor([-i - 1 if random.random() < 0.05 else i for i in slots])
    k, v = torch.randn(len(slots), 1, 16), torch.randn(len(slots), 1, size)
    caches, expected = (poisoned(layout, 64) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_MANY", 0)
        pack.append_kv(k, v, *caches, slots, layout=layout, k_scale=0.01, v_scale=0.02)
    reference.append_kv(k, v, *expected, slots, layout=layout, k_scale=0.01, v_scale=0.02)
    assert all(same_bytes(a, b) for a, b in zip(caches, expected, strict=True))


def attend(case, **options):
    from kvq.kernels.decode import decode_attention

    out = torch.full((*case.q.shape[:2], case.layout.value_dim), math.nan, dtype=case.q.dtype)
    decode_attention(*case.arguments, layout=case.layout, out=out, **case.scales, **options)
    return out


@pytest.mark.parametrize(("name", "variant"), DECODED)
def test_decode_attention_is_the_twins(name, variant):
    case = Case(LAYOUTS[name], [1, 0, 17, 300])
    heads = case.q.shape[1]
    sinks, slopes = torch.randn(heads), torch.rand(heads) / 50
    together = {"softcap": 5.0, "window": 150, "sinks": sinks, "alibi_slopes": slopes}
    for options in ({"num_kv_splits": 1}, {"num_kv_splits": 2, **together}):
        out = attend(case, variant=variant, **options)
        assert relative_error(out, case.expected(**options)) <= case.bound(variant), case.seed


@pytest.mark.parametrize("splits", [1, 3, None])
@pytest.mark.parametrize("window", [None, 5])
def test_a_length_below_zero_is_an_empty_request(splits, window):
    case = Case(LAYOUTS["fp8"], [40, 0, 70])
    expected = case.expected(window=window)
    assert bool((expected[1] == 0).all())
    case.seq_lens[1] = -200
    assert torch.equal(case.expected(window=window), expected)
    out = attend(case, num_kv_splits=splits, window=window)
    assert relative_error(out, expected) <= 6e-3, case.seed


@pytest.mark.parametrize("group", [1, 8, 20])
@pytest.mark.parametrize("name", ["fp8", "nvfp4", "nvfp4-odd"])
def test_query_heads_of_a_kv_head(name, group):
    # eight and more make NVFP4 tiles of one token in a row, 20 are two programs
    case = Case(LAYOUTS[name], [0, 200], group)
    assert relative_error(attend(case, num_kv_splits=2), case.expected()) <= 6e-3, case.seed


@pytest.mark.parametrize("name", ["float16", "fp8", "nvfp4", "mla-fp8", "mla-nvfp4"])
def test_logits_whose_differences_are_rounded_do_not_overflow(name):
    case = Case(LAYOUTS[name], [1, 0, 17, 70], dtype=torch.float16)
    # whole numbers, which every format and sum holds: logits are equal, or far apart after rounding
    case.q, case.k = case.q.sign(), case.k.sign()
    if case.v is not None:
        case.v *= 4  # blocks of the largest scale, which P is multiplied by
    case.append()
    for power in range(20, 30):
        scale = 2.0**power * case.layout.head_dim**-0.5
        expected = case.expected(softmax_scale=scale)
        for splits in (1, 3):
            out = attend(case, num_kv_splits=splits, softmax_scale=scale)
            assert relative_error(out, expected) <= 6e-3, (case.seed, power)


@pytest.mark.parametrize(
    ("name", "bound"), [("bfloat16", 3e-3), ("float16", 3e-3), ("fp8", 6e-2), ("nvfp4", 3e-3)]
)
def test_small_weights_count_where_the_token_of_the_largest_has_no_value(name, bound):
    case = Case(LAYOUTS[name], [600], dtype=torch.float16)
    case.scales = dict.fromkeys(case.scales, 2.0**-6)
    case.q[..., 0] = 16
    case.k[..., 0] = case.k[0] = case.v[0] = 0
    case.k[0, :, 0] = 6  # which every format holds, so that the weight is 2**18 of the others'
    case.append()
    scale = 18 * math.log(2) / 96
    error = relative_error(attend(case, softmax_scale=scale), case.expected(softmax_scale=scale))
    assert error <= bound, case.seed


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maxima
@pytest.mark.parametrize("name", ["bfloat16", "float16", "fp8", "nvfp4", "mla-fp8"])
@pytest.mark.parametrize("splits", [1, 2, None])
def test_infinity_in_q_gives_nan(name, splits):
    case = Case(LAYOUTS[name], [1, 0, 17, 200])
    case.k[..., 0] = -1 - case.k[..., 0].abs()
    case.append()
    case.q[2:, 3, 0] = math.inf  # all of its head's logits are -inf
    is_nan = torch.zeros(case.q.shape[:2], dtype=torch.bool)
    is_nan[2:, 3] = True
    assert torch.equal(case.expected().isnan().any(-1), is_nan)
    out = attend(case, num_kv_splits=splits)
    assert torch.equal(out.isnan(), is_nan[:, :, None].expand_as(out))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maxima
@pytest.mark.parametrize("name", ["bfloat16", "fp8", "nvfp4"])
def test_nan_in_q_or_k_stays_with_the_heads_that_meet_it(name):
    from kvq.kernels.pack import append_kv

    case = Case(LAYOUTS[name], [1, 0, 17, 70])
    case.q[2, 5] = math.nan
    case.k[-1, 0] = math.nan  # the last token of the last request
    new = case.k, case.v, case.k_cache, case.v_cache, case.slots
    append_kv(*new, layout=case.layout, **case.scales)
    is_nan = torch.zeros(case.q.shape[:2], dtype=torch.bool)
    is_nan[2, 5] = True
    is_nan[3, :4] = True
    assert torch.equal(attend(case).isnan(), is_nan[:, :, None].expand_as(case.q))


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mla-fp8", "mla-nvfp4"])
def test_scales_at_the_end_of_float32(name):
    case = Case(LAYOUTS[name], [1, 0, 17, 2000])
    case.rescale(122)
    for splits in (1, 2):
        assert relative_error(attend(case, num_kv_splits=splits), case.expected()) <= 1e-2


def test_a_cuda_kernel_is_not_run_on_the_cpu_by_chance(monkeypatch):
    from kvq.errors import InputError
    from kvq.kernels import launch
    from kvq.kernels.qdq import quantize_dequantize

    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(InputError, match="expected cuda"):
        quantize_dequantize(torch.zeros(16), FP8_E4M3, scale=1.0)
