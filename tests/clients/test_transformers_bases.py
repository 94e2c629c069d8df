"""transformers with compressed-tensors as the reader of scales on quantized bases, and of INT8."""

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests import bases
from tests.exports import CELLS, Exports, expected, kvq

pytestmark = pytest.mark.client_transformers
READ = [cell for cell in CELLS if expected(*cell, "transformers") == cell[2]]
INPUT_IDS = torch.arange(3, 43)[None]
E4M3_MAX, INT8_MIN, INT8_MAX = 448, -128, 127


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    return Exports(tmp_path_factory.mktemp("bases"))


def load(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own, about what it decompresses
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.fixture
def handed(monkeypatch):
    """Record what attention hands to the quantizing cache, layer by layer."""
    from compressed_tensors.modeling.kvcache import QuantizedKVCache

    found, update = [], QuantizedKVCache.update

    def recording(self, key_states, value_states, *args, **kwargs):
        found.append((key_states.clone(), value_states.clone()))
        return update(self, key_states, value_states, *args, **kwargs)

    monkeypatch.setattr(QuantizedKVCache, "update", recording)
    return found


def int8(states, scale):
    return (states / scale).clamp(INT8_MIN, INT8_MAX).round() * scale


def fp8(states, scale):
    scaled = (states / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).to(states.dtype) * scale


def cached(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(INPUT_IDS, past_key_values=cache)
    return cache.layers


def check(model, scales, handed, quantize):
    """The model holds these scales in its dtype, and its cache is what they make of K and V."""
    layers = cached(model)
    assert len(handed) == len(layers) == bases.NUM_LAYERS
    for path, states, layer in zip(bases.ATTENTION, handed, layers, strict=True):
        module = model.get_submodule(path)
        for side, plain, found in zip("kv", states, (layer.keys, layer.values), strict=True):
            written = np.array(scales[path, side], np.float32).astype(ml_dtypes.bfloat16)
            held = getattr(module, f"{side}_scale").data
            assert held.flatten().tolist() == written.astype(np.float32).tolist()
            by_head = held.reshape(1, -1, 1, 1)  # of [batch, heads, sequence, head size]
            assert torch.equal(found, quantize(plain, by_head)), (path, side)
            assert not torch.equal(found, plain)


@pytest.mark.parametrize("cell", READ, ids="-".join)
def test_the_cache_is_quantized_with_the_written_scales(exports, handed, cell):
    target, _ = exports.written(*cell)
    quantize = int8 if cell[3] == "int8" else fp8
    check(load(target), exports.scales(*cell[2:]), handed, quantize)


def test_int8_per_head_is_applied_too(exports, handed, tmp_path):
    argv = ["--scales", exports.calibration, "--kv-cfg", "INT8_PER_HEAD_KV_CFG", "--for",
            "transformers", "-o", tmp_path / "out"]  # fmt: skip
    kvq("export", exports.base("single"), *argv)
    scales = {key: (amax / np.float32(INT8_MAX)).tolist() for key, amax in exports.amax.items()}
    assert {len(values) for values in scales.values()} == {bases.NUM_KV_HEADS}
    check(load(tmp_path / "out"), scales, handed, int8)
