from hypothesis import given
from hypothesis import strategies as st

from kvq.kernels.splits import choose_splits

sizes = st.integers(1, 5000)


@given(sizes, sizes, st.integers(1, 1000))
def test_every_split_has_a_tile(programs, tiles, slots):
    splits = choose_splits(programs, tiles, slots)
    per_split = -(-tiles // splits)
    assert 1 <= splits <= min(tiles, 128)
    assert (splits - 1) * per_split < tiles


@given(sizes, st.integers(1, 1000))
def test_a_full_device_is_not_split_further(tiles, slots):
    assert choose_splits(slots, tiles, slots) == 1


def test_one_long_request_fills_the_device():
    assert 100 <= 8 * choose_splits(8, 256, 132) <= 132


def test_an_empty_table_is_one_split():
    assert choose_splits(4, 0, 132) == 1
