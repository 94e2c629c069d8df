import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.kernels.pages import PageLayout
from kvq.kernels.splits import Room, Shares, choose_shares, choose_splits

sizes = st.integers(1, 5000)

# microseconds on an H200 (132 multiprocessors) by splits; head_dim 128, 8 KV heads, pages of 128
TIMES = {
    ("nvfp4", 1, 32, 32768): {16: 51.96, 32: 29.32, 43: 24.15, 54: 21.03, 64: 19.34, 86: 20.20,
                              128: 17.27},
    ("nvfp4", 1, 32, 8192): {16: 16.75, 24: 13.23, 32: 11.22, 43: 10.21, 64: 9.19},
    ("nvfp4", 1, 32, 2048): {8: 10.43, 16: 7.85, 32: 6.57, 64: 6.27},
    ("nvfp4", 2, 32, 32768): {16: 53.33, 32: 32.58, 48: 32.38, 64: 27.64, 128: 35.06},
    ("nvfp4", 2, 64, 4096): {8: 16.15, 16: 11.08, 24: 9.90, 32: 9.07, 64: 9.88},
    ("nvfp4", 4, 32, 1024): {8: 8.03, 12: 7.66, 16: 7.26, 24: 7.80, 32: 7.29},
    ("nvfp4", 8, 32, 2048): {4: 16.98, 8: 12.10, 12: 13.00, 16: 11.68, 24: 13.43, 32: 15.49},
    ("nvfp4", 8, 32, 32768): {8: 105.95, 12: 103.60, 16: 84.91, 24: 85.47, 32: 103.82, 64: 96.62},
    ("nvfp4", 8, 64, 32768): {8: 105.26, 12: 108.08, 16: 87.79, 24: 87.74, 32: 101.13, 64: 99.17},
    ("nvfp4", 32, 32, 8192): {2: 106.27, 3: 102.99, 4: 84.80, 6: 84.29, 8: 109.09, 12: 89.73},
    ("nvfp4", 64, 32, 1024): {1: 31.12, 2: 28.16, 3: 28.65, 4: 34.94, 8: 34.84},
    ("fp8_e4m3", 1, 32, 32768): {8: 33.29, 16: 24.38, 24: 24.25, 32: 23.81, 48: 27.62, 64: 26.62},
    ("fp8_e4m3", 1, 32, 2048): {4: 7.98, 8: 6.48, 12: 6.75, 16: 6.25},
    ("fp8_e4m3", 2, 64, 4096): {4: 12.15, 8: 10.33, 12: 10.60, 16: 10.71, 32: 12.79},
    ("fp8_e4m3", 8, 32, 2048): {1: 17.90, 2: 14.55, 4: 14.30, 8: 17.10, 16: 19.00},
    ("fp8_e4m3", 8, 64, 32768): {1: 216.86, 2: 137.36, 4: 129.39, 5: 156.30, 8: 133.01},
    ("fp8_e4m3", 32, 32, 8192): {1: 127.49, 2: 131.55, 4: 134.24, 8: 138.05},
    ("bfloat16", 1, 32, 32768): {8: 62.91, 16: 44.42, 32: 44.37, 48: 48.19, 64: 46.64},
    ("bfloat16", 1, 32, 2048): {4: 13.43, 8: 10.85, 16: 9.82, 32: 10.20},
    ("bfloat16", 4, 32, 1024): {2: 14.22, 4: 12.21, 8: 12.14, 12: 13.41, 16: 15.07},
    ("bfloat16", 8, 32, 32768): {2: 256.18, 3: 250.30, 4: 245.59, 5: 300.13, 8: 248.91},
    ("bfloat16", 64, 32, 1024): {1: 73.28, 2: 77.81, 4: 80.43},
}  # fmt: skip


@pytest.mark.parametrize("shape", TIMES, ids=lambda x: "-".join(map(str, x)))
def test_the_choice_takes_at_most_a_tenth_longer_than_the_best(shape):
    pytest.importorskip("triton")
    from kvq.kernels.plans import plan

    name, batch, heads, tokens = shape
    chosen = plan(PageLayout(name, 128, 8, 128), heads // 8, "default")
    splits = choose_splits(batch * 8, tokens // chosen.tile, chosen.room(132))
    assert TIMES[shape][splits] <= 1.1 * min(TIMES[shape].values())


@given(sizes, sizes, st.integers(1, 150), st.integers(1, 12), st.sampled_from([1, 4, 8]))
def test_every_split_has_a_tile(programs, tiles, multiprocessors, per_sm, warps):
    splits = choose_splits(programs, tiles, Room(multiprocessors, per_sm, warps))
    per_split = -(-tiles // splits)
    assert 1 <= splits <= min(tiles, 128)
    assert (splits - 1) * per_split < tiles


@given(sizes, st.integers(1, 1000))
def test_a_full_device_is_not_split_further(tiles, multiprocessors):
    assert choose_splits(multiprocessors, tiles, Room(multiprocessors)) == 1


def test_one_long_request_fills_the_device():
    assert 100 <= 8 * choose_splits(8, 256, Room(132)) <= 132


@given(st.integers(1, 5000), st.integers(1, 64), sizes, st.integers(1, 12), st.sampled_from([1, 4]))
def test_shares_are_splits_of_equal_requests_or_fill_the_device(requests, programs, tiles, per_sm,
                                                                warps):  # fmt: skip
    room = Room(132, per_sm, warps)
    splits = choose_splits(requests * programs, tiles, room)
    shares = choose_shares(requests, programs, tiles, room)
    if requests == 1 or requests > 4096:
        assert shares == Shares(splits, balanced=False)
    else:
        assert shares.balanced
        assert shares.number in (requests * splits, max(132 * per_sm // programs, 1))


def test_a_line_has_no_more_shares_than_a_grid_or_their_arithmetic_holds():
    room = Room(188, 12, 1, 1.2)
    assert 3303 * choose_splits(3303 * 13, 1 << 16, room) > 65535
    assert choose_shares(3303, 13, 1 << 16, room).number <= 65535


def test_few_long_requests_fill_the_device_and_many_short_ones_stay_whole():
    room = Room(132, 12, 1, 1.2)
    assert choose_shares(32, 8, 256, room).number == 12 * 132 // 8
    assert choose_shares(128, 8, 16, room).number == 128


def test_an_empty_table_is_one_split():
    assert choose_splits(4, 0, Room(132)) == 1
