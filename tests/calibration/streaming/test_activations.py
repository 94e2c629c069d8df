import errno

import pytest
import torch

from kvq.calibration.streaming.activations import Activations, SharedStates
from kvq.errors import CheckpointError, InputError

SHAPES = [(1, 5, 4), (2, 3, 4)]


CPU = torch.device("cpu")


def make(folder, *, in_files, saved=None):
    return Activations(SHAPES, torch.bfloat16, CPU, folder, in_files=in_files, saved=saved)


def random_states():
    return [torch.randn(shape).to(torch.bfloat16) for shape in SHAPES]


def equal(made, states):
    return all(torch.equal(made.read(i), one) for i, one in enumerate(states))


@pytest.mark.parametrize("in_files", [False, True])
def test_what_a_layer_wrote_is_what_the_next_one_reads(tmp_path, in_files):
    made, states = make(tmp_path, in_files=in_files), random_states()
    for i, one in enumerate(states):
        made.write(i, one)
    for _ in range(3):
        for i, one in enumerate(states):
            assert torch.equal(made.read(i), one)
            states[i] = one * 2
            made.write(i, states[i])
    assert equal(made, states)
    assert bool(list(tmp_path.iterdir())) is in_files


@pytest.mark.parametrize("in_files", [False, True])
def test_writing_into_what_was_read_changes_nothing(tmp_path, in_files):
    made, states = make(tmp_path, in_files=in_files), random_states()
    made.write(0, states[0])
    made.read(0).zero_()
    assert torch.equal(made.read(0), states[0])


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("later", [0, 1, 2, 3, 5])
def test_what_was_saved_stays_whole_however_much_is_written_after_it(tmp_path, in_files, later):
    made, states = make(tmp_path, in_files=in_files), random_states()
    for _ in range(2):
        for i, one in enumerate(states):
            made.write(i, one)
        made.write(0, states[0] + 1)  # in the middle of a layer
        saved = made.prepare()
        made.commit()
    for number in range(later):
        made.write(number % 2, random_states()[number % 2])
    if later == 5:
        made.prepare()  # not committed: the process ends before its state is written
    again = make(tmp_path, in_files=in_files, saved=saved)
    assert equal(again, [states[0] + 1, states[1]])
    for i, one in enumerate(states):
        again.write(i, one)
    assert equal(again, states)
    assert equal(make(tmp_path, in_files=in_files, saved=saved), [states[0] + 1, states[1]])


@pytest.mark.parametrize(
    ("in_files", "change"),  # memory-mapped files have no checksum: it would be one of all of them
    [(False, "cut"), (False, "gone"), (False, "other"), (True, "cut"), (True, "gone")],
)
def test_damaged_files_are_refused(tmp_path, in_files, change):
    made, states = make(tmp_path, in_files=in_files), random_states()
    for i, one in enumerate(states):
        made.write(i, one)
    saved = made.prepare()
    made.commit()
    path = tmp_path / "activations-0.bin"
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif change == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"`.*activations-0.bin` is not whole"):
        make(tmp_path, in_files=in_files, saved=saved)


def test_files_that_do_not_fit_on_the_disk_are_refused_at_once(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(InputError, match="two files of 88 bytes for hidden states do not fit"):
        make(tmp_path, in_files=True)


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
