"""HF transformers with compressed-tensors as the reader of what kvq exports."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

pytestmark = [pytest.mark.client_transformers, pytest.mark.real_model]
TEXT = (
    "The history of numbers begins with counting. People cut notches into bones and tied knots "
    "into strings to keep track of days, animals and debts. Later, merchants needed larger numbers "
    "and invented signs for tens, hundreds and thousands. The idea that nothing is a number too "
    "took much longer; it came from India, travelled with traders, and changed arithmetic. "
)


@pytest.fixture(scope="module")
def checkpoint(smollm2, tmp_path_factory):
    from kvq.cli import run

    root = tmp_path_factory.mktemp("smollm2")
    calibration, target = root / "calibration", root / "checkpoint"
    calibrate = ["calibrate", smollm2, "--num-samples", 4, "--seq-len", 512, "-o", calibration]
    export = ["export", smollm2, "--scales", calibration, "-o", target]
    for argv in (calibrate, export):
        assert run([str(argument) for argument in argv]) == 0
    return target


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def cache_of(model, input_ids):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids, past_key_values=cache)
    return cache


def test_the_cache_is_the_plain_one_quantized_with_the_written_scales(
    checkpoint, smollm2, monkeypatch
):
    from compressed_tensors.modeling.kvcache import QuantizedKVCache

    from kvq.formats import FP8_E4M3
    from kvq.pipeline.inspect import inspect
    from kvq.reference import Parity, quantize_dequantize

    handed = []  # per layer: what attention hands to the quantizing cache
    update = QuantizedKVCache.update

    def recording(self, key_states, value_states, *args, **kwargs):
        handed.append((key_states.clone(), value_states.clone()))
        return update(self, key_states, value_states, *args, **kwargs)

    input_ids = AutoTokenizer.from_pretrained(smollm2)(TEXT, return_tensors="pt").input_ids
    plain = cache_of(load(smollm2), input_ids)
    monkeypatch.setattr(QuantizedKVCache, "update", recording)
    quantized = cache_of(load(checkpoint), input_ids)
    rows = inspect(checkpoint).rows
    assert len(rows) == len(handed) == len(quantized.layers) == 30
    # only layer 0 sees the same input in both models; deeper ones follow quantized attention
    assert torch.equal(handed[0][0], plain.layers[0].keys)
    assert torch.equal(handed[0][1], plain.layers[0].values)
    for row, states, layer in zip(rows, handed, quantized.layers, strict=True):
        for side, plain_states, found in zip("kv", states, (layer.keys, layer.values), strict=True):
            scale = torch.tensor(row.scale[side]).to(torch.bfloat16)  # transformers casts it
            expected = quantize_dequantize(
                plain_states, FP8_E4M3, scale=scale, parity=Parity.COMPRESSED_TENSORS
            )
            assert torch.equal(found, expected), (row.layer_idx, side)


def test_every_scale_is_loaded_in_every_layer(checkpoint):
    from kvq.pipeline.inspect import inspect

    model = load(checkpoint)
    for row in inspect(checkpoint).rows:
        attention = model.model.layers[row.layer_idx].self_attn
        for side in "kv":
            written = torch.tensor(row.scale[side]).to(torch.bfloat16)
            assert torch.equal(getattr(attention, f"{side}_scale").data, written)


def perplexity(model, input_ids):
    with torch.no_grad():
        logits = model(input_ids, use_cache=True).logits.float()
    losses = torch.nn.functional.cross_entropy(logits[0, :-1], input_ids[0, 1:])
    return math.exp(losses.item())


def test_perplexity_stays_within_two_percent(checkpoint, smollm2):
    input_ids = AutoTokenizer.from_pretrained(smollm2)(TEXT, return_tensors="pt").input_ids
    ratio = perplexity(load(checkpoint), input_ids) / perplexity(load(smollm2), input_ids)
    assert np.isfinite(ratio)
    assert ratio <= 1.02, ratio


def test_the_written_schema_is_the_one_the_installed_library_writes(checkpoint):
    from compressed_tensors.quantization import QuantizationConfig

    written = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(written)
    assert parsed.kv_cache_scheme.strategy == "tensor"
    assert parsed.kv_cache_scheme.symmetric


def test_a_mixture_of_experts_loads_with_its_scales(kvq, calibrated, tmp_path):
    model, calibration = calibrated("qwen3_moe")
    argv = ["export", model, "--scales", calibration, "-o", tmp_path / "out"]
    assert kvq(*argv, "--for", "transformers").code == 0
    result = kvq("verify", tmp_path / "out", "--live", "transformers", "--json")
    assert result.code == 0, result.out
    (reading,) = result.json["engines"]
    assert all(layer[side]["tensor"] for layer in reading["layers"] for side in "kv")
