"""What is simulated, against a second implementation in NumPy: ModelOpt's formulas, written out."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from kvq.errors import FormatError, InputError
from kvq.kernels import reference
from kvq.kernels.pages import PageLayout
from kvq.kernels.simulation import Simulation
from tests.kernels.cases import LAYOUTS, Case

THRESHOLDS = [
    (0.25, 0.0),
    (0.75, 0.5),
    (1.25, 1.0),
    (1.75, 1.5),
    (2.5, 2.0),
    (3.5, 3.0),
    (5.0, 4.0),
]
TIES_DOWN = (0.25, 1.25, 2.5, 5.0)


def e4m3(x):
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def fp8(x, amax):
    scale = np.float32(amax) / np.float32(448)
    return e4m3(x / scale) * scale


def e2m1(u):
    result = np.full_like(u, 6.0)
    for threshold, value in reversed(THRESHOLDS):
        below = u <= threshold if threshold in TIES_DOWN else u < threshold
        result = np.where(below, np.float32(value), result)
    return result


def nvfp4(x, amax):
    """Blocks of 16 along the last axis, a ragged one padded with zeros."""
    scale = np.float32(1) if amax is None else np.float32(amax) / np.float32(6 * 448)
    size = x.shape[-1]
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % 16)])
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    block_scale = e4m3(np.abs(blocks).max(-1, keepdims=True) / np.float32(6) / scale) * scale
    with np.errstate(divide="ignore", invalid="ignore"):
        units = np.where(block_scale == 0, np.float32(0), np.abs(blocks) / block_scale)
    y = np.sign(blocks) * e2m1(units) * block_scale
    return y.reshape(x.shape)[..., :size]


def attention(case, request, simulate, *, window=None, sinks=None):
    """One request's output `[num_heads, head_dim]`."""
    seq_len = int(case.seq_lens[request])
    k, v = reference.gather_kv(
        case.k_cache, case.v_cache, case.table[request], seq_len, layout=case.layout
    )
    group = case.q.shape[1] // case.layout.num_kv_heads
    k, v = (np.repeat(x.numpy(), group, axis=1) for x in (k, v))
    q = case.q[request].float().numpy().astype(np.float64)
    logits = np.einsum("hd,thd->ht", q, k) / math.sqrt(case.layout.head_dim)
    first = 0 if window is None else max(seq_len - window, 0)
    logits[:, :first] = -np.inf
    v[:first] = 0
    p = np.exp2((logits - logits.max(1, keepdims=True)) / math.log(2)).astype(np.float32)
    total = p.astype(np.float64).sum(1)
    if sinks is not None:
        total += np.exp(sinks.double().numpy() - logits.max(1))
    dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[case.layout.format]
    p = p.astype(dtype).astype(np.float32)
    if simulate.p is not None:
        rounded = {"fp8_e4m3": fp8, "nvfp4": nvfp4}[simulate.p]
        p = rounded(p, 1.0 if simulate.p_amax is None else simulate.p_amax)
    if simulate.v is not None:
        v = nvfp4(v.transpose(1, 2, 0), simulate.v_amax).transpose(2, 0, 1)
    return np.einsum("ht,thd->hd", p.astype(np.float64), v.astype(np.float64)) / total[:, None]


SIMULATIONS = [
    Simulation(p="fp8_e4m3"),
    Simulation(p="fp8_e4m3", p_amax=0.3),  # saturates
    Simulation(p="nvfp4"),
    Simulation(p="nvfp4", p_amax=0.02),  # saturates in the block scale and in the element
    Simulation(v="nvfp4"),
    Simulation(v="nvfp4", v_amax=4.5),
    Simulation(p="fp8_e4m3", v="nvfp4", v_amax=1.0),  # V saturates
    Simulation(p="nvfp4", v="nvfp4", v_amax=4.5),
]


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("simulate", SIMULATIONS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 21, 64], ids=str)
def test_the_twin_rounds_as_the_formulas_say(name, simulate, window):
    case = Case(LAYOUTS[name], [1, 16, 37, 70], seed=5)
    sinks = torch.randn(case.q.shape[1], generator=torch.Generator().manual_seed(5))
    for options in ({}, {"sinks": sinks}):
        out = case.expected(simulate=simulate, window=window, **options).numpy()
        for request in range(4):
            expected = attention(case, request, simulate, window=window, **options)
            np.testing.assert_allclose(out[request], expected, rtol=1e-6, atol=1e-7)


def test_each_simulation_changes_the_result_by_its_own_error():
    case = Case(PageLayout("bfloat16", 16, 2, 64), [600, 900], seed=6)
    exact = case.expected()

    def error(simulate):
        return float((case.expected(simulate=simulate) - exact).norm() / exact.norm())

    assert 0.01 < error(Simulation(p="fp8_e4m3")) < 0.04
    assert 0.05 < error(Simulation(p="nvfp4")) < 0.2
    assert 0.05 < error(Simulation(v="nvfp4")) < 0.2
    assert error(Simulation(p="fp8_e4m3", p_amax=1e-3)) > 0.5  # all P saturate


@pytest.mark.parametrize(
    ("arguments", "error", "code"),
    [
        ({}, InputError, "kernel.simulation"),
        ({"p": "fp8"}, InputError, "kernel.simulation"),
        ({"v": "fp8_e4m3"}, InputError, "kernel.simulation"),
        ({"p": "nvfp4", "v_amax": 1.0}, InputError, "kernel.simulation"),
        ({"v": "nvfp4", "p_amax": 1.0}, InputError, "kernel.simulation"),
        ({"p": "nvfp4", "p_amax": 0.0}, FormatError, "format.amax_nonpositive"),
        ({"p": "fp8_e4m3", "p_amax": math.nan}, FormatError, "format.amax_nonfinite"),
        ({"v": "nvfp4", "v_amax": math.inf}, FormatError, "format.amax_nonfinite"),
    ],
    ids=str,
)
def test_a_simulation_that_cannot_be_is_refused(arguments, error, code):
    with pytest.raises(error) as raised:
        Simulation(**arguments)
    assert raised.value.code == code


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mla-bfloat16"])
def test_other_pages_are_not_simulated_over(name):
    with pytest.raises(InputError) as error:
        Case(LAYOUTS[name], [3]).expected(simulate=Simulation(p="nvfp4"))
    assert error.value.code == "kernel.simulation"
