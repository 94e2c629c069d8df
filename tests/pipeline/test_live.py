"""The Python API: a model in memory, batches of its own inputs."""

import numpy as np
import pytest
import torch

import kvq as api
from kvq.errors import InputError
from kvq.state import read_calibration
from tests.models import build

BATCHES = [torch.arange(i, i + 20)[None] % 128 for i in range(3)]


def test_it_is_the_calibration_of_the_command_line(kvq, checkpoints, tmp_path):
    import json

    from transformers import AutoModelForCausalLM

    path = checkpoints("llama")
    rows = "".join(json.dumps({"input_ids": ids[0].tolist()}) + "\n" for ids in BATCHES)
    (tmp_path / "rows.jsonl").write_text(rows)
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 20, "--min-tokens", 1]
    assert kvq("calibrate", path, *argv, "-o", tmp_path / "c").code == 0
    expected = read_calibration(tmp_path / "c")
    model = AutoModelForCausalLM.from_pretrained(path)
    for checkpoint in (None, path):  # this model's names in memory are those of its checkpoint
        found = api.calibrate(model, BATCHES, checkpoint=checkpoint)
        assert found.digest == expected.digest
        assert [layer.percentile_99_9 for layer in found.layers] == [
            layer.percentile_99_9 for layer in expected.layers
        ]
        assert found.batches == found.batches_run == len(BATCHES)
        assert found.model["weight_fingerprint"] == expected.model["weight_fingerprint"]
        assert (found.modules, found.quantizers) == (expected.modules, expected.quantizers)
    api.write_calibration(found, tmp_path / "live", overwrite=False)
    shown = kvq("inspect", tmp_path / "live", "--scales").out
    assert "maxima were reached in the first half of the 3 batches" in shown
    argv = ["--scales", tmp_path / "live", "-o", tmp_path / "out"]
    assert kvq("export", path, *argv).code == 0
    assert kvq("verify", tmp_path / "out", "--against", tmp_path / "c").code == 0


def test_new_weights_give_new_statistics_and_another_fingerprint():
    model = build("qwen3")
    first = api.calibrate(model, BATCHES)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_norm.weight.mul_(2)
    second = api.calibrate(model, BATCHES)
    again = api.calibrate(model, BATCHES)
    assert second.model["weight_fingerprint"] != first.model["weight_fingerprint"]
    assert second.digest == again.digest != first.digest
    before, after = first.layers[0], second.layers[0]
    np.testing.assert_array_equal(after.amax["k_bmm_quantizer"], 2 * before.amax["k_bmm_quantizer"])
    np.testing.assert_array_equal(after.amax["v_bmm_quantizer"], before.amax["v_bmm_quantizer"])


def test_padding_is_refused_and_a_full_mask_is_not():
    model = build("llama")
    ids = torch.arange(8)[None].repeat(2, 1)
    mask = torch.ones_like(ids)
    plain = api.calibrate(model, [ids])
    assert api.calibrate(model, [{"input_ids": ids, "attention_mask": mask}]).digest == plain.digest
    mask[1, 0] = 0
    with pytest.raises(InputError, match="batch 0 is padded: 1 positions"):
        api.calibrate(model, [{"input_ids": ids, "attention_mask": mask}])


@pytest.mark.parametrize("batches", [[], [{"pixels": torch.zeros(1)}]])
def test_nothing_to_run_is_an_error(batches):
    with pytest.raises(InputError):
        api.calibrate(build("llama"), batches)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in build("llama").modules())


def test_queries_too_and_the_model_is_left_as_it_was():
    model = build("llama").train()
    implementation = model.config._attn_implementation
    found = api.calibrate(model, BATCHES, kv_cfg="FP8_ATTN_CFG")
    assert set(found.layers[0].amax) == {f"{s}_bmm_quantizer" for s in "qkv"}
    assert model.training
    assert model.config._attn_implementation is implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
