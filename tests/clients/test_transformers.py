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


def test_the_cache_is_the_plain_one_quantized_with_the_written_scales(checkpoint, smollm2):
    from kvq.formats import FP8_E4M3
    from kvq.pipeline.inspect import inspect
    from kvq.reference import Parity, quantize_dequantize

    input_ids = AutoTokenizer.from_pretrained(smollm2)(TEXT, return_tensors="pt").input_ids
    rows = inspect(checkpoint).rows
    quantized = cache_of(load(checkpoint), input_ids)
    plain = cache_of(load(smollm2), input_ids)
    # layer 0 sees the same input in both models; deeper ones see quantized attention before them
    for side, found, states in (
        ("k", quantized.layers[0].keys, plain.layers[0].keys),
        ("v", quantized.layers[0].values, plain.layers[0].values),
    ):
        scale = torch.tensor(rows[0].scale[side]).to(torch.bfloat16)  # transformers casts it
        expected = quantize_dequantize(
            states, FP8_E4M3, scale=scale, parity=Parity.COMPRESSED_TENSORS
        )
        assert torch.equal(found, expected), side
    assert len(rows) == len(quantized.layers) == 30


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
