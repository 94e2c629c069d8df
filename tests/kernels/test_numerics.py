"""Kernel arithmetic where it could be a unit off: on the GPU, or under the interpreter."""

import numpy as np
import pytest
import torch

from kvq.formats import E4M3
from kvq.kernels import reference
from kvq.kernels.pages import PageLayout
from tests.kernels.cases import Case, poisoned
from tests.kernels.conftest import INTERPRETED

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
DEVICE = "cpu" if INTERPRETED else "cuda"
BLOCK = 1 << 12
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
SHORT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def run(kernel, *inputs, dtype=torch.float32):
    """Launch over one-dimensional inputs, padded with ones to whole blocks."""
    count = len(inputs[0])
    padded = [torch.nn.functional.pad(x, (0, -count % BLOCK), value=1.0).to(DEVICE) for x in inputs]
    out = torch.full((len(padded[0]),), -1, dtype=dtype, device=DEVICE)
    kernel[(len(out) // BLOCK,)](*padded, out, BLOCK)
    return out[:count].cpu()


def check_codes(x, divisor):
    """The code that limits tell is that of the float32 quotient, ties to even."""
    from tests.kernels.arithmetic import e2m1_codes

    quotient = (x.float() / divisor).abs().clamp(max=6.0).numpy()
    middles = (E2M1_VALUES[1:] + E2M1_VALUES[:-1]) / 2
    below, above = (np.searchsorted(middles, quotient, side) for side in ("left", "right"))
    expected = np.where(below % 2 == 0, below, above)
    actual = run(e2m1_codes, x, divisor, dtype=torch.int32).numpy()
    wrong = actual != (16 + 2) * 0x01010101 * expected
    assert not wrong.any(), (x[wrong][:4], divisor[wrong][:4], actual[wrong][:4])


def test_reciprocals_are_rounded_for_every_significand():
    from tests.kernels.arithmetic import reciprocals

    significands = torch.arange(1 << 23, dtype=torch.int32)
    if INTERPRETED:  # a sample, and the ends
        order = torch.randperm(1 << 23)[: 1 << 16].to(torch.int32)
        significands = torch.cat((significands[:64], significands[-64:], order))
    x = (significands + (127 << 23)).view(torch.float32)
    # no reciprocal of 24 bits is as near to halfway as float64 is precise
    assert torch.equal(run(reciprocals, x), (1.0 / x.double()).float())


@SHORT
def test_codes_next_to_where_they_change(dtype):
    bits = 7 if dtype == torch.bfloat16 else 10
    x = 1 + torch.arange(1 << bits).float() / (1 << bits)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    units = torch.arange(-3, 4, dtype=torch.int32)
    nearest = (x[:, None, None] / middles[:, None]).expand(-1, -1, 7).contiguous()
    divisor = (nearest.view(torch.int32) + units).view(torch.float32)
    x = x[:, None, None].expand_as(divisor)
    for power in (-87, -60, 0, 60, 88) if dtype == torch.bfloat16 else (0, 9):
        unit = 2.0**power
        check_codes((x * unit).to(dtype).flatten(), (divisor * unit).flatten())


@SHORT
def test_every_number_over_random_divisors(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[~x.isnan()]
    for power in (torch.randn(2 if INTERPRETED else 64) * 4).tolist():
        for divisor in (2.0**power, 2.0 ** round(power), 1.25 * 2.0 ** round(power)):
            check_codes(x, torch.full(x.shape, divisor).clamp(max=16 * E4M3.max))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("power", [-149, -126, -101, -81, -79, 0, 3, 5, 79, 81, 117])
def test_nvfp4_scales_up_to_the_ends_of_float32(power, dtype):
    from kvq.kernels.pack import append_kv

    layout = PageLayout("nvfp4", 16, 1, 64)
    case = Case(layout, [20], device=DEVICE, dtype=dtype)
    size = torch.int32 if dtype == torch.float32 else torch.int16
    limit = torch.iinfo(size)
    for x in (case.k, case.v):
        bits = torch.randint(limit.min, limit.max, x.shape, dtype=torch.int64).to(size)
        x.copy_(torch.nan_to_num(bits.view(dtype), nan=-0.0, posinf=torch.inf, neginf=-torch.inf))
    # blocks near the scale
    case.v[:15] *= 2.0**power / case.v[:15].abs().float().amax((1, 2), keepdim=True).to(dtype)
    case.v.nan_to_num_(nan=-0.0)
    caches, expected = (poisoned(layout, case.num_pages, DEVICE) for _ in range(2))
    for call, target in ((append_kv, caches), (reference.append_kv, expected)):
        call(case.k, case.v, *target, case.slots, layout=layout, k_scale=2.0**power,
             v_scale=1.7 * 2.0**power)  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True)), case.seed
