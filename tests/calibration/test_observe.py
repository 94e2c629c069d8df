"""What must not disturb an observation: other threads, other lengths, weights that are not ours."""

import json
import shutil
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kvq as api
from kvq.errors import InputError
from kvq.geometry import LayerGeometry
from tests import zoo
from tests.models import build

BATCHES = [torch.arange(i, i + 20)[None] % 128 for i in range(30)]


def test_a_model_used_by_another_thread_meanwhile_gives_the_same_maxima():
    model = build("llama", num_hidden_layers=3)
    expected = api.calibrate(model, BATCHES)
    stop = threading.Event()

    def disturb():
        with torch.no_grad():
            while not stop.is_set():
                model(torch.full((1, 9), 77), use_cache=True)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        found = api.calibrate(model, BATCHES, kv_cfg="FP8_ATTN_CFG")
    finally:
        stop.set()
        thread.join()
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert layer.tokens == other.tokens == 600
        for quantizer, amax in other.amax.items():
            np.testing.assert_array_equal(layer.amax[quantizer], amax)


def test_dynamic_rope_does_not_make_the_order_of_lengths_matter():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = build("llama", max_position_embeddings=16, rope_parameters=rope)
    frequencies = model.model.rotary_emb.inv_freq
    long, short = torch.arange(64)[None], torch.arange(20)[None]
    digests = {api.calibrate(model, batches).digest for batches in ([long, short], [short, long])}
    assert len(digests) == 1
    assert api.calibrate(model, [short]).digest == api.calibrate(model, [short]).digest
    assert model.model.rotary_emb.inv_freq is frequencies


def test_weights_that_are_not_the_checkpoints_are_refused(checkpoints):
    from transformers import AutoModelForCausalLM

    path = checkpoints("qwen3")
    for dtype in (torch.bfloat16, torch.float32):  # another dtype is still the same weights
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        api.calibrate(model, BATCHES[:2], checkpoint=path)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_norm.weight.mul_(10)
    with pytest.raises(InputError, match=r"layers\.1\.self_attn\.k_norm\.weight"):
        api.calibrate(model, BATCHES[:2], checkpoint=path)
    found = api.calibrate(model, BATCHES[:2])
    assert found.layers


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": BATCHES[0], "use_cache": True},
        {"input_ids": BATCHES[0], "labels": BATCHES[0]},
        [1, 2, 3],
        torch.arange(5),
    ],
)
def test_batches_that_would_mean_something_else_are_refused(batch):
    with pytest.raises(InputError) as caught:
        api.calibrate(build("llama"), [batch])
    assert caught.value.code == "live.batch"


def test_a_padded_decoder_is_refused():
    model = zoo.tiny_model("seq2seq", "t5")
    ids = torch.arange(3, 11)[None]
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]])
    batch = {"input_ids": ids, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    with pytest.raises(InputError, match="4 positions of `decoder_attention_mask`"):
        api.calibrate(model, [batch])
    assert api.calibrate(model, [{"input_ids": ids.tolist(), "decoder_input_ids": ids}]).layers


def test_a_compiled_model_is_refused_with_the_way_that_works():
    with pytest.raises(InputError, match="compiled"):
        api.calibrate(torch.compile(build("llama"), backend="eager"), BATCHES[:1])


def test_repeated_heads_count_once_and_other_heads_are_an_error():
    from kvq.calibration.amax import Observer
    from kvq.errors import CalibrationError
    from kvq.quantizers import KEY

    layer = LayerGeometry(0, "full_attention", "h.0", 4, 2, 3, 3)
    observer = Observer([layer], queries=False)
    two = torch.tensor([1.0, 5.0]).view(1, 2, 1, 1).expand(1, 2, 7, 3)
    observer.see(("h.0", KEY), two.repeat_interleave(2, dim=1))
    assert observer.amax["h.0", KEY].tolist() == [1, 5]
    with pytest.raises(CalibrationError, match="expected \\[batch, 2"):
        observer.see(("h.0", KEY), two.repeat(1, 2, 1, 1))
    with pytest.raises(CalibrationError, match="expected \\[batch, 2, seq_len, 3\\]"):
        observer.see(("h.0", KEY), two[..., :2])


def edited(tmp_path, kind, name, change):
    """Save a tiny model and change its tensors and config; returns the folder."""
    folder = tmp_path / "model"
    zoo.tiny_model(kind, name).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_bias(tensors, config):
    name = next(n for n in tensors if n.endswith("layers.0.self_attn.k_proj.weight"))
    bias = torch.full((tensors[name].shape[0],), 5.0, dtype=torch.bfloat16)
    tensors[name.replace("weight", "bias")] = bias


def fp8_mlp(tensors, config):
    for name in [n for n in tensors if ".mlp.down_proj.weight" in n]:
        tensors[name] = (tensors[name] * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.tensor(0.01)


def unknown_method(tensors, config):
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}


def foreign_class(tensors, config):
    config["architectures"] = ["MyLlamaForCausalLM"]


@pytest.mark.parametrize(
    ("kind", "name", "change", "code"),
    [
        ("image-text", "llava", add_bias, "model.unused_tensors"),  # a prefix that loading renames
        ("causal", "llama", add_bias, "model.unused_tensors"),
        ("causal", "llama", fp8_mlp, "model.unused_tensors"),
        ("image-text", "llava", fp8_mlp, "model.unused_tensors"),
        ("causal", "llama", unknown_method, "model.quantization"),
        ("causal", "llama", foreign_class, "model.architecture"),
    ],
)
def test_another_model_than_the_files_say_is_never_run(
    kvq, rows, tmp_path, kind, name, change, code
):
    folder = edited(tmp_path, kind, name, change)
    argv = ["--dataset", rows, "--seq-len", 40, "-o", tmp_path / "c", "--json"]
    result = kvq("calibrate", folder, *argv)
    assert (result.code, result.json["error"]["code"]) == (2, code), result.json
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"max_position_embeddings": None},
        {"architectures": "LlamaForCausalLM"},
        {"attention_dropout": "a"},
        {"pad_token_id": 5000},
        {"num_kv_shared_layers": "x"},
        {"layer_types": [{}, {}, {}, {}]},
    ],
)
def test_a_strange_config_is_never_an_internal_error(kvq, rows, tmp_path, change):
    folder = edited(tmp_path, "causal", "llama", lambda tensors, config: config.update(change))
    argv = ["--dataset", rows, "--seq-len", 40, "-o", tmp_path / "c", "--json"]
    result = kvq("calibrate", folder, *argv)
    assert result.code == 0 or result.json["error"]["code"] != "internal", result.json


def test_layers_of_one_cache_are_skipped_together(kvq, tmp_path):
    folder = tmp_path / "model"
    zoo.tiny_model("causal", "gemma3n_text").save_pretrained(folder)
    row = {"input_ids": list(range(3, 40))}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1]
    result = kvq("calibrate", folder, *argv, "--skip-layers", "5", "-o", tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    donor = next(layer["shared_from"] for layer in config["layers"] if layer["layer_idx"] == 5)
    assert config["skip_layers"] == [int(donor.split(".")[2]), 5]
    assert "skipped together" in result.err


def test_a_margin_on_a_constant_amax_is_refused_and_inspect_shows_what_was_seen(
    kvq, checkpoints, rows, tmp_path
):
    model = checkpoints("llama")
    argv = ["--dataset", rows, "--seq-len", 64, "--margin", 2, "-o", tmp_path / "c"]
    result = kvq("calibrate", model, "--kv-cfg", "FP8_CAST_KV_CFG", *argv, "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "option.margin")
    assert kvq("calibrate", model, *argv).code == 0
    assert kvq("export", model, "--scales", tmp_path / "c", "-o", tmp_path / "out").code == 0
    shown = [kvq("inspect", tmp_path / p, "--json").json["layers"] for p in ("c", "out")]
    assert [row["amax"] for row in shown[0]] == [row["amax"] for row in shown[1]]
    assert [row["scale"] for row in shown[0]] == [row["scale"] for row in shown[1]]
