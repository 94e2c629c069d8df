"""The counts of magnitudes: sums of integers, a percentile within half a bin of the true one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq.calibration.amax import head_amax
from kvq.calibration.magnitudes import BINS, count_magnitudes, percentile_99_9, sampled

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
special = [0.0, -0.0, 1e-40, 3e38, float("inf"), float("-inf"), float("nan")]
shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 150), st.integers(1, 9))


def states_of(shape, seed, dtype=torch.float32):
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(shape) * 2.0 ** generator.integers(-20, 20, shape)
    return torch.from_numpy(values).to(dtype)


def the_percentile(values):
    return np.percentile(np.abs(values), 99.9, method="inverted_cdf")


@given(shapes, st.integers(0, 99), st.sampled_from(DTYPES), st.integers(0, 3))
def test_counts_of_parts_add_up_to_those_of_the_whole(shape, seed, dtype, cut):
    states = states_of(shape, seed, dtype)
    whole = count_magnitudes(states)
    assert whole.shape == (BINS,)
    parts = [states[:cut], states[cut:]]
    assert torch.equal(sum(count_magnitudes(part) for part in parts if len(part)), whole)
    assert torch.equal(count_magnitudes(-states.flip(0, 1, 3)), whole)
    length = len(range(shape[2])[sampled(shape[2])])
    assert int(whole.sum()) == shape[0] * shape[1] * shape[3] * length


@given(st.integers(1, 200_000))
def test_a_long_sequence_is_sampled_evenly_without_its_first_token(seq_len):
    positions = range(seq_len)[sampled(seq_len)]
    assert len(positions) == seq_len if seq_len < 64 else 32 <= len(positions) < 64
    assert (positions[0] == 0) is (seq_len < 64)
    assert seq_len - positions[-1] <= positions.step


@given(shapes, st.integers(0, 99), st.sampled_from(DTYPES))
def test_the_percentile_is_within_half_a_bin_of_numpys(shape, seed, dtype):
    states = states_of(shape, seed, dtype).clamp(-6e4, 6e4)
    expected = the_percentile(states[:, :, sampled(shape[2])].float().numpy())
    found = percentile_99_9(count_magnitudes(states).numpy())
    assert abs(found / expected - 1) < 1 / 31 if expected > 1e-37 else found < 1e-37


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 20_000])
def test_the_rank_is_rounded_up_as_numpy_does(count):
    values = np.arange(1, count + 1, dtype=np.float32) ** 3
    counts = count_magnitudes(torch.from_numpy(values).view(1, 1, 1, -1)).numpy()
    assert abs(percentile_99_9(counts) / the_percentile(values) - 1) < 1 / 31


def test_nothing_but_zeros_has_the_percentile_zero():
    assert percentile_99_9(count_magnitudes(torch.zeros(1, 2, 3, 4)).numpy()) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_are_counted_like_others(dtype):
    states = torch.tensor(special, dtype=dtype).view(1, 1, -1, 1)
    assert int(count_magnitudes(states).sum()) == len(special)


@given(
    st.lists(st.floats(width=16) | st.sampled_from(special), min_size=1, max_size=20),
    st.sampled_from(DTYPES),
)
def test_the_maximum_by_bits_is_the_maximum_by_value(values, dtype):
    states = torch.tensor(values, dtype=dtype).view(1, 1, -1, 1)
    expected = states.float().abs().amax((0, 2, 3))
    torch.testing.assert_close(head_amax(states), expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_not_finite_is_counted_alike_whatever_bits_a_device_gives_nan():
    bits = torch.tensor([0x7F800000, 0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7FA00000])
    bits = torch.cat([bits, bits + 0x80000000, torch.zeros(1, dtype=torch.int64)])
    counts = count_magnitudes(bits.to(torch.int32).view(torch.float32)[None, None, :, None])
    assert counts[0] == 1
    assert counts[0xFF0] == 10
    assert counts.sum() == 11
