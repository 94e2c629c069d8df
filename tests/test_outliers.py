"""Layers that stand out: Qwen2's key biases and what follows from them."""

import json

import numpy as np
import pytest

from kvq.tensorfile import write_float32
from tests.models import SIZES, build

NORMS = (605, 22, 20, 921)  # of Qwen2.5-7B's first, two middle and last layer


def biased_names():
    for i, norm in enumerate(NORMS):
        prefix = f"model.layers.{i}.self_attn"
        bias = np.zeros(16, np.float32)
        bias[3] = norm
        yield f"{prefix}.k_proj.bias", bias
        for side in "qkvo":
            yield f"{prefix}.{side}_proj.weight", np.zeros((1, 1), np.float32)


@pytest.fixture
def qwen2(tmp_path):
    """A Qwen2 whose first and last layer have a key bias far above the others'."""
    model = build("qwen2", num_hidden_layers=4)
    for layer, norm in zip(model.model.layers, NORMS, strict=True):
        layer.self_attn.k_proj.bias.data[:] = 0
        layer.self_attn.k_proj.bias.data[3] = norm
    model.save_pretrained(tmp_path / "qwen2")
    return tmp_path / "qwen2"


def calibrate(kvq, model, rows, target, *options):
    argv = ["--dataset", rows, "--seq-len", 64, "--num-samples", 24, "-o", target]
    result = kvq("calibrate", model, *argv, *options)
    assert result.code == 0, result.err
    return result


def test_inspect_warns_from_the_weights_alone(kvq, tmp_path):
    write_float32(tmp_path / "model.safetensors", dict(biased_names()), {"format": "pt"})
    config = SIZES | {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = kvq("inspect", tmp_path, "--json").json
    flagged = {row["layer_idx"]: row["flags"] for row in shown["layers"] if row["flags"]}
    assert flagged == {0: ["k bias norm 605, 28 x median"], 3: ["k bias norm 921, 42 x median"]}
    assert [row["k_bias_absmax"] for row in shown["layers"]] == list(NORMS)
    assert not any(row["k_norm"] for row in shown["layers"])
    assert "no norm on K: layers 0, 3 stand out" in shown["summary"]
    assert "--kv-cache-dtype-skip-layers 0 3" in shown["summary"]


def test_a_norm_on_keys_is_seen_and_no_bias_is_no_warning(kvq, checkpoints):
    shown = kvq("inspect", checkpoints("qwen3"), "--json").json
    assert all(row["k_norm"] and row["k_bias_absmax"] is None for row in shown["layers"])
    assert "stand out" not in shown["summary"]


def test_calibrate_flags_k_of_the_first_and_last_layer_and_proposes(kvq, qwen2, rows, tmp_path):
    result = calibrate(kvq, qwen2, rows, tmp_path / "c")
    assert "layers 0, 3 stand out" in result.err
    assert "vllm serve --kv-cache-dtype-skip-layers 0 3" in result.err
    layers = kvq("inspect", tmp_path / "c", "--json").json["layers"]
    for row in layers:
        outlier = row["layer_idx"] in (0, 3)
        assert any("x median" in flag for flag in row["flags"]) == outlier
        assert not any(flag.startswith("v ") for flag in row["flags"])


def test_a_model_without_outliers_gets_no_advice(kvq, checkpoints, rows, tmp_path):
    assert "stand out" not in calibrate(kvq, checkpoints("qwen2"), rows, tmp_path / "c").err


def test_skipped_layers_keep_their_scales_and_the_engine_is_told(kvq, qwen2, rows, tmp_path):
    plain = calibrate(kvq, qwen2, rows, tmp_path / "plain")
    result = calibrate(kvq, qwen2, rows, tmp_path / "c", "--skip-layers", "auto")
    assert plain.out.count("TensorQuantizer(disabled)") == 4  # the queries
    assert result.out.count("TensorQuantizer(disabled)") == 4 + 4
    assert "--kv-cache-dtype-skip-layers 0 3" in result.out
    statistics = [(tmp_path / c / "calibration.safetensors").read_bytes() for c in ("plain", "c")]
    assert statistics[0] == statistics[1]
    argv = ["export", qwen2, "--scales", tmp_path / "c", "-o", tmp_path / "out"]
    result = kvq(*argv)
    assert f"vllm serve {tmp_path / 'out'} --kv-cache-dtype-skip-layers 0 3" in result.out
    shown = kvq("inspect", tmp_path / "out", "--json").json
    assert [row["layer_idx"] for row in shown["layers"] if "skipped" in row["flags"]] == [0, 3]
    assert all(set(row["scale"]) == {"k", "v"} for row in shown["layers"])
    assert kvq("inspect", tmp_path / "out").out.count("TensorQuantizer(disabled)") == 4 + 4
    assert kvq("verify", tmp_path / "out", "--against", tmp_path / "plain").code == 0


@pytest.mark.parametrize("layers", ["4", "-1", "first", "0,", "1,9"])
def test_layers_that_do_not_exist_are_refused(kvq, checkpoints, rows, tmp_path, layers):
    argv = ["--dataset", rows, "--skip-layers", layers, "-o", tmp_path / "c", "--json"]
    result = kvq("calibrate", checkpoints("qwen2"), *argv)
    assert (result.code, result.json["error"]["code"]) == (2, "option.skip_layers")
    assert "0 to 1" in result.json["error"]["message"]


def test_margin_widens_every_scale_and_is_recorded(kvq, checkpoints, rows, tmp_path):
    model = checkpoints("llama")
    scales = {}
    for margin in (1, 1.25):
        calibrate(kvq, model, rows, tmp_path / f"c{margin}", "--margin", margin)
        argv = ["--scales", tmp_path / f"c{margin}", "-o", tmp_path / f"out{margin}"]
        assert kvq("export", model, *argv).code == 0
        shown = kvq("inspect", tmp_path / f"out{margin}", "--scales", "--json")
        scales[margin] = shown.json["scales"]
        result = kvq("verify", tmp_path / f"out{margin}", "--against", tmp_path / f"c{margin}")
        assert result.code == 0, result.out
    for name, scale in scales[1].items():
        assert scales[1.25][name] == pytest.approx(1.25 * scale, rel=1e-6)
    assert kvq("verify", tmp_path / "out1.25", "--against", tmp_path / "c1").code == 1


@pytest.mark.parametrize("margin", ["0.5", "17", "nan", "-1"])
def test_a_margin_that_clips_is_refused(kvq, checkpoints, rows, tmp_path, margin):
    argv = ["--dataset", rows, "--margin", margin, "-o", tmp_path / "c", "--json"]
    result = kvq("calibrate", checkpoints("llama"), *argv)
    assert (result.code, result.json["error"]["code"]) == (2, "option.margin")
