"""Checkpoints made to break the reader: each gives one clear error, in bounded time and memory."""

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = (
    ("inspect",), ("verify",), ("verify", "--engine", "vllm"), ("inspect", "--engine", "vllm"),
)  # fmt: skip
SHARD, SCALES = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "scripts" / "fuzz.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def valid(fuzz):
    return fuzz.bases()[0]


@pytest.fixture
def checkpoint(fuzz, valid, tmp_path):
    fuzz.write(valid, tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def bounded_time():
    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(kvq, path, codes, commands=COMMANDS):
    """Run every command: exit 2, one of the codes, no more than a few lines."""
    for command in commands:
        result = kvq(*command, path, "--json")
        assert result.code == 2, (command, result.out)
        assert result.json["error"]["code"] in codes, result.json
        assert len(result.json["error"]["message"]) < 2000
        assert result.err.startswith("error: ")
        assert "Traceback" not in result.err
        assert len(result.err.splitlines()) <= 3


def survived(kvq, path, commands=COMMANDS):
    """Run every command; returns the exit codes, none of them for an internal error."""
    results = [kvq(*command, path, "--json") for command in commands]
    for result in results:
        assert result.code in (0, 1, 2)
        if result.code == 2:
            assert result.json["error"]["code"] != "internal", result.json
    return [result.code for result in results]


def edit(path, change):
    document = json.loads(path.read_bytes())
    changed = change(document)
    path.write_text(json.dumps(document if changed is None else changed))


def edit_header(path, change):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_the_checkpoint_that_is_damaged_below_is_sound(kvq, checkpoint):
    assert kvq("inspect", checkpoint).code == 0
    assert kvq("verify", checkpoint).code == 0


# --- headers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "tensorfile.truncated"),
        (b"\x02\0\0", "tensorfile.truncated"),
        (struct.pack("<Q", 0), "tensorfile.truncated"),
        (struct.pack("<Q", 1) + b"{", "tensorfile.truncated"),
        (struct.pack("<Q", 2**63) + b"{}", "tensorfile.truncated"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "tensorfile.truncated"),
        (struct.pack("<Q", 3) + b"{}", "tensorfile.truncated"),
        (struct.pack("<Q", 99_999_999) + b"{}", "tensorfile.truncated"),
    ],
    ids=["empty", "cut", "0", "1", "2^63", "2^64-1", "one more", "many more"],
)
def test_a_header_length_that_cannot_be(kvq, checkpoint, data, code):
    (checkpoint / SCALES).write_bytes(data)
    refused(kvq, checkpoint, {code})
    refused(kvq, checkpoint / SCALES, {code}, [("inspect",)])


def entry(**changes):
    text = {"dtype": '"F32"', "shape": "[1]", "data_offsets": "[0, 4]"} | changes
    return '{"a": {' + ", ".join(f'"{key}": {value}' for key, value in text.items()) + "}}"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("nonsense", "json.invalid"),
        ('{"a": ', "json.invalid"),
        ("{} {}", "json.invalid"),
        ("[]", "json.not_object"),
        ('"a"', "json.not_object"),
        ("17", "json.not_object"),
        ("null", "json.not_object"),
        ('{"a": {}, "a": {}}', "json.duplicate_key"),
        ('{"a": {"dtype": "F32", "dtype": "F32"}}', "json.duplicate_key"),
        (entry(shape="[NaN]"), "json.nonfinite"),
        (entry(shape="[-Infinity]"), "json.nonfinite"),
        (entry(shape="[1e400]"), "json.nonfinite"),
        (entry(shape=f"[{'9' * 5000}]"), "json.invalid"),
        ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", "json.invalid"),
        ('{"a": ' * 10_000 + "1" + "}" * 10_000, "json.invalid"),
        ('{"a\\ud800": {}}', "json.invalid"),
        ('{"a": 1}', "tensorfile.entry"),
        ('{"a": [1, 2, 3]}', "tensorfile.entry"),
        ('{"a": {}}', "tensorfile.entry"),
        (entry(dtype="17"), "tensorfile.entry"),
        (entry(dtype='["F32"]'), "tensorfile.entry"),
        (entry(dtype="null"), "tensorfile.entry"),
        (entry(dtype='"F128"'), "tensorfile.entry"),
        (entry(dtype='"' + "F" * 100_000 + '"'), "tensorfile.entry"),
        (entry(shape="[-1]"), "tensorfile.entry"),
        (entry(shape="[1.0]"), "tensorfile.entry"),
        (entry(shape="[true]"), "tensorfile.entry"),
        (entry(shape='["1"]'), "tensorfile.entry"),
        (entry(shape="[[1]]"), "tensorfile.entry"),
        (entry(shape="1"), "tensorfile.entry"),
        (entry(shape=f"[{2**64}]"), "tensorfile.entry"),
        (entry(shape=f"[{2**62}, {2**62}, 4]"), "tensorfile.entry"),
        (entry(shape=f"[{10**4000}]"), "tensorfile.entry"),
        (entry(shape=f"[0, {2**62}, {2**62}]", data_offsets="[0, 0]"), "tensorfile.entry"),
        (entry(shape=f"[{'1, ' * 99_999}1]"), "tensorfile.entry"),
        (entry(shape=f"[{'9' * 4000 + ', '}{'9' * 4000}]"), "tensorfile.entry"),
        (entry(shape="[2]"), "tensorfile.size"),
        (entry(dtype='"F4"', shape="[7]"), "tensorfile.size"),
        (entry(data_offsets="[-4, 0]"), "tensorfile.entry"),
        (entry(data_offsets="[0]"), "tensorfile.entry"),
        (entry(data_offsets="[0, 4, 8]"), "tensorfile.entry"),
        (entry(data_offsets="[4, 0]"), "tensorfile.size"),
        (entry(data_offsets="[4, 8]"), "tensorfile.offsets"),
        (entry(data_offsets=f"[{2**62}, {2**62 + 4}]"), "tensorfile.offsets"),
        (entry(shape="[9]", data_offsets="[0, 36]"), "tensorfile.truncated"),
        (entry(shape="[0]", data_offsets="[0, 0]"), "tensorfile.truncated"),
        ('{"__metadata__": []}', "tensorfile.metadata"),
        ('{"__metadata__": {"kvq": {}}}', "tensorfile.metadata"),
    ],
    ids=lambda text: text[:60],
)
def test_a_header_that_is_wrong(kvq, checkpoint, header, code):
    text = header.encode()
    (checkpoint / SCALES).write_bytes(struct.pack("<Q", len(text)) + text + b"\0\0\0\0")
    refused(kvq, checkpoint, {code})


@pytest.mark.parametrize("text", [b"\xff{}", b"\xef\xbb\xbf{}", "{}".encode("utf-16")])
def test_a_header_that_is_not_utf_8(kvq, checkpoint, text):
    (checkpoint / SCALES).write_bytes(struct.pack("<Q", len(text)) + text)
    refused(kvq, checkpoint, {"json.invalid"})


def test_tensors_that_overlap(kvq, checkpoint):
    def overlap(header):
        names = [name for name in header if name != "__metadata__"]
        header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]

    edit_header(checkpoint / SCALES, overlap)
    refused(kvq, checkpoint, {"tensorfile.offsets"})


@pytest.mark.parametrize(
    "name",
    ["a\nb.k_scale", "a\x1b[2Jb.k_scale", "a\0b", "\u202eelacs", "x" * 1001, f"a.{'1' * 5000}.b"],
    ids=["newline", "escape", "zero", "right to left", "long", "number"],
)
def test_a_tensor_name_that_would_disturb_a_terminal(kvq, checkpoint, name):
    def rename(header):
        first = next(key for key in header if key != "__metadata__")
        header[name] = header.pop(first)

    edit_header(checkpoint / SCALES, rename)
    refused(kvq, checkpoint, {"checkpoint.name"})
    refused(kvq, checkpoint / SCALES, {"checkpoint.name"}, [("inspect",)])


@pytest.mark.parametrize("dtype", ["C64", "F6_E2M3", "F4", "BOOL", "I64", "F8_E4M3"])
def test_scales_of_any_dtype_are_no_crash(kvq, checkpoint, dtype):
    from kvq.tensorfile import BITS

    def retype(header):
        for name, tensor in header.items():
            if name.endswith("_scale") and 32 % BITS[dtype] == 0:
                tensor |= {"dtype": dtype, "shape": [32 // BITS[dtype]]}

    edit_header(checkpoint / SCALES, retype)
    assert 0 not in survived(kvq, checkpoint)[1:3] or 32 % BITS[dtype]


# --- the folder ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("../escape.safetensors", "index.path"),
        ("/etc/passwd", "index.path"),
        ("sub/x.safetensors", "index.path"),
        ("./x.safetensors", "index.path"),
        ("..", "index.path"),
        ("", "index.path"),
        ("a\nb.safetensors", "checkpoint.name"),
        ("\x1b[31m", "checkpoint.name"),
    ],
)
def test_an_index_that_leaves_the_folder(kvq, checkpoint, file, code):
    (checkpoint.parent / "escape.safetensors").write_bytes((checkpoint / SCALES).read_bytes())
    edit(checkpoint / INDEX, lambda i: i["weight_map"].update(dict.fromkeys(i["weight_map"], file)))
    refused(kvq, checkpoint, {code})


@pytest.mark.parametrize("change", [
    lambda index: [], lambda index: 1, lambda index: {}, lambda index: {"weight_map": []},
    lambda index: {"weight_map": {"a": 1}}, lambda index: {"weight_map": {"a": ["b"]}},
])  # fmt: skip
def test_an_index_that_is_none(kvq, checkpoint, change):
    edit(checkpoint / INDEX, change)
    refused(kvq, checkpoint, {"json.not_object", "index.no_weight_map"})


def test_an_index_without_any_tensor_or_of_missing_files(kvq, checkpoint):
    edit(checkpoint / INDEX, lambda index: {"weight_map": {"a": "gone.safetensors"}})
    assert survived(kvq, checkpoint, COMMANDS[:3]) == [2, 2, 2]
    edit(checkpoint / INDEX, lambda index: {"weight_map": {}})
    assert survived(kvq, checkpoint, COMMANDS[:3]) == [2, 2, 2]


def test_a_link_out_of_the_folder_is_how_the_hub_keeps_files(kvq, checkpoint, tmp_path_factory):
    blob = tmp_path_factory.mktemp("blobs") / "0123abcd"
    (checkpoint / SCALES).rename(blob)
    (checkpoint / SCALES).symlink_to(blob)
    assert kvq("verify", checkpoint).code == 0


def make_odd(path, kind):
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "dangling", "device"])
@pytest.mark.parametrize("name", [SCALES, "other.safetensors", "config.json", INDEX])
def test_what_only_has_the_name_of_a_file(kvq, checkpoint, name, kind):
    make_odd(checkpoint / name, kind)
    refused(kvq, checkpoint, {"file.not_regular"})


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "dangling", "device"])
def test_an_odd_file_as_the_argument(kvq, tmp_path, kind):
    make_odd(tmp_path / "x.safetensors", kind)
    refused(kvq, tmp_path / "x.safetensors", {"checkpoint.missing", "checkpoint.no_safetensors"})


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "dangling", "device"])
def test_an_odd_legacy_config_is_not_opened(kvq, checkpoint, kind):
    edit(checkpoint / "config.json", lambda config: config.pop("quantization_config"))
    make_odd(checkpoint / "hf_quant_config.json", kind)
    survived(kvq, checkpoint)


def test_a_calibration_whose_config_is_a_fifo(kvq, checkpoint):
    (checkpoint / SCALES).rename(checkpoint / "calibration.safetensors")
    make_odd(checkpoint / "config.json", "fifo")
    refused(kvq, checkpoint, {"file.not_regular"})


@pytest.mark.parametrize("name", [SCALES, SHARD, INDEX, "config.json"])
def test_empty_files(kvq, checkpoint, name):
    (checkpoint / name).write_bytes(b"")
    refused(kvq, checkpoint, {"tensorfile.truncated", "json.invalid"})


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
@pytest.mark.parametrize("name", [SCALES, SHARD, INDEX, "config.json", "."])
def test_files_without_permission(kvq, checkpoint, name):
    (checkpoint / name).chmod(0)
    try:
        refused(kvq, checkpoint, {"file.unreadable"})
    finally:
        (checkpoint / name).chmod(0o700)


def test_a_path_that_no_file_can_have(kvq, tmp_path):
    refused(kvq, tmp_path / ("x" * 300), {"file.unreadable"}, COMMANDS[1:])


# --- config.json --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"[]", "json.not_object"),
        (b'"llama"', "json.not_object"),
        (b"1", "json.not_object"),
        (b'{"a": "\xff"}', "json.invalid"),
        (b'\xef\xbb\xbf{"model_type": "llama"}', "json.invalid"),
        ('{"model_type": "llama"}'.encode("utf-16"), "json.invalid"),
        (b'{"a": "\xed\xa0\x80"}', "json.invalid"),
        (b'{"a": "\\udc00"}', "json.invalid"),
        (b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "json.invalid"),
        (b'{"text_config": ' * 500 + b"1" + b"}" * 500, "json.invalid"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "json.invalid"),
        (b'{"rope_theta": 1e400}', "json.nonfinite"),
        (b'{"rope_theta": Infinity}', "json.nonfinite"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", "json.invalid"),
    ],
    ids=lambda data: repr(data[:30]) if isinstance(data, bytes) else data,
)
def test_a_config_that_is_no_config(kvq, checkpoint, data, code):
    (checkpoint / "config.json").write_bytes(data)
    refused(kvq, checkpoint, {code})


@pytest.mark.parametrize("found", [[], "fp8", 1, True, [{}]])
def test_a_quantization_config_that_is_no_object(kvq, checkpoint, found):
    edit(checkpoint / "config.json", lambda config: config.update(quantization_config=found))
    refused(kvq, checkpoint, {"checkpoint.quantization_config"}, COMMANDS[:3])
    survived(kvq, checkpoint)


@pytest.mark.parametrize("groups", [1, [1], "x", {"a": 1}, {"a": {"targets": 1}}, {"a": []}, True])
def test_config_groups_of_other_types(kvq, checkpoint, groups):
    edit(checkpoint / "config.json",
         lambda config: config["quantization_config"].update(config_groups=groups))  # fmt: skip
    assert survived(kvq, checkpoint)[1] == 1


HUGE = 10**9


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": HUGE},
        {"num_hidden_layers": 10**30},
        {"num_hidden_layers": HUGE, "attn_layer_period": 2},
        {"num_hidden_layers": HUGE, "full_attention_interval": 2},
        {"num_hidden_layers": HUGE, "block_types": ["attention"]},
        {"num_hidden_layers": HUGE, "sliding_window_pattern": 2},
        {"num_hidden_layers": HUGE, "attn_layer_indices": [0]},
        {"num_hidden_layers": HUGE, "num_kv_shared_layers": HUGE - 1},
        {"num_hidden_layers": None, "layers_block_type": 17},
        {"num_hidden_layers": None, "hybrid_override_pattern": {"a": 1}},
        {"num_hidden_layers": [2]},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 2.0},
        {"num_hidden_layers": True},
        {"num_hidden_layers": "2"},
        {"num_attention_heads": HUGE},
        {"num_attention_heads": 0},
        {"num_key_value_heads": HUGE},
        {"head_dim": 10**30},
        {"head_dim": [[1]]},
        {"layer_types": "full_attention"},
        {"layer_types": [["full_attention"], {}]},
        {"layer_types": ["x" * 100_000] * 2},
        {"layer_types": ["full_attention"] * 100_000},
        {"num_kv_shared_layers": HUGE},
        {"num_kv_shared_layers": [1]},
    ],
    ids=lambda change: json.dumps(change)[:60],
)
def test_numbers_that_no_model_has(kvq, checkpoint, change):
    edit(checkpoint / "config.json", lambda config: config.update(change))
    codes = {"geometry.number", "geometry.layer_types", "geometry.layer_kind"}
    refused(kvq, checkpoint, codes)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": [[[]]]},
        {"architectures": {"a": 1}},
        {"architectures": ["a\n\x1b[31mb"]},
        {"architectures": ["x" * 100_000]},
        {"model_type": ["llama"]},
        {"model_type": {"a": 1}},
        {"model_type": "zamba"},
        {"text_config": []},
        {"per_layer_config": {"²": {}, "1" * 5000: {}, "0": 1}},
        {"per_layer_config": [1]},
        {"kv_lora_rank": 4},
        {"kv_lora_rank": "4"},
        {"attn_layer_indices": [[], {}, "0"]},
        {"attn_layer_period": 2, "attn_layer_offset": [1]},
        {"dtype": [1]},
        {"dtype": {"a": "b"}},
        {"vision_config": 1},
    ],
    ids=lambda change: json.dumps(change)[:60],
)
def test_values_of_other_types_are_no_crash(kvq, checkpoint, change):
    edit(checkpoint / "config.json", lambda config: config.update(change))
    survived(kvq, checkpoint)


@pytest.mark.parametrize("bits", ["8" * 5000, "٨", "²", -8, 10**400, True, [8]])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers", "tensorrt-llm"])
def test_numbers_of_bits_that_are_none(kvq, checkpoint, bits, engine):
    def change(config):
        group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int"}}
        config["quantization_config"]["config_groups"] = {"group_0": group}
        config["quantization_config"]["kv_cache_scheme"]["num_bits"] = bits

    edit(checkpoint / "config.json", change)
    assert kvq("inspect", checkpoint, "--engine", engine).code == 0


@pytest.mark.parametrize("amax", [[], [1.0] * 7, [1.0]])
def test_a_record_of_other_heads_gives_no_scales(kvq, checkpoint, amax, tmp_path):
    def change(header):
        found = json.loads(header["__metadata__"]["kvq"])
        found["amax"] = dict.fromkeys(found["amax"], amax)
        header["__metadata__"]["kvq"] = json.dumps(found)

    edit_header(checkpoint / SCALES, change)
    argv = ["export", checkpoint, "--scales", checkpoint, "-o", tmp_path / "out", "--json"]
    result = kvq(*argv)
    assert (result.code, result.json["error"]["code"]) == (2, "export.heads")
    assert not (tmp_path / "out").exists()


def damaged(text):
    return lambda header: header["__metadata__"].update(kvq=text)


def record(**changes):
    def change(header):
        found = json.loads(header["__metadata__"]["kvq"])
        header["__metadata__"]["kvq"] = json.dumps(found | changes)

    return change


PATH = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    "change",
    [
        damaged(""),
        damaged("{"),
        damaged("[]"),
        damaged("{}"),
        damaged('{"format": NaN}'),
        damaged('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"),
        damaged('{"format": "\\ud800"}'),
        record(format=["fp8_e4m3"]),
        record(amax=[]),
        record(amax={PATH: 1}),
        record(amax={PATH: {}}),
        record(amax={PATH: "12"}),
        record(amax={PATH: [10**400]}),
        record(amax={PATH: [1e39]}),
        record(amax={PATH: [True]}),
        record(tokens=[1]),
        record(tokens={PATH: "1"}),
        record(status={PATH: 1}),
        record(status={PATH: {"k": ["calibrated"]}}),
        record(margin=10**400),
        record(margin="1"),
        record(skip_layers=1),
        record(skip_layers={}),
        record(skip_layers=["1"]),
        record(attention_class=1),
        record(weight_fingerprint=None),
    ],
)
def test_a_damaged_record(kvq, checkpoint, change):
    edit_header(checkpoint / SCALES, change)
    codes = {"provenance.damaged", "json.invalid", "json.not_object", "json.nonfinite"}
    refused(kvq, checkpoint, codes, COMMANDS[:3])


# --- size ---------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from kvq.cli import run
sys.exit(run(sys.argv[1:]))
"""


def run_limited(*argv):
    """Run in a process with 2 GiB of address space; returns the error document."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, argv), "--json"],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)["error"]


def test_100_megabytes_of_spaces(checkpoint):
    (checkpoint / "config.json").write_bytes(b" " * 100_000_000)
    assert run_limited("verify", checkpoint)["code"] == "json.too_large"
    (checkpoint / "config.json").write_bytes(b" " * 60_000_000)
    assert run_limited("verify", checkpoint)["code"] in ("json.invalid", "json.too_large")


def test_a_header_of_spaces_as_large_as_headers_may_be(checkpoint):
    with (checkpoint / SCALES).open("wb") as file:
        file.write(struct.pack("<Q", 100_000_000) + b" " * 100_000_000)
    assert run_limited("inspect", checkpoint)["code"] == "json.invalid"


def test_a_sparse_file_of_a_terabyte(checkpoint):
    with (checkpoint / SCALES).open("wb") as file:
        text = entry(shape=f"[{2**38}]", data_offsets=f"[0, {2**40}]").encode()
        text = text.replace(b'"a"', f'"{PATH}.k_scale"'.encode())
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 2**40)
    assert run_limited("inspect", checkpoint)["code"] == "tensorfile.large_tensor"


# --- patterns of layers -------------------------------------------------------------------------


def quantized_with(pattern, names):
    """Weights in FP8 with scales of such names, none of which the pattern matches."""

    def build(folder):
        from tests.engines.quantization import W8A8, ct
        from tests.engines.tensors import filled, scales
        from tests.engines.variant import Variant
        from tests.engines.variants import write_variant

        config = ct(config_groups={"group_0": W8A8}, ignore=[f"re:{pattern}"],
                    format="float-quantized")  # fmt: skip
        extra = scales() | {f"{name}.weight_scale": filled(0.1) for name in names}
        write_variant(Variant(extra, config, "fp8-channel"), folder)

    return build


LONG = "model.layers.0." + "a" * 900


@pytest.mark.parametrize(
    "pattern",
    [
        "(.+)+!", "((.|.))+!", "(.+(?#())+!", "(?:(.|.)x?)*!",
        "(a|a|.)*!", "(.*)*(.*)*!", "(?:(?:.+)+)+!", "((.?){9}){9}!", ".*" * 200 + "!",
        "(.|.)" * 90 + "!", ".?" * 240 + "!" * 5, "(?x)(.+ #)\n)+!", "(?=(.+)+!)", "(" * 10_000,
        "[" * 400, ".{1,99999}.{1,99999}.{1,99999}!", "(.*!)*?", "(.++)++!",
        r"(.+)\1+\1+\1+!", "a{99999999999999999999}", "*", "\\",
    ],
)  # fmt: skip
def test_a_pattern_that_would_run_for_ever_is_not_run(kvq, tmp_path, pattern):
    quantized_with(pattern, [LONG])(tmp_path / "checkpoint")
    for command in (("verify", "--engine", "vllm"), ("inspect", "--engine", "vllm")):
        result = kvq(*command, tmp_path / "checkpoint", "--json")
        assert result.code in (0, 1), result.out
        assert result.err == ""
        (reading,) = result.json["engines"]
        assert any("pattern" in note or "excluded" in note for note in reading["notes"])


@pytest.mark.parametrize(
    "pattern",
    [r".*lm_head", r"model\.layers\.\d+\.mlp\..*", ".*(q|k|v|o)_proj$", "^(?!.*mlp).*",
     "re:.*self_attn.*", "[(]+", "(?i).*LM_HEAD"],
)  # fmt: skip
def test_patterns_that_models_have_are_run(kvq, tmp_path, pattern):
    quantized_with(pattern, [])(tmp_path / "checkpoint")
    result = kvq("verify", tmp_path / "checkpoint", "--engine", "vllm", "--json")
    (reading,) = result.json["engines"]
    assert reading["error"] or all(layer["k"]["value"] for layer in reading["layers"])


def test_many_names_for_a_costly_pattern_are_too_many(kvq, tmp_path):
    names = [f"model.layers.{layer}.{'b' * 300}" for layer in range(300)]
    quantized_with(".*b.*b.*c", names)(tmp_path / "checkpoint")
    result = kvq("verify", tmp_path / "checkpoint", "--engine", "vllm", "--json")
    (reading,) = result.json["engines"]
    assert any("too long" in note for note in reading["notes"])


# --- random damage ------------------------------------------------------------------------------


def test_random_damage_is_never_an_internal_error(fuzz):
    before = signal.getsignal(signal.SIGALRM)
    try:
        counts, failures = fuzz.fuzz(200, seed=1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not failures, "\n".join(failures)
    assert sum(counts.values()) == 200 * len(fuzz.COMMANDS)
    assert counts["verify {}: exit 1"] > 20  # much of the damage gets past the reader
