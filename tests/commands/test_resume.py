"""kvq calibrate --resume: whatever ends a run, going on gives the bytes of one that never ended."""

import json
import os
import random
import shutil
import signal
import time

import numpy as np
import pytest
import torch

from tests.forks import Forks

pytestmark = pytest.mark.slow

MODES = {
    "memory": [],
    "streaming": ["--streaming"],
    "files": ["--streaming", "--memory-budget", "1"],
}


KILLS = 4  # of each mode
ON_CUDA = ["--device", "cuda", "--batch-size", "8"]
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_rows(path, count, seed=0):
    generator = np.random.default_rng(seed)
    rows = [{"input_ids": generator.integers(0, 128, 12 + i % 3).tolist()} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module", autouse=True)
def one_core():
    """On a busy machine two threads wait for each other at each of the many tiny products."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def command(checkpoints, tmp_path):
    """Arguments of a run of many small batches into `tmp_path / name`."""
    rows = write_rows(tmp_path / "rows.jsonl", 100)
    model = checkpoints("llama", num_hidden_layers=4)

    def call(name, *options):
        return ["calibrate", model, "--dataset", rows, "--seq-len", 64, "-o", tmp_path / name,
                *options]  # fmt: skip

    return call


@pytest.fixture(scope="module")
def forks(tmp_path_factory, one_core):
    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


@pytest.mark.parametrize("device", [[], pytest.param(ON_CUDA, marks=GPU, id="cuda")])
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_random_moments_and_resumed_the_bytes_are_the_same(
    forks, command, tmp_path, mode, device
):
    forks.start(*command("whole", *device))
    code, output = forks.wait()
    assert code == 0, output
    moments, kills, resumed = random.Random(mode), 0, 0
    while kills < KILLS or not (tmp_path / "killed").exists():
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        pid = forks.start(*command("killed", "--resume", *MODES[mode], *device))
        if kills < KILLS:  # at a random moment after a random line of progress
            lines, end = moments.randrange(8), time.monotonic() + 60
            while forks.seen("calibrating ") < lines and time.monotonic() < end:
                time.sleep(0.002)
                if forks.seen("wrote "):
                    break
            time.sleep(moments.uniform(0, 0.05))
            os.kill(pid, signal.SIGKILL)
        code, output = forks.wait()
        resumed += "Resumed after" in output
        if code == 0:
            assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
        else:
            assert code == -signal.SIGKILL, output
            kills += 1
    assert resumed
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_says_how_to_continue_and_exits_130(forks, command, tmp_path, mode, number):
    forks.start(*command("whole"))
    assert forks.wait()[0] == 0
    pid = forks.start(*command("stopped", *MODES[mode]))
    while not forks.seen("calibrating"):
        time.sleep(0.002)
    os.kill(pid, number)
    code, output = forks.wait()
    assert code == 130, output
    assert f"{number.name}: stopping after this batch." in output
    assert f"{number.name}: stopped; the same command with --resume goes on." in output
    assert not (tmp_path / "stopped").exists()
    forks.start(*command("stopped", "--resume", *MODES[mode]))
    code, output = forks.wait()
    assert code == 0, output
    assert "Resumed after" in output
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


@pytest.fixture
def interrupted(kvq, command, monkeypatch):
    """Run a command line in this process until a number of batches is done and saved."""
    from kvq.calibration.saving import Saver

    def call(*options, batches=7, name="c"):
        before = Saver.after_batch
        left = batches

        def stopping(self, *args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
            before(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Saver, "after_batch", stopping)
            result = kvq(*command(name, *options))
        assert result.code == 130, result.err
        return result

    return call


def state_path(tmp_path, name="c"):
    return tmp_path / f".{name}.kvq-progress" / "progress.json"


@pytest.mark.parametrize("batches", [1, 100, 101, 250, 301, 499])
@pytest.mark.parametrize("mode", ["streaming", "files"])
def test_a_streamed_run_goes_on_from_any_batch(kvq, command, interrupted, tmp_path, mode, batches):
    assert kvq(*command("whole")).code == 0
    interrupted(*MODES[mode], batches=batches)
    result = kvq(*command("c", "--resume"))  # the mode is the state's
    assert result.code == 0, result.err
    assert ("Resumed after" in result.err) is (batches > 100)  # before, it only embeds
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


def test_a_run_interrupted_again_and_again_gives_the_same_bytes(
    kvq, command, interrupted, tmp_path
):
    assert kvq(*command("whole")).code == 0
    for mode in MODES.values():
        interrupted(*mode, batches=150 if mode else 20)
        for _ in range(3):
            interrupted(*mode, "--resume", batches=180 if mode else 20)
        assert kvq(*command("c", "--resume")).code == 0
        assert contents(tmp_path / "c") == contents(tmp_path / "whole")
        shutil.rmtree(tmp_path / "c")


@pytest.mark.parametrize("batches", [1, 24, 25, 26, -1, 0])
def test_a_run_that_ends_early_does_so_at_the_same_batch_when_resumed(
    kvq, command, interrupted, tmp_path, batches
):
    """It may end after 25, 31 and so on; -1 and 0 count from the batch after which it does."""
    different = [np.random.default_rng(i).integers(0, 128, 40 - i).tolist() for i in range(18)]
    rows = [{"input_ids": ids} for ids in different + [different[-1][:7]] * 82]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert kvq(*command("whole", "--stop-when-stable")).code == 0
    end = json.loads((tmp_path / "whole" / "config.json").read_text())["run"]["ended_after"]
    assert 25 < end < 100
    batches = batches % end or end
    interrupted("--stop-when-stable", batches=batches)
    result = kvq(*command("c", "--stop-when-stable", "--resume"))
    assert result.code == 0, result.err
    assert f"Resumed after {batches} batches." in result.err
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


def test_progress_that_nobody_mentions_is_not_lost(kvq, command, interrupted, tmp_path):
    interrupted()
    result = kvq(*command("c", "--json"))
    assert (result.code, result.json["error"]["code"]) == (2, "progress.exists")
    assert "--resume" in result.json["error"]["hint"]
    assert state_path(tmp_path).exists()
    result = kvq(*command("c", "--overwrite"))
    assert result.code == 0
    assert "The progress of an unfinished calibration is discarded." in result.err
    assert not state_path(tmp_path).parent.exists()


def test_nothing_to_resume_is_said_and_done_from_the_beginning(kvq, command, tmp_path):
    result = kvq(*command("c", "--resume"))
    assert result.code == 0
    assert "There is no progress to resume" in result.err


@pytest.mark.parametrize("mode", ["memory", "streaming"])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--kv-cfg", "FP8_ATTN_CFG"], "`options.--kv-cfg` was 'FP8_KV_CFG' and is"),
        (["--dtype", "float32"], "`options.--dtype` was 'auto' and is 'float32'"),
        (["--batch-size", "4"], "`plan.batch_size` was 1 and is 4"),
        (["--num-samples", "90"], "`data."),
        (["--margin", "1.5"], "`options.--margin` was 1.0 and is 1.5"),
        (["--stop-when-stable"], "`options.--stop-when-stable` was False and is True"),
    ],
)
def test_progress_under_other_options_is_refused_by_name(
    kvq, command, interrupted, tmp_path, mode, options, named
):
    interrupted(*MODES[mode], batches=140 if mode == "streaming" else 7)
    before = state_path(tmp_path).read_bytes()
    result = kvq(*command("c", "--resume", "--json", *options))
    assert (result.code, result.json["error"]["code"]) == (2, "progress.other_run")
    assert named in result.json["error"]["message"]
    assert state_path(tmp_path).read_bytes() == before


def test_progress_of_other_data_weights_or_versions_is_refused_by_name(
    kvq, command, interrupted, checkpoints, tmp_path, monkeypatch
):
    from safetensors.torch import load_file, save_file

    interrupted()

    def refusal(argv):
        result = kvq(*argv, "--resume", "--json")
        assert (result.code, result.json["error"]["code"]) == (2, "progress.other_run")
        return result.json["error"]["message"]

    argv = command("c")
    write_rows(tmp_path / "other.jsonl", 100, seed=1)
    other = [tmp_path / "other.jsonl" if str(a).endswith("rows.jsonl") else a for a in argv]
    assert "`data.digest` was" in refusal(other)
    shutil.copytree(argv[1], tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][0] += 1
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    assert "`model.weights` was" in refusal([argv[0], tmp_path / "model", *argv[2:]])
    assert "`mode` was 'memory' and is 'streaming'" in refusal(command("c", "--streaming"))
    monkeypatch.setattr("torch.__version__", "9.9")
    assert "`version.torch` was" in refusal(argv)


@pytest.mark.parametrize("change", ["cut", "empty", "edited", "no json"])
def test_damaged_progress_is_reported_and_not_half_used(
    kvq, command, interrupted, tmp_path, change
):
    interrupted()
    path = state_path(tmp_path)
    text = path.read_text()
    edited = text.replace('"batches": 7', '"batches": 8')
    assert edited != text
    path.write_text({"cut": text[: len(text) // 2], "empty": "", "edited": edited,
                     "no json": "[1]"}[change])  # fmt: skip
    result = kvq(*command("c", "--resume", "--json"))
    assert (result.code, result.json["error"]["code"]) == (2, "progress.damaged")
    assert not (tmp_path / "c").exists()
    assert kvq(*command("c", "--overwrite")).code == 0


def test_damaged_hidden_states_are_reported(kvq, command, interrupted, tmp_path):
    for mode in ("streaming", "files"):
        interrupted(*MODES[mode], "--overwrite", batches=250)
        for path in state_path(tmp_path).parent.glob("activations-*.bin"):
            path.write_bytes(path.read_bytes()[:-1])
        result = kvq(*command("c", "--resume", "--json"))
        assert (result.code, result.json["error"]["code"]) == (2, "progress.damaged")


def test_two_runs_into_one_folder_are_refused(kvq, command, tmp_path):
    from kvq.calibration.progress import Folder

    held = Folder(state_path(tmp_path).parent)
    result = kvq(*command("c", "--json"))
    assert (result.code, result.json["error"]["code"]) == (2, "progress.locked")
    held.close()
    assert kvq(*command("c")).code == 0


def test_a_full_disk_is_said_once_and_the_run_goes_on(kvq, command, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvq.calibration.progress.sync", full)
    monkeypatch.setattr("kvq.calibration.saving.SHARE", 0)
    result = kvq(*command("c"))
    assert result.code == 0
    assert result.err.count("Progress cannot be saved: No space left on device.") == 1


def test_an_error_leaves_no_progress_behind(kvq, command, tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward, calls = LlamaAttention.forward, iter(range(10**6))

    def failing(self, *args, **kwargs):
        if next(calls) > 300:
            raise RuntimeError("broken")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", failing)
    result = kvq(*command("c", "--json"))
    assert (result.code, result.json["error"]["code"]) == (2, "model.forward")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl"]
