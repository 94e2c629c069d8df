"""torchrun -m kvq calibrate: several processes, the bytes of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvq.calibration.amax import Observer
from kvq.calibration.distributed import Ranks, named_errors
from kvq.errors import InputError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def torchrun(*argv, program=("-m", "kvq"), processes=2, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               processes, *program, *argv]  # fmt: skip
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, timeout=300,
    )  # fmt: skip


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def argv(checkpoints, rows):
    return ["calibrate", checkpoints("llama"), "--dataset", rows, "--seq-len", 64]


def test_two_processes_give_the_bytes_of_one_and_the_first_alone_speaks(kvq, argv, tmp_path):
    assert kvq(*argv, "-o", tmp_path / "one").code == 0
    result = torchrun(*argv, "-o", tmp_path / "two", "--streaming")
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert result.stdout.count("wrote ") == 1
    assert result.stdout.count("LlamaForCausalLM(") == 1
    assert result.stderr.count("Streaming, one decoder layer") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices")
@pytest.mark.parametrize("options", [[], ["--streaming"], ["--device-map", "auto"]], ids=str)
def test_two_processes_on_a_device_each_give_the_bytes_of_one(kvq, argv, tmp_path, options):
    argv = [*argv, "--batch-size", 4]
    assert kvq(*argv, "--device", "cuda", "-o", tmp_path / "one").code == 0
    result = torchrun(*argv, *options, "-o", tmp_path / "two")
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_two_processes_that_spread_the_model_give_the_bytes_of_one(kvq, argv, tmp_path):
    assert kvq(*argv, "--device", "cpu", "-o", tmp_path / "one").code == 0
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    result = torchrun(*argv, "--device-map", "auto", "-o", tmp_path / "two", **environment)
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


@pytest.mark.parametrize(
    ("devices", "local_world", "expected"),
    [(8, 2, [range(4), range(4, 8)]), (3, 2, [range(1), range(1, 3)]), (2, 1, [range(2)]),
     (0, 2, [range(0), range(0)])],
)  # fmt: skip
def test_processes_that_spread_a_model_share_the_devices(
    monkeypatch, devices, local_world, expected
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    # of two machines, the second one
    ours = [Ranks(local_world + i, 2 * local_world, i, local_world) for i in range(local_world)]
    assert [one.cuda_devices() for one in ours] == expected
    if devices:
        assert [one.device("auto", spread=True) for one in ours] == [
            f"cuda:{own[0]}" for own in expected
        ]


def test_more_processes_than_devices_cannot_share_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="3 processes share 2 CUDA devices"):
        Ranks(0, 3, 0, 3).cuda_devices()


@pytest.fixture
def converging(checkpoints, tmp_path):
    """A calibration that ends early: after two batches nothing is new."""
    rows = [[5, 9, 2, 7] * 5] * 40 + [[3, 1, 4, 1, 5] * 5]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": r}) + "\n" for r in rows))
    return ["calibrate", checkpoints("llama"), "--dataset", tmp_path / "rows.jsonl",
            "--seq-len", 64, "--stop-when-stable", "-o"]  # fmt: skip


def test_processes_end_early_together_where_one_does(kvq, converging, tmp_path):
    assert kvq(*converging, tmp_path / "one").code == 0
    for processes in (2, 3):
        result = torchrun(*converging, tmp_path / "many", "--overwrite", processes=processes)
        assert result.returncode == 0, result.stderr
        assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert "stopped after 15 of 41 batches" in result.stdout


def test_killed_on_two_sides_of_a_boundary_processes_go_on_to_the_same_bytes(kvq, argv, tmp_path):
    """One has saved its progress behind a boundary, which the other has yet to reach again."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys\n"
        "from kvq.cli import run\n"
        "import kvq.calibration.run as running, kvq.calibration.saving as saving\n"
        "saving.SHARE = 0\n"
        "before, runs = running.batch_inputs, []\n"
        "def batch_inputs(*given):\n"
        "    runs.append(given)\n"
        "    if len(runs) == 7: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return before(*given)\n"
        "if os.environ['RANK'] == '1': running.batch_inputs = batch_inputs\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    argv = [*argv, "--stop-when-stable", "-o"]
    assert kvq(*argv, tmp_path / "one").code == 0
    stopped = torchrun(*argv, tmp_path / "two", program=[program])
    assert stopped.returncode != 0
    progress = [
        json.loads((tmp_path / f".two.kvq-progress-{rank}-of-2" / "progress.json").read_text())
        for rank in (0, 1)
    ]
    done = [state["position"]["batches"] for state in progress]
    # of 24 batches 12 is a boundary: one process has run batch 12, the other not yet batch 13
    assert (done[0] >= 7, done[1]) == (True, 6)
    resumed = torchrun(*argv, tmp_path / "two", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_a_process_that_fails_stops_all_with_its_message(argv, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from kvq.cli import run\n"
        "from kvq.errors import CheckpointError\n"
        "import kvq.calibration.run as running\n"
        "if os.environ['RANK'] == '1':\n"
        "    def batch_inputs(*_): raise CheckpointError('the disk is gone', code='test')\n"
        "    running.batch_inputs = batch_inputs\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    result = torchrun(*argv, "-o", tmp_path / "c", "--json", program=[program])
    assert result.returncode != 0
    assert "error: process 1: the disk is gone" in result.stderr
    assert json.loads(result.stdout)["error"]["code"] == "test"
    assert not (tmp_path / "c").exists()


def test_a_failure_of_one_process_that_is_no_error_of_kvq_is_said_once(argv, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from kvq.cli import run\n"
        "import kvq.calibration.run as running\n"
        "if os.environ['RANK'] == '1':\n"
        "    def batch_inputs(*_): raise OSError('the disk is gone')\n"
        "    running.batch_inputs = batch_inputs\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    result = torchrun(*argv, "-o", tmp_path / "c", program=[program])
    assert result.returncode != 0
    assert result.stderr.count("error: internal error: ") == 1
    assert "error: internal error: OSError: the disk is gone" in result.stderr


def test_an_error_of_all_processes_is_said_once(argv, tmp_path):
    result = torchrun(*argv, "-o", tmp_path / "c", "--margin", 99, "--json")
    assert result.returncode != 0
    assert json.loads(result.stdout)["error"]["code"] == "option.margin"
    assert result.stderr.count("error: ") == 1
    assert "error: process 0: --margin is 99" in result.stderr


def test_batches_are_handed_out_whole_and_all(argv):
    plan = [(0, 1), (2, 3), (4,), (5,), (6,)]
    parts = [Ranks(rank, 3).own(plan) for rank in range(3)]
    assert sorted(batch for part in parts for batch in part) == plan
    assert Ranks().own(plan) == plan
    with pytest.raises(InputError, match="6 processes share 5 batches"):
        Ranks(0, 6).own(plan)


@pytest.mark.parametrize(
    "variables", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "two"},
                  {"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}]
)  # fmt: skip
def test_an_environment_that_torchrun_did_not_make_is_refused(
    kvq, argv, tmp_path, monkeypatch, variables
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = kvq(*argv, "-o", tmp_path / "c", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "ranks.environment")


def test_errors_name_their_process_where_there_are_several():
    with pytest.raises(InputError, match=r"^process 1: broken$"), named_errors(Ranks(1, 2)):
        raise InputError("broken", code="x")
    with pytest.raises(InputError, match=r"^broken$"), named_errors(Ranks()):
        raise InputError("broken", code="x")


def _merging(rank, folder):
    import torch.distributed as dist

    from kvq.calibration.distributed import check_same, connected, furthest, merge
    from kvq.calibration.magnitudes import BINS
    from kvq.geometry import LayerGeometry

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=(folder / "port").read_text(),
                      RANK=str(rank), WORLD_SIZE="2")  # fmt: skip
    ours = Ranks(rank, 2)
    observer = Observer(
        [LayerGeometry(i, "full_attention", f"layers.{i}", 4, 2, 8, 8) for i in range(2)],
        queries=False,
    )

    def saw(layer, side, amax, raised, tokens):
        key = f"layers.{layer}", f"{side}_bmm_quantizer"
        observer.amax[key], observer.raised[key] = torch.tensor(amax), torch.tensor(raised)
        observer.counts[key] = torch.arange(BINS) * (rank + 1)
        observer.tokens[key] = tokens

    saw(0, "k", [[1.5, 3.0], [2.5, float("nan")]][rank], [[7, 7], [5, 5]][rank], rank + 4)
    saw(1, "v", [4.0, 1.0 + rank], [9 - rank, 2 * rank], 1)
    if rank == 1:
        saw(1, "k", [1.0, float("inf")], [3, 1], 2)
    with connected(ours, torch.device("cpu")):
        assert dist.get_world_size() == 2
        merge(ours, observer, torch.device("cpu"))
        assert furthest(ours, [4, -1][rank]) == 4
        refused = ""
        try:
            check_same(ours, {"data": rank})
        except InputError as error:
            refused = str(error)
    amax = {"/".join(key): value.tolist() for key, value in observer.amax.items()}
    raised = {"/".join(key): value.tolist() for key, value in observer.raised.items()}
    counts = {"/".join(key): int(value[10]) for key, value in observer.counts.items()}
    (folder / f"{rank}.txt").write_text(repr((amax, raised, counts, observer.tokens, refused)))


def test_maxima_are_merged_exactly_and_differences_refused(tmp_path):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(probe.getsockname()[1]))
    torch.multiprocessing.spawn(_merging, (tmp_path,), nprocs=2)
    found = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert found[0] == found[1]
    amax, raised, counts, tokens, refused = eval(found[0], {"inf": np.inf})
    assert amax == {"layers.0/k_bmm_quantizer": [2.5, np.inf],
                    "layers.1/v_bmm_quantizer": [4.0, 2.0],
                    "layers.1/k_bmm_quantizer": [1.0, np.inf]}  # fmt: skip
    assert raised == {"layers.0/k_bmm_quantizer": [5, 5], "layers.1/v_bmm_quantizer": [8, 2],
                      "layers.1/k_bmm_quantizer": [3, 1]}  # fmt: skip
    assert counts == {"layers.0/k_bmm_quantizer": 30, "layers.1/v_bmm_quantizer": 30,
                      "layers.1/k_bmm_quantizer": 20}  # fmt: skip
    assert tokens == {("layers.0", "k_bmm_quantizer"): 9, ("layers.1", "v_bmm_quantizer"): 2,
                      ("layers.1", "k_bmm_quantizer"): 2}  # fmt: skip
    assert refused == "process 1 has other data, weights, options or versions than process 0"
