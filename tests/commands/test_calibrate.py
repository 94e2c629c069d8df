import json
import random
import re

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from kvq.calibration.model import find_device
from kvq.errors import InputError
from tests.models import FAMILIES
from tests.recorder import record

SIDES = {"q": "q_bmm_quantizer", "k": "k_bmm_quantizer", "v": "v_bmm_quantizer"}


def statistics(calibration):
    return load_file(calibration / "calibration.safetensors")


def read_rows(path):
    return [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
def test_amax_equals_a_plain_recorder_bit_for_bit(calibrated, rows, family):
    model, calibration = calibrated(family, "--kv-cfg", "FP8_ATTN_CFG")
    implementation = "eager" if family == "gemma2" else "sdpa"
    expected = record(model, read_rows(rows), torch.bfloat16, implementation)
    found = statistics(calibration)
    assert len(found) == len(expected)
    for (layer, side), amax in expected.items():
        name = f"model.layers.{layer}.self_attn.{SIDES[side]}._amax"
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], amax, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch_size", [3, 8])
def test_amax_does_not_depend_on_batch_size_or_row_order(
    calibrated, kvq, checkpoints, rows, tmp_path, dtype, batch_size
):
    _, alone = calibrated("llama", "--dtype", dtype, "--batch-size", 1)
    shuffled = rows.read_text().splitlines()
    random.Random(1).shuffle(shuffled)
    other_order = tmp_path / "shuffled.jsonl"
    other_order.write_text("\n".join(shuffled))
    target = tmp_path / "other"
    result = kvq(
        "calibrate", checkpoints("llama"), "--dataset", other_order, "--seq-len", 64,
        "--num-samples", 24, "--dtype", dtype, "--batch-size", batch_size, "-o", target,
    )  # fmt: skip
    assert result.code == 0, result.err
    name = "calibration.safetensors"
    assert (target / name).read_bytes() == (alone / name).read_bytes()


def test_same_input_gives_the_same_bytes(calibrated):
    _, calibration = calibrated()
    first = {path.name: path.read_bytes() for path in calibration.iterdir()}
    _, calibration = calibrated()
    assert {path.name: path.read_bytes() for path in calibration.iterdir()} == first


def test_no_output_file_holds_an_absolute_path(calibrated, tmp_path):
    _, calibration = calibrated()
    for path in calibration.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()


def test_tokens_are_counted_per_layer(calibrated):
    _, calibration = calibrated()
    config = json.loads((calibration / "config.json").read_text())
    assert [layer["tokens"] for layer in config["layers"]] == [8 * (5 + 17 + 40)] * 2


@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_layer_shows_in_which_batch_its_maxima_were_reached(
    kvq, checkpoints, rows, tmp_path, batch_size
):
    from kvq.calibration.batches import Sequence, plan_batches

    argv = ["--dataset", rows, "--seq-len", 64, "--num-samples", 9, "--batch-size", batch_size,
            "--min-tokens", 1]  # fmt: skip
    result = kvq("calibrate", checkpoints("llama"), *argv, "-o", tmp_path / "c")
    given = read_rows(rows)[:9]
    alone = [record(checkpoints("llama"), [row], torch.bfloat16, "sdpa") for row in given]
    plan = plan_batches([Sequence(np.array(row)) for row in given], batch_size)
    by_batch = [
        {key: np.max([alone[i][key] for i in batch], axis=0) for key in alone[0]} for batch in plan
    ]
    layers = json.loads((tmp_path / "c" / "config.json").read_text())["layers"]
    last = []
    for layer in layers:
        for side in "kv":
            shown = np.stack([one[layer["layer_idx"], side] for one in by_batch])
            expected = int(shown.argmax(0).max())  # of equal ones, the first
            assert layer["raised"][f"{side}_bmm_quantizer"] == expected
            last.append(expected)
    early = sum(number < len(plan) / 2 for number in last)
    assert (
        f"convergence: {early} of 4 maxima were reached in the first half of the {len(plan)} "
        "batches, the last one (layer " in result.out
    )
    assert f") in batch {max(last) + 1}\n" in result.out


def test_the_tree_and_the_table_are_printed_at_the_end(kvq, checkpoints, rows, tmp_path):
    result = kvq(
        "calibrate", checkpoints("llama"), "--dataset", rows, "--seq-len", 64,
        "--num-samples", 24, "-o", tmp_path / "calibration",
    )  # fmt: skip
    assert result.code == 0, result.err
    amax = statistics(tmp_path / "calibration")["model.layers.0.self_attn.k_bmm_quantizer._amax"]
    line = (
        "(k_bmm_quantizer): TensorQuantizer((4, 3) bit fake per-tensor "
        f"amax={amax.max():.4f} calibrator=MaxCalibrator quant)"
    )
    assert line in result.out
    assert "(self_attn): QuantLlamaAttention(" in result.out
    assert "(q_bmm_quantizer): TensorQuantizer(disabled)" in result.out
    assert "(q_proj): Linear(in_features=32, out_features=32, bias=False)" in result.out
    assert "496 tokens, batches of" in result.err


def test_a_layer_with_nan_is_named_and_nothing_is_written(kvq, tmp_path, rows):
    from tests.models import build

    model = build("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[3, 3] = float("nan")
    model.save_pretrained(tmp_path / "model")
    result = kvq(
        "calibrate", tmp_path / "model", "--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c"
    )
    assert result.code == 2
    assert (
        "NaN or infinity in `model.layers.1.self_attn.v_bmm_quantizer`; nothing was written"
        in result.err
    )
    assert not (tmp_path / "c").exists()


def test_a_missing_tensor_is_an_error_not_random_numbers(kvq, tmp_path, rows):
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    from tests.models import save

    save("llama", tmp_path / "model")
    tensors = load(tmp_path / "model" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    result = kvq(
        "calibrate", tmp_path / "model", "--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c"
    )
    assert result.code == 2
    assert "`model.layers.1.mlp.up_proj.weight`" in result.err


def test_the_model_is_left_as_found():
    import transformers

    from kvq.calibration.amax import Observer
    from kvq.calibration.modules import attention_modules
    from kvq.calibration.observe import observing
    from kvq.pipeline.live import live_geometry
    from tests.models import build

    model = build("llama").train()
    model.model.layers[0].mlp.eval()  # a part someone froze
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    registered = set(transformers.AttentionInterface._global_mapping)
    implementation = model.config._attn_implementation
    layers = live_geometry(model).layers
    attentions = attention_modules(model.model, [layer.attention for layer in layers])
    with observing(model.model, attentions, Observer(layers, queries=True)) as run:
        run({"input_ids": torch.arange(8)[None]})
        assert model.config._attn_implementation is not implementation
        assert not model.model.training
    assert model.config._attn_implementation is implementation
    assert set(transformers.AttentionInterface._global_mapping) == registered
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_after_the_first_sequence_nothing_runs_that_changes_no_maximum():
    from kvq.calibration.amax import Observer
    from kvq.calibration.modules import attention_modules
    from kvq.calibration.observe import observing
    from kvq.pipeline.live import live_geometry
    from tests.models import build

    model = build("llama")
    runs = []
    last = model.model.layers[1]
    for module in (model.lm_head, model.model.norm, last.mlp, last.self_attn.o_proj):
        module.register_forward_pre_hook(lambda module, _: runs.append(module))
    layers = live_geometry(model).layers
    attentions = attention_modules(model, [layer.attention for layer in layers])
    observer = Observer(layers, queries=False)
    with observing(model, attentions, observer) as run:
        run({"input_ids": torch.arange(8)[None]})
        assert len(runs) == 4
        run({"input_ids": torch.arange(9)[None]})
    assert len(runs) == 4
    assert len(observer.results()) == 4
    assert set(observer.tokens.values()) == {17}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--kv-cfg", "FP8_KV_CFF"], "config.unknown"),
        (["--batch-size", "0"], "option.batch_size"),
        (["--batch-size", "many"], "option.batch_size"),
        (["--dtype", "int8"], "option.dtype"),
        (["--device", "tpu9"], "option.device"),
        (["--device", "cuda"], "option.device"),
        (["--seq-len", "0"], None),
        (["--num-samples", "0"], None),
        (["--seq-len", "65"], None),
    ],
)
def test_a_bad_option_is_one_error_with_exit_code_2(
    kvq, checkpoints, rows, tmp_path, options, code
):
    if code == "option.device" and "cuda" in options and torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    result = kvq(
        "calibrate", checkpoints("llama"), "--dataset", rows, "--seq-len", 64, "-o",
        tmp_path / "c", "--json", *options,
    )  # fmt: skip
    assert result.code == 2
    assert result.json["ok"] is None
    assert code is None or result.json["error"]["code"] == code
    assert not (tmp_path / "c").exists()


def test_an_existing_target_is_kept_without_overwrite(kvq, checkpoints, rows, tmp_path):
    target = tmp_path / "c"
    target.mkdir()
    (target / "mine").write_text("mine")
    result = kvq("calibrate", checkpoints("llama"), "--dataset", rows, "-o", target)
    assert (result.code, (target / "mine").read_text()) == (2, "mine")
    assert "--overwrite" in result.err


@pytest.mark.real_model
def test_real_model_reproduces_the_golden_amax(kvq, smollm2, tmp_path):
    from pathlib import Path

    golden = json.loads((Path(__file__).parent.parent / "goldens/smollm2_amax.json").read_text())
    vocab = golden["vocab_size"]
    lines = [
        json.dumps({"input_ids": [(i * 7919 + j * 104729 + (i * j) % 977) % vocab
                                  for j in range(256)]})
        for i in range(4)
    ]  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(lines))
    target = tmp_path / "calibration"
    result = kvq(
        "calibrate", smollm2, "--dataset", rows, "--seq-len", 256, "--num-samples", 4,
        "--dtype", "float32", "--kv-cfg", "FP8_ATTN_CFG", "-o", target,
    )  # fmt: skip
    assert result.code == 0, result.err
    found = statistics(target)
    assert len(golden["amax"]) == len(found) == 90
    for key, amax in golden["amax"].items():
        layer, side = key.split(".")
        name = f"model.layers.{layer}.self_attn.{SIDES[side]}._amax"
        np.testing.assert_allclose(found[name], amax, rtol=1e-4, err_msg=name)


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_model_amax_is_bit_equal_for_batch_sizes_and_padding_sides(
    kvq, smollm2, tmp_path, dtype
):
    import shutil

    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Document {i}: " + "the quick brown fox " * (i % 3 + 4)
                                for i in range(18)))  # fmt: skip
    digests = set()
    for batch_size, side in ((1, "left"), (3, "right"), (8, "left")):
        model = tmp_path / f"model-{side}"
        if not model.exists():
            model.mkdir()
            for file in smollm2.iterdir():
                (model / file.name).symlink_to(file)
            config = model / "tokenizer_config.json"
            changed = json.loads(config.read_text()) | {"padding_side": side}
            config.unlink()
            config.write_text(json.dumps(changed))
        target = tmp_path / f"c{batch_size}"
        result = kvq(
            "calibrate", model, "--dataset", text, "--seq-len", 64, "--no-pack", "--dtype", dtype,
            "--num-samples", 18, "--batch-size", batch_size, "-o", target,
        )  # fmt: skip
        assert result.code == 0, result.err
        digests.add((target / "calibration.safetensors").read_bytes())
        shutil.rmtree(target)
    assert len(digests) == 1


def test_a_layer_that_never_reaches_the_cache_is_named(
    kvq, checkpoints, rows, tmp_path, monkeypatch
):
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward

    def bypass(self, *args, past_key_values=None, **kwargs):
        cache = None if self.layer_idx == 0 else past_key_values
        return forward(self, *args, past_key_values=cache, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", bypass)
    result = kvq(
        "calibrate", checkpoints("llama"), "--dataset", rows, "--seq-len", 64, "-o",
        tmp_path / "c", "--json",
    )  # fmt: skip
    assert (result.code, result.json["error"]["code"]) == (2, "calibrate.not_observed")
    message = result.json["error"]["message"]
    names = [f"`model.layers.0.self_attn.{side}_bmm_quantizer`" for side in "kv"]
    assert message == f"0 observations of {', '.join(names)}"
    assert not (tmp_path / "c").exists()


def test_remote_code_is_not_run_unless_asked(kvq, checkpoints, rows, tmp_path):
    import shutil

    model = tmp_path / "model"
    shutil.copytree(checkpoints("llama"), model)
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil"}
    config["model_type"] = "evil"
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text("raise SystemExit('executed')")
    argv = ["calibrate", model, "--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c", "--json"]
    result = kvq(*argv)
    assert (result.code, result.json["error"]["code"]) == (2, "model.remote_code")
    config["model_type"] = "llama"  # an architecture of transformers: its own code runs
    (model / "config.json").write_text(json.dumps(config))
    assert kvq(*argv).code == 0


def test_a_checkpoint_that_quantizes_its_cache_is_not_calibrated(kvq, exported, rows, tmp_path):
    checkpoint = exported()
    argv = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "again", "--json"]
    result = kvq("calibrate", checkpoint, *argv)
    assert (result.code, result.json["error"]["code"]) == (2, "calibrate.quantized_cache")


def test_a_single_file_beside_shards_is_ambiguous(kvq, tmp_path, rows):
    from tests.models import build

    build("llama").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    build("llama").save_pretrained(tmp_path / "one")
    single = (tmp_path / "one" / "model.safetensors").read_bytes()
    (tmp_path / "model" / "model.safetensors").write_bytes(single)
    argv = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c", "--json"]
    result = kvq("calibrate", tmp_path / "model", *argv)
    assert (result.code, result.json["error"]["code"]) == (2, "calibrate.single_and_shards")


def test_attention_tensors_that_transformers_ignores_are_refused(kvq, checkpoints, rows, tmp_path):
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    tensors = load(checkpoints("llama") / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.bias"] = torch.ones(16, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((checkpoints("llama") / "config.json").read_bytes())
    argv = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c", "--json"]
    result = kvq("calibrate", tmp_path, *argv)
    assert (result.code, result.json["error"]["code"]) == (2, "model.unused_tensors")
    assert "`model.layers.0.self_attn.k_proj.bias`" in result.json["error"]["message"]


def test_a_broken_tokenizer_is_one_clear_error(kvq, checkpoints, rows, tmp_path):
    import shutil

    shutil.copytree(checkpoints("llama"), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    argv = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c", "--json"]
    result = kvq("calibrate", tmp_path / "model", *argv)
    assert (result.code, result.json["error"]["code"]) == (2, "model.tokenizer")


def test_a_config_without_its_numbers_is_one_clear_error(kvq, checkpoints, rows, tmp_path):
    import shutil

    shutil.copytree(checkpoints("llama"), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["vocab_size"] = None
    path.write_text(json.dumps(config))
    argv = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c", "--json"]
    result = kvq("calibrate", tmp_path / "model", *argv)
    assert (result.code, result.json["error"]["code"]) == (2, "geometry.number")
    assert "`vocab_size`" in result.json["error"]["message"]


def test_a_device_map_gives_the_same_statistics(calibrated):
    _, calibration = calibrated("llama")
    expected = statistics(calibration)
    _, calibration = calibrated("llama", "--device-map", "auto")
    found = statistics(calibration)
    assert found.keys() == expected.keys()
    if not torch.cuda.is_available():  # there, it is another device
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "options",
    [["--device-map", "all"], ["--device-map", "auto", "--streaming"],
     ["--device-map", "auto", "--device", "cpu"]],
)  # fmt: skip
def test_a_device_map_that_says_nothing_or_two_things_is_refused(
    kvq, checkpoints, rows, tmp_path, options
):
    argv = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c", "--json"]
    result = kvq("calibrate", checkpoints("llama"), *argv, *options)
    assert (result.code, result.json["error"]["code"]) == (2, "option.device_map")


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InputError, match="there is no `cuda:2`: this machine has 2 CUDA devices"):
        find_device("cuda:2")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices")
def test_a_model_spread_over_two_devices_gives_the_statistics_of_one(
    kvq, checkpoints, rows, tmp_path
):
    model = checkpoints("llama", num_hidden_layers=8, hidden_size=256)
    argv = ["calibrate", model, "--dataset", rows, "--seq-len", 64, "--batch-size", 4]
    assert kvq(*argv, "--device", "cuda", "-o", tmp_path / "one").code == 0
    result = kvq(*argv, "--device-map", "auto", "-o", tmp_path / "two")
    assert result.code == 0, result.err
    assert re.search(r"Spread over cuda:0 \(\d+ parts\), cuda:1 \(\d+ parts\)\.", result.err)
    found, expected = statistics(tmp_path / "two"), statistics(tmp_path / "one")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_package_that_a_model_misses_only_when_it_runs_is_named(
    kvq, checkpoints, rows, tmp_path, monkeypatch
):
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self, x):
        raise ImportError("`kernels` is not installed")

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    result = kvq("calibrate", checkpoints("llama"), "--dataset", rows, "-o", tmp_path / "c",
                 "--seq-len", 64, "--min-tokens", 1, "--json")  # fmt: skip
    error = result.json["error"]
    assert (result.code, error["code"]) == (2, "dependency.model")
    assert "another package to run: `kernels` is not installed" in error["message"]
