import json
import subprocess
import sys

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
