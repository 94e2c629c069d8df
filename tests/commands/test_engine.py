"""`--engine`: what an engine would do, as answers of the command line."""

import json
from pathlib import Path

import pytest

from kvq.errors import KvqError
from kvq.pipeline.verify import EngineQuestion, verify
from tests.engines.variants import VARIANTS, write

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "vllm.json").read_text())["variants"]


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """Every variant of a checkpoint that real vLLM was asked about, by name."""
    root = tmp_path_factory.mktemp("variants")
    for name in VARIANTS:
        write(name, root / name)
    return root


def test_a_good_checkpoint_holds_and_says_what_the_engine_uses(kvq, exported):
    result = kvq("verify", exported(), "--engine", "vllm")
    assert result.code == 0, result.out
    assert (
        "vllm 0.32.0, --kv-cache-dtype auto, sm90, tp 1: cache fp8, 4 of 4 scales from the "
        "checkpoint" in result.out
    )


def test_the_table_names_tensor_and_reason(kvq, exported, variants):
    shown = kvq("inspect", exported(), "--engine", "vllm")
    assert shown.code == 0
    assert shown.out.count("model.layers.") == 4
    result = kvq("inspect", variants / "ct-only-k", "--engine", "vllm", "--json").json
    first = result["engines"][0]["layers"][0]
    assert first["v"]["value"] == [1.0]
    assert first["v"]["tensor"] is None
    assert first["v"]["reason"].startswith("default 1.0")


@pytest.mark.parametrize(
    ("variant", "code"),
    [
        ("ct-only-k", "engine.default"),
        ("ct-files-unindexed-shard", "engine.default"),
        ("modelopt-only-k", "engine.value"),  # v is a copy of k
        ("ct-scheme-strategy-channel", "engine.load"),
        ("modelopt-legacy-algo-null", "engine.load"),
        ("none-name-attention", "engine.load"),
    ],
)
def test_what_the_engine_would_not_use_fails(kvq, variants, variant, code):
    result = kvq("verify", variants / variant, "--engine", "vllm", "--json")
    assert result.code == 1
    assert code in {finding["code"] for finding in result.json["findings"]}


def test_modelopt_checkpoints_are_judged_by_what_the_engine_reads(kvq, variants):
    name = "modelopt-legacy-fp8"
    result = kvq("verify", variants / name, "--engine", "vllm", "--json")
    assert result.code == 0, result.json["findings"]
    assert {finding["code"] for finding in result.json["findings"]} <= {"engine.value"}  # rounding


def test_an_unknown_engine_is_refused_by_name(kvq, checkpoints):
    result = kvq("verify", checkpoints("llama"), "--engine", "vlm", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "engine.unknown")
    assert "vllm" in result.json["error"]["hint"]


def used_as_written(golden):
    """Whether real vLLM loaded it with a quantized cache and no layer at the default."""
    if golden["error"] is not None:
        return False
    layers = golden["layers"].values()
    return all(
        layer["dtype"].startswith(("fp8", "nvfp4")) and layer["k"] != 1.0 and layer["v"] != 1.0
        for layer in layers
    )


def test_nothing_holds_that_real_vllm_does_not_use(variants):
    from kvq.engines.base import EngineOptions

    passed = 0
    for name, variant in VARIANTS.items():
        if variant.skip_layers:
            continue  # layers at the default by request, and a warning says so
        options = EngineOptions(variant.kv_cache_dtype, "cpu")
        try:
            report = verify(variants / name, ask=EngineQuestion(["vllm"], options))
        except KvqError:
            continue
        if report.ok():
            passed += 1
            assert used_as_written(GOLDEN[name]), name
    assert passed > 100


def test_live_without_the_engine_is_one_clear_error(kvq, exported, tmp_path):
    result = kvq("verify", exported(), "--live", "vllm", "--python", tmp_path / "none", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "live.python")
    result = kvq("verify", exported(), "--live", "vlm", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "engine.unknown")
    import sys

    result = kvq("verify", exported(), "--live", "vllm", "--python", sys.executable, "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "live.missing")
    assert "No module named 'vllm'" in result.json["error"]["message"]


def test_export_refuses_what_a_named_engine_would_not_use(kvq, calibrated, tmp_path):
    model, calibration = calibrated("qwen2")
    argv = ["export", model, "--scales", calibration, "-o", tmp_path / "out"]
    assert "serve it with: vllm serve" in kvq(*argv).out
    result = kvq(*argv, "--for", "sgl", "--overwrite", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "engine.unknown")


def test_transformers_says_when_memory_would_be_uninitialised(kvq, variants):
    result = kvq("verify", variants / "ct-only-k", "--engine", "transformers", "--json")
    unknown = [f for f in result.json["findings"] if f["code"] == "engine.unknown"]
    assert unknown
    assert {finding["severity"] for finding in unknown} == {"error"}


def test_sglang_leaves_qwen2_at_one_and_export_for_it_refuses(kvq, calibrated, tmp_path):
    model, calibration = calibrated("qwen2")
    argv = ["export", model, "--scales", calibration, "-o", tmp_path / "out", "--for", "sglang"]
    result = kvq(*argv, "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "export.unread")
    assert "sglang" in result.json["error"]["message"]
    assert not (tmp_path / "out").exists()
    model, calibration = calibrated("llama")
    argv = ["export", model, "--scales", calibration, "-o", tmp_path / "out", "--for", "sglang"]
    result = kvq(*argv)
    assert result.code == 0, result.err
    assert "sglang.launch_server" in result.out


def test_platform_and_gpus_are_inputs_shown_in_the_report(kvq, exported, variants):
    per_head = exported("llama", "--granularity", "head")
    argv = ["verify", per_head, "--engine", "vllm"]
    assert kvq(*argv).code == 0
    assert kvq(*argv, "--tp", 2).code == 0
    for extra in (["--platform", "sm80"], ["--platform", "gfx942"], ["--tp", 3]):
        result = kvq(*argv, *extra, "--json")
        assert (result.code, [f["code"] for f in result.json["findings"]]) == (1, ["engine.load"])
    shown = kvq("inspect", per_head, "--engine", "vllm", "--platform", "cpu", "--tp", 2).out
    assert "--kv-cache-dtype auto, cpu, tp 2" in shown
    skipped = ["--kv-cache-dtype-skip-layers", "1"]
    result = kvq("verify", exported(), "--engine", "vllm", *skipped, "--json")
    assert {(f["code"], f["layer_idx"]) for f in result.json["findings"]} == {
        ("engine.unquantized", 1)
    }


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--platform", "hopper"], "option.platform"),
        (["--tp", "0"], "option.tp"),
        (["--engine-version", "0.28.0"], "engine.version"),
        (["--engine", "sglang", "--engine-version", "0.32.0"], "engine.version"),
    ],
)
def test_a_platform_or_version_without_a_model_is_refused(kvq, checkpoints, argv, code):
    result = kvq("verify", checkpoints("llama"), "--engine", "vllm", *argv, "--json")
    assert (result.code, result.json["error"]["code"]) == (2, code)
    assert "--" in result.json["error"]["message"] + (result.json["error"]["hint"] or "")


def test_the_version_that_is_modelled_may_be_named(kvq, exported):
    assert kvq("verify", exported(), "--engine", "vllm", "--engine-version", "0.32.0").code == 0


def test_the_scale_of_queries_is_read_too(kvq, variants):
    argv = ["--engine", "vllm", "--json"]
    shown = kvq("inspect", variants / "ct-q-scale", *argv).json
    assert shown["engines"][0]["layers"][0]["q"]["value"] == [pytest.approx(0.3)]
