"""Real vLLM on the CPU as the reader of what kvq exports."""

import json
import os
import re
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.clients.servable import EXPANDED, LOADED, MLA, REFUSED, UNBUILT, export

pytestmark = pytest.mark.client_vllm
SCRIPT = Path(__file__).parents[2] / "kvq" / "engines" / "probes" / "probe_vllm.py"


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
    families = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "qwen3_moe")
    for family in families:
        model = tmp_path / family
        save(family, model, **SERVABLE)
        argv = ["--dataset", rows, "--seq-len", 64, "--num-samples", 24]
        calibration = tmp_path / f"{family}-calibration"
        assert kvq("calibrate", model, *argv, "-o", calibration).code == 0
        for granularity in ("tensor", "head"):
            target = tmp_path / f"{family}-{granularity}"
            argv = ["--scales", calibration, "--granularity", granularity, "-o", target]
            readers = ["--for", "vllm"]
            if family == "qwen3_moe" and granularity == "tensor":
                readers += ["--for", "transformers"]  # which adds a group that matches no layer
            assert kvq("export", model, *argv, *readers).code == 0
            made.append(target)
    for target, loaded in zip(made, loaded_by_vllm(*made), strict=True):
        check(kvq, target, loaded)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Family → (exported checkpoint, what one vLLM process says of it); some without scales too."""
    expecting_errors = {name: family for name, (family, _) in (REFUSED | UNBUILT).items()}
    made = {}
    for name, family in (LOADED | MLA | EXPANDED | expecting_errors).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers, about its own configurations
            folder = tmp_path_factory.mktemp(family.model_type)
            made[name] = export(family, folder, unread=name in expecting_errors)
    made |= {(name, "source"): made[name].parent / "source" for name in expecting_errors}
    loaded = loaded_by_vllm(*made.values())
    return {name: (made[name], answer) for name, answer in zip(made, loaded, strict=True)}


def written_scales(checkpoint):
    """Return the values of every scale in the checkpoint by layer, cross-attention and side."""
    (*_, shard) = sorted(checkpoint.glob("*.safetensors"))
    scales = {place(name): values.ravel().tolist() for name, values in load_file(shard).items()}
    assert scales
    return scales


def held_scales(loaded):
    return {
        place(f"{name}.{side}_scale"): layer[f"{side}_all"]
        for name, layer in loaded["layers"].items()
        for side in "kv"
    }


def place(name):
    """Where a scale belongs, which kvq and vLLM call by different module names."""
    return int(re.search(r"\.(\d+)\.", name)[1]), "encoder_attn" in name, name[-7:]


@pytest.mark.parametrize("family", LOADED)
def test_vllm_holds_the_scales_that_were_written(family, outcomes):
    checkpoint, loaded = outcomes[family]
    assert "error" not in loaded, loaded
    assert {layer["dtype"] for layer in loaded["layers"].values()} == {"fp8"}
    assert held_scales(loaded) == written_scales(checkpoint)
    for layer in loaded["layers"].values():
        assert (layer["k"], layer["v"]) == (max(layer["k_all"]), max(layer["v_all"]))


@pytest.mark.parametrize("family", MLA)
def test_vllm_reads_no_scale_of_mla_and_leaves_the_cache_unquantized(family, outcomes):
    checkpoint, loaded = outcomes[family]
    assert loaded["cache_dtype"] == "auto"
    assert {layer["dtype"] for layer in loaded["layers"].values()} == {"auto"}
    assert {layer["heads"] for layer in loaded["layers"].values()} == {1}
    assert held_scales(loaded).keys() == written_scales(checkpoint).keys()
    assert {value for values in held_scales(loaded).values() for value in values} == {1.0}


@pytest.mark.parametrize("family", EXPANDED)
def test_vllm_applies_the_scale_of_the_latent_row_to_expanded_heads(family, outcomes):
    checkpoint, loaded = outcomes[family]
    assert {layer["dtype"] for layer in loaded["layers"].values()} == {"fp8"}
    assert {layer["heads"] for layer in loaded["layers"].values()} == {4}
    assert held_scales(loaded) == written_scales(checkpoint)


@pytest.mark.parametrize("family", REFUSED)
def test_vllm_refuses_a_checkpoint_for_its_scales(family, outcomes):
    _, loaded = outcomes[family]
    assert REFUSED[family][1] in loaded["error"]
    _, without_scales = outcomes[family, "source"]
    assert without_scales["layers"]


@pytest.mark.parametrize("family", UNBUILT)
def test_vllm_cannot_build_these_on_the_cpu(family, outcomes):
    _, loaded = outcomes[family]
    assert UNBUILT[family][1] in loaded["error"]
    _, without_scales = outcomes[family, "source"]
    assert UNBUILT[family][1] in without_scales["error"]


def test_verify_live_asks_the_real_engine(kvq, exported, tmp_path):
    from safetensors.numpy import load_file, save_file

    from tests.models import SERVABLE, save

    python = os.environ["KVQ_VLLM_PYTHON"]
    save("llama", tmp_path / "model", **SERVABLE)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": list(range(40))}) + "\n")
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 64, "--min-tokens", 1]
    assert kvq("calibrate", tmp_path / "model", *argv, "-o", tmp_path / "c").code == 0
    argv = ["--scales", tmp_path / "c", "-o", tmp_path / "out", "--link", "copy"]
    assert kvq("export", tmp_path / "model", *argv).code == 0
    result = kvq("verify", tmp_path / "out", "--live", "vllm", "--python", python)
    assert result.code == 0, result.out
    (shard,) = (tmp_path / "out").glob("model-00002-*.safetensors")
    tensors = load_file(shard)
    del tensors["model.layers.1.self_attn.v_scale"]
    save_file(tensors, shard)
    result = kvq("verify", tmp_path / "out", "--live", "vllm", "--python", python, "--json")
    codes = {finding["code"] for finding in result.json["findings"]}
    assert "engine.default" in codes  # the real engine agrees with the prediction
    assert not codes & {"live.value", "live.load", "live.prediction"}
