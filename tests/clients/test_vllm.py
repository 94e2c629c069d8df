"""Real vLLM on the CPU as the reader of what kvq exports."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.client_vllm
SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_scales.py"


def loaded_by_vllm(*checkpoints):
    done = subprocess.run(
        [os.environ["KVQ_VLLM_PYTHON"], SCRIPT, *checkpoints], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(checkpoints), done.stderr[-3000:]
    return lines


def check(kvq, checkpoint, loaded):
    assert "error" not in loaded, loaded
    written = kvq("inspect", checkpoint, "--scales", "--json").json["scales"]
    assert loaded["cache_dtype"] in ("fp8", "fp8_e4m3")
    assert len(loaded["layers"]) * 2 == len(written)
    for name, layer in loaded["layers"].items():
        attention = name.removesuffix(".attn")
        for side in "kv":
            values = np.atleast_1d(np.array(written[f"{attention}.{side}_scale"], np.float32))
            assert layer[side] == float(values.max()), (name, side)
            np.testing.assert_array_equal(np.array(layer[f"{side}_all"], np.float32), values)


@pytest.mark.real_model
def test_real_model_scales_are_those_written(kvq, smollm2, tmp_path):
    calibration, target = tmp_path / "calibration", tmp_path / "checkpoint"
    argv = ["--num-samples", 4, "--seq-len", 256, "-o", calibration]
    assert kvq("calibrate", smollm2, *argv).code == 0
    assert kvq("export", smollm2, "--scales", calibration, "-o", target).code == 0
    (loaded,) = loaded_by_vllm(target)
    check(kvq, target, loaded)


def test_every_family_and_granularity_loads_as_written(kvq, tmp_path, rows):
    from tests.models import SERVABLE, save

    made = []
    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"):
        model = tmp_path / family
        save(family, model, **SERVABLE)
        argv = ["--dataset", rows, "--seq-len", 64, "--num-samples", 24]
        calibration = tmp_path / f"{family}-calibration"
        assert kvq("calibrate", model, *argv, "-o", calibration).code == 0
        for granularity in ("tensor", "head"):
            target = tmp_path / f"{family}-{granularity}"
            argv = ["--scales", calibration, "--granularity", granularity, "-o", target]
            assert kvq("export", model, *argv).code == 0
            made.append(target)
    for target, loaded in zip(made, loaded_by_vllm(*made), strict=True):
        check(kvq, target, loaded)
