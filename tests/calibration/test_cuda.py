"""CUDA: the same maxima as a plain recorder on the same device, and the same bytes for one plan."""

import json

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

pytestmark = pytest.mark.gpu
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def observe(path, sequences, plan, *, queries=True, compile_layers=False, synchronizes=True):
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
    sequences = [Sequence(s) for s in sequences]
    if not synchronizes:
        run_batches(loaded, attentions, observer, sequences, plan[:1])  # libraries start up
        torch.cuda.set_sync_debug_mode("error")
    try:
        run_batches(loaded, attentions, observer, sequences, plan, compile_layers=compile_layers)
    finally:
        if not synchronizes:
            torch.cuda.set_sync_debug_mode("default")
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


@NO_CUDA
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_nothing_waits_for_the_device_from_batch_to_batch(checkpoints, family):
    sequences = [np.arange(i, i + 48) % 128 for i in range(8)]
    observe(checkpoints(family), sequences, [[0, 1], [2, 3], [4, 5]], synchronizes=False)


@NO_CUDA
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "phi3", "qwen3_moe"])
def test_compiled_layers_show_the_same_maxima_but_for_rounding(checkpoints, family):
    model = checkpoints(family, num_hidden_layers=12, hidden_size=256, intermediate_size=512)
    sequences = [np.arange(i, i + 48) % 128 for i in range(7)]
    plan = [[0, 1, 2], [3, 4, 5], [6]]
    expected = observe(model, sequences, plan)
    torch._dynamo.reset()
    counters.clear()
    found, again = (observe(model, sequences, plan, compile_layers=True) for _ in range(2))
    assert counters["stats"]["unique_graphs"] >= 6  # before and after attention, rotation; 2 shapes
    for key, amax in expected.items():
        np.testing.assert_allclose(found[key], amax, rtol=0.03)
        np.testing.assert_array_equal(again[key], found[key])


@NO_CUDA
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_compiled_calibration_says_so(kvq, checkpoints, rows, tmp_path):
    argv = ["--dataset", rows, "--seq-len", 64, "--num-samples", 24, "--device", "cuda"]
    for name, options in (("eager", []), ("compiled", ["--compile"])):
        result = kvq("calibrate", checkpoints("llama"), *argv, *options, "-o", tmp_path / name)
        assert result.code == 0, result.err
        run = json.loads((tmp_path / name / "config.json").read_text())["run"]
        assert run.get("compiled", False) is (name == "compiled")


@NO_CUDA
def test_batches_are_of_16384_tokens_unless_told_and_recorded(kvq, checkpoints, rows, tmp_path):
    argv = ["--dataset", rows, "--seq-len", 64, "--num-samples", 24, "--device", "cuda"]
    result = kvq("calibrate", checkpoints("llama"), *argv, "-o", tmp_path / "c")
    assert result.code == 0, result.err
    plan = json.loads((tmp_path / "c" / "config.json").read_text())["run"]["batch_plan"]
    assert (plan["batch_size"], plan["batches"]) == (16384 // 40, 3)


@NO_CUDA
@pytest.mark.parametrize("options", [[], ["--streaming"]], ids=str)
def test_too_little_memory_is_an_error_that_says_what_to_lower(kvq, checkpoints, tmp_path, options):
    generator = np.random.default_rng(0)
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"input_ids": generator.integers(3, 100, 2000).tolist()})] * 64
    rows.write_text("\n".join(lines))
    model = checkpoints("llama", intermediate_size=16384, max_position_embeddings=2048)
    argv = ["--dataset", rows, "--seq-len", 2000, "--device", "cuda", "--batch-size", 64]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((2 << 30) / total)
    try:
        result = kvq("calibrate", model, *argv, *options, "-o", tmp_path / "c", "--json")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    error = result.json["error"]
    assert (result.code, error["code"]) == (2, "calibrate.memory")
    assert "with 64 sequences in a batch" in error["message"]


@NO_CUDA
def test_weights_that_do_not_fit_after_all_are_an_error(kvq, checkpoints, rows, tmp_path):
    model = checkpoints("llama", hidden_size=1024, intermediate_size=16384)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((64 << 20) / total)
    argv = ["--dataset", rows, "--seq-len", 64, "--device", "cuda", "-o", tmp_path / "c", "--json"]
    try:
        result = kvq("calibrate", model, *argv)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (result.code, result.json["error"]["code"]) == (2, "calibrate.memory")
    assert "--streaming" in result.json["error"]["hint"]


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
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
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
