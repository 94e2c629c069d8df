import json
import subprocess
import sys

import numpy as np
import pytest


def test_a_checkpoint_shows_the_attention_trees_with_amax(kvq, exported, calibrated):
    result = kvq("inspect", exported())
    assert result.code == 0, result.err
    assert result.out.count("(self_attn): QuantLlamaAttention(") == 2
    assert result.out.count("(q_bmm_quantizer): TensorQuantizer(disabled)") == 2
    _, calibration = calibrated()
    shown = kvq("inspect", calibration)
    lines = [line.strip() for line in shown.out.splitlines() if "_bmm_quantizer" in line]
    assert [line.strip() for line in result.out.splitlines() if "_bmm_quantizer" in line] == lines
    assert "KV scales: fp8, 2 of 2 layers; weights bf16" in result.out


def test_a_checkpoint_without_scales_says_what_an_engine_would_do(kvq, checkpoints):
    result = kvq("inspect", checkpoints("llama"))
    assert "KV scales: none; an fp8 cache would run at scale 1.0" in result.out
    assert "QuantLlamaAttention [derived name](" in result.out


def test_nvfp4_prints_its_blocks(kvq, calibrated):
    _, calibration = calibrated("llama", "--kv-cfg", "NVFP4_KV_CFG")
    line = (
        "TensorQuantizer((2, 1) bit fake block_sizes={-1: 16, 'type': 'dynamic', "
        "'scale_bits': (4, 3)}, amax="
    )
    assert kvq("inspect", calibration).out.count(line) == 4


def test_per_head_prints_axis_and_range(kvq, calibrated):
    _, calibration = calibrated("llama", "--kv-cfg", "FP8_PER_HEAD_KV_CFG")
    out = kvq("inspect", calibration).out
    assert out.count("(4, 3) bit fake axis=1 amax=[") == 4
    assert out.count("](2) calibrator=MaxCalibrator quant)") == 4


def test_scales_table_flags_outliers(kvq, tmp_path, rows):
    from tests.models import build

    model = build("qwen2", num_hidden_layers=4)
    model.model.layers[0].self_attn.k_proj.bias.data[3] = 600
    model.model.layers[3].self_attn.k_proj.bias.data[5] = 900
    model.save_pretrained(tmp_path / "model")
    args = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c"]
    assert kvq("calibrate", tmp_path / "model", *args).code == 0
    layers = kvq("inspect", tmp_path / "c", "--json").json["layers"]
    flagged = {layer["layer_idx"]: layer["flags"] for layer in layers if layer["flags"]}
    assert set(flagged) == {0, 3}
    assert all(any(flag == "k amax > 448" for flag in flags) for flags in flagged.values())
    table = kvq("inspect", tmp_path / "c", "--scales").out
    assert "k amax > 448" in table


def test_the_answer_is_one_json_document(kvq, exported):
    shown = kvq("inspect", exported(), "--json").json
    assert (shown["schema"], shown["kind"], len(shown["layers"])) == (1, "checkpoint", 2)


def test_a_single_file_is_inspected_without_its_config(kvq, exported):
    result = kvq("inspect", exported() / "model-00002-of-00002.safetensors", "--scales")
    assert "4 tensors, 4 KV scales" in result.out


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({"pytorch_model.bin": b"", "config.json": b"{}"}, "save_pretrained"),
        ({"model.gguf": b""}, "gguf_file"),
        ({"adapter_model.safetensors": b"", "config.json": b"{}"}, "merge"),
        ({}, "expected config.json"),
    ],
)
def test_inputs_of_other_kinds_are_refused_with_what_converts_them(kvq, tmp_path, files, hint):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    result = kvq("inspect", tmp_path, "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "checkpoint.no_safetensors")
    assert hint in result.json["error"]["hint"]


def test_inspect_verify_and_export_import_neither_torch_nor_transformers(exported, calibrated):
    checkpoint = exported()
    model, calibration = calibrated()
    program = (
        "import sys; from kvq.cli import run; code = run(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'datasets', 'triton'} & set(sys.modules); "
        "assert not heavy, heavy; sys.exit(code)"
    )
    for argv in (
        ["--help"],
        ["inspect", checkpoint, "--scales"],
        ["inspect", calibration],
        ["verify", checkpoint, "--against", calibration],
        ["export", model, "--scales", calibration, "-o", checkpoint.parent / "o", "--dry-run"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, argv)], capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_scales_json_is_what_against_reads(kvq, exported):
    scales = kvq("inspect", exported(), "--scales", "--json").json
    assert scales["schema"] == 1
    assert json.dumps(scales["scales"]).count("_scale") == 4


def test_a_damaged_scale_is_shown_not_a_crash(kvq, exported):
    from tests.commands.test_verify import K0, rewrite, set_scale

    checkpoint = exported()
    rewrite(checkpoint, set_scale(K0, [np.nan]))
    assert kvq("inspect", checkpoint, "--json").json["layers"][0]["scale"]["k"] == ["nan"]
    assert kvq("inspect", checkpoint, "--scales", "--json").json["scales"][K0] == "nan"
    assert kvq("inspect", checkpoint, "--scales").code == 0


@pytest.mark.parametrize("scheme", ["FP8", [], {"strategy": 5}, None])
def test_odd_schemes_are_inspected_without_a_crash(kvq, exported, scheme):
    checkpoint = exported()
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(kv_cache_scheme=scheme, config_groups=[1])
    path.write_text(json.dumps(config))
    assert kvq("inspect", checkpoint).code == 0
    assert kvq("verify", checkpoint).code == 1


def test_scales_under_other_names_are_not_called_absent(kvq, checkpoints, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoints("llama") / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((checkpoints("llama") / "config.json").read_bytes())
    out = kvq("inspect", tmp_path).out
    assert "KV scales: undeclared, 0 of 2 layers" in out
    shown = kvq("inspect", tmp_path, "--scales", "--json").json
    assert shown["scales"] == {"model.layers.0.self_attn.k_proj.k_scale": 1.0}


def test_a_checkpoint_of_the_bare_decoder_has_its_own_paths_in_the_tree(kvq, rows, tmp_path):
    from tests.models import build

    model = build("llama", tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLM"]}
    path.write_text(json.dumps(config))
    argv = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c"]
    result = kvq("calibrate", tmp_path / "model", *argv)
    assert result.code == 0, result.err
    assert result.out.startswith("LlamaModel(")
    assert result.out.count("QuantLlamaAttention(") == 2
    argv = ["--scales", tmp_path / "c", "-o", tmp_path / "o"]
    assert kvq("export", tmp_path / "model", *argv).code == 0
    scales = kvq("inspect", tmp_path / "o", "--scales", "--json").json["scales"]
    assert set(scales) == {f"layers.{i}.self_attn.{s}_scale" for i in (0, 1) for s in "kv"}
