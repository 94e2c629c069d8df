"""The naive twins against the formats' own numbers, hand-packed bytes and textbook attention."""

import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.errors import InputError
from kvq.formats import NVFP4_KV
from kvq.kernels import reference
from kvq.kernels.checks import new_cache
from kvq.kernels.pages import PageLayout
from kvq.reference import quantize
from tests.kernels.cases import LAYOUTS, POISON, Case, poisoned

ALL = pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=list(LAYOUTS))


def test_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import kvq.kernels.reference"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fp8_pages_hold_k_by_token_and_v_by_dimension():
    layout = PageLayout("fp8_e4m3", 16, 2, 16)
    k = torch.randn(3, 2, 16)
    v = torch.randn(3, 2, 16)
    k_cache, v_cache = new_cache(layout, 4, "cpu")
    slots = torch.tensor([37, -1, 16])
    reference.append_kv(k, v, k_cache, v_cache, slots, layout=layout, k_scale=0.25, v_scale=0.5)

    def code(x, scale):
        return (x.numpy() / np.float32(scale)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    expected_k, expected_v = np.zeros((2, 4, 2, 256), np.uint8)
    for token, page, offset in ((0, 2, 5), (2, 1, 0)):
        for head in range(2):
            for d in range(16):
                expected_k[page, head, offset * 16 + d] = code(k[token, head, d], 0.25)
                expected_v[page, head, d * 16 + offset] = code(v[token, head, d], 0.5)
    assert np.array_equal(k_cache.numpy(), expected_k)
    assert np.array_equal(v_cache.numpy(), expected_v)


def test_nvfp4_bytes_of_one_token_by_hand():
    layout = PageLayout("nvfp4", 16, 1, 48)  # three blocks: a fourth of padding
    x = torch.zeros(1, 1, 48)
    x[0, 0, :16] = 6.0  # block scale 1, code 7
    x[0, 0, 1] = -0.5  # code 1 with the sign
    x[0, 0, 16:32] = 12.0  # block scale 2
    x[0, 0, 17] = 3.0  # 1.5, code 3
    x[0, 0, 32:] = 1.5  # block scale 0.25
    x[0, 0, 33] = -1.0  # -4, code 6 with the sign
    caches = poisoned(layout, 2)
    slots = torch.tensor([18])
    reference.append_kv(x, x, *caches, slots, layout=layout, k_scale=1.0, v_scale=1.0)
    # bits S e e m E E M s of the codes s e e m (dimension d) and S E E M (d + 32)
    both = 0b01111110  # 0 111 and 0 111
    signs = 0b10011101  # 1 001 and 1 110
    ones = [0b01110000, 0b00110000]  # 0 111 and 0 011, above padding
    codes = [both, signs] + [both] * 14 + ones + [ones[0]] * 14
    pairs = [[0x38, 0x28], [0x40, 0x00]]  # E4M3 of 1 and 0.25, of 2 and the padding block
    k_page, v_page = caches[0][1, 0].tolist(), caches[1][1, 0].tolist()
    assert k_page[2 * 32 : 3 * 32] == codes
    assert v_page[2 : 16 * 32 : 16] == codes
    for i, pair in enumerate(pairs):
        assert k_page[16 * 32 + 2 * 4 + 2 * i :][:2] == pair
        assert v_page[16 * 32 + i * 32 + 2 * 2 :][:2] == pair
    assert {page.count(POISON) for page in (k_page, v_page)} == {len(k_page) - 36}
    assert set(caches[0][0].flatten().tolist()) == {POISON}


def test_a_large_nvfp4_page_holds_v_in_chunks():
    layout = PageLayout("nvfp4", 64, 1, 32)
    x = torch.full((1, 1, 32), 6.0)
    x[..., 16:] = 12.0
    caches = poisoned(layout, 1)
    reference.append_kv(x, x, *caches, torch.tensor([33]), layout=layout, k_scale=1.0, v_scale=1.0)
    page = caches[1][0, 0]
    codes, scales = page[: 64 * 16].view(4, 16, 16), page[64 * 16 :].view(4, 1, 16, 2)
    assert codes[2, :, 1].tolist() == [0b01111110] * 16
    assert scales[2, 0, 1].tolist() == [0x38, 0x40]
    assert int((page != POISON).sum()) == 18


def test_a_page_of_48_tokens_holds_fp8_v_in_three_chunks():
    layout = PageLayout("fp8_e4m3", 48, 1, 16)
    codes = (torch.arange(48 * 16) % 120).to(torch.uint8).view(48, 1, 16)  # none of them NaN
    x = codes.view(torch.float8_e4m3fn).float()
    caches = poisoned(layout, 2)
    slots = torch.arange(48, 96)
    reference.append_kv(x, x, *caches, slots, layout=layout, k_scale=1.0, v_scale=1.0)
    assert torch.equal(caches[0][1, 0].view(48, 16), codes[:, 0])
    assert torch.equal(caches[1][1, 0].view(3, 16, 16), codes.view(3, 16, 16).transpose(1, 2))
    assert all(bool((cache[0] == POISON).all()) for cache in caches)


@ALL
def test_pages_give_back_what_the_formats_reference_gives(layout):
    case = Case(layout, [1, 0, 37, 64], seed=1)
    begin = 0
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        k, v = reference.gather_kv(
            case.k_cache, case.v_cache, case.table[request], seq_len, layout=layout, **case.scales
        )
        for got, x, side in ((k, case.k, "k_scale"), (v, case.v, "v_scale")):
            source = case.k[..., : layout.value_dim] if x is None else x
            source = source[begin : begin + seq_len]
            if layout.kv_format is None:
                expected = source.float()
            else:
                scale = case.scales["k_scale" if layout.shared else side][:, None]
                expected = reference.quantize_dequantize(
                    source.float(), layout.kv_format, scale=scale
                )
            assert torch.equal(got, expected)
        begin += seq_len


def test_a_block_of_shared_rows_keeps_its_scale():
    layout = LAYOUTS["mla-nvfp4"]
    case = Case(layout, [5], seed=2)
    q = quantize(case.k, NVFP4_KV, scale=case.scales["k_scale"][:, None])
    begin = layout.k_scales_offset + int(case.slots[3]) % 16 * 36
    page = int(case.slots[3]) // 16
    pairs = case.k_cache[page, 0, begin : begin + 36].view(18, 2)
    assert torch.equal(pairs.T.flatten(), q.block_scales[3, 0])


@ALL
@given(data=st.data())
@settings(max_examples=10)
def test_the_order_of_writing_does_not_matter(layout, data):
    case = Case(layout, [19, 3], seed=3)
    order = torch.tensor(data.draw(st.permutations(range(22))))
    cut = data.draw(st.integers(0, 22))
    caches = poisoned(layout, case.num_pages)
    for part in (order[:cut], order[cut:]):
        v = None if case.v is None else case.v[part]
        reference.append_kv(
            case.k[part], v, *caches, case.slots[part], layout=layout, **case.scales
        )
    for cache, expected in zip(caches, (case.k_cache, case.v_cache), strict=True):
        if cache is not None:
            assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


@ALL
def test_attention_is_torch_attention_over_the_gathered_cache(layout):
    case = Case(layout, [1, 37, 64], group=2, seed=4)
    out = case.expected()
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        k, v = reference.gather_kv(
            case.k_cache, case.v_cache, case.table[request], seq_len, layout=layout, **case.scales
        )
        expected = torch.nn.functional.scaled_dot_product_attention(
            case.q[request, :, None].double(), k.double().transpose(0, 1),
            v.double().transpose(0, 1), enable_gqa=True,
        )  # fmt: skip
        torch.testing.assert_close(out[request], expected[:, 0])


def one_number(logits, values, **options):
    """Attention of one head whose logits and values are these numbers."""
    layout = PageLayout("bfloat16", 16, 1, 16)
    k, v = torch.zeros(2, len(logits), 1, 16, dtype=torch.bfloat16)
    k[:, 0, 0] = torch.tensor(logits)
    v[:, 0, 0] = torch.tensor(values)
    caches = poisoned(layout, 1)
    reference.append_kv(k, v, *caches, torch.arange(len(logits)), layout=layout)
    q = torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    q[0, 0, 0] = 1.0
    table, seq_lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([len(logits)])
    out = reference.decode_attention(
        q, *caches, table, seq_lens, layout=layout, softmax_scale=1.0, **options
    )
    return float(out[0, 0, 0])


def test_options_by_hand():
    logits, values = [1.0, 2.0, 0.5], [1.0, -2.0, 4.0]

    def mean(x, extra=0.0):
        weights = [math.exp(a) for a in x]
        total = sum(weights) + extra
        return sum(w * v for w, v in zip(weights, values[-len(x) :], strict=True)) / total

    assert one_number(logits, values) == pytest.approx(mean(logits))
    assert one_number(logits, values, window=2) == pytest.approx(mean(logits[1:]))
    capped = [1.5 * math.tanh(x / 1.5) for x in logits]
    assert one_number(logits, values, softcap=1.5) == pytest.approx(mean(capped))
    sink = torch.tensor([0.75])
    assert one_number(logits, values, sinks=sink) == pytest.approx(mean(logits, math.exp(0.75)))
    slope = torch.tensor([0.5])
    sloped = [x - 0.5 * distance for x, distance in zip(logits, (2, 1, 0), strict=True)]
    assert one_number(logits, values, alibi_slopes=slope) == pytest.approx(mean(sloped))


def refused(call, *arguments, **options):
    with pytest.raises(InputError) as error:
        call(*arguments, **options)
    return error.value.code


def test_caches_of_another_layout_are_refused():
    case = Case(LAYOUTS["fp8"], [3])
    q, k_cache, v_cache, *rest = case.arguments

    def code(k, v, layout=case.layout):
        return refused(reference.decode_attention, q, k, v, *rest, layout=layout, **case.scales)

    assert code(k_cache[..., :-1], v_cache) == "kernel.cache"
    assert code(k_cache.view(torch.int8), v_cache) == "kernel.cache"
    assert code(k_cache, None) == "kernel.cache"
    assert code(k_cache, v_cache[:-1]) == "kernel.cache"
    assert code(k_cache, v_cache.transpose(1, 2).contiguous().transpose(1, 2)) == "kernel.cache"
    assert code(k_cache, v_cache, LAYOUTS["nvfp4"]) == "kernel.cache"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"q": lambda q: q[:, :3]}, "kernel.heads"),
        ({"q": lambda q: q[..., :32]}, "kernel.query"),
        ({"q": lambda q: q.float()}, "kernel.query"),
        ({"table": lambda t: t[:1]}, "kernel.indices"),
        ({"table": lambda t: t.float()}, "kernel.indices"),
        ({"lens": lambda s: s[:1]}, "kernel.indices"),
        ({"k_scale": lambda s: s[:1].double()}, "kernel.scale"),
        ({"k_scale": lambda s: s.repeat(2)}, "kernel.scale"),
        ({"k_scale": lambda _: 0.0}, "kernel.scale"),
        ({"v_scale": lambda _: math.nan}, "kernel.scale"),
        ({"v_scale": lambda _: None}, "kernel.scale"),
        ({"softcap": 0.0}, "kernel.softcap"),
        ({"window": 0}, "kernel.window"),
        ({"num_kv_splits": 0}, "kernel.splits"),
        ({"num_kv_splits": 257}, "kernel.splits"),
        ({"variant": "fastest"}, "kernel.variant"),
        ({"sinks": torch.zeros(3)}, "kernel.heads"),
        ({"alibi_slopes": torch.zeros(8).double()}, "kernel.heads"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(change, code):
    case = Case(LAYOUTS["fp8"], [3, 20])
    q, k_cache, v_cache, table, lens = case.arguments
    values = {"q": q, "table": table, "lens": lens, **case.scales}
    for name, value in change.items():
        values[name] = value(values[name]) if callable(value) else value
    q, table, lens = (values.pop(name) for name in ("q", "table", "lens"))
    assert (
        refused(
            reference.decode_attention,
            q,
            k_cache,
            v_cache,
            table,
            lens,
            layout=case.layout,
            **values,
        )
        == code
    )


def test_new_tokens_that_do_not_fit_are_refused():
    case = Case(LAYOUTS["bfloat16"], [3])

    def code(k=case.k, v=case.v, slots=case.slots, **scales):
        return refused(
            reference.append_kv, k, v, case.k_cache, case.v_cache, slots,
            layout=case.layout, **scales,
        )  # fmt: skip

    assert code(k=case.k[:, :1]) == "kernel.tokens"
    assert code(v=None) == "kernel.tokens"
    assert code(v=case.v.half()) == "kernel.tokens"
    assert code(slots=case.slots[:2]) == "kernel.indices"
    assert code(slots=case.slots.float()) == "kernel.indices"
    assert code(k_scale=1.0) == "kernel.scale"
