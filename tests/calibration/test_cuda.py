"""CUDA: the same maxima as a plain recorder on the same device, and the same bytes for one plan."""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def observe(path, sequences, plan, *, queries=True):
    from kvq.calibration.amax import Observer
    from kvq.calibration.batches import Sequence
    from kvq.calibration.model import load_model
    from kvq.calibration.modules import attention_modules
    from kvq.calibration.run import run_batches
    from kvq.files import read_json
    from kvq.pipeline.live import live_geometry

    loaded = load_model(
        path, read_json(path / "config.json"), device="cuda", dtype="auto", trust_remote_code=False
    )
    layers = live_geometry(loaded.model).layers
    attentions = attention_modules(loaded.body, [layer.attention for layer in layers])
    observer = Observer(layers, queries=queries)
    run_batches(loaded, attentions, observer, [Sequence(s) for s in sequences], plan)
    number = {layer.attention: layer.layer_idx for layer in layers}
    return {(number[path], q): amax.numpy() for (path, q), amax in observer.results().items()}


@NO_CUDA
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "phi3"])
def test_amax_equals_a_plain_recorder_on_the_same_device(checkpoints, family):
    from tests.recorder import record

    sequences = [np.arange(i, i + 48) % 128 for i in range(6)]
    found = observe(checkpoints(family), sequences, [[i] for i in range(6)])
    implementation = "eager" if family == "gemma2" else "sdpa"
    rows = [sequence.tolist() for sequence in sequences]
    expected = record(checkpoints(family), rows, torch.bfloat16, implementation, device="cuda")
    assert len(found) == len(expected)
    for (layer, side), amax in expected.items():
        np.testing.assert_array_equal(found[layer, f"{side}_bmm_quantizer"], amax)


@NO_CUDA
def test_the_same_plan_gives_the_same_bits_and_another_plan_nearly_so(checkpoints):
    sequences = [np.arange(i, i + 48) % 128 for i in range(8)]
    batched = [[0, 1, 2, 3], [4, 5, 6, 7]]
    first, second = (observe(checkpoints("llama"), sequences, batched) for _ in range(2))
    alone = observe(checkpoints("llama"), sequences, [[i] for i in range(8)])
    for key, amax in first.items():
        np.testing.assert_array_equal(second[key], amax)
        np.testing.assert_allclose(alone[key], amax, rtol=2**-6)


ZOO = ["deepseek_v3", "deepseek_v32", "falcon", "gemma3n_text", "gemma4_text", "gpt_oss", "jamba"]


@NO_CUDA
@pytest.mark.parametrize("name", [*ZOO, "mixtral", "qwen3_next"])
def test_every_kind_of_cache_is_observed_on_the_device(name):
    import kvq as api
    from tests import zoo
    from tests.recorder import record_cache

    model = zoo.tiny_model("causal", name).cuda()
    batches = [torch.arange(i + 3, i + n)[None].cuda() % 100 for i, n in enumerate((8, 20, 43))]
    found = api.calibrate(model, batches)
    recorded = list(record_cache(model, [{"input_ids": ids} for ids in batches]).values())
    own = [layer for layer in found.layers if layer.shared_from is None]
    assert found.run["device"] == "cuda"
    assert len(own) == len(recorded)
    for layer, expected in zip(own, recorded, strict=True):
        for quantizer, amax in zip(layer.quantizers[1:], expected, strict=True):
            np.testing.assert_array_equal(layer.amax[quantizer], amax)


@NO_CUDA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_observing_never_waits_for_the_device_and_counts_what_the_cpu_counts(dtype):
    from kvq.calibration.amax import Observer
    from kvq.geometry import LayerGeometry

    layers = [LayerGeometry(0, "full_attention", "layers.0", 4, 2, 16, 16)]
    key = "layers.0", "k_bmm_quantizer"
    states = [torch.randn(3, length, 2, 16).to(dtype).transpose(1, 2) for length in (7, 200, 64)]
    states[0][0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
    on_cpu, on_cuda = (Observer(layers, queries=False) for _ in range(2))
    moved = [one.cuda() for one in states]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for one in moved:
            on_cuda.see(key, one)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one in states:
        on_cpu.see(key, one)
    assert torch.equal(on_cuda.counts[key].cpu(), on_cpu.counts[key])
    torch.testing.assert_close(on_cuda.amax[key].cpu(), on_cpu.amax[key], equal_nan=True)
