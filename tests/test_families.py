"""Each family once, end to end: geometry, observation, names; scripts/support_matrix.py has all."""

import json

import numpy as np
import pytest
import torch
import transformers

from kvq.geometry import read_geometry
from kvq.state import read_calibration
from tests import zoo
from tests.recorder import record_cache, sampled_magnitudes, sampled_percentile

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# family: kind of zoo entry, attention path of its first layer, its cached layers' kinds,
# query heads, KV heads and head sizes of K and V in the first layer
FAMILIES = {
    "llama": ("causal", "model.layers.0.self_attn", [FULL] * 4, (4, 2, 8, 8)),
    "qwen2": ("causal", "model.layers.0.self_attn", [FULL] * 4, (4, 2, 8, 8)),
    "qwen3": ("causal", "model.layers.0.self_attn", [FULL] * 4, (4, 2, 8, 8)),
    "qwen3_moe": ("causal", "model.layers.0.self_attn", [FULL] * 4, (4, 2, 8, 8)),
    "mixtral": ("causal", "model.layers.0.self_attn", [FULL] * 4, (4, 2, 8, 8)),
    "gemma2": ("causal", "model.layers.0.self_attn", [SLIDING, FULL] * 2, (4, 2, 8, 8)),
    "gemma3_text": ("causal", "model.layers.0.self_attn", None, (4, 2, 8, 8)),
    "gemma3n_text": ("causal", "model.layers.0.self_attn", None, (4, 2, 8, 8)),
    "gemma4_text": ("causal", "model.layers.0.self_attn", None, (4, 2, 8, 8)),
    "phi3": ("causal", "model.layers.0.self_attn", [FULL] * 4, (4, 2, 8, 8)),
    "gpt2": ("causal", "transformer.h.0.attn", [FULL] * 4, (4, 4, 8, 8)),
    "gpt_neox": ("causal", "gpt_neox.layers.0.attention", [FULL] * 4, (4, 4, 8, 8)),
    "falcon": ("causal", "transformer.h.0.self_attention", [FULL] * 4, (4, 1, 8, 8)),
    "bloom": ("causal", "transformer.h.0.self_attention", [FULL] * 2, (4, 4, 8, 8)),
    "mpt": ("causal", "transformer.blocks.0.attn", [FULL] * 4, (4, 4, 8, 8)),
    "opt": ("causal", "model.decoder.layers.0.self_attn", [FULL] * 4, (4, 4, 8, 8)),
    "gptj": ("causal", "transformer.h.0.attn", [FULL] * 4, (4, 4, 8, 8)),
    "starcoder2": ("causal", "model.layers.0.self_attn", [FULL] * 4, (4, 2, 8, 8)),
    "cohere": ("causal", "model.layers.0.self_attn", [FULL] * 4, (4, 2, 8, 8)),
    "glm4": ("causal", "model.layers.0.self_attn", [FULL] * 4, (4, 2, 8, 8)),
    "gpt_oss": ("causal", "model.layers.0.self_attn", [SLIDING, FULL] * 2, (4, 2, 8, 8)),
    "llama4_text": ("causal", "model.layers.0.self_attn", [CHUNKED] * 3 + [FULL], (4, 2, 8, 8)),
    "deepseek_v2": ("causal", "model.layers.0.self_attn", [FULL] * 4, (4, 1, 8, 16)),
    "deepseek_v3": ("causal", "model.layers.0.self_attn", [FULL] * 4, (4, 1, 8, 16)),
    "deepseek_v32": ("causal", "model.layers.0.self_attn", [FULL] * 4, (4, 1, 8, 16)),
    "qwen3_next": ("causal", "model.layers.3.self_attn", [FULL], (4, 2, 8, 8)),
    "nemotron_h": ("causal", None, None, (4, 2, 8, 8)),
    "jamba": ("causal", None, None, (4, 2, 8, 8)),
    "gemma3": ("image-text", "language_model.model.layers.0.self_attn", None, (4, 2, 8, 8)),
    "qwen2_5_vl": ("image-text", "model.layers.0.self_attn", [FULL] * 4, (4, 2, 8, 8)),
    "t5": ("seq2seq", "decoder.block.0.layer.0.SelfAttention", None, (4, 4, 8, 8)),
    "bart": ("seq2seq", "model.decoder.layers.0.self_attn", None, (4, 4, 8, 8)),
}


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    """One family's tiny checkpoint: (name, folder, whether it is an encoder-decoder)."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    zoo.tiny_model(FAMILIES[request.param][0], request.param).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return request.param, folder, bool(config.get("is_encoder_decoder"))


def names(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "np") as file:
        return list(file.keys())


def pairs(count=3):
    generator = np.random.default_rng(0)
    draw = lambda n: generator.integers(3, 100, n).tolist()  # noqa: E731
    return [{"input_ids": draw(n), "labels": draw(n + 2)} for n in (5, 17, 40)[:count]]


def decoder_start(config):
    own = config.get("decoder_start_token_id")
    return own if own is not None else config["pad_token_id"]


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_family(kvq, family, tmp_path):
    name, folder, encoder_decoder = family
    _, first, kinds, sizes = FAMILIES[name]
    config = json.loads((folder / "config.json").read_text())

    geometry = read_geometry(config, names(folder))
    layer = geometry.layers[0]
    assert first in (None, layer.attention)
    assert kinds in (None, [layer.kind for layer in geometry.layers])
    found = (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim, layer.v_head_dim)
    assert found == sizes

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1]
    argv += ["--target-column", "labels"] if encoder_decoder else []
    result = kvq("calibrate", folder, *argv, "-o", tmp_path / "calibration")
    assert result.code == 0, result.err

    calibration = read_calibration(tmp_path / "calibration")
    eager = calibration.run["attention"] == "eager"
    model = getattr(transformers, config["architectures"][0]).from_pretrained(
        folder, attn_implementation="eager" if eager else None
    )
    inputs = [{"input_ids": torch.tensor([row["input_ids"]])} for row in pairs()]
    if encoder_decoder:
        for one, row in zip(inputs, pairs(), strict=True):
            one["decoder_input_ids"] = torch.tensor([[decoder_start(config), *row["labels"][:-1]]])
    recorded = list(record_cache(model.eval(), inputs).items())
    own = [layer for layer in calibration.layers if layer.shared_from is None]
    assert len(own) == len(recorded)
    for layer, (module, expected) in zip(own, recorded, strict=True):
        assert layer.attention.rpartition(".")[2] == module.rpartition(".")[2]
        for quantizer, amax in zip(layer.quantizers[1:], expected, strict=True):
            np.testing.assert_array_equal(layer.amax[quantizer], amax[:: amax.size // layer.amax[
                quantizer].size])  # fmt: skip
    percentiles = record_cache(model, inputs, keep=sampled_magnitudes, join=sampled_percentile)
    for layer, expected in zip(own, percentiles.values(), strict=True):
        for quantizer, true in zip(layer.quantizers[1:], expected, strict=True):
            assert abs(layer.percentile_99_9[quantizer] / true - 1) < 1 / 31

    # what vLLM 0.32 cannot load, scales or not; gemma3 as it is saved by transformers 5
    unbuilt = name in ("jamba", "mpt", "t5", "bart", "gemma3")
    unread = ["--allow-unread"] if geometry.is_mla or unbuilt else []
    argv = ["--scales", tmp_path / "calibration", "-o", tmp_path / "checkpoint", *unread]
    assert kvq("export", folder, *argv).code == 0
    result = kvq("verify", tmp_path / "checkpoint", "--against", tmp_path / "calibration")
    assert result.code == 0, result.out
    shown = kvq("inspect", tmp_path / "checkpoint", "--json").json["layers"]
    assert [row["attention"] for row in shown] == [layer.attention for layer in geometry.layers]


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"], indirect=True)
def test_layers_that_share_a_cache_get_the_scales_of_the_layer_they_read(kvq, family, tmp_path):
    _, folder, _ = family
    (tmp_path / "rows.jsonl").write_text(json.dumps(pairs()[1]) + "\n")
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1]
    assert kvq("calibrate", folder, *argv, "-o", tmp_path / "c").code == 0
    assert kvq("export", folder, "--scales", tmp_path / "c", "-o", tmp_path / "out").code == 0
    layers = read_geometry(json.loads((folder / "config.json").read_text()), names(folder)).layers
    sharing = [layer for layer in layers if layer.shared_from]
    scales = kvq("inspect", tmp_path / "out", "--scales", "--json").json["scales"]
    # Gemma: the last layer of the same kind that has its own cache
    kinds = json.loads((folder / "config.json").read_text())["layer_types"]
    own = len(layers) - len(sharing)
    assert len(sharing) == 2
    for layer in sharing:
        donor = max(i for i in range(own) if kinds[i] == kinds[layer.layer_idx])
        assert layer.shared_from == f"model.layers.{donor}.self_attn"
        for side in "kv":
            shared = scales[f"{layer.shared_from}.{side}_scale"]
            assert scales[f"{layer.attention}.{side}_scale"] == shared
    *before, last = json.loads((tmp_path / "c" / "config.json").read_text())["layers"]
    assert last["provenance"]["k_bmm_quantizer"].startswith("shared from model.layers.")
    donor = next(layer for layer in before if layer["attention"] == last["shared_from"])
    for name in ("raised", "percentile_99_9"):
        assert last[name] == donor[name] != {}


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "deepseek_v32"], indirect=True)
def test_mla_has_its_own_quantizers_and_one_scale(kvq, family, tmp_path):
    name, folder, _ = family
    (tmp_path / "rows.jsonl").write_text(json.dumps(pairs()[2]) + "\n")
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1]
    result = kvq("calibrate", folder, *argv, "-o", tmp_path / "c")
    lines = [line.split(":")[0].strip() for line in result.out.splitlines() if "_bmm_" in line]
    assert lines[:3] == ["(q_bmm_quantizer)", "(kv_c_bmm_quantizer)", "(k_pe_bmm_quantizer)"]
    result = kvq("export", folder, "--scales", tmp_path / "c", "-o", tmp_path / "out", "--json")
    if name == "deepseek_v32":  # of a class that the model does not cover
        assert any("is not known" in notice for notice in result.json["notices"])
    else:
        assert (result.code, result.json["error"]["code"]) == (2, "export.unread")
        assert "vllm 0.32.0 uses no scales" in result.json["error"]["message"]
    argv = ["--scales", tmp_path / "c", "-o", tmp_path / "out", "--allow-unread", "--overwrite"]
    per_head = kvq("export", folder, *argv, "--granularity", "head", "--json")
    assert (per_head.code, per_head.json["error"]["code"]) == (2, "scales.mla_head")
    assert kvq("export", folder, *argv).code == 0
    scales = kvq("inspect", tmp_path / "out", "--scales", "--json").json["scales"]
    for layer in read_calibration(tmp_path / "c").layers:
        largest = max(float(layer.amax[q].max()) for q in layer.quantizers[1:])
        expected = float(np.float32(np.float32(largest) / np.float32(448)))
        for side in "kv":
            assert scales[f"{layer.attention}.{side}_scale"] == expected
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "-o", tmp_path / "c2", "--json"]
    result = kvq("calibrate", folder, "--kv-cfg", "FP8_ATTN_CFG", *argv)
    assert (result.code, result.json["error"]["code"]) == (2, "calibrate.mla_query")


def test_whisper_is_calibrated_from_python_with_its_audio(kvq, tmp_path):
    import kvq as api

    config = transformers.WhisperConfig(
        vocab_size=128, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=16, max_target_positions=64, decoder_start_token_id=1, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "model")
    audio = torch.randn(2, 8, 32).to(torch.bfloat16)
    batches = [
        {"input_features": audio[i : i + 1], "decoder_input_ids": torch.arange(1, n)[None]}
        for i, n in enumerate((7, 30))
    ]
    calibration = api.calibrate(model, batches, checkpoint=tmp_path / "model")
    recorded = record_cache(model, batches)
    assert [layer.attention for layer in calibration.layers] == [
        f"model.decoder.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn", "encoder_attn")
    ]
    for layer in calibration.layers:
        for quantizer, amax in zip(layer.quantizers[1:], recorded[layer.attention], strict=True):
            np.testing.assert_array_equal(layer.amax[quantizer], amax)
    api.write_calibration(calibration, tmp_path / "c", overwrite=False)
    argv = ["--scales", tmp_path / "c", "-o", tmp_path / "out"]
    assert kvq("export", tmp_path / "model", *argv).code == 0
    assert kvq("verify", tmp_path / "out", "--against", tmp_path / "c").code == 0


def test_a_model_that_hears_is_refused_on_text_with_the_way_that_works(kvq, tmp_path):
    config = zoo.tiny_config("causal", "whisper")
    config.is_decoder, config.is_encoder_decoder = False, True
    config.decoder_start_token_id = 1
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1,
            "--target-column", "labels", "-o", tmp_path / "c", "--json"]  # fmt: skip
    result = kvq("calibrate", tmp_path / "model", *argv)
    assert (result.code, result.json["error"]["code"]) == (2, "model.forward")
    assert "Python API" in result.json["error"]["hint"]
    assert not (tmp_path / "c").exists()


def test_pixtral_like_towers_stay_untouched_and_are_named(kvq, tmp_path):
    folder = tmp_path / "model"
    zoo.tiny_model("image-text", "gemma3").save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text(json.dumps(pairs()[1]) + "\n")
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1]
    result = kvq("calibrate", folder, *argv, "-o", tmp_path / "c")
    assert "no image or audio tokens are seen" in result.err
    assert "Quant" not in "".join(line for line in result.out.splitlines() if "Siglip" in line)
    written = read_calibration(tmp_path / "c").statistics()
    assert all("vision" not in name for name in written)


def test_draft_layers_are_named_and_get_no_scales(kvq, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    model = zoo.tiny_model("causal", "deepseek_v3")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    layer = model.config.num_hidden_layers
    for name, tensor in list(tensors.items()):
        if ".layers.1." in name:
            tensors[name.replace(".layers.1.", f".layers.{layer}.")] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (tmp_path / "rows.jsonl").write_text(json.dumps(pairs()[1]) + "\n")
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1]
    result = kvq("calibrate", folder, *argv, "-o", tmp_path / "c")
    assert result.code == 0, result.err
    assert f"1 draft layers (`model.layers.{layer}.self_attn`) are never run" in result.err
    assert "1 draft layers without scales" in kvq("inspect", folder).out


def test_every_query_is_observed_or_named(kvq, tmp_path):
    outcomes = {}
    for name in ("gpt2", "gpt_neox", "cohere", "gpt_oss", "qwen3_next", "bloom", "gptj"):
        folder = tmp_path / name
        zoo.tiny_model("causal", name).save_pretrained(folder)
        (tmp_path / "rows.jsonl").write_text(json.dumps(pairs()[1]) + "\n")
        argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1]
        argv += ["--kv-cfg", "FP8_ATTN_CFG", "-o", tmp_path / f"{name}-c"]
        result = kvq("calibrate", folder, *argv, "--json")
        outcomes[name] = "ok" if result.code == 0 else result.json["error"]["message"]
    reached = {name for name, outcome in outcomes.items() if outcome == "ok"}
    assert reached == {"gpt2", "gpt_neox", "cohere", "gpt_oss", "qwen3_next"}
    for name in ("bloom", "gptj"):  # their attention is not reached through the common function
        assert outcomes[name].startswith("0 observations of")
        assert "q_bmm_quantizer" in outcomes[name]
        assert "k_bmm_quantizer" not in outcomes[name]


def test_a_module_called_attn_gets_the_name_that_vllm_reads(kvq, tmp_path):
    """vLLM takes `….attn.k_scale` for its own inner module: see tests/clients/test_vllm.py."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "model"
    zoo.tiny_model("causal", "gpt2").save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text(json.dumps(pairs()[1]) + "\n")
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1]
    assert kvq("calibrate", folder, *argv, "-o", tmp_path / "c").code == 0
    argv = ["--scales", tmp_path / "c", "-o", tmp_path / "out", "--link", "copy"]
    assert kvq("export", folder, *argv).code == 0
    (shard,) = (tmp_path / "out").glob("model-00002-*.safetensors")
    tensors = load_file(shard)
    assert "transformer.h.0.attn.attn.k_scale" in tensors
    assert kvq("verify", tmp_path / "out", "--against", tmp_path / "c").code == 0
    plain = {name.replace(".attn.attn.", ".attn."): values for name, values in tensors.items()}
    save_file(plain, shard)
    findings = kvq("verify", tmp_path / "out", "--json").json["findings"]
    assert {"scale.missing", "scale.stray"} <= {finding["code"] for finding in findings}


@pytest.mark.parametrize(
    ("name", "reason"), [("jamba", "no module or parameter"), ("minicpm3", "expanded")]
)
def test_what_vllm_would_not_read_as_meant_is_refused(kvq, tmp_path, name, reason):
    folder = tmp_path / "model"
    zoo.tiny_model("causal", name).save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text(json.dumps(pairs()[1]) + "\n")
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1]
    assert kvq("calibrate", folder, *argv, "-o", tmp_path / "c").code == 0
    argv = ["--scales", tmp_path / "c", "-o", tmp_path / "out"]
    result = kvq("export", folder, *argv, "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "export.unread")
    assert reason in result.json["error"]["message"]
    result = kvq("export", folder, *argv, "--allow-unread")
    assert result.code == 0
    assert reason in result.err


def test_layers_with_other_head_counts_have_no_scales_per_head(kvq, tmp_path):
    folder = tmp_path / "model"
    zoo.tiny_model("causal", "gemma4_unified_text").save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text(json.dumps(pairs()[1]) + "\n")
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1]
    assert kvq("calibrate", folder, *argv, "-o", tmp_path / "c").code == 0
    argv = ["--scales", tmp_path / "c", "-o", tmp_path / "out"]
    result = kvq("export", folder, *argv, "--granularity", "head", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "dialect.heads_differ")
    assert kvq("export", folder, *argv).code == 0


def with_scales(kvq, name, tmp_path, change):
    """Export a family with changed scale tensors; returns verify's findings."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "model"
    zoo.tiny_model("causal", name).save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text(json.dumps(pairs()[1]) + "\n")
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 48, "--min-tokens", 1]
    assert kvq("calibrate", folder, *argv, "-o", tmp_path / "c").code == 0
    argv = ["--scales", tmp_path / "c", "-o", tmp_path / "out", "--allow-unread", "--link", "copy"]
    assert kvq("export", folder, *argv).code == 0
    assert kvq("verify", tmp_path / "out").code == 0
    (shard,) = (tmp_path / "out").glob("model-00002-*.safetensors")
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)  # without kvq's metadata, as another tool would write it
    result = kvq("verify", tmp_path / "out", "--json")
    return {finding["code"] for finding in result.json["findings"]}


def test_verify_finds_two_scales_for_one_latent_row(kvq, tmp_path):
    def change(tensors):
        tensors["model.layers.1.self_attn.v_scale"] *= np.float32(2)

    assert with_scales(kvq, "deepseek_v3", tmp_path, change) == {"scale.mla"}


def test_verify_finds_a_shared_cache_read_with_another_scale(kvq, tmp_path):
    def change(tensors):
        last = max(name for name in tensors if name.endswith("k_scale"))
        tensors[last] *= np.float32(2)

    assert with_scales(kvq, "gemma3n_text", tmp_path, change) == {"scale.shared"}


def test_verify_finds_a_sharing_layer_without_scales(kvq, tmp_path):
    def change(tensors):
        last = max(name for name in tensors if name.endswith("k_scale"))
        del tensors[last]

    assert "scale.missing" in with_scales(kvq, "gemma4_text", tmp_path, change)


REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_the_checkpoint_runs_when_asked(kvq, checkpoints, rows, tmp_path, monkeypatch):
    import shutil

    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(REMOTE_CODE)
    argv = ["--dataset", rows, "--seq-len", 64, "-o"]
    assert kvq("calibrate", folder, *argv, tmp_path / "no").code == 2
    result = kvq("calibrate", folder, *argv, tmp_path / "c", "--trust-remote-code")
    assert result.code == 0, result.err
    assert kvq("calibrate", checkpoints("llama"), *argv, tmp_path / "native").code == 0
    own, native = (read_calibration(tmp_path / name) for name in ("c", "native"))
    assert own.digest == native.digest


def test_scales_of_draft_layers_are_checked_like_any_other(kvq, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "draft"
    model = zoo.tiny_model("causal", "glm4_moe")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".layers.1.self_attn" in name]:
        tensors[name.replace(".layers.1.", ".layers.4.")] = tensors[name].clone()
    tensors["model.layers.4.self_attn.k_scale"] = torch.tensor([float("nan")])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 4
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    findings = kvq("verify", folder, "--json").json["findings"]
    own = [f for f in findings if f["tensor"] and ".layers.4." in f["tensor"]]
    assert {"scale.nonfinite"} <= {finding["code"] for finding in own}
