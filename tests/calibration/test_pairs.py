"""Encoder-decoder data: what the encoder reads beside what the decoder is fed."""

import json

import pytest

from kvq.calibration.batches import Sequence, describe_plan, plan_batches
from kvq.calibration.data import DataOptions, load
from kvq.errors import InputError


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def options(path, **changes):
    return DataOptions(**{"dataset": path, "target_column": "labels", "seq_len": 8, **changes})


def read(choices, start=1):
    return load(choices, None, max_length=None, vocab_size=100, decoder_start=start)


def test_the_decoder_is_fed_its_start_token_and_all_but_the_last(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7], "labels": [8, 9, 2]}])
    (sequence,) = read(options(path)).sequences
    assert sequence.token_ids.tolist() == [5, 6, 7]
    assert sequence.decoder_ids.tolist() == [1, 8, 9]
    assert len(sequence) == 6


def test_long_sides_are_cut_and_empty_pairs_skipped(tmp_path):
    rows = [
        {"input_ids": list(range(20)), "labels": [3]},
        {"input_ids": [], "labels": [3]},
        {"input_ids": [4], "labels": []},
        {"input_ids": [4], "labels": list(range(20))},
    ]
    found = read(options(written(tmp_path / "a.jsonl", rows)))
    assert [s.lengths for s in found.sequences] == [(8, 1), (1, 8)]
    identity = found.identity
    assert (identity["rows_truncated"], identity["rows_skipped_empty"]) == (2, 2)
    assert identity["target_column"] == "labels"


def test_the_plan_groups_pairs_of_equal_lengths():
    pairs = [Sequence([1, 2], [3]), Sequence([1], [2, 3]), Sequence([4, 5], [6]), Sequence([7, 8])]
    plan = plan_batches(pairs, 4)
    assert sorted(map(sorted, plan)) == [[0, 2], [1], [3]]
    assert describe_plan(pairs, 4)["lengths"] == {"2+1": 2, "2": 1, "1+2": 1}
    assert len({pair.digest for pair in [*pairs, Sequence([1, 2, 3])]}) == 5


@pytest.mark.parametrize(
    ("changes", "start", "code"),
    [
        ({"target_column": None}, 1, "data.no_target"),
        ({"target_column": "answer"}, 1, "data.no_column"),
        ({}, None, "data.target"),
    ],
)
def test_a_missing_or_superfluous_target_is_named(tmp_path, changes, start, code):
    path = written(tmp_path / "a.jsonl", [{"input_ids": [5], "labels": [8]}])
    with pytest.raises(InputError) as caught:
        read(options(path, **changes), start)
    assert caught.value.code == code


def test_token_ids_of_targets_are_checked(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"input_ids": [5], "labels": [100]}])
    with pytest.raises(InputError, match="`labels` of row 0 has the token id 100"):
        read(options(path))
