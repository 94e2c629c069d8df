import pytest
import torch

from kvq.calibration import memory
from kvq.checkpoint import open_checkpoint


@pytest.mark.parametrize(
    ("limit", "expected"), [("1000000", 1_000_000 - 700_000 + 200_000), ("max", None)]
)
def test_a_control_group_counts_what_it_could_drop(tmp_path, limit, expected):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 200000\n")
    assert memory._available_of_group(tmp_path) == expected


def test_no_control_group_has_no_limit(tmp_path):
    assert memory._available_of_group(tmp_path / "absent") is None


def test_this_machine_has_some_memory_left():
    assert 1 << 20 < memory.available_bytes(torch.device("cpu")) < 1 << 50


@pytest.mark.parametrize(("dtype", "factor"), [("auto", 1), ("float32", 2), ("float16", 1)])
def test_weights_are_counted_in_the_dtype_they_are_loaded_in(checkpoints, dtype, factor):
    view = open_checkpoint(checkpoints("llama"))
    stored = sum(info.end - info.start for info in view.tensors.values())
    assert memory.weight_bytes(view, dtype) == factor * stored
