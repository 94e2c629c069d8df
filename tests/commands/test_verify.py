import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from kvq.tensorfile import read_header, read_tensor, write_float32


def rewrite(checkpoint, change):
    """Change the scales of an exported checkpoint in place, index included."""
    shard = checkpoint / "model-00002-of-00002.safetensors"
    file = read_header(shard)
    scales = {name: read_tensor(info) for name, info in file.tensors.items()}
    metadata = dict(file.metadata)
    change(scales, metadata)
    write_float32(shard, scales, metadata)
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    before = sum(info.end - info.start for info in file.tensors.values())
    index["metadata"]["total_size"] += sum(array.nbytes for array in scales.values()) - before
    weights = {n: f for n, f in index["weight_map"].items() if f != shard.name}
    index["weight_map"] = weights | dict.fromkeys(scales, shard.name)
    path.write_text(json.dumps(index))


def edit_config(checkpoint, change):
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


K0 = "model.layers.0.self_attn.k_scale"
V1 = "model.layers.1.self_attn.v_scale"


def set_scale(name, value):
    return lambda scales, _: scales.update({name: np.array(value, np.float32)})


@pytest.mark.parametrize(
    ("change", "code", "tensor"),
    [
        (lambda scales, _: scales.pop(V1), "scale.missing", V1),
        (set_scale(K0, [0.0]), "scale.nonpositive", K0),
        (set_scale(K0, [-1.0]), "scale.nonpositive", K0),
        (set_scale(K0, [np.nan]), "scale.nonfinite", K0),
        (set_scale(K0, [np.inf]), "scale.nonfinite", K0),
        (set_scale(K0, [1e-7]), "scale.range", K0),
        (set_scale(K0, [1001.0]), "scale.range", K0),
        (set_scale(K0, [0.1, 0.2]), "scale.shape", K0),
        (set_scale("model.layers.7.self_attn.k_scale", [0.1]), "scale.stray",
         "model.layers.7.self_attn.k_scale"),
        *[
            (set_scale(f"model.layers.0.self_attn.{leaf}", [0.1]), "scale.stray",
             f"model.layers.0.self_attn.{leaf}")
            for leaf in ("k_scales", "k_scale_inv", "k_zero_point")
        ],
        *[
            (set_scale(f"model.layers.0.self_attn.{leaf}", [0.1]), "scale.conflict",
             f"model.layers.0.self_attn.{leaf}")
            for leaf in ("k_proj.k_scale", "k_proj.output_scale", "k_cache.scale", "kv_scale")
        ],
        (set_scale("model.layers.0.self_attn.q_scale", [0.1]), "scale.missing",
         "model.layers.1.self_attn.q_scale"),
    ],
)  # fmt: skip
def test_a_wrong_scale_is_found_and_named(kvq, exported, change, code, tensor):
    checkpoint = exported()
    rewrite(checkpoint, lambda scales, metadata: (change(scales, metadata), metadata.pop("kvq")))
    result = kvq("verify", checkpoint, "--json")
    assert result.code == 1
    found = {(finding["code"], finding["tensor"]) for finding in result.json["findings"]}
    assert found == {(code, tensor)}
    assert all(f["expected"] and f["found"] for f in result.json["findings"])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda c: c.pop("quantization_config"), "config.missing"),
        (lambda c: c["quantization_config"].pop("kv_cache_scheme"), "config.no_scheme"),
        (lambda c: c["quantization_config"].update(config_groups=None), "config.groups"),
        (lambda c: c["quantization_config"].update(config_groups=[1]), "config.groups"),
        (lambda c: c["quantization_config"].update(
            config_groups={"g": {"targets": ["re:.*self_attn"], "weights": None}}), "config.group"),
        (lambda c: c["quantization_config"].update(quant_method="awq"), "config.quant_method"),
        (lambda c: c["quantization_config"]["kv_cache_scheme"].update(num_bits=4), "config.scheme"),
        (lambda c: c["quantization_config"]["kv_cache_scheme"].update(type="int"), "config.scheme"),
        (lambda c: c["quantization_config"]["kv_cache_scheme"].update(dynamic=True),
         "config.scheme"),
        (lambda c: c["quantization_config"]["kv_cache_scheme"].pop("symmetric"), "config.scheme"),
        (lambda c: c["quantization_config"]["kv_cache_scheme"].update(strategy="channel"),
         "config.strategy"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_found(kvq, exported, change, code):
    checkpoint = exported()
    edit_config(checkpoint, change)
    result = kvq("verify", checkpoint, "--json")
    assert result.code == 1
    assert {finding["code"] for finding in result.json["findings"]} == {code}


def test_a_declared_cache_without_scales_is_found(kvq, exported):
    checkpoint = exported()
    rewrite(checkpoint, lambda scales, _: scales.clear())
    result = kvq("verify", checkpoint, "--json")
    codes = [finding["code"] for finding in result.json["findings"]]
    assert codes.count("scale.missing") == 4
    assert "config.no_scales" in codes


@pytest.mark.parametrize("value", [1.0, 0.25])
def test_equal_scales_look_uncalibrated_unless_recorded_as_constant(kvq, exported, value):
    checkpoint = exported(kv_cfg="FP8_CAST_KV_CFG")

    def forget(scales, metadata):
        del metadata["kvq"]
        for name in scales:
            scales[name] = np.array([value], np.float32)

    assert kvq("verify", checkpoint).code == 0
    rewrite(checkpoint, forget)
    result = kvq("verify", checkpoint, "--json")
    expected = "scale.all_one" if value == 1.0 else "scale.all_equal"
    assert [finding["code"] for finding in result.json["findings"]] == [expected] * 2  # K and V


BOTH = [f"model.layers.{i}.self_attn.{s}_scale" for i in (0, 1) for s in "kv"]


@pytest.mark.parametrize(
    "change",
    [
        lambda s, _: s.update({K0: np.ones(1, np.float32)}),
        lambda s, _: s.update({n: np.ones(1, np.float32) for n in BOTH if "k_" in n}),
        lambda s, _: s.update({n: s[n] * np.float32(448) for n in BOTH}),
        lambda s, _: s.update({n: 1 / s[n] for n in BOTH}),
        lambda s, _: s.update({n: s[n] / np.float32(6) for n in BOTH}),
        lambda s, _: s.update({K0: s[K0.replace("k_s", "v_s")], K0.replace("k_s", "v_s"): s[K0]}),
    ],
    ids=["one", "k lost", "amax", "reciprocal", "2688", "swapped"],
)
def test_a_scale_that_does_not_follow_from_its_recorded_amax_is_found(kvq, exported, change):
    checkpoint = exported()
    rewrite(checkpoint, change)
    result = kvq("verify", checkpoint, "--json")
    assert result.code == 1
    assert "provenance.scale" in {finding["code"] for finding in result.json["findings"]}


def test_a_single_1_without_provenance_is_a_warning(kvq, exported):
    checkpoint = exported()
    rewrite(checkpoint, lambda s, m: (s.update({K0: np.ones(1, np.float32)}), m.pop("kvq")))
    result = kvq("verify", checkpoint, "--json")
    assert [(f["code"], f["severity"]) for f in result.json["findings"]] == [
        ("scale.one", "warning")
    ]
    assert result.code == 0
    assert kvq("verify", checkpoint, "--strict").code == 1


def test_zero_points_that_change_nothing_are_no_finding(kvq, exported):
    checkpoint = exported()
    rewrite(checkpoint, set_scale("model.layers.0.self_attn.k_zero_point", [0.0]))
    assert kvq("verify", checkpoint).code == 0


def test_what_vllm_loads_without_a_word_is_no_error(kvq, exported):
    checkpoint = exported()
    edit_config(checkpoint, lambda c: c["quantization_config"]["kv_cache_scheme"].pop("dynamic"))
    assert kvq("verify", checkpoint, "--strict").code == 0
    edit_config(checkpoint, lambda c: c["quantization_config"].pop("config_groups"))
    assert (kvq("verify", checkpoint).code, kvq("verify", checkpoint, "--strict").code) == (0, 1)


@pytest.mark.parametrize(
    "record", ["[]", '{"status": []}', "{", '{"amax": ' + "[" * 99999 + "]" * 99999 + "}"],
    ids=["list", "incomplete", "cut", "deep"],
)  # fmt: skip
def test_a_damaged_record_is_one_clear_error(kvq, exported, record):
    checkpoint = exported()
    rewrite(checkpoint, lambda _, metadata: metadata.update(kvq=record))
    for command in ("verify", "inspect"):
        result = kvq(command, checkpoint, "--json")
        assert result.code == 2
        assert result.json["error"]["code"].startswith(("provenance.", "json."))


@pytest.mark.parametrize(
    ("made", "written"),
    [("FP8_ATTN_CFG", "FP8_KV_CFG"), ("FP8_CAST_KV_CFG", "FP8_KV_CFG"),
     ("NVFP4_KV_CFG", "FP8_PER_HEAD_KV_CFG"), ("FP8_KV_CFG", "FP8_CAST_KV_CFG")],
)  # fmt: skip
def test_an_export_in_another_configuration_matches_its_calibration(
    kvq, calibrated, tmp_path, made, written
):
    model, calibration = calibrated("llama", "--kv-cfg", made)
    target = tmp_path / "out"
    argv = ["--scales", calibration, "--kv-cfg", written, "-o", target]
    assert kvq("export", model, *argv).code == 0
    assert kvq("verify", target, "--against", calibration).code == 0


def test_scales_in_a_file_the_index_does_not_name_are_found(kvq, exported):
    checkpoint = exported()
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if "00001" in f}
    path.write_text(json.dumps(index))
    codes = {f["code"] for f in kvq("verify", checkpoint, "--json").json["findings"]}
    assert {"index.unindexed", "scale.missing", "config.no_scales"} == codes


def test_a_missing_shard_and_a_consolidated_file_are_found(kvq, exported):
    checkpoint = exported()
    first = checkpoint / "model-00001-of-00002.safetensors"
    (checkpoint / "consolidated.safetensors").write_bytes(first.read_bytes())
    codes = {f["code"] for f in kvq("verify", checkpoint, "--json").json["findings"]}
    assert codes == {"files.consolidated"}


def test_changed_weights_are_found_by_their_fingerprint(kvq, exported):
    from tests.models import build

    checkpoint = exported()
    model = build("llama")
    model.model.layers[0].self_attn.v_proj.weight.data.add_(1)
    model.save_pretrained(checkpoint.parent / "tuned")
    (checkpoint / "model-00001-of-00002.safetensors").write_bytes(
        (checkpoint.parent / "tuned" / "model.safetensors").read_bytes()
    )
    codes = {f["code"] for f in kvq("verify", checkpoint, "--json").json["findings"]}
    assert codes == {"provenance.weights"}


def test_against_a_calibration_a_checkpoint_and_printed_scales(kvq, exported, calibrated, tmp_path):
    checkpoint = exported()
    _, calibration = calibrated()
    printed = tmp_path / "scales.json"
    printed.write_text(kvq("inspect", checkpoint, "--scales", "--json").out)
    for reference in (calibration, checkpoint, printed):
        assert kvq("verify", checkpoint, "--against", reference).code == 0
    rewrite(checkpoint, lambda scales, metadata: (
        scales.update({K0: scales[K0] * np.float32(1.001)}), metadata.pop("kvq")))  # fmt: skip
    for reference in (calibration, printed):
        result = kvq("verify", checkpoint, "--against", reference, "--json")
        assert [f["tensor"] for f in result.json["findings"]] == [K0]
        assert kvq("verify", checkpoint, "--against", reference, "--rtol", "0.01").code == 0


def test_a_per_head_export_matches_its_per_tensor_calibration(kvq, exported, calibrated):
    checkpoint = exported("llama", "--granularity", "head")
    _, calibration = calibrated()
    assert kvq("verify", checkpoint, "--against", calibration).code == 0


@pytest.mark.parametrize("text", ['{"schema": 1, "scales": {"a": "1"}}', '{"schema": 2}', "[]"])
def test_a_reference_that_is_no_scales_file_is_refused(kvq, exported, tmp_path, text):
    (tmp_path / "scales.json").write_text(text)
    result = kvq("verify", exported(), "--against", tmp_path / "scales.json", "--json")
    assert (result.code, result.json["ok"]) == (2, None)


def test_every_report_form_says_the_same(kvq, exported):
    checkpoint = exported()
    rewrite(checkpoint, lambda s, m: (set_scale(K0, [0.0])(s, m), m.pop("kvq")))
    human = kvq("verify", checkpoint)
    assert f"error [scale.nonpositive] layer 0: `{K0}` is 0.0 in model-00002" in human.out
    assert "does not hold: 1 errors, 0 warnings" in human.out
    github = kvq("verify", checkpoint, "--report", "github")
    assert github.out.startswith("::error title=scale.nonpositive::")
    junit = ElementTree.fromstring(kvq("verify", checkpoint, "--report", "junit").out)
    assert (junit.get("tests"), junit.get("failures")) == ("1", "1")
    assert len(junit.findall("testcase")) == 1
    assert junit.find("testcase").get("name") == K0
    assert {r.code for r in (human, github)} == {1}


def test_a_model_without_a_cache_is_an_error_not_a_pass(kvq, tmp_path):
    write_float32(tmp_path / "model.safetensors", {"x": np.zeros(1, np.float32)}, {})
    config = {"architectures": ["MambaForCausalLM"], "num_hidden_layers": 2,
              "num_attention_heads": 1, "layer_types": ["mamba", "mamba"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = kvq("verify", tmp_path, "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "verify.no_checks")


def test_findings_that_differ_in_the_layer_alone_are_one_line(kvq, exported):
    checkpoint = exported("gemma3")
    argv = ["verify", checkpoint, "--engine", "vllm", "--kv-cache-dtype", "bfloat16"]
    lines = [line for line in kvq(*argv).out.splitlines() if "[engine.unquantized]" in line]
    assert [line.partition(": ")[0] for line in lines] == ["error [engine.unquantized] layers 0-3"]
    argv += ["--kv-cache-dtype", "auto", "--kv-cache-dtype-skip-layers", "0,2,3"]
    assert "warning [engine.unquantized] layers 0, 2-3: " in kvq(*argv).out
    assert len(kvq(*argv, "--json").json["findings"]) == 3
