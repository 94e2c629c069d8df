import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

SCHEME = {"dynamic": False, "group_size": None, "num_bits": 8, "strategy": "tensor",
          "symmetric": True, "type": "float"}  # fmt: skip


def observed(calibration):
    return load_file(calibration / "calibration.safetensors")


def scale_shard(checkpoint):
    return sorted(checkpoint.glob("*.safetensors"))[-1]


def test_scales_are_amax_over_448_in_float32_of_shape_1(calibrated, exported):
    checkpoint = exported()
    _, calibration = calibrated()
    scales = load_file(scale_shard(checkpoint))
    amax = observed(calibration)
    assert len(scales) == 4
    for layer in (0, 1):
        for side in "kv":
            scale = scales[f"model.layers.{layer}.self_attn.{side}_scale"]
            per_head = amax[f"model.layers.{layer}.self_attn.{side}_bmm_quantizer._amax"]
            assert (scale.dtype, scale.shape) == (np.float32, (1,))
            assert scale[0] == per_head.max() / np.float32(448)


def test_per_head_scales_have_one_value_per_head(exported):
    checkpoint = exported("llama", "--granularity", "head")
    scales = load_file(scale_shard(checkpoint))
    assert {scale.shape for scale in scales.values()} == {(2, 1, 1)}
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == SCHEME | {"strategy": "attn_head"}


def test_configuration_is_the_one_of_compressed_tensors(exported):
    config = json.loads((exported() / "config.json").read_text())["quantization_config"]
    assert config == {
        "config_groups": {}, "format": "dense", "global_compression_ratio": None, "ignore": [],
        "kv_cache_scheme": SCHEME, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
        "version": "0.20.0",
    }  # fmt: skip


def test_query_scales_add_an_attention_group_with_the_class_name(exported):
    checkpoint = exported("qwen3", kv_cfg="FP8_PER_HEAD_ATTN_CFG")
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert group["targets"] == ["Qwen3Attention"]
    assert group["input_activations"] == SCHEME | {"strategy": "attn_head"}
    assert load_file(scale_shard(checkpoint))["model.layers.0.self_attn.q_scale"].shape == (4, 1, 1)


def test_weights_are_the_same_bytes_under_the_two_shard_naming(exported, checkpoints):
    checkpoint = exported()
    names = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    source = (checkpoints("llama") / "model.safetensors").read_bytes()
    assert (checkpoint / names[0]).read_bytes() == source
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    listed = dict(index["weight_map"])
    for file in names:
        with safe_open(checkpoint / file, "np") as opened:
            assert {listed.pop(name) for name in opened.keys()} == {file}  # noqa: SIM118
    assert not listed


def test_a_sharded_source_is_renamed_to_the_new_count(kvq, tmp_path, rows):
    from tests.models import build

    build("llama").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 2
    args = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c"]
    assert kvq("calibrate", tmp_path / "model", *args).code == 0
    target = tmp_path / "out"
    result = kvq("export", tmp_path / "model", "--scales", tmp_path / "c", "-o", target)
    assert result.code == 0, result.err
    count = len(shards) + 1
    found = sorted(target.glob("*.safetensors"))
    assert [path.name for path in found] == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    for source, linked in zip(shards, found, strict=False):
        assert source.read_bytes() == linked.read_bytes()
    assert kvq("verify", target, "--against", tmp_path / "c").code == 0


def test_provenance_travels_in_the_added_shard(exported, calibrated):
    checkpoint = exported()
    _, calibration = calibrated()
    with safe_open(scale_shard(checkpoint), "np") as opened:
        recorded = json.loads(opened.metadata()["kvq"])
    assert recorded["attention_class"] == "LlamaAttention"
    assert recorded["status"]["model.layers.1.self_attn"] == {"k": "calibrated", "v": "calibrated"}
    amax = observed(calibration)["model.layers.0.self_attn.k_bmm_quantizer._amax"]
    assert recorded["amax"]["model.layers.0.self_attn.k_bmm_quantizer"] == amax.tolist()


def test_exporting_onto_an_export_replaces_the_old_scales(kvq, exported, calibrated, tmp_path):
    first = exported()
    _, calibration = calibrated()
    target = tmp_path / "again"
    result = kvq("export", first, "--scales", calibration, "--granularity", "head", "-o", target)
    assert result.code == 0, result.err
    assert "4 scale tensors of the source are replaced" in result.err
    assert len(list(target.glob("*.safetensors"))) == 2
    assert kvq("verify", target).code == 0


def test_old_scales_inside_a_weight_shard_go_and_the_rest_stays(kvq, calibrated, tmp_path):
    model, calibration = calibrated()
    source = tmp_path / "source"
    shutil.copytree(model, source)
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    tensors = load(source / "model.safetensors")
    import torch

    polluted = tensors | {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(polluted, source / "model.safetensors", {"format": "pt"})
    result = kvq("export", source, "--scales", calibration, "-o", tmp_path / "out")
    assert result.code == 0, result.err
    kept = load(tmp_path / "out" / "model-00001-of-00002.safetensors")
    assert set(kept) == set(tensors)
    assert all(torch.equal(kept[name], tensors[name]) for name in tensors)
    assert kvq("verify", tmp_path / "out", "--against", calibration).code == 0


def test_side_files_come_along_and_consolidated_files_do_not(kvq, calibrated, tmp_path):
    model, calibration = calibrated()
    source = tmp_path / "source"
    shutil.copytree(model, source)
    shutil.copyfile(source / "model.safetensors", source / "consolidated.safetensors")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    result = kvq("export", source, "--scales", calibration, "-o", tmp_path / "out")
    assert result.code == 0, result.err
    assert "consolidated.safetensors not carried along" in result.err
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "chat_template.jinja" in names
    assert "consolidated.safetensors" not in names


def test_the_configuration_of_a_quantized_base_is_kept(kvq, calibrated, tmp_path):
    model, calibration = calibrated()
    source = tmp_path / "source"
    shutil.copytree(model, source)
    config = json.loads((source / "config.json").read_text())
    own = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
           "format": "pack-quantized", "ignore": ["lm_head"], "quant_method": "compressed-tensors",
           "quantization_status": "compressed"}  # fmt: skip
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": own}))
    (source / "hf_quant_config.json").write_text("{}")
    result = kvq("export", source, "--scales", calibration, "-o", tmp_path / "out")
    assert result.code == 0, result.err
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written == own | {"kv_cache_scheme": SCHEME}
    assert "hf_quant_config.json not carried along" in result.err
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    ("method", "code"),
    [("awq", "dialect.no_kv_method"), ("gptq", "dialect.no_kv_method"), ("xyz", "dialect.base")],
)
def test_a_base_of_another_method_is_refused(kvq, calibrated, tmp_path, method, code):
    model, calibration = calibrated()
    source = tmp_path / "source"
    shutil.copytree(model, source)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (source / "config.json").write_text(json.dumps(config))
    result = kvq("export", source, "--scales", calibration, "-o", tmp_path / "out", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, code)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kv_cfg", ["NVFP4_KV_CFG", "INT8_KV_CFG"])
def test_a_format_that_no_engine_reads_is_refused(kvq, calibrated, tmp_path, kv_cfg):
    model, calibration = calibrated("llama", "--kv-cfg", kv_cfg)
    result = kvq("export", model, "--scales", calibration, "-o", tmp_path / "out", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "dialect.format")
    assert "--kv-cfg FP8_KV_CFG" in result.json["error"]["hint"]
    other = kvq(
        "export", model, "--scales", calibration, "-o", tmp_path / "out", "--kv-cfg", "FP8_KV_CFG"
    )
    assert other.code == 0, other.err


def test_constant_amax_exports_1_and_says_so(kvq, exported):
    checkpoint = exported(kv_cfg="FP8_CAST_KV_CFG")
    assert {float(scale[0]) for scale in load_file(scale_shard(checkpoint)).values()} == {1.0}
    assert kvq("verify", checkpoint).code == 0


def test_dry_run_writes_nothing_and_prints_the_plan(kvq, calibrated, tmp_path):
    model, calibration = calibrated()
    before = {path.name for path in tmp_path.iterdir()}
    result = kvq(
        "export", model, "--scales", calibration, "-o", tmp_path / "x", "--dry-run", "--json"
    )
    assert result.code == 0, result.err
    assert {path.name for path in tmp_path.iterdir()} == before
    assert result.json["scale_shard"] == "model-00002-of-00002.safetensors"
    assert len(result.json["scales"]) == 4


def test_other_weights_are_refused(kvq, calibrated, tmp_path):
    from tests.models import build

    _, calibration = calibrated()
    model = build("llama")
    model.model.layers[1].self_attn.k_proj.weight.data.add_(0.5)
    model.save_pretrained(tmp_path / "tuned")
    result = kvq(
        "export", tmp_path / "tuned", "--scales", calibration, "-o", tmp_path / "o", "--json"
    )
    assert (result.code, result.json["error"]["code"]) == (2, "export.weights")


def test_a_dead_head_is_an_error_that_names_layer_and_quantizer(kvq, tmp_path, rows):
    from tests.models import build

    model = build("llama")
    model.model.layers[1].self_attn.v_proj.weight.data.zero_()
    model.save_pretrained(tmp_path / "model")
    args = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c"]
    assert kvq("calibrate", tmp_path / "model", *args).code == 0
    assert "NO SCALES: `v_bmm_quantizer` of layer 1" in kvq("inspect", tmp_path / "c").out
    result = kvq("export", tmp_path / "model", "--scales", tmp_path / "c", "-o", tmp_path / "o")
    assert result.code == 2
    assert "`v_bmm_quantizer` of layer 1" in result.err
    assert not (tmp_path / "o").exists()


def test_overwrite_replaces_the_whole_folder(kvq, calibrated, tmp_path):
    model, calibration = calibrated()
    target = tmp_path / "out"
    assert kvq("export", model, "--scales", calibration, "-o", target).code == 0
    (target / "stale").write_text("stale")
    assert kvq("export", model, "--scales", calibration, "-o", target).code == 2
    result = kvq("export", model, "--scales", calibration, "-o", target, "--overwrite")
    assert result.code == 0, result.err
    assert not (target / "stale").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_overwrite_never_costs_an_input_or_a_folder_of_someone_else(kvq, calibrated, tmp_path):
    source, calibration = calibrated()
    model = tmp_path / "models" / "model"
    shutil.copytree(source, model)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis").write_text("thesis")
    (tmp_path / "link").symlink_to(theirs)
    for target, code in (
        (model, "output.holds_input"),
        (tmp_path / "models", "output.holds_input"),
        (calibration, "output.holds_input"),
        (theirs, "output.foreign"),
        (tmp_path / "link", "output.invalid"),
        ("..", "output.invalid"),
        (tmp_path / "no" / "parent", "output.no_parent"),
    ):
        for extra in ([], ["--dry-run"]):
            argv = ["--scales", calibration, "-o", target, "--overwrite", "--json", *extra]
            result = kvq("export", model, *argv)
            assert (result.code, result.json["error"]["code"]) == (2, code), target
    assert (theirs / "thesis").read_text() == "thesis"


KILLED = """
import os, sys
from kvq import files
from kvq.cli import run
if sys.argv[1] == "before":
    files._swap = lambda work, target: os._exit(9)
else:
    files._exchange = lambda first, second: False
    first_rename = files.Path.rename
    def rename(self, target):
        first_rename(self, target)
        os._exit(9)
    files.Path.rename = rename
run(sys.argv[2:])
"""


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_killed_export_leaves_the_old_state_and_the_next_run_cleans_up(
    kvq, calibrated, tmp_path, moment
):
    model, calibration = calibrated()
    target = tmp_path / "out"
    argv = ["export", str(model), "--scales", str(calibration), "-o", str(target), "--overwrite"]
    assert kvq(*argv).code == 0
    before = _digests(target)
    killed = subprocess.run([sys.executable, "-c", KILLED, moment, *argv], check=False)
    assert killed.returncode == 9
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".out.kvq-")]
    assert left
    assert kvq("export", *argv[1:-1]).code == 2  # recovered: the old state is there again
    assert _digests(target) == before
    assert kvq(*argv).code == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out.kvq-")]


def _digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_links_share_the_source_and_copies_do_not(kvq, calibrated, tmp_path):
    model, calibration = calibrated()
    source = model / "model.safetensors"
    for link in ("hard", "copy", "symbolic"):
        target = tmp_path / link
        argv = ["--scales", calibration, "-o", target, "--link", link]
        result = kvq("export", model, *argv)
        assert result.code == 0, result.err
        first = target / "model-00001-of-00002.safetensors"
        assert os.path.samefile(first, source) == (link != "copy")
        assert first.is_symlink() == (link == "symbolic")
        assert ("weight shards are hard links" in result.err) == (link == "hard")


@pytest.mark.parametrize("place", ["list", "groups"])
def test_a_base_whose_quantization_is_no_object_is_refused(kvq, calibrated, tmp_path, place):
    model, calibration = calibrated()
    source = tmp_path / "source"
    shutil.copytree(model, source)
    config = json.loads((source / "config.json").read_text())
    own = {"quant_method": "compressed-tensors", "config_groups": {}}
    broken = [own] if place == "list" else own | {"config_groups": [1]}
    config["quantization_config"] = broken
    (source / "config.json").write_text(json.dumps(config))
    result = kvq("export", source, "--scales", calibration, "-o", tmp_path / "out", "--json")
    assert result.code == 2
    assert result.json["error"]["code"] in (
        "dialect.base_place", "dialect.base", "checkpoint.quantization_config",
    )  # fmt: skip


def test_a_base_that_says_null_or_frozen_comes_out_as_readers_want_it(kvq, calibrated, tmp_path):
    model, calibration = calibrated()
    source = tmp_path / "source"
    shutil.copytree(model, source)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": None,
                                     "quantization_status": "frozen"}  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    result = kvq("export", source, "--scales", calibration, "-o", tmp_path / "out")
    assert result.code == 0, result.err
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (written["config_groups"], written["quantization_status"]) == ({}, "compressed")


def test_stale_provenance_in_a_merged_source_does_not_count(kvq, exported, calibrated, tmp_path):
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    first = exported()
    source, calibration = calibrated()
    merged = tmp_path / "merged"
    shutil.copytree(source, merged)
    tensors = {}
    for shard in sorted(first.glob("*.safetensors")):
        tensors |= load(shard)
    record = json.dumps({"weight_fingerprint": "stale"})
    save_file(tensors, merged / "model.safetensors", {"format": "pt", "kvq": record})
    result = kvq("export", merged, "--scales", calibration, "-o", tmp_path / "out")
    assert result.code == 0, result.err
    assert kvq("verify", tmp_path / "out", "--against", calibration).code == 0


@pytest.mark.parametrize("amax", [[-5.0, 1.0], [1.0, 2.0, 3.0], [[1.0, 2.0]], [], [np.nan, 1.0]])
def test_damaged_statistics_are_refused(kvq, calibrated, tmp_path, amax):
    from kvq.tensorfile import write_float32

    model, calibration = calibrated()
    statistics = observed(calibration)
    statistics["model.layers.1.self_attn.k_bmm_quantizer._amax"] = np.array(amax, np.float32)
    write_float32(calibration / "calibration.safetensors", statistics, {})
    argv = ["--scales", calibration, "--granularity", "head", "-o", tmp_path / "o", "--json"]
    result = kvq("export", model, *argv)
    assert result.code == 2
    assert result.json["error"]["code"] in ("calibration.statistic", "export.heads")


def test_scales_of_other_weights_are_refused_or_recorded(kvq, calibrated, checkpoints, tmp_path):
    _, calibration = calibrated("llama")
    other = tmp_path / "other"
    shutil.copytree(checkpoints("llama"), other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"] *= 2
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    argv = ["export", other, "--scales", calibration, "-o", tmp_path / "out"]
    refused = kvq(*argv, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "export.weights")
    assert "--for-other-weights" in refused.json["error"]["hint"]
    done = kvq(*argv, "--for-other-weights", "--json")
    assert done.code == 0, done.err
    assert any("other weights" in notice for notice in done.json["notices"])
    report = kvq("verify", tmp_path / "out", "--json")
    assert (report.code, [f["code"] for f in report.json["findings"]]) == (
        0, ["provenance.other_weights"],
    )  # fmt: skip
    assert kvq("verify", tmp_path / "out", "--strict").code == 1
    again = ["export", tmp_path / "out", "--scales", tmp_path / "out", "-o", tmp_path / "again"]
    assert kvq(*again).code == 0  # the exception is known by now
    tensors["model.layers.0.self_attn.k_proj.weight"] *= 2
    changed = tmp_path / "out" / "model-00001-of-00002.safetensors"
    changed.unlink()
    save_file(tensors, changed, {"format": "pt"})
    report = kvq("verify", tmp_path / "out", "--json")
    assert [f["code"] for f in report.json["findings"]] == ["provenance.weights"]


def test_a_mixture_of_experts_gets_the_group_that_transformers_looks_for(kvq, calibrated, tmp_path):
    model, calibration = calibrated("qwen3_moe")
    argv = ["export", model, "--scales", calibration, "-o"]
    assert kvq(*argv, tmp_path / "vllm").code == 0
    assert kvq(*argv, tmp_path / "both", "--for", "transformers", "--for", "vllm").code == 0
    groups = {}
    for name in ("vllm", "both"):
        config = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        groups[name] = config["config_groups"]
        result = kvq("verify", tmp_path / name, "--engine", "transformers", "--json")
        assert (result.code == 0) == (name == "both")
    assert groups["vllm"] == {}
    assert [group["targets"] for group in groups["both"].values()] == [["re:^$"]]
    assert kvq("export", tmp_path / "both", "--strip", "-o", tmp_path / "bare").code == 0
    bare, source = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "bare", model))
    assert bare == source
