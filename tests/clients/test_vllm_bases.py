"""Real vLLM on the CPU reads the scales that are written onto bases of other methods."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import bases
from tests.exports import CELLS, Exports, expected

pytestmark = pytest.mark.client_vllm
PROBE = Path(__file__).parents[2] / "kvq" / "engines" / "probes" / "probe_vllm.py"
READ = [cell for cell in CELLS if expected(*cell, "vllm") == cell[2]]
# vLLM's CPU build lacks the operation that these need for their weights
NO_KERNEL, MISSING = ("ct-fp8", "fp8-tensor"), "static_scaled_fp8_quant"
LOADED = [cell for cell in READ if cell[1] not in NO_KERNEL]
DTYPE = {"fp8": ("fp8", "fp8_e4m3"), "fp8-head": ("fp8", "fp8_e4m3"), "nvfp4": ("nvfp4",)}


def ask(checkpoints, *options):
    """Return what vLLM holds, by checkpoint; its emulation stands in for kernels of NVFP4."""
    done = subprocess.run(
        [os.environ["KVQ_VLLM_PYTHON"], PROBE, *options, *checkpoints], capture_output=True,
        text=True, check=False, env={**os.environ, "VLLM_BATCH_INVARIANT": "1"},
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(checkpoints), done.stderr[-3000:]
    return {answer["checkpoint"]: answer for answer in answers}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    return Exports(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def answers(exports):
    """Ask once for each set of options that `export` printed."""
    asked = {}
    for cell in READ:
        target, commands = exports.written(*cell)
        _, _, _, *options = shlex.split(commands["vllm"])
        asked.setdefault(tuple(options), []).append(str(target))
    for name in NO_KERNEL:
        asked[()].append(str(exports.base(name)))
    found = {}
    for options, targets in asked.items():
        found |= ask(targets, *options)
    return found


@pytest.mark.parametrize("cell", LOADED, ids="-".join)
def test_vllm_holds_the_scales_that_were_written(exports, answers, cell):
    _, _, dialect, form = cell
    answer = answers[str(exports.written(*cell)[0])]
    assert "error" not in answer, answer
    held = {
        (name.removesuffix(".attn"), side): layer[f"{side}_all"]
        for name, layer in answer["layers"].items() for side in "kv"
    }  # fmt: skip
    assert held == exports.scales(dialect, form)
    assert {layer["dtype"] for layer in answer["layers"].values()} <= set(DTYPE[form])
    assert len(answer["layers"]) == bases.NUM_LAYERS


@pytest.mark.parametrize("name", NO_KERNEL)
def test_vllm_on_the_cpu_cannot_run_these_bases_with_or_without_scales(exports, answers, name):
    written = [exports.written(*cell)[0] for cell in READ if cell[1] == name]
    for checkpoint in (exports.base(name), *written):
        assert MISSING in answers[str(checkpoint)]["error"]


def test_every_method_is_among_those_that_are_loaded():
    assert {group for group, *_ in LOADED} == {"none", "ct", "modelopt", "fp8"}
    names = {name for _, name, *_ in LOADED}
    assert names == {*bases.UNQUANTIZED, *bases.COMPRESSED, *bases.MODELOPT, *bases.FP8} - {
        *NO_KERNEL
    }
