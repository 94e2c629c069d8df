import hashlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.calibration.batches import Sequence, describe_plan, pack, plan_batches
from kvq.errors import InputError

token_lists = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=20)
batch_sizes = st.integers(1, 7)


def digests(sequences: list[Sequence], batch_size: int) -> list[list[str]]:
    return [[sequences[i].digest for i in batch] for batch in plan_batches(sequences, batch_size)]


def test_digest_is_the_sha256_of_little_endian_int64():
    expected = hashlib.sha256(struct.pack("<3q", 1, 2, 300)).hexdigest()
    assert Sequence(np.array([1, 2, 300], dtype=np.int32)).digest == expected


def test_sequence_is_read_only_and_apart_from_its_source():
    source = np.array([1, 2, 3])
    sequence = Sequence(source)
    source[0] = 9
    assert sequence.token_ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        sequence.token_ids[0] = 5


@given(token_lists, batch_sizes)
def test_every_index_is_planned_once(lists, batch_size):
    plan = plan_batches([Sequence(np.array(ids)) for ids in lists], batch_size)
    assert sorted(i for batch in plan for i in batch) == list(range(len(lists)))


@given(token_lists, batch_sizes)
def test_batches_hold_equal_lengths_longest_first(lists, batch_size):
    plan = plan_batches([Sequence(np.array(ids)) for ids in lists], batch_size)
    lengths = [{len(lists[i]) for i in batch} for batch in plan]
    assert all(len(found) == 1 for found in lengths)
    assert [max(found) for found in lengths] == sorted(map(max, lengths), reverse=True)
    assert all(1 <= len(batch) <= batch_size for batch in plan)


@given(token_lists, batch_sizes)
def test_no_more_batches_than_the_lengths_need(lists, batch_size):
    plan = plan_batches([Sequence(np.array(ids)) for ids in lists], batch_size)
    counts = [sum(len(ids) == length for ids in lists) for length in range(1, 5)]
    assert len(plan) == sum(-(-count // batch_size) for count in counts)


@given(token_lists, batch_sizes, st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_the_input(lists, batch_size, random):
    sequences = [Sequence(np.array(ids)) for ids in lists]
    shuffled = random.sample(sequences, len(sequences))
    assert digests(shuffled, batch_size) == digests(sequences, batch_size)
    assert describe_plan(shuffled, batch_size) == describe_plan(sequences, batch_size)


def test_description_counts_lengths_and_is_json():
    sequences = [Sequence(np.array(ids)) for ids in ([1, 2], [3, 4], [5, 6], [7])]
    record = describe_plan(sequences, 2)
    assert json.loads(json.dumps(record)) == record
    assert record["batches"] == 3
    assert record["sequences"] == 4
    assert record["batch_size"] == 2
    assert record["lengths"] == {"2": 3, "1": 1}


def test_plan_digest_sees_batch_size_and_tokens():
    sequences = [Sequence(np.array(ids)) for ids in ([1, 2], [3, 4])]
    others = [Sequence(np.array(ids)) for ids in ([1, 2], [3, 5])]
    found = {
        describe_plan(given, size)["digest"] for given in (sequences, others) for size in (1, 2)
    }
    assert len(found) == 4


@pytest.mark.parametrize("batch_size", [0, -3])
def test_batch_size_below_one_is_refused(batch_size):
    with pytest.raises(InputError, match=f"is {batch_size}, expected at least 1") as refused:
        plan_batches([], batch_size)
    assert refused.value.code == "data.batch_size"


@given(token_lists, st.integers(1, 6))
def test_packing_is_the_joined_rows_cut(lists, seq_len):
    joined: list[int] = []
    for index, ids in enumerate(lists):
        joined += ids if index == 0 or lists[index - 1][-1] == 3 else [3, *ids]
    full = len(joined) // seq_len
    expected = [joined[i * seq_len : (i + 1) * seq_len] for i in range(full)]
    assert list(pack(lists, 3, seq_len)) == expected


def test_packing_asks_for_no_row_it_does_not_need():
    asked = []

    def rows():
        for row in range(10):
            asked.append(row)
            yield [1, 1, 1]

    packed = pack(rows(), 0, 4)
    next(packed)
    assert asked == [0, 1]
