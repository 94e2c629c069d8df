import pytest
import torch

from kvq.calibration.streaming.activations import Activations, SharedStates

SHAPES = [(1, 5, 4), (2, 3, 4)]


@pytest.mark.parametrize("in_files", [False, True])
def test_what_a_layer_wrote_is_what_the_next_one_reads(tmp_path, in_files):
    made = Activations(SHAPES, torch.bfloat16, torch.device("cpu"), tmp_path if in_files else None)
    states = [torch.randn(shape).to(torch.bfloat16) for shape in SHAPES]
    for i, one in enumerate(states):
        made.write(i, one)
    for _ in range(3):
        made.begin_layer()
        for i, one in enumerate(states):
            assert torch.equal(made.read(i), one)
            states[i] = one * 2
            made.write(i, states[i])
        made.end_layer()
    assert all(torch.equal(made.read(i), one) for i, one in enumerate(states))
    assert bool(list(tmp_path.iterdir())) is in_files


def test_writing_into_what_was_read_changes_nothing(tmp_path):
    for folder in (None, tmp_path):
        made = Activations(SHAPES, torch.float32, torch.device("cpu"), folder)
        made.write(0, torch.ones(SHAPES[0]))
        made.read(0).zero_()
        assert made.read(0).min() == 1


def test_a_saved_file_stays_whole_while_layers_write(tmp_path):
    made = Activations(SHAPES, torch.float32, torch.device("cpu"), tmp_path)
    for i, shape in enumerate(SHAPES):
        made.write(i, torch.full(shape, 1.0))
    made.saved = made.before
    before = made.paths[made.saved].read_bytes()
    for value in (2.0, 3.0):
        made.begin_layer()
        for i, shape in enumerate(SHAPES):
            made.write(i, torch.full(shape, value))
        made.end_layer()
        assert made.paths[made.saved].read_bytes() == before
        assert made.read(1).min() == value


@pytest.mark.parametrize("room", [1 << 20, 0])
def test_shared_states_keep_values_and_strides_in_memory_and_in_files(tmp_path, room):
    made = SharedStates(room, tmp_path / "work")
    assert made.empty
    states = torch.randn(1, 5, 3, 8).transpose(1, 2)
    made.of(0)[0] = {"full": (states, [states + 1])}
    made.keep(0)
    key, (value,) = made.of(0)[0]["full"]
    assert torch.equal(key, states)
    assert torch.equal(value, states + 1)
    assert key.stride() == states.stride()
    assert not made.empty
    assert (tmp_path / "work").exists() is (room == 0)
    made.keep(0)
    assert made.of(0)[0]["full"][0] is key
    assert not list(tmp_path.rglob("*.bin"))
