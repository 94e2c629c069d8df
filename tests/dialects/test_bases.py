"""Every base by dialect and format: written as meant and nothing else touched, or refused."""

import shlex

import pytest

from kvq.checkpoint import open_checkpoint
from kvq.dialects import DIALECTS
from kvq.engines.base import EngineOptions
from kvq.errors import KvqError
from kvq.pipeline.convert import Wanted
from kvq.pipeline.export import ExportOptions, plan_export
from kvq.pipeline.judge import judge
from tests import bases
from tests.exports import (
    CELLS,
    ENGINES,
    FLAGS,
    FORMATS,
    GROUPS,
    PLATFORM,
    Exports,
    by_side,
    expected,
    json_of,
    kvq,
    read,
    tensors,
    without_null,
)

LEGACY = "hf_quant_config.json"
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


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    return Exports(tmp_path_factory.mktemp("bases"))


@pytest.mark.parametrize("group", GROUPS)
def test_each_base_is_exported_onto_or_refused_with_the_reason(exports, group):
    found, wanted = {}, {}
    for name in GROUPS[group]:
        view = open_checkpoint(exports.base(name))
        for dialect in ("auto", *DIALECTS):
            for form, (_, kv_cfg) in FORMATS.items():
                for engine in ENGINES:
                    cell = (name, dialect, form, engine)
                    options = ExportOptions(Wanted(kv_cfg), dialect, (engine,), 1, True)
                    try:
                        plan = plan_export(view.root, exports.calibration, options)
                        judge(
                            plan,
                            view,
                            [engine],
                            EngineOptions(platform=PLATFORM.get(form, "sm90")),
                            allow_unread=False,
                        )
                        found[cell] = plan.dialect
                    except KvqError as error:
                        found[cell] = error.code
                    wanted[cell] = expected(group, name, dialect, form, engine)
    assert found == wanted


@pytest.mark.parametrize(("group", "name", "dialect", "form"), CELLS)
def test_scales_read_back_as_the_dialect_rounds_them(exports, group, name, dialect, form):
    target, commands = exports.written(group, name, dialect, form)
    scales = read(target)
    assert by_side(scales) == exports.scales(dialect, form)
    meant = {"fp8-head": "fp8_e4m3", "fp8": "fp8_e4m3"}.get(form, form)
    assert scales.granularity == ("head" if form == "fp8-head" else "tensor")
    assert scales.format == meant
    assert commands
    for engine, command in commands.items():
        dtype = FLAGS.get(engine, ()) if dialect == "fp8" else ()
        assert [word for word in shlex.split(command) if "dtype" in word] == [*dtype[:1]], command
        option = ("--kv-cache-dtype", dtype[1]) if dtype else ()
        argv = ["--engine", engine, "--platform", PLATFORM.get(form, "sm90"), *option]
        kvq("verify", target, "--against", exports.calibration, *argv)


@pytest.mark.parametrize(("group", "name", "dialect", "form"), CELLS)
def test_nothing_else_of_the_base_changes(exports, group, name, dialect, form):
    source = exports.base(name)
    target, _ = exports.written(group, name, dialect, form)
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
    exports, tmp_path, group, name, dialect, form
):
    source = exports.base(name)
    target, commands = exports.written(group, name, dialect, form)
    for_all = [word for engine in commands for word in ("--for", engine)]
    for_all += ["--platform", PLATFORM.get(form, "sm90")]
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
