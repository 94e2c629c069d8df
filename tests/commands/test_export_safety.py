"""What an export must never do: lose a file, change a meaning, make a doubtful scale look good."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvq.checkpoint import open_checkpoint
from kvq.provenance import read_provenance

LAYER = "model.layers.0.self_attn"


@pytest.fixture
def bare(exported, tmp_path):
    """An exported checkpoint whose scales have no record; `change` may edit them."""

    def call(change=lambda scales: None, name="bare"):
        checkpoint = tmp_path / name
        shutil.copytree(exported(), checkpoint)
        shard = checkpoint / "model-00002-of-00002.safetensors"
        scales = dict(load_file(shard))
        change(scales)
        save_file(scales, shard, {"format": "pt"})
        path = checkpoint / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] |= dict.fromkeys(scales, shard.name)
        path.write_text(json.dumps(index))
        return checkpoint

    return call


def export(kvq, model, scales, out, *options):
    return kvq("export", model, "--scales", scales, "-o", out, *options, "--json")


def record(checkpoint):
    view = open_checkpoint(checkpoint)
    return read_provenance(view, [f"{LAYER}.k_scale"])


def test_a_folder_that_links_point_into_is_not_replaced(kvq, exported, tmp_path):
    first, linked = exported(), tmp_path / "linked"
    assert export(kvq, first, first, linked, "--link", "symbolic").code == 0
    options = ("--link", "symbolic", "--overwrite")
    result = export(kvq, linked, linked, first, *options)
    assert (result.code, result.json["error"]["code"]) == (2, "output.holds_input")
    assert kvq("verify", linked).code == kvq("verify", first).code == 0


def test_groups_of_the_base_keep_their_order(kvq, calibrated, tmp_path):
    model, calibration = calibrated()
    base = tmp_path / "base"
    shutil.copytree(model, base)
    config = json.loads((base / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    groups = {f"group_{i}": {"targets": [f"re:^none{i}$"], "weights": weights} for i in range(12)}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": groups}
    (base / "config.json").write_text(json.dumps(config))
    result = export(kvq, base, calibration, tmp_path / "out")
    assert result.code == 0, result.err
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [*written["quantization_config"]["config_groups"]] == [*groups]
    assert [*written][:5] == [*config][:5]


def zero_point(scales):
    scales[f"{LAYER}.k_zero_point"] = np.ones(1, np.float32)


def second_name(scales):
    scales[f"{LAYER}.k_proj.k_scale"] = np.full(1, 9, np.float32)


def three_numbers(scales):
    scales[f"{LAYER}.k_scale"] = np.array([0.02, 0.3, 0.02], np.float32)


@pytest.mark.parametrize(
    ("change", "code"),
    [(zero_point, "scales.zero_point"), (second_name, "scales.conflict"),
     (three_numbers, "scales.length")],
)  # fmt: skip
def test_a_source_that_contradicts_itself_is_refused(kvq, bare, tmp_path, change, code):
    source = bare(change)
    for options in ((), ("--granularity", "tensor")):
        result = export(kvq, source, source, tmp_path / "out", *options)
        assert (result.code, result.json["error"]["code"]) == (2, code)
        assert not (tmp_path / "out").exists()


def test_scales_in_two_files_are_refused(kvq, bare, tmp_path):
    source = bare()
    shard = source / "model-00001-of-00002.safetensors"
    tensors = dict(load_file(shard)) | {f"{LAYER}.k_scale": np.ones(1, np.float32)}
    save_file(tensors, shard, {"format": "pt"})
    result = export(kvq, source, source, tmp_path / "out")
    assert (result.code, result.json["error"]["code"]) == (2, "scales.duplicate")


def test_scales_of_other_weights_stay_so_and_may_go_home(kvq, calibrated, bare, tmp_path):
    model, _ = calibrated()
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tensors = dict(load_file(other / "model.safetensors"))
    tensors[f"{LAYER}.k_proj.weight"] = tensors[f"{LAYER}.k_proj.weight"] * 2
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    source, first, again = bare(), tmp_path / "first", tmp_path / "again"
    assert export(kvq, other, source, first, "--for-other-weights").code == 0
    assert export(kvq, first, first, again).code == 0
    for checkpoint in (first, again):
        codes = [f["code"] for f in kvq("verify", checkpoint, "--json").json["findings"]]
        assert codes == ["provenance.other_weights"]
        assert record(checkpoint).exported_onto is not None
    home = tmp_path / "home"
    assert export(kvq, model, again, home).code == 0
    assert record(home).exported_onto is None
    assert kvq("verify", home).code == 0


def test_scales_of_unknown_weights_do_not_claim_the_targets(kvq, exported, calibrated, tmp_path):
    model, _ = calibrated()
    scales = tmp_path / "scales.json"
    scales.write_text(kvq("inspect", exported(), "--scales", "--json").out)
    result = export(kvq, model, scales, tmp_path / "out")
    assert result.code == 0, result.err
    assert record(tmp_path / "out").weight_fingerprint == "unknown"
    assert any("on which weights" in notice for notice in result.json["notices"])


def test_a_parameter_that_is_only_called_like_a_scale_stays(kvq, calibrated, tmp_path):
    model, calibration = calibrated()
    base = tmp_path / "base"
    shutil.copytree(model, base)
    own = {"model.layers.0.mlp.q_scale": np.ones((64, 4), np.float32)}
    save_file(dict(load_file(base / "model.safetensors")) | own, base / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    result = export(kvq, base, calibration, tmp_path / "out", "--allow-unread")
    held = open_checkpoint(tmp_path / "out").tensors if result.code == 0 else {}
    assert result.json.get("error", {}).get("code") == "export.verify" or own.keys() <= held.keys()
    assert not any("scale tensors of the source" in x for x in result.json.get("notices", []))


def test_what_an_engine_would_not_use_is_recorded_when_allowed(kvq, calibrated, tmp_path):
    model, calibration = calibrated("qwen2")
    options = ("--for", "sglang", "--allow-unread")
    assert export(kvq, model, calibration, tmp_path / "out", *options).code == 0
    view = open_checkpoint(tmp_path / "out")
    metadata = json.loads(view.files["model-00002-of-00002.safetensors"].metadata["kvq"])
    assert "reads no scales" in metadata["allowed_unread"]["sglang"]


@pytest.mark.parametrize(
    "options",
    [("--kv-cfg", "FP8_KV_CFG"), ("--granularity", "head"), ("--dialect", "modelopt"),
     ("--for-other-weights",), ("--for", "vllm")],
)  # fmt: skip
def test_strip_takes_no_option_that_it_would_ignore(kvq, exported, tmp_path, options):
    argv = ["export", exported(), "--strip", "-o", tmp_path / "out", *options, "--json"]
    result = kvq(*argv)
    assert (result.code, result.json["error"]["code"]) == (2, "option.strip")


def test_a_file_system_that_refuses_is_one_clear_error(kvq, exported, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link", "shard")

    monkeypatch.setattr("kvq.pipeline.write.os.link", refuse)
    source = exported()
    result = export(kvq, source, source, tmp_path / "out", "--link", "hard")
    assert (result.code, result.json["error"]["code"]) == (2, "output.write")
    assert "cross-device" in result.json["error"]["message"]
    assert not (tmp_path / "out").exists()
    result = export(kvq, source, source, tmp_path / "out")
    assert any("were copied" in notice for notice in result.json["notices"])


def test_the_indexs_own_words_are_kept(kvq, exported, tmp_path):
    source = exported()
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_parameters"] = 123
    path.write_text(json.dumps(index))
    assert export(kvq, source, source, tmp_path / "out").code == 0
    written = json.loads((tmp_path / "out" / path.name).read_text())
    assert written["metadata"]["total_parameters"] == 123


def test_a_configuration_without_the_query_leaves_it_out(kvq, bare, calibrated, tmp_path):
    def query(scales):
        scales |= {f"model.layers.{i}.self_attn.q_scale": np.full(1, 0.1, np.float32)
                   for i in range(2)}  # fmt: skip

    source = bare(query)
    model, _ = calibrated()
    options = ("--kv-cfg", "FP8_KV_CFG")
    assert export(kvq, model, source, tmp_path / "out", *options).code == 0
    assert not any(name.endswith("q_scale") for name in open_checkpoint(tmp_path / "out").tensors)
    plain = bare(name="plain")
    result = export(kvq, model, plain, tmp_path / "q", "--kv-cfg", "FP8_ATTN_CFG")
    assert (result.code, result.json["error"]["code"]) == (2, "scales.not_observed")


def test_scales_that_are_not_there_are_named(kvq, checkpoints, tmp_path):
    result = export(kvq, checkpoints("llama"), tmp_path / "nowhere", tmp_path / "out")
    error = result.json["error"]
    assert (result.code, error["code"]) == (2, "scales.missing")
    assert f"`{tmp_path / 'nowhere'}` does not exist" in error["message"]


def test_an_engine_that_cannot_skip_layers_is_named(kvq, calibrated, tmp_path):
    model, calibration = calibrated("llama", "--skip-layers", "1")
    for engine, told in (("vllm", False), ("sglang", True)):
        shown = export(kvq, model, calibration, tmp_path / engine, "--for", engine).json
        said = [text for text in shown["notices"] if text.startswith("layers 1 are to stay")]
        assert [f"option of {engine}" in text for text in said] == [True] * told
        assert ("skip-layers 1" in shown["serve"][engine]) is not told


def test_a_reference_in_a_file_beside_a_checkpoint_is_pointed_at(kvq, calibrated, tmp_path):
    model, calibration = calibrated()
    options = ("--dialect", "sglang-json", "--for", "sglang", "--allow-unread")
    assert export(kvq, model, calibration, tmp_path / "out", *options).code == 0
    error = kvq("verify", model, "--against", tmp_path / "out", "--json").json["error"]
    assert error["code"] == "reference.no_scales"
    assert error["hint"] == f"give `{tmp_path / 'out' / 'kv_cache_scales.json'}` itself"
    named = kvq("verify", model, "--against", tmp_path / "out" / "kv_cache_scales.json", "--json")
    assert named.code == 1  # compared: the model has no scales
