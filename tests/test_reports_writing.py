"""Public reports about scales that were written wrongly: one case each, by the command line."""

import json
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import bases, models
from tests.engines.layouts import save
from tests.engines.variants import write as write_variant
from tests.exports import Exports, by_side, json_of, read, tensors, up_to_bf16

NAMES = [f"{path}.{side}_scale" for path in bases.ATTENTION for side in "kv"]
VALUES = dict(zip(NAMES, (0.011, 0.016, 0.021, 0.026), strict=True))


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    return Exports(tmp_path_factory.mktemp("reports"))


@pytest.fixture
def given(tmp_path):
    """Write scales to a JSON file; returns its path."""

    def call(scales=VALUES):
        path = tmp_path / "scales.json"
        path.write_text(json.dumps({"schema": 1, "scales": scales}))
        return path

    return call


def written(folder):
    """Return every scale in a checkpoint's last shard by name, as float32 arrays."""
    (*_, shard) = sorted(folder.glob("*.safetensors"))
    return load_file(shard)


def held(source, folder, names):
    """Copy a checkpoint of one file, with tensors added to it and a declared cache."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    for name, array in names.items():
        end = len(data) - start + array.nbytes
        header[name] = {"dtype": "F32", "shape": list(array.shape),
                        "data_offsets": [end - array.nbytes, end]}  # fmt: skip
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[start:])
    config = json_of(folder)
    own = config.get("quantization_config")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True,
              "dynamic": False}  # fmt: skip
    if own is None:
        own = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    config["quantization_config"] = own | {"kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scale(value, *shape):
    return np.full(shape, value, np.float32)


def test_model_optimizer_20_a_scale_is_amax_over_448_and_never_raised_to_1(kvq, exports, tmp_path):
    argv = ["--scales", exports.calibration, "--kv-cfg", "FP8_KV_CFG", "-o", tmp_path / "out"]
    assert kvq("export", exports.base("single"), *argv).code == 0
    for name, array in written(tmp_path / "out").items():
        path, side = name[: -len(".k_scale")], name[-7]
        assert array[0] == exports.amax[path, side].max() / np.float32(448) < 1
    ones = held(exports.base("single"), tmp_path / "ones", {n: scale(1, 1) for n in NAMES})
    result = kvq("verify", ones)
    assert result.code == 1
    assert "looks uncalibrated" in result.out
    result = kvq("export", ones, "--scales", ones, "-o", tmp_path / "again")
    assert result.code == 2
    assert "1.0" in result.err


def test_model_optimizer_2298_small_scales_stay_small_in_every_dialect(
    kvq, exports, given, tmp_path
):
    small = dict(zip(NAMES, (0.004, 0.0002, 0.00003, 0.9), strict=True))
    for name, exact in (("single", True), ("modelopt-fp8-both", False), ("fp8-tensor", False)):
        argv = ["--scales", given(small), "-o", tmp_path / name]
        assert kvq("export", exports.base(name), *argv).code == 0
        found = {f"{path}.{side}_scale": x for (path, side), (x,) in
                 by_side(read(tmp_path / name)).items()}  # fmt: skip
        single = {n: float(np.float32(x)) for n, x in small.items()}
        assert found == (single if exact else {n: up_to_bf16(x) for n, x in single.items()})


def test_model_optimizer_1012_a_constant_by_request_is_told_from_a_lost_scale(
    kvq, exports, tmp_path
):
    out = tmp_path / "out"
    argv = ["--scales", exports.calibration, "--kv-cfg", "FP8_CAST_KV_CFG", "-o", out]
    assert kvq("export", exports.base("single"), *argv).code == 0
    assert {float(array[0]) for array in written(out).values()} == {1.0}
    assert kvq("verify", out).code == 0
    (*_, shard) = sorted(out.glob("*.safetensors"))
    save(shard, written(out))  # the same numbers, without the record
    result = kvq("verify", out)
    assert result.code == 1
    assert "looks uncalibrated" in result.out


def test_vllm_10063_a_single_kv_scale_becomes_two_equal_ones(kvq, exports, tmp_path):
    single = {f"{path}.kv_scale": scale(0.02 + i, 1) for i, path in enumerate(bases.ATTENTION)}
    source = held(exports.base("single"), tmp_path / "old", single)
    shown = kvq("inspect", source, "--scales", "--json").json["scales"]
    assert sorted(set(shown.values())) == [float(np.float32(x)) for x in (0.02, 1.02)]
    result = kvq("export", source, "--scales", source, "-o", tmp_path / "new")
    assert result.code == 0, result.err
    assert "2 single scales" in result.err
    assert {name: float(array[0]) for name, array in written(tmp_path / "new").items()} == {
        f"{path}.{side}_scale": float(np.float32(0.02 + i))
        for i, path in enumerate(bases.ATTENTION) for side in "kv"
    }  # fmt: skip


def test_compressed_tensors_133_scales_of_projections_move_to_the_attention(kvq, exports, tmp_path):
    shapes = {"k": (), "v": (1,)}
    old = {f"{path}.{s}_proj.output_scale": scale(0.5 + i + (s == "v") / 4, *shapes[s])
           for i, path in enumerate(bases.ATTENTION) for s in "kv"}  # fmt: skip
    source = held(exports.base("single"), tmp_path / "old", old)
    result = kvq("export", source, "--scales", source, "-o", tmp_path / "new")
    assert result.code == 0, result.err
    found = written(tmp_path / "new")
    assert {array.shape for array in found.values()} == {(1,)}
    assert [float(found[name][0]) for name in NAMES] == [0.5, 0.75, 1.5, 1.75]
    assert not [name for name in tensors(tmp_path / "new") if "output_scale" in name]


@pytest.mark.parametrize("kv_cfg", ["FP8_KV_CFG", "NVFP4_KV_CFG"])
def test_vllm_29980_both_files_of_modelopt_declare_the_same_cache(
    kvq, exports, given, tmp_path, kv_cfg
):
    out, algorithm = tmp_path / "out", kv_cfg.split("_")[0]
    argv = ["--scales", given(), "--kv-cfg", kv_cfg, "--platform", "sm100", "-o", out]
    result = kvq("export", exports.base("modelopt-fp8-both"), *argv)
    assert result.code == 0, result.err
    scheme = json_of(out)["quantization_config"]["kv_cache_scheme"]
    flat = {"FP8": {"dynamic": False, "num_bits": 8, "type": "float"}, "NVFP4": "NVFP4"}
    assert scheme == flat[algorithm]
    legacy = json_of(out, "hf_quant_config.json")
    assert legacy["quantization"]["kv_cache_quant_algo"] == algorithm
    config = json_of(out)  # one of two files edited by hand
    del config["quantization_config"]["kv_cache_scheme"]
    (out / "config.json").write_text(json.dumps(config))
    assert kvq("verify", out, "--engine", "vllm").code == 1
    argv = ["--scales", out, "--platform", "sm100", "-o", tmp_path / "repaired"]
    assert kvq("export", out, *argv).code == 0
    assert json_of(tmp_path / "repaired")["quantization_config"]["kv_cache_scheme"] == scheme
    argv = ["--engine", "vllm", "--platform", "sm100"]
    assert kvq("verify", tmp_path / "repaired", *argv).code == 0


@pytest.mark.parametrize(("config", "legacy"), [("FP8", "NVFP4"), (None, "NVFP4"), ("NVFP4", None)])
def test_model_optimizer_557_files_that_disagree_are_repaired_only_where_it_is_clear(
    kvq, exports, given, tmp_path, config, legacy
):
    source = tmp_path / "source"
    argv = ["--scales", given(), "--kv-cfg", "FP8_KV_CFG", "-o", source, "--link", "copy"]
    assert kvq("export", exports.base("modelopt-nvfp4-both"), *argv).code == 0
    (*_, shard) = sorted(source.glob("*.safetensors"))
    save(shard, written(source))  # by another tool: nothing is recorded
    files = {name: json_of(source, name) for name in ("config.json", "hf_quant_config.json")}
    files["config.json"]["quantization_config"]["kv_cache_scheme"] = config
    files["hf_quant_config.json"]["quantization"]["kv_cache_quant_algo"] = legacy
    for name, document in files.items():
        (source / name).write_text(json.dumps(document))
    argv = ["export", source, "--scales", source, "--platform", "sm100", "--json"]
    argv += ["-o", tmp_path / "new"]
    result = kvq(*argv)
    if config and legacy:
        assert (result.code, result.json["error"]["code"]) == (2, "scales.declarations")
        assert kvq(*argv, "--kv-cfg", "NVFP4_KV_CFG").code == 0
    assert json_of(tmp_path / "new")["quantization_config"]["kv_cache_scheme"] == "NVFP4"
    inner = json_of(tmp_path / "new", "hf_quant_config.json")["quantization"]
    assert inner["kv_cache_quant_algo"] == "NVFP4"


def test_compressed_tensors_135_kv_only_needs_no_group_and_touches_no_weight(
    kvq, exports, given, tmp_path
):
    source, out = exports.base("single"), tmp_path / "out"
    assert kvq("export", source, "--scales", given(), "-o", out).code == 0
    own = json_of(out)["quantization_config"]
    assert own["config_groups"] == {}
    assert own["kv_cache_scheme"]["num_bits"] == 8
    first = (out / "model-00001-of-00002.safetensors").read_bytes()
    assert first == (source / "model.safetensors").read_bytes()


def test_model_optimizer_790_an_nvfp4_scale_is_amax_over_448_and_says_so(kvq, exports, tmp_path):
    source, out = exports.base("modelopt-nvfp4-both"), tmp_path / "out"
    argv = ["--scales", exports.calibration, "--for-other-weights", "--platform", "sm100"]
    assert kvq("export", source, *argv, "--kv-cfg", "NVFP4_KV_CFG", "-o", out).code == 0
    assert by_side(read(out)) == exports.scales("modelopt", "nvfp4")
    (*_, shard) = sorted(out.glob("*.safetensors"))
    data = shard.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    record = json.loads(header["__metadata__"]["kvq"])
    assert record["convention"] == "scale = amax / scale_divisor, dequantization multiplier"
    for (path, side), amax in exports.amax.items():
        assert record["amax"][f"{path}.{side}_bmm_quantizer"] == amax.tolist()
    for divisor in (2688, 6, 1):
        wrong = {
            f"{path}.{side}_scale": float(amax.max()) / divisor
            for (path, side), amax in exports.amax.items()
        }
        (tmp_path / "wrong.json").write_text(json.dumps({"schema": 1, "scales": wrong}))
        result = kvq("verify", out, "--against", tmp_path / "wrong.json")
        assert result.code == 1, divisor


def test_sglang_18818_the_scales_json_is_refused_with_the_reason_or_written_with_its_losses(
    kvq, exports, given, tmp_path
):
    argv = ["--scales", given(), "--dialect", "sglang-json", "--for", "sglang", "-o"]
    result = kvq("export", exports.base("single"), *argv, tmp_path / "no")
    assert result.code == 2
    assert "SGLang 0.5.23 reads the file, but" in result.err
    assert not (tmp_path / "no").exists()
    result = kvq("export", exports.base("single"), *argv, tmp_path / "out", "--allow-unread")
    assert result.code == 0, result.err
    assert "one number for K and V; coarser than observed: layer 0 k 1.45x" in result.err
    text = (tmp_path / "out" / "kv_cache_scales.json").read_text()
    factors = {"0": float(np.float32(0.016)), "1": float(np.float32(0.026))}
    assert json.loads(text) == {
        "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}},
        "model_type": "llama",
    }


def test_llm_compressor_937_export_ends_with_the_command_that_serves_the_result(
    kvq, exports, given, tmp_path
):
    out = tmp_path / "out"
    argv = ["--scales", given(), "--for", "vllm", "--for", "sglang", "-o", out]
    *_, first, second = kvq("export", exports.base("single"), *argv).out.splitlines()
    assert first == f"serve it with: vllm serve {out}"
    assert second == f"serve it with: python -m sglang.launch_server --model-path {out}"
    argv = ["--scales", given(), "-o", tmp_path / "flagged"]
    (*_, last) = kvq("export", exports.base("fp8-blocks"), *argv).out.splitlines()
    assert last == f"serve it with: vllm serve {tmp_path / 'flagged'} --kv-cache-dtype fp8"


@pytest.mark.parametrize(("name", "shape"), [("single", (1,)), ("modelopt-fp8-flat", ())])
def test_vllm_39418_every_shape_of_one_number_is_written_in_one_shape(
    kvq, exports, tmp_path, name, shape
):
    shapes = ((), (1,), (1, 1), (1, 1, 1))
    old = {n: scale(x, *s) for (n, x), s in zip(VALUES.items(), shapes, strict=True)}
    source = held(exports.base(name), tmp_path / "old", old)
    result = kvq("export", source, "--scales", source, "-o", tmp_path / "new")
    assert result.code == 0, result.err
    assert {array.shape for array in written(tmp_path / "new").values()} == {shape}


def test_vllm_39418_two_numbers_are_not_one_scale(kvq, exports, tmp_path):
    old = {name: scale(0.02, 3) for name in NAMES}  # neither one, nor one for each of 2 heads
    source = held(exports.base("single"), tmp_path / "old", old)
    result = kvq("export", source, "--scales", source, "-o", tmp_path / "new")
    assert result.code == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("platform", ["sm90", "gfx942"])
def test_vllm_45562_scales_are_those_of_e4m3fn_on_every_platform(
    kvq, exports, given, tmp_path, platform
):
    values = dict(zip(NAMES, (4.48 / 448, 0.02, 0.03, 0.04), strict=True))
    argv = ["--scales", given(values), "--platform", platform, "-o", tmp_path / "out"]
    result = kvq("export", exports.base("single"), *argv)
    if platform == "gfx942":  # its codes end at 240, and the engine has to double a scale for it
        assert result.code == 2
        assert "does not double this scale for gfx942" in result.err
        result = kvq("export", exports.base("single"), *argv, "--allow-unread")
    assert result.code == 0, result.err
    found = {name: float(array[0]) for name, array in written(tmp_path / "out").items()}
    assert found == {name: float(np.float32(value)) for name, value in values.items()}


def test_vllm_8409_a_stripped_checkpoint_can_have_an_e5m2_cache(kvq, exports, given, tmp_path):
    source, out = exports.base("modelopt-fp8-both"), tmp_path / "out"
    assert kvq("export", source, "--scales", given(), "-o", out).code == 0
    result = kvq("verify", out, "--engine", "vllm", "--kv-cache-dtype", "fp8_e5m2")
    assert result.code == 1
    assert "fp8_e5m2 kv-cache is not supported with fp8 checkpoints" in result.out
    assert kvq("export", out, "--strip", "-o", tmp_path / "bare").code == 0
    assert tensors(tmp_path / "bare") == tensors(source)
    assert "kv_cache_scheme" not in json_of(tmp_path / "bare")["quantization_config"]
    legacy = json_of(tmp_path / "bare", "hf_quant_config.json")
    assert legacy["quantization"]["kv_cache_quant_algo"] is None


def test_tensorrt_llm_967_k_and_v_keep_scales_of_their_own(kvq, exports, given, tmp_path):
    apart = {name: 0.02 * (20 if "v_scale" in name else 1) + i / 1000
             for i, name in enumerate(NAMES)}  # fmt: skip
    argv = ["--scales", given(apart), "-o", tmp_path / "out"]
    assert kvq("export", exports.base("single"), *argv).code == 0
    found = written(tmp_path / "out")
    assert {name: float(array[0]) for name, array in found.items()} == {
        name: float(np.float32(value)) for name, value in apart.items()
    }


def test_tensorrt_llm_18953_int8_is_amax_over_127_and_refused_where_no_engine_reads_it(
    kvq, exports, tmp_path
):
    argv = ["--scales", exports.calibration, "--kv-cfg", "INT8_KV_CFG", "-o"]
    for engine in ("tensorrt-llm", "vllm", "sglang"):
        result = kvq("export", exports.base("single"), *argv, tmp_path / "no", "--for", engine)
        assert result.code == 2
        assert "int8" in result.err
    out = tmp_path / "out"
    assert kvq("export", exports.base("single"), *argv, out, "--for", "transformers").code == 0
    for name, array in written(out).items():
        amax = exports.amax[name[: -len(".k_scale")], name[-7]]
        assert array[0] == amax.max() / np.float32(127)


def test_model_optimizer_2060_side_files_come_along_and_a_stale_declaration_does_not(
    kvq, exports, given, tmp_path
):
    source = tmp_path / "source"
    shutil.copytree(exports.base("ct-w4a16"), source)
    stale = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (source / "hf_quant_config.json").write_text(json.dumps(stale))
    result = kvq("export", source, "--scales", given(), "-o", tmp_path / "out")
    assert result.code == 0, result.err
    assert "hf_quant_config.json not carried along" in result.err
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    for name in bases.SIDE_FILES:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_megatron_bridge_919_tied_weights_stay_one_tensor(kvq, exports, given, tmp_path):
    source, out = exports.base("tied"), tmp_path / "out"
    assert kvq("export", source, "--scales", given(), "-o", out).code == 0
    assert "lm_head.weight" not in tensors(source)
    assert tensors(out).keys() - tensors(source).keys() == set(NAMES)
    assert json_of(out)["tie_word_embeddings"] is True


def test_model_optimizer_2427_the_index_names_every_scale_and_their_bytes(
    kvq, exports, given, tmp_path
):
    source = tmp_path / "source"
    shutil.copytree(exports.base("sharded"), source)
    save(source / "kv_scales.safetensors", {name: scale(0.02, 1) for name in NAMES})
    assert kvq("verify", source).code == 1
    result = kvq("export", source, "--scales", given(), "-o", tmp_path / "out")
    assert result.code == 0, result.err
    assert "kv_scales.safetensors not carried along: the index does not name it" in result.err
    index = json_of(tmp_path / "out", "model.safetensors.index.json")
    assert {name: index["weight_map"].get(name) for name in NAMES} == dict.fromkeys(
        NAMES, "model-00004-of-00004.safetensors"
    )
    size = 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        data = path.read_bytes()
        size += len(data) - 8 - struct.unpack("<Q", data[:8])[0]
    assert index["metadata"]["total_size"] == size
    assert kvq("verify", tmp_path / "out").code == 0


def test_model_optimizer_2076_a_scale_has_the_prefix_of_the_checkpoints_own_names(kvq, tmp_path):
    source = tmp_path / "source"
    write_variant("gemma3-none", source)
    (prefix,) = {name.split(".layers.")[0] for name in tensors(source)
                 if name.endswith(".self_attn.k_proj.weight") and "vision" not in name}  # fmt: skip
    given = {f"{prefix}.layers.{i}.self_attn.{s}_scale": 0.01 + i / 64 + (s == "k") / 128
             for i in (0, 1) for s in "kv"}  # fmt: skip
    (tmp_path / "scales.json").write_text(json.dumps({"schema": 1, "scales": given}))
    out = tmp_path / "out"
    assert kvq("export", source, "--scales", tmp_path / "scales.json", "-o", out).code == 0
    assert prefix != "model"
    assert tensors(out).keys() - tensors(source).keys() == given.keys()
    assert kvq("verify", out, "--engine", "vllm").code == 0


def test_verl_4435_scales_of_weights_that_moved_on_are_refused(kvq, exports, tmp_path):
    model = models.build("llama", **bases.SIZES)
    model.model.layers[1].self_attn.k_proj.weight.data.add_(0.5)
    model.save_pretrained(tmp_path / "tuned")
    argv = ["--scales", exports.calibration, "--kv-cfg", "FP8_KV_CFG", "-o"]
    result = kvq("export", tmp_path / "tuned", *argv, tmp_path / "no", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "export.weights")
    out = tmp_path / "out"
    assert kvq("export", exports.base("single"), *argv, out, "--link", "copy").code == 0
    tuned = tmp_path / "tuned" / "model.safetensors"
    shutil.copyfile(tuned, out / "model-00001-of-00002.safetensors")
    result = kvq("verify", out)
    assert result.code == 1
    assert "calibrated on other weights" in result.out
    forced = tmp_path / "forced"
    result = kvq("export", tmp_path / "tuned", *argv, forced, "--for-other-weights")
    assert result.code == 0, result.err
    assert "are written onto" in result.err
    assert kvq("verify", forced).code == 0


def test_sglang_18396_a_checkpoint_for_a_bf16_cache_is_one_without_scales(
    kvq, exports, given, tmp_path
):
    source, out = exports.base("sharded"), tmp_path / "out"
    assert kvq("export", source, "--scales", given(), "-o", out).code == 0
    result = kvq("export", out, "--strip", "-o", tmp_path / "bare")
    assert result.code == 0, result.err
    assert "no scales, no declared cache" in result.out
    assert tensors(tmp_path / "bare") == tensors(source)
    assert json_of(tmp_path / "bare") == json_of(source)
    again = kvq("export", tmp_path / "bare", "--strip", "-o", tmp_path / "again", "--json")
    assert (again.code, again.json["error"]["code"]) == (2, "strip.nothing")
