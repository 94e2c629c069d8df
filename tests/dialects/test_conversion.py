"""Scales from any checkpoint or file into another dialect, format or granularity; repair."""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest

from kvq.cli import run
from tests import bases, models
from tests.engines.architectures import ARCHITECTURES
from tests.engines.layouts import save, write_index
from tests.engines.variants import write as write_variant
from tests.exports import by_side, json_of, read, tensors, up_to_bf16, without_null

HELD = {  # (attention, side) → what the old checkpoints hold; no two alike, none of bfloat16
    (path, side): 0.011 + 0.01 * i + 0.005 * (side == "v")
    for i, path in enumerate(bases.ATTENTION) for side in "kv"
}  # fmt: skip
OLD = {  # spelling → leaf of a scale
    "attention": "{s}_scale", "projection": "{s}_proj.{s}_scale", "inner": "attn.{s}_scale",
    "fused": "qkv_proj.{s}_scale", "output": "{s}_proj.output_scale", "cache": "{s}_cache.scale",
    "native": "{s}_fake_quantizer.qscale_act",
}  # fmt: skip
SINGLE = {"single": "kv_scale", "native-single": "kv_fake_quantizer.qscale_act"}
KV_ONLY = {
    "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": [],
    "quantization_status": "compressed", "kv_cache_scheme": {
        "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
}  # fmt: skip
SHARDS = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversion") / "dense"
    models.save("llama", folder, **bases.SIZES)
    return folder


def export(*argv, code=0):
    assert run(["export", *(str(argument) for argument in argv)]) == code


def f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def old_scales(spelling, dtype=np.float32, shape=(1,)):
    """Return the scales under one spelling; a single one has K's value."""
    leaf = (OLD | SINGLE)[spelling]
    return {
        f"{path}.{leaf.format(s=side)}": np.full(shape, value, dtype)
        for (path, side), value in HELD.items() if side == "k" or spelling not in SINGLE
    }  # fmt: skip


def old_checkpoint(dense, folder, old, base=None, config=KV_ONLY):
    """Write three shards, the second one with old scales among its weights."""
    base = base or bases.Base(config={"quantization_config": config})

    def spread(weights, folder):
        names = sorted(weights)
        files = {file: {n: weights[n] for n in names[i::3]} for i, file in enumerate(SHARDS)}
        held = list(files[SHARDS[1]].items())
        middle = len(held) // 2  # scales between weights: bytes after them move
        files[SHARDS[1]] = {**dict(held[:middle]), **old, **dict(held[middle:])}
        for file, part in files.items():
            save(folder / file, part)
        write_index(folder, files)

    return bases.write(base, dense, folder, spread)


@pytest.mark.parametrize("spelling", [*OLD, *SINGLE])
def test_a_repair_rewrites_only_the_shard_with_old_scales(dense, tmp_path, capfd, spelling):
    source = old_checkpoint(dense, tmp_path / "old", old_scales(spelling))
    export(source, "--scales", source, "-o", tmp_path / "new", "--link", "hard")
    said = capfd.readouterr()
    for old, new in zip(SHARDS, range(1, 4), strict=True):
        target = tmp_path / "new" / f"model-{new:05}-of-00004.safetensors"
        assert os.path.samefile(source / old, target) == (new != 2)
    held = {
        key: [f32(HELD[key[0], "k"] if spelling in SINGLE else value)]
        for key, value in HELD.items()
    }
    assert by_side(read(tmp_path / "new")) == held
    before, after = tensors(source), tensors(tmp_path / "new")
    own = {f"{path}.{side}_scale" for path, side in HELD}
    old = old_scales(spelling).keys()
    assert after.keys() == before.keys() - old | own
    assert {n: after[n] for n in before.keys() - old} == {n: before[n] for n in before.keys() - old}
    assert ("stand for K and V alike" in said.err) == (spelling in SINGLE)
    assert run(["verify", str(tmp_path / "new"), "--engine", "vllm", "--engine", "sglang"]) == 0


@pytest.mark.parametrize("form", [(np.float16, ()), (ml_dtypes.bfloat16, (1, 1, 1)),
                                  (np.float32, (1, 1))], ids=str)  # fmt: skip
def test_old_scales_of_another_dtype_and_shape_become_the_dialects_own(dense, tmp_path, form):
    dtype, shape = form
    source = old_checkpoint(dense, tmp_path / "old", old_scales("output", dtype, shape))
    export(source, "--scales", source, "-o", tmp_path / "new")
    rounded = {key: [float(np.array(value, dtype))] for key, value in HELD.items()}
    assert by_side(read(tmp_path / "new")) == rounded
    after = tensors(tmp_path / "new")
    assert {after[f"{path}.{side}_scale"][:2] for path, side in HELD} == {("F32", (1,))}


@pytest.mark.parametrize("spelling", [*OLD, *SINGLE])
@pytest.mark.parametrize("name", ["modelopt-fp8-both", "fp8-blocks"])
def test_every_spelling_is_repaired_on_a_base_of_another_dialect(dense, tmp_path, name, spelling):
    base = bases.BASES[name]
    source = old_checkpoint(dense, tmp_path / "old", old_scales(spelling), base)
    export(source, "--scales", source, "-o", tmp_path / "new")
    expected = {
        key: [up_to_bf16(f32(HELD[key[0], "k"] if spelling in SINGLE else value))]
        for key, value in HELD.items()
    }
    assert by_side(read(tmp_path / "new")) == expected
    left = set(tensors(tmp_path / "new")) & set(old_scales(spelling))
    leaf = {"modelopt-fp8-both": OLD["projection"], "fp8-blocks": OLD["attention"]}[name]
    assert left == (set(old_scales(spelling)) if OLD.get(spelling) == leaf else set())
    dtype = ["--kv-cache-dtype", "fp8"] if name == "fp8-blocks" else []
    assert run(["verify", str(tmp_path / "new"), "--engine", "vllm", *dtype]) == 0


@pytest.mark.parametrize("factor", [1, 2])
def test_two_spellings_leave_one_where_they_agree(dense, tmp_path, capfd, factor):
    both = old_scales("attention") | {n: a * factor for n, a in old_scales("output").items()}
    source = old_checkpoint(dense, tmp_path / "old", both)
    export(source, "--scales", source, "-o", tmp_path / "new", code=0 if factor == 1 else 2)
    said = capfd.readouterr().err
    if factor == 2:
        assert "has two scales of one layer that differ" in said
        return
    assert "8 scale tensors of the source are replaced" in said
    assert by_side(read(tmp_path / "new")) == {key: [f32(x)] for key, x in HELD.items()}
    assert not tensors(tmp_path / "new").keys() & old_scales("output").keys()


def test_scales_per_head_become_their_maximum_and_not_the_other_way(dense, tmp_path):
    heads = {
        name: np.array([array[0], array[0] / 3], np.float32).reshape(2, 1, 1)
        for name, array in old_scales("attention").items()
    }
    scheme = KV_ONLY["kv_cache_scheme"] | {"strategy": "attn_head"}
    source = old_checkpoint(
        dense, tmp_path / "old", heads, config=KV_ONLY | {"kv_cache_scheme": scheme}
    )
    export(source, "--scales", source, "--granularity", "tensor", "-o", tmp_path / "tensor")
    assert by_side(read(tmp_path / "tensor")) == {key: [f32(x)] for key, x in HELD.items()}
    export(source, "--scales", source, "-o", tmp_path / "head")
    assert by_side(read(tmp_path / "head")) == {
        key: [f32(x), float(np.float32(x) / np.float32(3))] for key, x in HELD.items()
    }
    argv = ["--scales", tmp_path / "tensor", "--granularity", "head", "-o", tmp_path / "no"]
    export(source, *argv, code=2)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("order", [("FP8_KV_CFG", "NVFP4_KV_CFG"), ("NVFP4_KV_CFG", "FP8_KV_CFG")])
def test_fp8_and_nvfp4_have_the_same_number(dense, tmp_path, order):
    base = bases.BASES["modelopt-nvfp4-both"]
    source = old_checkpoint(dense, tmp_path / "old", old_scales("projection"), base)
    words = {"FP8_KV_CFG": "FP8", "NVFP4_KV_CFG": "NVFP4"}
    for i, kv_cfg in enumerate(order):
        target = tmp_path / str(i)
        export(source, "--scales", source, "--kv-cfg", kv_cfg, "--platform", "sm100", "-o", target)
        expected = {key: [up_to_bf16(f32(value))] for key, value in HELD.items()}
        assert by_side(read(target)) == expected
        assert read(target).format == {"FP8": "fp8_e4m3", "NVFP4": "nvfp4"}[words[kv_cfg]]
        legacy = json_of(target, "hf_quant_config.json")["quantization"]
        assert legacy["kv_cache_quant_algo"] == words[kv_cfg]
        scheme = json_of(target)["quantization_config"]["kv_cache_scheme"]
        assert (scheme == "NVFP4") == (words[kv_cfg] == "NVFP4")
        source = target


@pytest.mark.parametrize("spelling", ["attention", "projection", "single"])
def test_scales_from_a_json_file_under_any_spelling(dense, tmp_path, spelling):
    named = {name: float(array[0]) for name, array in old_scales(spelling).items()}
    (tmp_path / "scales.json").write_text(json.dumps({"schema": 1, "scales": named}))
    export(dense, "--scales", tmp_path / "scales.json", "-o", tmp_path / "new")
    assert by_side(read(tmp_path / "new")) == {
        key: [f32(HELD[key[0], "k"] if spelling == "single" else value)]
        for key, value in HELD.items()
    }


def test_a_file_of_sglang_gives_one_number_to_both_sides(dense, tmp_path):
    factors = {str(i): HELD[path, "v"] for i, path in enumerate(bases.ATTENTION)}
    document = {"model_type": "llama", "kv_cache": {
        "dtype": "float8_e4m3fn", "scaling_factor": {"0": factors, "1": factors}}}  # fmt: skip
    (tmp_path / "kv.json").write_text(json.dumps(document))
    export(dense, "--scales", tmp_path / "kv.json", "-o", tmp_path / "new")
    assert by_side(read(tmp_path / "new")) == {
        (path, side): [f32(HELD[path, "v"])] for path, side in HELD
    }
    argv = ["--dialect", "sglang-json", "--for", "sglang", "--tp", 2, "-o", tmp_path / "json"]
    export(dense, "--scales", tmp_path / "new", *argv, "--allow-unread")
    written = json_of(tmp_path / "json", "kv_cache_scales.json")
    factors = {number: f32(value) for number, value in factors.items()}
    assert written["kv_cache"]["scaling_factor"] == {"0": factors, "1": factors}
    assert tensors(tmp_path / "json") == tensors(dense)


def test_the_models_own_dtype_decides_what_a_scale_is_rounded_up_to(dense, tmp_path):
    base = bases.BASES["modelopt-fp8-flat"]
    half = bases.Base(base.attention, base.mlp, {**base.config, "dtype": "float16"})
    source = old_checkpoint(dense, tmp_path / "old", old_scales("projection"), half)
    export(source, "--scales", source, "-o", tmp_path / "new")
    for key, (found,) in by_side(read(tmp_path / "new")).items():
        near = np.float16(f32(HELD[key]))
        up = near if near >= np.float32(HELD[key]) else np.nextafter(near, np.float16(np.inf))
        assert found == float(up), key
    bare = bases.Base(base.attention, base.mlp, {**base.config, "dtype": "float16"})
    big = {name: np.full(1, 7e4, np.float32) for name in old_scales("projection")}
    source = old_checkpoint(dense, tmp_path / "big", big, bare)
    export(source, "--scales", source, "-o", tmp_path / "no", code=2)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("place", ["quantization_config", "text_config"])
def test_a_multimodal_base_keeps_its_prefix_and_the_place_of_its_quantization(tmp_path, place):
    architecture = ARCHITECTURES["gemma3"]
    source = tmp_path / "source"
    write_variant("gemma3-none", source)
    own = bases.CT_W4A16 | {"ignore": ["re:.*"], "format": "dense"}
    config = json_of(source)
    if place == "text_config":
        config["text_config"]["quantization_config"] = own
    else:
        config["quantization_config"] = own
    (source / "config.json").write_text(json.dumps(config))
    paths = [f"{architecture.layers}.{i}.{architecture.attention}" for i in (0, 1)]
    named = {f"{path}.{s}_scale": 0.01 + i / 64 for i, path in enumerate(paths) for s in "kv"}
    (tmp_path / "scales.json").write_text(json.dumps({"schema": 1, "scales": named}))
    export(source, "--scales", tmp_path / "scales.json", "-o", tmp_path / "new")
    added = tensors(tmp_path / "new").keys() - tensors(source).keys()
    assert added == named.keys()
    written = json_of(tmp_path / "new")
    inner = written["text_config"] if place == "text_config" else written
    scheme = inner["quantization_config"].pop("kv_cache_scheme")
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"]) == (8, "float", "tensor")
    kept = own | {}
    del kept["kv_cache_scheme"]
    assert inner["quantization_config"] == kept
    for key in config.keys() - {"quantization_config", "text_config"}:
        assert written[key] == config[key]
    assert written.keys() == config.keys()
    assert run(["verify", str(tmp_path / "new"), "--engine", "vllm"]) == 0
    export(tmp_path / "new", "--strip", "-o", tmp_path / "bare")
    assert tensors(tmp_path / "bare") == tensors(source)


@pytest.mark.parametrize("name", [*bases.WITHOUT_SCALES, *bases.COMPRESSED, *bases.FP8])
def test_strip_takes_stray_scales_and_nothing_of_the_weights_declaration(dense, tmp_path, name):
    base, old = bases.BASES[name], old_scales("attention")
    source = old_checkpoint(dense, tmp_path / "old", old, base)
    export(source, "--strip", "-o", tmp_path / "bare")
    assert without_null(json_of(tmp_path / "bare")) == without_null(json_of(source))
    before = tensors(source)
    assert tensors(tmp_path / "bare") == {n: before[n] for n in before.keys() - old.keys()}


def test_strip_keeps_rotations_and_removes_a_scheme_that_kvq_does_not_know(dense, tmp_path):
    rotations = {"config_groups": {"R1": {"type": "hadamard"}}}
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True}
    for number, own in enumerate(({"transform_config": rotations}, {})):
        source = tmp_path / f"old-{number}"
        declared = KV_ONLY | {"kv_cache_scheme": scheme} | own
        bases.write(bases.Base(config={"quantization_config": declared}), dense, source)
        export(source, "--strip", "-o", tmp_path / f"bare-{number}")
        left = json_of(tmp_path / f"bare-{number}").get("quantization_config")
        rest = {key: value for key, value in declared.items() if key != "kv_cache_scheme"}
        assert left == (rest if own else None)


def test_strip_keeps_the_method_fp8_where_it_declares_a_cache(dense, tmp_path):
    declared = bases.FP8["fp8-tensor"].config["quantization_config"]
    for number, scheme in enumerate(("static", {"num_bits": 8, "type": "float"})):
        source, config = tmp_path / f"old-{number}", declared | {"kv_cache_scheme": scheme}
        base = bases.FP8["fp8-tensor"]
        base = bases.Base(base.attention, base.mlp, {"quantization_config": config})
        bases.write(base, dense, source)
        export(source, "--strip", "-o", tmp_path / f"bare-{number}")
        assert json_of(tmp_path / f"bare-{number}")["quantization_config"] == declared


@pytest.mark.parametrize("method", ["compressed_tensors", "Compressed-Tensors"])
def test_a_method_in_another_spelling_comes_out_in_the_one_that_all_readers_know(
    dense, tmp_path, method
):
    base = bases.BASES["ct-w4a16"]
    config = base.config["quantization_config"] | {"quant_method": method}
    base = bases.Base(base.attention, base.mlp, {"quantization_config": config})
    source = old_checkpoint(dense, tmp_path / "old", old_scales("attention"), base)
    export(source, "--scales", source, "-o", tmp_path / "new")
    written = json_of(tmp_path / "new")["quantization_config"]
    assert written.pop("kv_cache_scheme")["num_bits"] == 8
    expected = config | {"quant_method": "compressed-tensors"}
    assert written == {key: value for key, value in expected.items() if key != "kv_cache_scheme"}
    assert run(["verify", str(tmp_path / "new"), "--engine", "vllm"]) == 0


def test_scales_of_a_draft_layer_stay(dense, tmp_path):
    source = old_checkpoint(dense, tmp_path / "old", old_scales("attention"))
    config = json_of(source) | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    export(source, "--scales", source, "-o", tmp_path / "new", "--allow-unread")
    before, after = tensors(source), tensors(tmp_path / "new")
    drafts = {f"{bases.ATTENTION[1]}.{side}_scale" for side in "kv"}
    assert {name: after.get(name) for name in drafts} == {name: before[name] for name in drafts}


def test_what_is_left_behind_is_said(dense, tmp_path, capfd):
    source = old_checkpoint(dense, tmp_path / "old", old_scales("attention"))
    (source / "original").mkdir()
    (source / "original" / "params.json").write_text("{}")
    for name in ("pytorch_model.bin", "model-q4.gguf"):
        (source / name).write_text("{}")
    export(source, "--scales", source, "-o", tmp_path / "new")
    said = capfd.readouterr().err
    names = {path.name for path in (tmp_path / "new").iterdir()}
    for name in ("original", "pytorch_model.bin", "model-q4.gguf"):
        assert name in said
        assert name not in names


def test_a_tensor_in_two_shards_stays_in_the_one_that_the_index_names(dense, tmp_path):
    source = old_checkpoint(dense, tmp_path / "old", old_scales("attention"))
    index = json_of(source, "model.safetensors.index.json")["weight_map"]
    twice = next(name for name, file in index.items() if file == SHARDS[0])
    _, weights = bases.dense(dense)
    held = {name: weights[name] for name, file in index.items() if file == SHARDS[2]}
    save(source / SHARDS[2], held | {twice: weights[twice] * 2})
    export(source, "--scales", source, "-o", tmp_path / "new")
    written = json_of(tmp_path / "new", "model.safetensors.index.json")["weight_map"]
    assert written[twice] == "model-00001-of-00004.safetensors"
    assert {name: file[:11] for name, file in written.items() if name in weights} == {
        name: file[:11] for name, file in index.items() if name in weights
    }


def test_a_checkpoint_of_consolidated_files_alone_is_refused(dense, tmp_path, capfd):
    source = bases.write(bases.Base(), dense, tmp_path / "old")
    (source / "model.safetensors").rename(source / "consolidated.safetensors")
    named = {name: float(array[0]) for name, array in old_scales("attention").items()}
    (tmp_path / "scales.json").write_text(json.dumps({"schema": 1, "scales": named}))
    export(source, "--scales", tmp_path / "scales.json", "-o", tmp_path / "new", code=2)
    assert "has no weights beside consolidated.safetensors" in capfd.readouterr().err


def test_scales_of_another_checkpoint_are_written_onto_a_quantized_copy_when_asked(
    dense, tmp_path, capfd
):
    source = old_checkpoint(dense, tmp_path / "old", old_scales("attention"))
    copy = bases.write(bases.BASES["ct-w4a16"], dense, tmp_path / "copy")
    export(copy, "--scales", source, "-o", tmp_path / "no", code=2)
    assert "the scales belong to other weights" in capfd.readouterr().err
    export(copy, "--scales", source, "-o", tmp_path / "new", "--for-other-weights")
    assert "are written onto" in capfd.readouterr().err
    assert by_side(read(tmp_path / "new")) == {key: [f32(x)] for key, x in HELD.items()}
    assert run(["verify", str(tmp_path / "new"), "--engine", "vllm"]) == 0


def test_int8_scales_become_fp8_scales_of_the_same_amax(dense, tmp_path):
    scheme = KV_ONLY["kv_cache_scheme"] | {"type": "int"}
    config = KV_ONLY | {"kv_cache_scheme": scheme}
    source = old_checkpoint(dense, tmp_path / "old", old_scales("attention"), config=config)
    export(source, "--scales", source, "--kv-cfg", "FP8_KV_CFG", "-o", tmp_path / "new")
    assert read(tmp_path / "new").format == "fp8_e4m3"
    for key, (found,) in by_side(read(tmp_path / "new")).items():
        assert found == pytest.approx(HELD[key] * 127 / 448, rel=1e-6)


def test_modelopt_in_text_config_is_served_with_the_option_that_vllm_needs(tmp_path, capfd):
    source = tmp_path / "source"
    write_variant("gemma3-none", source)
    config = json_of(source)
    own = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*"]}
    config["text_config"]["quantization_config"] = own
    (source / "config.json").write_text(json.dumps(config))
    layers = ARCHITECTURES["gemma3"].layers
    named = {f"{layers}.{i}.self_attn.{s}_scale": 0.01 + i / 64 + (s == "k") / 128
             for i in (0, 1) for s in "kv"}  # fmt: skip
    (tmp_path / "scales.json").write_text(json.dumps({"schema": 1, "scales": named}))
    export(source, "--scales", tmp_path / "scales.json", "-o", tmp_path / "new")
    assert capfd.readouterr().out.splitlines()[-1].endswith("--kv-cache-dtype fp8")
    argv = ["verify", str(tmp_path / "new"), "--engine", "vllm"]
    assert run(argv) == 1
    assert run([*argv, "--kv-cache-dtype", "fp8"]) == 0
    assert "quantization_config" not in json_of(tmp_path / "new")


def test_code_of_the_model_is_copied_with_a_word_and_never_run(dense, tmp_path, capfd):
    source = old_checkpoint(dense, tmp_path / "old", old_scales("attention"))
    export(source, "--scales", source, "-o", tmp_path / "new")
    assert "code of the model is copied, never run: modeling_own.py" in capfd.readouterr().err
    own = (tmp_path / "new" / "modeling_own.py").read_text()
    assert own == bases.SIDE_FILES["modeling_own.py"] == "raise SystemExit(9)\n"
