"""kvq calibrate --streaming: one layer in memory at a time, and the same bytes."""

import json

import numpy as np
import pytest
import torch

from tests import zoo

# kind of zoo entry, model type
FAMILIES = [
    *(("causal", name) for name in (
        "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "gemma3n_text",
        "gemma4_text", "phi3", "gpt2", "gpt_neox", "falcon", "bloom", "gpt_oss", "llama4_text",
        "deepseek_v3", "deepseek_v2", "qwen3_next", "nemotron_h", "jamba",
        "zamba",  # two layers share their weights
    )),
    ("image-text", "gemma3"),
    ("image-text", "qwen2_5_vl"),
]  # fmt: skip


QUICK = ("llama", "mixtral", "gemma3_text", "deepseek_v3")


def write_rows(path, lengths=(5, 17, 40, 40, 17, 40)):
    generator = np.random.default_rng(0)
    rows = [{"input_ids": generator.integers(3, 100, n).tolist()} for n in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def calibrate(kvq, tmp_path):
    """Calibrate a folder on six short rows; returns the result and the bytes written."""
    data = write_rows(tmp_path / "rows.jsonl")

    def call(model, *options, name="calibration"):
        result = kvq(
            "calibrate", model, "--dataset", data, "--seq-len", 48, "--min-tokens", 1, "-o",
            tmp_path / name, "--overwrite", *options,
        )  # fmt: skip
        return result, contents(tmp_path / name) if result.code == 0 else None

    return call


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(*one, marks=[pytest.mark.slow] if one[1] not in QUICK else [])
        for one in FAMILIES
    ],
)
def test_streaming_gives_the_same_bytes(calibrate, tmp_path, kind, name):
    zoo.tiny_model(kind, name).save_pretrained(tmp_path / "model")
    whole, expected = calibrate(tmp_path / "model")
    assert whole.code == 0, whole.err
    result, in_memory = calibrate(tmp_path / "model", "--streaming")
    assert "Streaming, one decoder layer" in result.err
    assert in_memory == expected
    result, in_files = calibrate(tmp_path / "model", "--streaming", "--memory-budget", 1)
    assert "in files beside calibration" in result.err
    assert in_files == expected
    assert {p.name for p in tmp_path.iterdir()} == {"model", "rows.jsonl", "calibration"}


def test_layers_that_share_what_is_not_saved_are_named(calibrate, checkpoints, tmp_path):
    zoo.tiny_model("causal", "gemma3n_text").save_pretrained(tmp_path / "model")
    donor = 2  # of layers 4 and 5, the first of those that are read later
    result, _ = calibrate(tmp_path / "model", "--streaming")
    assert f"Progress is saved before layer {donor} alone" in result.err
    assert "Progress is saved" not in calibrate(checkpoints("llama"), "--streaming")[0].err


@pytest.mark.parametrize("options", [["--kv-cfg", "FP8_ATTN_CFG"], ["--dtype", "float32"],
                                     ["--batch-size", 3], ["--skip-layers", "1"]])  # fmt: skip
def test_streaming_honours_the_other_options(calibrate, checkpoints, options):
    model = checkpoints("gemma3")
    _, expected = calibrate(model, *options)
    result, streamed = calibrate(model, *options, "--streaming")
    assert "Streaming" in result.err
    assert streamed == expected


def test_tied_and_sharded_weights_stream(calibrate, tmp_path):
    from tests.models import build

    for tied in (True, False):
        model = build("llama", tie_word_embeddings=tied)
        model.save_pretrained(tmp_path / f"model-{tied}", max_shard_size="20KB")
        _, expected = calibrate(tmp_path / f"model-{tied}")
        assert len(list((tmp_path / f"model-{tied}").glob("*.safetensors"))) > 2
        assert calibrate(tmp_path / f"model-{tied}", "--streaming")[1] == expected


def test_every_weight_is_read_once_and_of_embeddings_the_rows_in_use(
    calibrate, checkpoints, monkeypatch
):
    from kvq.calibration.streaming.stored import Reader

    read = []
    before = Reader._fill

    def counted(self, file, info, parts, place):
        read.append((info.name, sum(size for _, size in parts)))
        before(self, file, info, parts, place)

    monkeypatch.setattr(Reader, "_fill", counted)
    result, _ = calibrate(checkpoints("llama"), "--streaming")
    assert result.code == 0
    names = [name for name, _ in read]
    assert sorted(set(names)) == sorted(names)
    assert sum("layers." in name for name in names) == 2 * 9
    assert "lm_head.weight" not in names
    generator = np.random.default_rng(0)
    used = {i for n in (5, 17, 40, 40, 17, 40) for i in generator.integers(3, 100, n).tolist()}
    assert dict(read)["model.embed_tokens.weight"] == len(used) * 32 * 2 < 128 * 32 * 2


def test_no_more_than_two_layers_are_filled_at_once(calibrate, checkpoints, monkeypatch):
    from kvq.calibration.streaming.hollow import HollowModel

    most = 0
    fill = HollowModel.fill

    def counted(self, number):
        nonlocal most
        fill(self, number)
        filled = [next(layer.parameters()).device.type != "meta" for layer in self.layers]
        most = max(most, sum(filled))

    monkeypatch.setattr(HollowModel, "fill", counted)
    result, _ = calibrate(checkpoints("llama", num_hidden_layers=6), "--streaming")
    assert result.code == 0
    assert 1 <= most <= 2


def test_a_model_that_does_not_fit_is_streamed_aloud(calibrate, checkpoints, monkeypatch):
    _, expected = calibrate(checkpoints("llama"))
    monkeypatch.setattr("kvq.calibration.memory.available_bytes", lambda device: 4096)
    result, streamed = calibrate(checkpoints("llama"), "--memory-budget", "1MiB")
    assert "Streaming, the weights take 0.0 GiB, and cpu has 0.0 GiB left: one" in result.err
    assert streamed == expected


def test_a_model_that_cannot_be_streamed_says_why_and_is_loaded_whole(kvq, tmp_path):
    folder = tmp_path / "model"
    zoo.tiny_model("seq2seq", "bart").save_pretrained(folder)
    rows = [{"input_ids": [5, 6, 7], "labels": [8, 9]}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1,
            "--target-column", "labels"]  # fmt: skip
    assert kvq("calibrate", folder, *argv, "-o", tmp_path / "a").code == 0
    result = kvq("calibrate", folder, *argv, "-o", tmp_path / "b", "--streaming")
    assert result.code == 0
    assert (
        "Not streamed, since its decoder reads what its encoder made. The whole model is loaded"
        in result.err
    )
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_model_that_neither_fits_nor_streams_is_refused(kvq, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    zoo.tiny_model("seq2seq", "bart").save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [5, 6, 7], "labels": [8, 9]}\n')
    monkeypatch.setattr("kvq.calibration.memory.available_bytes", lambda device: 4096)
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1,
            "--target-column", "labels", "-o", tmp_path / "c", "--json"]  # fmt: skip
    result = kvq("calibrate", folder, *argv)
    assert (result.code, result.json["error"]["code"]) == (2, "streaming.impossible")
    assert "its decoder reads what its encoder made" in result.json["error"]["message"]
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("glm_moe_dsa", "layer 0 returns more than hidden states"),
        ("xlm", "something comes between layers 0 and 1"),
        ("zaya", "transformers writes into its weights while it loads them"),
        ("big_bird", "layer 0 exchanges its modules while it runs"),
    ],
)
def test_a_model_whose_layers_depend_on_more_is_not_streamed(calibrate, tmp_path, name, reason):
    zoo.tiny_model("causal", name).save_pretrained(tmp_path / "model")
    _, expected = calibrate(tmp_path / "model")
    result, found = calibrate(tmp_path / "model", "--streaming")
    assert f"Not streamed, since {reason}. The whole model is loaded instead." in result.err
    assert found == expected


def test_errors_are_those_of_a_whole_run(kvq, tmp_path, rows):
    from safetensors.torch import load_file, save_file

    from tests.models import build

    model = build("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[3, 3] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    argv = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c", "--streaming", "--json"]
    result = kvq("calibrate", tmp_path / "nan", *argv)
    assert (result.code, result.json["error"]["code"]) == (2, "calibrate.nonfinite")
    assert "`model.layers.1.self_attn.v_bmm_quantizer`" in result.json["error"]["message"]
    tensors = load_file(tmp_path / "nan" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "nan" / "model.safetensors", {"format": "pt"})
    result = kvq("calibrate", tmp_path / "nan", *argv)
    assert (result.code, result.json["error"]["code"]) == (2, "model.missing_tensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["nan"]


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5.2GiB", "8XB"])
def test_a_bad_memory_budget_is_refused(kvq, checkpoints, rows, tmp_path, text):
    argv = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c", "--json"]
    result = kvq("calibrate", checkpoints("llama"), *argv, f"--memory-budget={text}")
    assert (result.code, result.json["error"]["code"]) == (2, "option.memory_budget")


def test_a_memory_budget_without_streaming_is_said_to_change_nothing(calibrate, checkpoints):
    result, _ = calibrate(checkpoints("llama"), "--memory-budget", "1GiB")
    assert "--memory-budget changes nothing: the whole model is in memory." in result.err


def test_a_model_that_looks_at_the_device_of_its_tower_is_not_streamed(calibrate, tmp_path):
    zoo.tiny_model("image-text", "idefics3").save_pretrained(tmp_path / "model")
    _, expected = calibrate(tmp_path / "model")
    result, found = calibrate(tmp_path / "model", "--streaming")
    assert "Not streamed, since what it computes before its layers takes weights" in result.err
    assert found == expected


@pytest.mark.real_model
def test_the_real_model_streams_to_the_same_bytes(kvq, smollm2, tmp_path):
    argv = ["--num-samples", 3, "--seq-len", 96]
    assert kvq("calibrate", smollm2, *argv, "-o", tmp_path / "a").code == 0
    result = kvq("calibrate", smollm2, *argv, "-o", tmp_path / "b", "--streaming")
    assert "Streaming, one decoder layer" in result.err
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral", "deepseek_v3", "gemma3n_text"])
def test_streaming_on_cuda_gives_the_same_bytes_for_the_same_plan(calibrate, tmp_path, name):
    zoo.tiny_model("causal", name).save_pretrained(tmp_path / "model")
    _, expected = calibrate(tmp_path / "model", "--device", "cuda", "--batch-size", 3)
    for budget in ("1GiB", "1"):
        result, streamed = calibrate(tmp_path / "model", "--device", "cuda", "--batch-size", 3,
                                     "--streaming", "--memory-budget", budget)  # fmt: skip
        assert "Streaming" in result.err
        assert streamed == expected


@pytest.mark.parametrize(("family", "masks"), [("llama", 0), ("gemma3", 1)])
def test_no_square_of_the_length_is_kept_but_the_mask_of_a_window(
    calibrate, checkpoints, monkeypatch, family, masks
):
    from kvq.calibration.streaming.calls import Kept

    sizes = []
    put = Kept.put

    def measured(self, shape, calls):
        if shape[1] == 40:
            sizes.append([tensor.numel() for tensor in calls.tensors()])
        put(self, shape, calls)

    monkeypatch.setattr(Kept, "put", measured)
    result, _ = calibrate(checkpoints(family), "--streaming")
    assert result.code == 0
    (kept,) = sizes
    assert sum(size >= 40 * 40 for size in kept) == masks
