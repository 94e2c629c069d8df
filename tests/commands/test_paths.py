"""What is given is said by what it is, where something else is expected."""

import json
import shutil

import pytest

from tests.engines.tensors import value


def test_a_reference_that_does_not_exist_is_said_to(kvq, checkpoints, tmp_path):
    for name in ("none", "none.json", f"{300 * 'x'}-none"):
        result = kvq("verify", checkpoints("llama"), "--against", tmp_path / name, "--json")
        assert (result.code, result.json["error"]["code"]) == (2, "reference.missing")
        assert f"{name}` does not exist" in result.json["error"]["message"]


@pytest.mark.parametrize("command", ["verify", "calibrate"])
def test_a_checkpoint_that_does_not_exist_is_said_to(kvq, tmp_path, command):
    more = ["-o", tmp_path / "out"] if command == "calibrate" else []
    result = kvq(command, tmp_path / "none", *more, "--json")
    assert result.code == 2
    assert "none` does not exist" in result.json["error"]["message"]


@pytest.mark.parametrize("command", ["verify", "inspect", "calibrate"])
def test_a_calibration_in_place_of_a_model_is_named(kvq, calibrated, tmp_path, command):
    _, calibration = calibrated()
    more = {"inspect": ["--engine", "vllm"], "calibrate": ["-o", tmp_path / "out"], "verify": []}
    result = kvq(command, calibration, *more[command], "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "model.calibration")
    assert "is a calibration" in result.json["error"]["message"]
    assert "--against" in result.json["error"]["hint"]


def test_scales_in_sglangs_file_alone_are_mentioned(kvq, checkpoints, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("llama"), folder)
    argv = ["verify", folder, "--require", "kv-scales", "--json"]
    name = "kv_cache_scales.json"
    assert not any(name in f["message"] for f in kvq(*argv).json["findings"])
    factors = {str(layer): value(layer, "k") for layer in range(2)}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}}
    (folder / name).write_text(json.dumps({"kv_cache": cache, "model_type": "llama"}))
    found = {f["code"]: f for f in kvq(*argv).json["findings"]}
    assert set(found) == {"scale.missing", "require.kv_scales"}
    assert all(name in finding["message"] for finding in found.values())
