import pytest
import torch

from kvq.calibration import memory
from kvq.checkpoint import open_checkpoint
from tests import bases


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


@pytest.mark.parametrize(("dtype", "width"), [("auto", 2), ("float32", 4), ("bfloat16", 2)])
def test_packed_weights_are_counted_as_they_are_unpacked(checkpoints, tmp_path, dtype, width):
    dense = open_checkpoint(checkpoints("llama", **bases.SIZES))
    base = bases.write(bases.COMPRESSED["ct-w4a16"], dense.root, tmp_path / "base")
    view = open_checkpoint(base)
    unpacked = width * sum(info.numel for info in dense.tensors.values())
    assert unpacked <= memory.weight_bytes(view, dtype) < 1.05 * unpacked  # and their scales


def test_each_group_has_bits_of_its_own():
    def group(bits, *targets):
        return {"weights": {"num_bits": bits}, "targets": list(targets)}

    groups = [group(8, "re:.*self_attn.*"), group(4, "Linear"), group(2, "lm_head"),
              group(1, "re:(", 7)]  # fmt: skip
    assert memory._packed_bits(groups[:2], "layers.0.self_attn.q_proj") == 8
    assert memory._packed_bits(groups[:2], "layers.0.mlp.up_proj") == 4
    assert memory._packed_bits(groups, "lm_head") == 2
    assert memory._packed_bits([], "lm_head") == 16
