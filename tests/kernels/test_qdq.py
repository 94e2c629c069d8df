import math

import pytest
import torch

from kvq.errors import FormatError, InputError
from kvq.formats import FP8_E4M3, FP8_E5M2, INT8, MXFP4, MXFP8, NVFP4, NVFP4_KV
from kvq.kernels import reference

pytestmark = pytest.mark.gpu
FORMATS = (FP8_E4M3, INT8, NVFP4, NVFP4_KV, MXFP8, MXFP4)
ALL = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
SIZES = {2: torch.int16, 4: torch.int32}


def same_bits(actual, expected):
    size = SIZES[actual.element_size()]
    return torch.equal(actual.cpu().view(size), expected.cpu().view(size))


def check(x, fmt, scale, out=None):
    from kvq.kernels.qdq import quantize_dequantize

    if fmt.scale_divisor is None:
        scale = None
    if out is None:
        out = torch.full_like(x, math.nan)
    result = quantize_dequantize(x.cuda(), fmt, scale=scale, out=out)
    assert result is out
    cpu_scale = scale.cpu() if isinstance(scale, torch.Tensor) else scale
    expected = reference.quantize_dequantize(x.cpu(), fmt, scale=cpu_scale)
    assert same_bits(out, expected)


@ALL
@DTYPES
def test_every_value_of_the_dtype_at_several_scales(fmt, dtype):
    if dtype == torch.float32:
        x = torch.randint(-(2**31), 2**31, (1 << 18,), dtype=torch.int64).to(torch.int32)
    else:
        x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        x = x[torch.randperm(len(x))]
    x = x.view(dtype)
    x = x[~x.isnan()]
    x = x[: len(x) // 64 * 64].view(-1, 64).cuda()
    for scale in (1.0, 0.0123, 2.0**-9, 7.5312, 2.0**-126, 2.0**100):
        check(x, fmt, scale)


@pytest.mark.parametrize("fmt", [FP8_E4M3, INT8, NVFP4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_that_put_quotients_next_to_where_rounding_changes(fmt, dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite() & (x.abs() < 1e6)]
    powers = (2.0 ** torch.arange(-14, 15)).to(dtype).repeat(64)
    x = torch.cat((x[torch.randperm(len(x))], powers))
    x = x[: len(x) // 64 * 64].view(-1, 64).cuda()
    # a unit or two beside a number of few bits
    few = torch.arange(8, 16, dtype=torch.float32).repeat_interleave(6)
    units = torch.tensor([-2, -1, 0, 1, 2, 3], dtype=torch.int32).repeat(8)
    for scale in (few.view(torch.int32) + units).view(torch.float32).tolist():
        check(x, fmt, scale / 32)


@ALL
@DTYPES
def test_random_values_near_midpoints(fmt, dtype):
    x = torch.randn(333, 5, 96, device="cuda") * torch.rand(333, 5, 1, device="cuda").exp2()
    for amax in torch.rand(4).mul(8).add(0.1).tolist():
        scale = torch.tensor(amax / 448.0, device="cuda")
        check(x.to(dtype), fmt, scale)
        if fmt.element.bits == 4 and fmt.scale_divisor:
            continue
        halves = (torch.randint(-40, 40, (64, 64), device="cuda") / 2).float() * scale
        check(halves.to(dtype), fmt, scale)


@ALL
@pytest.mark.parametrize(
    "shape", [(1,), (7,), (16,), (33,), (3, 1, 80), (2, 3, 5, 7, 11), (4099,), (1, 1), (0, 64)],
    ids=str,
)  # fmt: skip
def test_any_shape(fmt, shape):
    check(torch.randn(shape, device="cuda"), fmt, 0.013)


def test_a_single_number():
    check(torch.tensor(1.7, device="cuda"), FP8_E4M3, 0.013)


@ALL
def test_any_strides_and_in_place(fmt):
    base = torch.randn(6, 10, 4, 128, device="cuda", dtype=torch.bfloat16)
    scale = torch.rand(4, 1, 1, device="cuda") + 0.01
    for view in (base[::2, 3:, :, :96], base.transpose(0, 3)[:, ::3], base[..., ::2],
                 base[:, :1].expand(6, 10, 4, 128)):  # fmt: skip
        check(view, fmt, 0.01)
    per_head = base.transpose(1, 2)
    check(per_head, fmt, scale)
    check(per_head, fmt, scale, out=torch.full_like(base, math.nan).transpose(1, 2))
    copy = base.clone()
    from kvq.kernels.qdq import quantize_dequantize

    number = None if fmt.scale_divisor is None else 0.01
    quantize_dequantize(copy, fmt, scale=number, out=copy)
    assert same_bits(copy, reference.quantize_dequantize(base.cpu(), fmt, scale=number))


@pytest.mark.parametrize("fmt", [FP8_E4M3, INT8], ids=lambda fmt: fmt.name)
def test_a_scale_for_each_channel(fmt):
    check(torch.randn(50, 3, 40, device="cuda"), fmt, torch.rand(40, device="cuda") + 0.01)


@ALL
def test_nan_stays_visible(fmt):
    from kvq.kernels.qdq import quantize_dequantize

    x = torch.randn(4, 64, device="cuda")
    x[1, 37] = math.nan
    out = quantize_dequantize(x, fmt, scale=None if fmt.scale_divisor is None else 0.1)
    block = slice(37, 38)
    if fmt.element.bits == 4:
        block = slice(32, 48) if fmt.block_size == 16 else slice(32, 64)
    expected = torch.zeros_like(x, dtype=torch.bool)
    expected[1, block] = True
    assert torch.equal(out.isnan(), expected)


def test_more_elements_than_int32():
    from kvq.kernels.qdq import quantize_dequantize

    x = torch.zeros(2**31 + 4096, device="cuda", dtype=torch.bfloat16)
    x[-64:] = torch.randn(64, device="cuda").bfloat16()
    quantize_dequantize(x, NVFP4, scale=0.01, out=x)
    assert same_bits(x[-64:], reference.quantize_dequantize(x[-64:].cpu(), NVFP4, scale=0.01))


def test_wrong_arguments_are_named():
    from kvq.kernels.qdq import quantize_dequantize

    x = torch.zeros(4, 32, device="cuda")
    scales = torch.ones(4, 1, device="cuda")
    for arguments, code in (
        ((x, FP8_E5M2, 1.0), "kernel.format"),
        ((x, FP8_E4M3, None), "format.scale"),
        ((x, MXFP8, 1.0), "format.scale"),
        ((x, FP8_E4M3, 0.0), "format.scale"),
        ((x, FP8_E4M3, scales.repeat(2, 1)), "format.scale"),
        ((x, NVFP4, torch.ones(32, device="cuda")), "format.scale"),
        ((x, FP8_E4M3, scales.double()), "format.scale"),
        ((x.cpu(), FP8_E4M3, 1.0), "kernel.device"),
        ((x.double(), FP8_E4M3, 1.0), "kernel.dtype"),
    ):
        with pytest.raises((FormatError, InputError)) as error:
            quantize_dequantize(arguments[0], arguments[1], scale=arguments[2])
        assert error.value.code == code
