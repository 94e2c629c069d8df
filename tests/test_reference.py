import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvq.errors import FormatError
from kvq.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FORMATS,
    FP8_E4M3,
    FP8_E5M2,
    INT8,
    INT8_CODE,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8,
    NVFP4,
    NVFP4_KV,
    KVFormat,
)
from kvq.reference import Parity, dequantize, pack, quantize, quantize_dequantize, unpack

ELEMENTS = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E2M1: ml_dtypes.float4_e2m1fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    E3M2: ml_dtypes.float6_e3m2fn,
}
ALL = pytest.mark.parametrize("fmt", list(FORMATS.values()), ids=lambda fmt: fmt.name)
FLOATS = pytest.mark.parametrize("element", list(ELEMENTS), ids=lambda e: f"e{e.exponent_bits}")
MX = [MXFP8, MXFP6_E2M3, MXFP6_E3M2, MXFP4]
MX += [replace(fmt, name=f"{fmt.name}-ceil", scale_rounding="ceil") for fmt in MX]
EVERY_BFLOAT16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
NUMBERS = EVERY_BFLOAT16[~EVERY_BFLOAT16.isnan()]
SCALES = [2.0**-9, 0.0123, 0.3330078125, 1.0, 7.5312]

finite = st.floats(min_value=-(2.0**60), max_value=2.0**60, width=32)
vectors = hnp.arrays(np.float32, st.integers(1, 70), elements=finite).map(torch.from_numpy)


def plain(element):
    """A format of this element alone, with a tensor scale."""
    return KVFormat("plain", element, element.max)


PLAIN = pytest.mark.parametrize(
    "fmt",
    [FP8_E4M3, FP8_E5M2, INT8, plain(E2M1), plain(E2M3), plain(E3M2)],
    ids=["e4m3", "e5m2", "int8", "e2m1", "e2m3", "e3m2"],
)


def scale_of(fmt, amax):
    return None if fmt.scale_divisor is None else fmt.scale(amax)


def same_bits(a, b):
    assert a.dtype == b.dtype
    size = {2: torch.int16, 4: torch.int32}[a.element_size()]
    nan = a.isnan()
    assert torch.equal(nan, b.isnan())
    return torch.equal(a.view(size)[~nan], b.view(size)[~nan])


@FLOATS
def test_every_bfloat16_gets_the_code_of_the_ml_dtypes_cast(element):
    codes = quantize(NUMBERS, plain(element), scale=1.0).codes
    clamped = NUMBERS.float().numpy().clip(-element.max, element.max)
    assert codes.numpy().tolist() == clamped.astype(ELEMENTS[element]).view(np.uint8).tolist()


@pytest.mark.parametrize(
    ("fmt", "dtype"), [(FP8_E4M3, torch.float8_e4m3fn), (FP8_E5M2, torch.float8_e5m2)]
)
def test_every_bfloat16_gets_the_code_of_the_clamped_torch_cast(fmt, dtype):
    expected = EVERY_BFLOAT16.float().clamp(-fmt.element.max, fmt.element.max).to(dtype)
    q = quantize(EVERY_BFLOAT16, fmt, scale=1.0)
    assert torch.equal(q.codes, expected.view(torch.uint8))
    assert same_bits(dequantize(q, fmt, torch.float32), expected.float())


def test_every_bfloat16_gets_the_int8_code_of_numpy_rint():
    codes = quantize(NUMBERS, INT8, scale=1.0).codes
    expected = np.rint(NUMBERS.float().numpy().clip(-127, 127)).astype(np.int8)
    assert codes.dtype == torch.int8
    assert np.array_equal(codes.numpy(), expected)


@FLOATS
def test_every_code_survives_a_round_trip(element):
    values = [element.decode(code) for code in range(1 << element.bits)]
    codes = [code for code, value in enumerate(values) if math.isfinite(value)]
    x = torch.tensor([values[code] for code in codes])
    q = quantize(x, plain(element), scale=1.0)
    assert q.codes.tolist() == codes
    assert same_bits(dequantize(q, plain(element), torch.float32), x)


@FLOATS
def test_every_midpoint_goes_to_the_even_code_and_its_neighbours_do_not(element):
    codes = torch.tensor(element.magnitudes)
    middles, lower = (codes[:-1] + codes[1:]) / 2, torch.arange(len(codes) - 1)
    for x, expected in (
        (middles, lower + lower % 2),
        (middles.nextafter(torch.tensor(0.0)), lower),
        (middles.nextafter(torch.tensor(math.inf)), lower + 1),
    ):
        assert quantize(x, plain(element), scale=1.0).codes.tolist() == expected.tolist()
        negative = quantize(-x, plain(element), scale=1.0).codes.tolist()
        assert negative == (expected + element.sign_bit).tolist()


@FLOATS
def test_codes_agree_with_the_one_value_encoder(element):
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * element.max / 3
    codes = quantize(x, plain(element), scale=1.0).codes.tolist()
    assert codes == [element.encode(value) for value in x.tolist()]


@FLOATS
@pytest.mark.parametrize("amax", [1.0, 1.7, 3.3, 7.5312])
def test_values_near_a_midpoint_are_divided_by_the_scale_in_float32(element, amax):
    fmt = plain(element)
    scale = np.float32(fmt.scale(amax))
    codes = np.array(element.magnitudes, np.float32)
    x = (codes[:-1] + codes[1:]) / np.float32(2) * scale
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(9e9))])
    q = quantize(torch.from_numpy(x), fmt, scale=float(scale))
    expected = (x / scale).clip(-element.max, element.max).astype(ELEMENTS[element])
    assert q.codes.tolist() == expected.view(np.uint8).tolist()
    out = dequantize(q, fmt, torch.float32).numpy()
    assert np.array_equal(out, expected.astype(np.float32) * scale)


@PLAIN
def test_infinities_saturate(fmt):
    x = torch.tensor([math.inf, -math.inf])
    out = quantize_dequantize(x, fmt, scale=0.5)
    assert out.tolist() == [fmt.element.max / 2, -fmt.element.max / 2]


@ALL
def test_nan_stays_where_the_element_has_one_and_is_refused_elsewhere(fmt):
    x = torch.tensor([1.0, math.nan, 2.0])
    if fmt.element in (E4M3, E5M2):
        out = quantize_dequantize(x, fmt, scale=scale_of(fmt, 2.0))
        assert out.isnan().tolist() == [False, True, False]
    else:
        with pytest.raises(FormatError) as error:
            quantize(x, fmt, scale=scale_of(fmt, 2.0))
        assert error.value.code == "format.nan"


@FLOATS
def test_negative_zero_keeps_its_sign(element):
    q = quantize(torch.tensor([-0.0, 0.0]), plain(element), scale=3.0)
    assert q.codes.tolist() == [element.sign_bit, 0]


def block_scales_of(x, fmt, scale):
    """Code and value of each block scale, one block at a time in numpy float32 and math."""
    codes, values = [], []
    for start in range(0, len(x), fmt.block_size):
        amax = np.abs(x[start : start + fmt.block_size]).max()
        if scale is not None:
            ratio = np.minimum(amax / np.float32(6) / scale, np.float32(448))
            code = ratio.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            value = code.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
        else:
            exponent = -127
            if amax > 0 and fmt.scale_rounding == "floor":
                exponent = math.floor(math.log2(amax)) - math.floor(math.log2(fmt.element.max))
            elif amax > 0:
                exponent = math.ceil(math.log2(float(amax) / fmt.element.max))
            code = max(exponent, -127) + 127
            value = np.float32(2.0 ** (code - 127))
        codes.append(int(code))
        values.append(value)
    return codes, values


@pytest.mark.parametrize("fmt", [NVFP4, NVFP4_KV, *MX], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("size", [1, 15, 16, 33, 200])
def test_block_formats_match_a_blockwise_numpy_twin(fmt, size):
    rng = np.random.default_rng(size)
    x = (rng.standard_normal(size) * 10.0 ** rng.integers(-8, 4, size)).astype(np.float32)
    x[:1] = 0.0
    scale = None if fmt.scale_divisor is None else np.float32(fmt.scale(float(np.abs(x).max() + 1)))
    q = quantize(torch.from_numpy(x), fmt, scale=None if scale is None else float(scale))
    codes, values = block_scales_of(x, fmt, scale)
    assert q.block_scales.tolist() == codes
    effective = np.repeat(np.array(values, np.float32), fmt.block_size)[:size]
    safe = np.where(effective == 0, np.float32(1), effective)
    scaled = np.where(effective == 0, 0, x / safe).clip(-fmt.element.max, fmt.element.max)
    elements = scaled.astype(np.float32).astype(ELEMENTS[fmt.element])
    assert q.codes.tolist() == elements.view(np.uint8).tolist()
    out = dequantize(q, fmt, torch.float32).numpy()
    assert np.array_equal(out, elements.astype(np.float32) * effective)


@pytest.mark.parametrize("fmt", [NVFP4, NVFP4_KV], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("amax", [1.7, 7.5312])
def test_nvfp4_block_scales_near_a_midpoint_divide_by_six_first(fmt, amax):
    scale = np.float32(fmt.scale(amax))
    codes = np.array(E4M3.magnitudes, np.float32)
    x = (codes[:-1] + codes[1:]) / np.float32(2) * scale * np.float32(6)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(9e9))])
    q = quantize(torch.from_numpy(x).view(-1, 1), fmt, scale=float(scale))
    expected = (x / np.float32(6) / scale).astype(ml_dtypes.float8_e4m3fn)
    assert q.block_scales.flatten().tolist() == expected.view(np.uint8).tolist()


def test_nan_and_its_block_neighbours_do_not_disturb_each_other_in_mxfp8():
    x = torch.tensor([0.001, math.nan, -0.003])
    q = quantize(x, MXFP8, scale=None)
    expected = quantize(x.nan_to_num(nan=0.0), MXFP8, scale=None)
    assert torch.equal(q.block_scales, expected.block_scales)
    assert torch.equal(q.codes[::2], expected.codes[::2])


@pytest.mark.parametrize("fmt", MX, ids=lambda fmt: fmt.name)
def test_an_mx_block_of_zeros_has_the_smallest_scale_and_zero_codes(fmt):
    q = quantize(torch.zeros(2, 40), fmt, scale=None)
    assert q.block_scales.tolist() == [[0, 0], [0, 0]]
    assert not q.codes.any()


@pytest.mark.parametrize(
    ("rounding", "amax", "scale_code", "value"),
    [("floor", 7.0, 127, 6.0), ("ceil", 7.0, 128, 8.0), ("ceil", 6.0, 127, 6.0)],
)
def test_mxfp4_floor_saturates_where_ceil_does_not(rounding, amax, scale_code, value):
    fmt = replace(MXFP4, scale_rounding=rounding)
    q = quantize(torch.tensor([amax]), fmt, scale=None)
    assert q.block_scales.tolist() == [scale_code]
    assert dequantize(q, fmt, torch.float32).tolist() == [value]


@pytest.mark.parametrize("fmt", MX, ids=lambda fmt: fmt.name)
def test_mx_scales_stay_in_range_at_the_ends_of_float32(fmt):
    largest = torch.finfo(torch.float32).max
    q = quantize(torch.tensor([[2.0**-149], [2.0**-126], [largest], [-math.inf]]), fmt, scale=None)
    assert q.block_scales[:2].flatten().tolist() == [0, 0]
    assert q.block_scales[2] == q.block_scales[3] > 127
    assert q.codes[3] == q.codes[2] + fmt.element.sign_bit or fmt.scale_rounding == "ceil"


@pytest.mark.parametrize("fmt", [NVFP4, NVFP4_KV], ids=lambda fmt: fmt.name)
def test_an_nvfp4_block_whose_scale_rounds_to_zero_has_zero_codes(fmt):
    scale = fmt.scale(1.0)
    x = torch.cat([torch.ones(16), torch.full((16,), -6 * scale * 2.0**-10)])
    q = quantize(x, fmt, scale=scale)
    assert q.block_scales[1] == 0
    assert not q.codes[16:].any()
    assert not dequantize(q, fmt, torch.float32)[16:].any()


def test_nvfp4_values_above_amax_saturate_in_block_scale_and_element():
    scale = NVFP4.scale(1.0)
    out = quantize_dequantize(torch.tensor([5.0, -math.inf]), NVFP4, scale=scale)
    assert torch.equal(out, torch.tensor([2688.0, -2688.0]) * scale)


@PLAIN
@given(x=vectors, amax=st.floats(2.0**-10, 2.0**10, width=32))
@settings(deadline=None, max_examples=40)
def test_plain_quantization_is_idempotent_monotone_and_within_half_a_step(fmt, x, amax):
    x, scale = x.sort().values, fmt.scale(amax)
    out = quantize_dequantize(x, fmt, scale=scale)
    assert torch.equal(quantize_dequantize(out, fmt, scale=scale), out)
    assert (out.diff() >= 0).all()
    grid = np.array([fmt.element.decode(code) for code in range(1 << fmt.code_bits)])
    if fmt.element == INT8_CODE:
        grid = np.arange(-127.0, 128.0)
    grid = np.unique(grid[np.isfinite(grid)])
    scaled = (x.double() / scale).numpy().clip(grid[0], grid[-1])
    best = np.abs(scaled[:, None] - grid).min(1)
    error = np.abs(out.double().numpy() / scale - scaled)
    assert (error <= best + np.abs(scaled) * 2.0**-22).all()


@pytest.mark.parametrize("fmt", MX, ids=lambda fmt: fmt.name)
@given(x=vectors)
@settings(deadline=None, max_examples=30)
def test_mx_quantization_is_idempotent(fmt, x):
    out = quantize_dequantize(x, fmt, scale=None)
    assert torch.equal(quantize_dequantize(out, fmt, scale=None), out)


@pytest.mark.parametrize("fmt", [NVFP4, NVFP4_KV], ids=lambda fmt: fmt.name)
@given(x=hnp.arrays(np.float32, (3, 16), elements=st.floats(-1, 1, width=32)))
@settings(deadline=None, max_examples=30)
def test_nvfp4_is_idempotent_while_block_scales_are_normal(fmt, x):
    x = torch.from_numpy(x).clone()
    x[:, 0] = torch.tensor([1.0, -0.3, 0.07])
    once = quantize(x, fmt, scale=fmt.scale(1.0))
    twice = quantize(dequantize(once, fmt, torch.float32), fmt, scale=fmt.scale(1.0))
    assert torch.equal(once.codes, twice.codes)
    assert torch.equal(once.block_scales, twice.block_scales)


@ALL
def test_a_per_head_scale_equals_each_head_alone(fmt):
    if fmt.scale_divisor is None:
        scale = None
    else:
        scale = torch.tensor([fmt.scale(a) for a in (0.5, 3.0, 40.0)]).view(3, 1, 1)
    x = torch.randn(2, 3, 5, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    together = quantize_dequantize(x, fmt, scale=scale)
    for head in range(3):
        alone = None if scale is None else float(scale[head])
        assert torch.equal(together[:, head], quantize_dequantize(x[:, head], fmt, scale=alone))


@ALL
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_codes_and_results_have_the_shape_and_dtype_asked_for(fmt, dtype):
    x = torch.randn(2, 37, 3, dtype=torch.float32).to(dtype).transpose(1, 2)
    q = quantize(x, fmt, scale=scale_of(fmt, 3.0))
    assert q.codes.shape == x.shape
    assert torch.equal(q.codes, quantize(x.contiguous(), fmt, scale=scale_of(fmt, 3.0)).codes)
    if fmt.block_size is not None:
        assert q.block_scales.shape == (2, 3, math.ceil(37 / fmt.block_size))
    out = quantize_dequantize(x, fmt, scale=scale_of(fmt, 3.0))
    assert (out.shape, out.dtype) == (x.shape, dtype)


@ALL
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty_tensors_stay_empty(fmt, shape):
    out = quantize_dequantize(torch.empty(shape), fmt, scale=scale_of(fmt, 1.0))
    assert out.shape == shape


@pytest.mark.parametrize(
    ("fmt", "scale"),
    [
        (FP8_E4M3, None),
        (MXFP4, 1.0),
        (FP8_E4M3, 0.0),
        (FP8_E4M3, -1.0),
        (FP8_E4M3, math.nan),
        (FP8_E4M3, math.inf),
        (FP8_E4M3, torch.ones(3, 1, 1)),
        (FP8_E4M3, torch.ones(5)),
        (NVFP4, torch.ones(4)),
    ],
)
@pytest.mark.parametrize("parity", list(Parity))
def test_a_scale_that_does_not_fit_is_refused(fmt, scale, parity):
    parity = Parity.EXACT if fmt.block_size else parity
    with pytest.raises(FormatError) as error:
        quantize_dequantize(torch.ones(2, 4), fmt, scale=scale, parity=parity)
    assert error.value.code == "format.scale"


@ALL
@given(shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9), seed=st.integers(0))
@settings(deadline=None, max_examples=30)
def test_unpack_inverts_pack(fmt, shape, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << fmt.code_bits, shape, dtype=np.uint8)
    codes = torch.from_numpy(codes)
    codes = codes.view(torch.int8) if fmt is INT8 else codes
    packed = pack(codes, fmt)
    assert packed.dtype == torch.uint8
    assert packed.shape[:-1] == shape[:-1]
    assert packed.numel() * 8 >= codes.numel() * fmt.code_bits
    assert torch.equal(unpack(packed, fmt, shape[-1]), codes)


@pytest.mark.parametrize(
    ("fmt", "codes", "packed"),
    [
        (NVFP4, [1, 2, 0xF], [0x21, 0x0F]),
        (MXFP6_E2M3, [1, 2, 3, 4], [0x81, 0x30, 0x10]),
        (MXFP6_E2M3, [0x3F, 0, 0, 0, 0x3F], [0x3F, 0, 0, 0x3F, 0, 0]),
        (FP8_E4M3, [0, 0x7E, 0xFF], [0, 0x7E, 0xFF]),
    ],
)
def test_packed_bytes_hold_the_first_code_lowest(fmt, codes, packed):
    assert pack(torch.tensor(codes, dtype=torch.uint8), fmt).tolist() == packed


def test_packed_bytes_of_another_size_are_refused():
    with pytest.raises(FormatError) as error:
        unpack(torch.zeros(2, dtype=torch.uint8), NVFP4, 5)
    assert error.value.code == "format.packed_size"


@pytest.mark.parametrize("fmt", [FP8_E5M2, NVFP4, MXFP4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("parity", [Parity.MODELOPT, Parity.COMPRESSED_TENSORS])
def test_parity_is_refused_for_formats_the_other_library_lacks(fmt, parity):
    with pytest.raises(FormatError) as error:
        quantize_dequantize(torch.ones(4), fmt, scale=scale_of(fmt, 1.0), parity=parity)
    assert error.value.code == "format.parity"


def modelopt_twin(x, amax, bound, is_int):
    """ModelOpt's eager fake quantization in numpy; torch computes `448.0 / amax` by reciprocal."""
    amax, bound = np.float32(amax), np.float32(bound)
    if is_int and amax <= 2.0**-24:
        return np.zeros_like(x)
    amax = np.float32(1) if amax <= 2.0**-24 else amax
    scale = bound / amax if is_int else np.float32(1) / amax * bound
    with np.errstate(over="ignore"):
        scaled = x * scale
    if is_int:
        return np.rint(scaled.clip(-bound - 1, bound)) / scale
    codes = scaled.clip(-bound, bound).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32) * (np.float32(1) / scale)


@pytest.mark.parametrize(("fmt", "bound"), [(FP8_E4M3, 448), (INT8, 127)], ids=["fp8", "int8"])
@pytest.mark.parametrize("amax", [1.0, 1.7, 17.6, 448.0, 3.3, 2.0**-24, 2.0**-23])
def test_modelopt_parity_matches_its_formula_on_every_bfloat16(fmt, bound, amax):
    out = quantize_dequantize(
        NUMBERS, fmt, scale=fmt.scale(amax), parity=Parity.MODELOPT, amax=amax
    )
    expected = modelopt_twin(NUMBERS.float().numpy(), amax, bound, fmt is INT8)
    assert torch.equal(out, torch.from_numpy(expected).bfloat16())
    x = NUMBERS.float()  # float32 shows the last bit
    out = quantize_dequantize(x, fmt, scale=fmt.scale(amax), parity=Parity.MODELOPT, amax=amax)
    assert torch.equal(out, torch.from_numpy(expected))


def test_modelopt_parity_takes_amax_from_the_scale_if_none_is_given():
    x = torch.linspace(-3, 3, 1001)
    given_amax = quantize_dequantize(
        x, FP8_E4M3, scale=FP8_E4M3.scale(2.0), parity=Parity.MODELOPT, amax=2.0
    )
    derived = quantize_dequantize(x, FP8_E4M3, scale=FP8_E4M3.scale(2.0), parity=Parity.MODELOPT)
    assert torch.equal(given_amax, derived)


def test_modelopt_int8_uses_the_lowest_code_that_exact_never_writes():
    x = torch.tensor([-1.01])
    scale = INT8.scale(1.0)
    modelopt = quantize_dequantize(x, INT8, scale=scale, parity=Parity.MODELOPT)
    assert modelopt.item() == pytest.approx(-128 / 127)
    assert quantize_dequantize(x, INT8, scale=scale).item() == pytest.approx(-1)


@pytest.mark.client_transformers
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", SCALES)
@pytest.mark.parametrize("fmt", [FP8_E4M3, INT8], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_compressed_tensors_parity_is_its_fake_quantize_bit_for_bit(
    fmt, value, scale_dtype, strategy
):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    args = quantization.QuantizationArgs(
        num_bits=8, type="int" if fmt is INT8 else "float", strategy=strategy, symmetric=True
    )
    x = NUMBERS[: NUMBERS.numel() // 60 * 60].view(2, 3, -1, 10)  # [batch, heads, seq_len, dim]
    if strategy == "tensor":
        scale = torch.tensor([value]).to(scale_dtype)
    else:
        scale = torch.tensor([value, value * 1.37, value * 3]).view(3, 1, 1).to(scale_dtype)
    zero_point = torch.zeros_like(scale)
    expected = lifecycle.fake_quantize(x, scale, zero_point, args)
    without_zero_point = lifecycle.fake_quantize(x, scale, None, args)
    out = quantize_dequantize(x, fmt, scale=scale, parity=Parity.COMPRESSED_TENSORS)
    assert same_bits(out, without_zero_point)
    assert torch.equal(out, expected)


def test_compressed_tensors_parity_takes_a_scalar_as_a_scale_of_shape_one():
    parity = Parity.COMPRESSED_TENSORS
    expected = quantize_dequantize(NUMBERS, FP8_E4M3, scale=torch.tensor([1.7]), parity=parity)
    assert same_bits(quantize_dequantize(NUMBERS, FP8_E4M3, scale=1.7, parity=parity), expected)
    single = quantize_dequantize(NUMBERS[5], FP8_E4M3, scale=1.7, parity=parity)
    assert same_bits(single, expected[5])


def test_modelopt_fp8_multiplier_is_the_one_torch_computes_for_a_number_over_a_tensor():
    amax = torch.tensor(1.7)
    multiplier = 448.0 / amax
    x = torch.linspace(-2, 2, 10001)
    codes = (x * multiplier).clamp(-448, 448).to(torch.float8_e4m3fn)
    out = quantize_dequantize(
        x, FP8_E4M3, scale=FP8_E4M3.scale(1.7), parity=Parity.MODELOPT, amax=amax
    )
    assert torch.equal(out, codes.float() * (1 / multiplier))


def test_modelopt_differs_by_its_reciprocal_and_compressed_tensors_by_its_dtype():
    x = torch.linspace(-3, 3, 10001)
    scale = FP8_E4M3.scale(1.7)
    exact, modelopt, compressed = (
        quantize_dequantize(x, FP8_E4M3, scale=scale, parity=parity) for parity in Parity
    )
    assert not torch.equal(exact, modelopt)
    assert torch.equal(exact, compressed)
    scale = torch.tensor([scale]).bfloat16()
    exact, _, compressed = (
        quantize_dequantize(NUMBERS, FP8_E4M3, scale=scale, parity=parity) for parity in Parity
    )
    assert not torch.equal(exact, compressed)
