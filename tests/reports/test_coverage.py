"""Every public report that kvq knows of is a named test, or stands in a table with the reason.

Reports are numbered K01 to K77, in kvq's own order. A test of this package says in its docstring
which one it is of, and where it was reported.
"""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent
ALL = [f"K{i:02}" for i in range(1, 78)]

# What concerns observing, not loading, and is tested where observing is.
ELSEWHERE = {
    "K04": "tests/test_outliers.py"
    "::test_calibrate_flags_k_of_the_first_and_last_layer_and_proposes",
    "K06": "tests/test_outliers.py::test_a_norm_on_keys_is_seen_and_no_bias_is_no_warning",
    "K07": "tests/test_outliers.py::test_inspect_warns_from_the_weights_alone",
    "K16": "tests/test_families.py::test_family",  # qwen3_next: equal to a plain recorder
    "K17": "tests/test_families.py::test_family",
    "K26": "tests/commands/test_export.py"
    "::test_weights_are_the_same_bytes_under_the_two_shard_naming",
    "K28": "tests/commands/test_calibrate.py::test_a_layer_that_never_reaches_the_cache_is_named",
    "K30": "tests/test_families.py"
    "::test_layers_that_share_a_cache_get_the_scales_of_the_layer_they_read",
    "K32": "tests/commands/test_calibrate.py::test_amax_equals_a_plain_recorder_bit_for_bit",
    "K34": "tests/commands/test_calibrate.py::test_amax_does_not_depend_on_batch_size_or_row_order",
    "K35": "tests/calibration/test_data.py::test_too_few_tokens",
    "K56": "tests/test_outliers.py::test_skipped_layers_keep_their_scales_and_the_engine_is_told",
    "K57": "tests/test_families.py::test_family",  # what is observed is the cache, not a signature
    "K59": "tests/commands/test_calibrate.py"
    "::test_after_the_first_sequence_nothing_runs_that_changes_no_maximum",
    "K60": "tests/calibration/test_data.py::test_builtin_needs_no_datasets_library",
    "K61": "tests/calibration/test_data.py::test_no_usable_column",
    "K62": "tests/calibration/test_data.py::test_padding_side_and_pad_token_change_nothing",
    "K63": "tests/commands/test_export.py"
    "::test_side_files_come_along_and_consolidated_files_do_not",
    "K67": "tests/test_state.py::test_what_is_written_reads_back_and_writes_the_same_bytes",
    "K68": "tests/commands/test_export.py"
    "::test_a_dead_head_is_an_error_that_names_layer_and_quantizer",
    "K77": "tests/commands/test_calibrate.py::test_amax_equals_a_plain_recorder_bit_for_bit",
}

# What concerns writing a checkpoint, and is not tested here yet; some have a named test of reading.
WRITING = {
    "K02": "renaming scales without a calibration",
    "K13": "an option for a floor, recorded where it is used",
    "K21": "splitting one old scale into two",
    "K24": "both files of ModelOpt, from one source",
    "K27": "NVFP4 scales, with the convention in the metadata",
    "K38": "SGLang's JSON: a golden, the versions that use it, and a warning",
    "K39": "the serve command of every engine at the end",
    "K40": "one shape for each dialect",
    "K46": "taking declaration and scales out of a checkpoint",
    "K50": "one number for K and V where a reader has one place, and what that costs",
    "K51": "scales for INT8 caches",
    "K64": "a source with tied weights",
    "K65": "an indexed shard onto a sharded source",
    "K73": "taking scales out of a checkpoint",
}

# What files and configurations cannot answer.
OUTSIDE = {
    "K05": "damage to answers shows when a model runs on prompts, not in its files",
    "K37": "which share of elements clips or vanishes is known from the elements alone",
    "K47": "damage by E5M2 at a scale of 1.0 shows when a model runs on prompts",
    "K58": "a model is calibrated on one device; none is spread over devices and disk",
    "K76": "INT4 caches compute their scales while serving, and read none of a checkpoint",
}

_REFERENCE = re.compile(r"[\w.-]+/[\w.-]+#(\d+)")


def functions(path):
    """The test functions of a file, by name."""
    nodes = ast.parse(path.read_text()).body
    found = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    return {node.name: node for node in found}


NAMED = {
    (path.name, name): ast.get_docstring(node) or ""
    for path in sorted(HERE.glob("test_*.py"))
    if path.name != Path(__file__).name
    for name, node in functions(path).items()
}


def covered():
    return {case for text in NAMED.values() for case in re.findall(r"\bK\d\d\b", text)}


def test_every_report_is_a_named_test_or_in_a_table():
    known = covered() | ELSEWHERE.keys() | WRITING.keys() | OUTSIDE.keys()
    assert sorted(known) == ALL


def test_what_is_outside_or_elsewhere_has_no_second_place():
    assert not covered() & (ELSEWHERE.keys() | OUTSIDE.keys())
    assert not OUTSIDE.keys() & (ELSEWHERE.keys() | WRITING.keys())
    assert not WRITING.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("case", ELSEWHERE)
def test_the_test_elsewhere_exists(case):
    path, _, name = ELSEWHERE[case].partition("::")
    assert name in functions(TESTS.parent / path)


@pytest.mark.parametrize(("file", "name"), NAMED, ids="::".join)
def test_a_named_test_says_what_it_is_of_and_asserts_something(file, name):
    text = NAMED[file, name]
    assert re.match(r"K\d\d, [\w.-]+/[\w.-]+#\d+", text), f"{name}: report and reference first"
    numbers = set(_REFERENCE.findall(text))
    assert numbers & set(re.findall(r"\d+", name)), f"{name}: the name has no reported number"
    node = functions(HERE / file)[name]
    assert any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
