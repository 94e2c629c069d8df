"""Every base by dialect and format: written as meant and nothing else touched, or refused."""

import hashlib
import io
import json
import shlex
import struct
from contextlib import redirect_stdout

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvq.checkpoint import open_checkpoint
from kvq.cli import run
from kvq.dialects import DIALECTS, read_scales
from kvq.engines.base import EngineOptions
from kvq.errors import KvqError
from kvq.geometry import read_geometry
from kvq.pipeline.convert import Wanted
from kvq.pipeline.export import ExportOptions, plan_export
from kvq.pipeline.judge import judge
from tests import bases, models

ENGINES = ("vllm", "sglang", "tensorrt-llm", "transformers")
LEGACY = "hf_quant_config.json"

FORMATS = {  # (format, granularity) → options of export
    "fp8": ("--kv-cfg", "FP8_KV_CFG"),
    "fp8-head": ("--kv-cfg", "FP8_PER_HEAD_KV_CFG"),
    "nvfp4": ("--kv-cfg", "NVFP4_KV_CFG"),
    "int8": ("--kv-cfg", "INT8_KV_CFG"),
}
DIVISOR = {"fp8": 448, "fp8-head": 448, "nvfp4": 448, "int8": 127}  # of the specifications
GROUPS = {
    "none": bases.UNQUANTIZED, "ct": bases.COMPRESSED, "modelopt": bases.MODELOPT,
    "fp8": bases.FP8, "other": bases.WITHOUT_SCALES,
}  # fmt: skip
MIXED = [name for name in bases.MODELOPT if "mixed" in name]
FLAGS = {  # the option that an engine needs where the checkpoint cannot declare the cache
    "vllm": ("--kv-cache-dtype", "fp8"), "sglang": ("--kv-cache-dtype", "fp8_e4m3"),
}  # fmt: skip
SPELLED = {
    "compressed-tensors": lambda path: (f"{path}.k_scale", f"{path}.v_scale"),
    "modelopt": lambda path: (f"{path}.k_proj.k_scale", f"{path}.v_proj.v_scale"),
    "fp8": lambda path: (f"{path}.k_scale", f"{path}.v_scale"),
}
SHAPES = {
    ("compressed-tensors", "fp8"): (1,), ("compressed-tensors", "int8"): (1,),
    ("compressed-tensors", "fp8-head"): (bases.NUM_KV_HEADS, 1, 1),
    ("modelopt", "fp8"): (), ("modelopt", "nvfp4"): (), ("fp8", "fp8"): (1,),
}  # fmt: skip
NESTS = ("quantization", "quantization_config")
NEW_LEGACY = ("none", "modelopt")  # a file that a KV-only ModelOpt checkpoint adds


def expected(group, base, dialect, form, engine):
    """Return the dialect that is written, or the code of the refusal."""
    if dialect == "auto":
        own = {"none": "compressed-tensors", "ct": "compressed-tensors"}.get(group, group)
        dialect = "modelopt" if (group, engine) == ("none", "tensorrt-llm") else own
        if dialect == "other":
            return "dialect.no_kv_method"
    if dialect == "fp8":
        if group == "other":
            return "dialect.no_kv_method"
        if group != "fp8":
            return "dialect.base"
        found = "export.unread" if engine == "transformers" else "fp8"
        return found if form == "fp8" else "dialect.format"
    return _EXPECTED[dialect](group, base, form, engine)


def _compressed(group, base, form, engine):
    if form == "nvfp4" or (form == "int8" and engine != "transformers"):
        return "dialect.format"
    if group not in ("none", "ct"):
        return "dialect.no_kv_method" if group == "other" else "dialect.base"
    if engine == "tensorrt-llm" or (engine == "sglang" and form == "fp8-head"):
        return "export.unread"
    return "compressed-tensors"


def _modelopt(group, base, form, engine):
    if form == "int8":
        return "dialect.format"
    if form == "fp8-head":
        return "dialect.granularity"
    if group not in ("none", "modelopt"):
        return "dialect.no_kv_method" if group == "other" else "dialect.base"
    if engine == "tensorrt-llm":  # it reads the scales of NVFP4 caches only
        return "modelopt" if form == "nvfp4" else "export.unread"
    if engine == "transformers" or group == "none" or (engine == "sglang" and form == "nvfp4"):
        return "export.unread"
    if engine == "sglang" and ("channels" in base or "dense-mlp" in base):  # it reads none there
        return "export.unread"
    return "export.unread" if form == "nvfp4" and base in MIXED else "modelopt"


def _sglang_json(group, base, form, engine):
    if form != "fp8":
        return "dialect.format"
    return "dialect.base" if group == "modelopt" else "export.unread"


_EXPECTED = {
    "compressed-tensors": _compressed, "modelopt": _modelopt, "sglang-json": _sglang_json,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Hold the dense model, its calibration, and bases made from it."""
    folder = tmp_path_factory.mktemp("bases")
    models.save("llama", folder / "dense", **bases.SIZES)
    generator = np.random.default_rng(0)
    lines = [json.dumps({"input_ids": generator.integers(0, 128, n).tolist()}) for n in (17, 40)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    argv = ["--dataset", folder / "rows.jsonl", "--seq-len", 64, "--min-tokens", 1]
    kvq("calibrate", folder / "dense", *argv, "-o", folder / "calibration")
    return folder


def kvq(*argv, code=0):
    assert run([str(argument) for argument in argv]) == code


@pytest.fixture(scope="module")
def base(root):
    """Return the folder of a base by name; it is written once."""

    def get(name):
        folder = root / name
        return folder if folder.exists() else bases.write(bases.BASES[name], root / "dense", folder)

    return get


def amax_of(root):
    """Return what was observed, by attention and side, one number per head."""
    statistics = load_file(root / "calibration" / "calibration.safetensors")
    return {
        (path, side): statistics[f"{path}.{side}_bmm_quantizer._amax"]
        for path in bases.ATTENTION for side in "kv"
    }  # fmt: skip


def up_to_bf16(value):
    """Return the smallest bfloat16 that is not below a positive float32, by its bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (found,) = struct.unpack("<f", struct.pack("<I", -(-bits >> 16) << 16))
    return found


def scales_from(amax, dialect, form):
    """Return the scales of the specification, as lists, from observed maxima per head."""
    found = {}
    for key, heads in amax.items():
        kept = heads if form == "fp8-head" else heads.max(keepdims=True)
        exact = [float(np.float32(x) / np.float32(DIVISOR[form])) for x in kept]
        found[key] = [up_to_bf16(x) for x in exact] if dialect in ("modelopt", "fp8") else exact
    return found


def read(folder):
    view = open_checkpoint(folder)
    return read_scales(view, read_geometry(view.config, view.tensors))


def by_side(scales):
    return {
        (layer.attention, s): list(x) for layer in scales.layers for s, x in layer.scales.items()
    }


def tensors(folder):
    """Return dtype, shape and digest of every tensor that a loader sees, by our own reading."""
    index = folder / "model.safetensors.index.json"
    files = (
        set(json.loads(index.read_text())["weight_map"].values())
        if index.exists() else {"model.safetensors"}
    )  # fmt: skip
    found = {}
    for file in files:
        data = (folder / file).read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = (start + offset for offset in entry["data_offsets"])
            digest = hashlib.sha256(data[first:last]).hexdigest()
            found[name] = (entry["dtype"], tuple(entry["shape"]), digest)
    return found


def json_of(folder, name="config.json"):
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else None


CELLS = [
    (group, name, dialect, form)
    for group, members in GROUPS.items() for name in members
    for dialect in ("compressed-tensors", "modelopt", "fp8") for form in FORMATS
    if any(expected(group, name, dialect, form, engine) == dialect for engine in ENGINES)
]  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_each_base_is_exported_onto_or_refused_with_the_reason(root, base, group):
    found, wanted = {}, {}
    for name in GROUPS[group]:
        view = open_checkpoint(base(name))
        for dialect in ("auto", *DIALECTS):
            for form, (_, kv_cfg) in FORMATS.items():
                for engine in ENGINES:
                    cell = (name, dialect, form, engine)
                    options = ExportOptions(Wanted(kv_cfg), dialect, (engine,), 1, True)
                    try:
                        plan = plan_export(view.root, root / "calibration", options)
                        judge(plan, view, [engine], EngineOptions(), allow_unread=False)
                        found[cell] = plan.dialect
                    except KvqError as error:
                        found[cell] = error.code
                    wanted[cell] = expected(group, name, dialect, form, engine)
    assert found == wanted


@pytest.fixture(scope="module")
def written(root, base):
    """Export onto a base for every engine that reads it; returns folder, engines and commands."""
    made = {}

    def get(group, name, dialect, form):
        cell = (name, dialect, form)
        if cell not in made:
            readers = [e for e in ENGINES if expected(group, name, dialect, form, e) == dialect]
            target = root / "-".join(cell)
            argv = ["--scales", root / "calibration", *FORMATS[form], "--dialect", dialect,
                    "-o", target, "--for-other-weights", "--json",
                    *(word for engine in readers for word in ("--for", engine))]  # fmt: skip
            with redirect_stdout(io.StringIO()) as out:
                kvq("export", base(name), *argv)
            made[cell] = target, json.loads(out.getvalue())["serve"]
        return made[cell]

    return get


@pytest.mark.parametrize(("group", "name", "dialect", "form"), CELLS)
def test_scales_read_back_as_the_dialect_rounds_them(root, written, group, name, dialect, form):
    target, commands = written(group, name, dialect, form)
    scales = read(target)
    assert by_side(scales) == scales_from(amax_of(root), dialect, form)
    meant = {"fp8-head": "fp8_e4m3", "fp8": "fp8_e4m3"}.get(form, form)
    assert scales.granularity == ("head" if form == "fp8-head" else "tensor")
    assert scales.format == meant
    assert commands
    for engine, command in commands.items():
        dtype = FLAGS.get(engine, ()) if dialect == "fp8" else ()
        assert [word for word in shlex.split(command) if "dtype" in word] == [*dtype[:1]], command
        option = ("--kv-cache-dtype", dtype[1]) if dtype else ()
        kvq("verify", target, "--against", root / "calibration", "--engine", engine, *option)


@pytest.mark.parametrize(("group", "name", "dialect", "form"), CELLS)
def test_nothing_else_of_the_base_changes(base, written, group, name, dialect, form):
    source, (target, _) = base(name), written(group, name, dialect, form)
    before, after = tensors(source), tensors(target)
    added = {n for path in bases.ATTENTION for n in SPELLED[dialect](path)}
    assert {n: after[n] for n in after.keys() - added} == before
    assert {after[n][:2] for n in added} == {("F32", SHAPES[dialect, form])}
    assert without_cache(json_of(target)) == without_cache(json_of(source))
    legacy = json_of(source, LEGACY)
    if legacy is not None:
        assert without_cache(json_of(target, LEGACY)) == without_cache(legacy)
    for file, text in bases.SIDE_FILES.items():
        assert (target / file).read_bytes() == text.encode()
    others = {path.name for path in target.iterdir() if path.suffix not in (".safetensors", ".kvq")}
    allowed = {*bases.SIDE_FILES, "config.json", "model.safetensors.index.json", ".kvq"}
    assert others - allowed == ({LEGACY} if legacy or (group, dialect) == NEW_LEGACY else set())


@pytest.mark.parametrize(("group", "name", "dialect", "form"), CELLS)
def test_a_second_export_keeps_the_scales_and_strip_gives_the_base_back(
    base, written, tmp_path, group, name, dialect, form
):
    source, (target, commands) = base(name), written(group, name, dialect, form)
    for_all = [word for engine in commands for word in ("--for", engine)]
    kvq("export", target, "--scales", target, "--dialect", dialect, *for_all, "-o", tmp_path / "2")
    assert by_side(read(tmp_path / "2")) == by_side(read(target))
    assert json_of(tmp_path / "2") == json_of(target)
    kvq("export", target, "--strip", "-o", tmp_path / "bare")
    assert tensors(tmp_path / "bare") == tensors(source)
    assert without_null(json_of(tmp_path / "bare")) == without_null(json_of(source))
    assert json_of(tmp_path / "bare", LEGACY) == json_of(source, LEGACY)
    names = {path.name for path in (tmp_path / "bare").iterdir()}
    assert names - {".kvq"} == {path.name for path in source.iterdir()}


def without_cache(document):
    """Return config.json or hf_quant_config.json without what declares the cache."""
    if document is None:
        return None
    kept = {}
    for key, value in document.items():
        inner = without_cache(value) if isinstance(value, dict) and key in NESTS else value
        # where the base was not quantized, the whole declaration is the cache's
        only_cache = key == "quantization_config" and not (
            inner.get("config_groups") or inner.get("quant_algo") or inner["quant_method"] == "fp8"
        )
        if key not in ("kv_cache_scheme", "kv_cache_quant_algo") and not only_cache:
            kept[key] = inner
    return kept


def without_null(config):
    """Drop a cache's null entry, which says the same as none."""
    own = config.get("quantization_config")
    if own is None:
        return config
    kept = {k: v for k, v in own.items() if not (k == "kv_cache_scheme" and v is None)}
    return {**config, "quantization_config": kept}
