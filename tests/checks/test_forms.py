"""How findings are shown: once for all layers that they say the same of, and as what they are."""

import re
import xml.etree.ElementTree as ElementTree

import ml_dtypes
import numpy as np

from tests.commands.test_verify import edit_config, rewrite
from tests.engines.quantization import CT, FLAT
from tests.engines.tensors import BASE, NAMES, scales


def lines_of(result, code):
    return [line for line in result.out.splitlines() if f"[{code}]" in line]


def test_scales_that_miss_in_all_layers_are_a_line_for_each_side(kvq, exported):
    checkpoint = exported()
    rewrite(checkpoint, lambda tensors, _: tensors.clear())
    lines = lines_of(kvq("verify", checkpoint), "scale.missing")
    assert [line.partition(" scale under its name")[0] for line in lines] == [
        f"error [scale.missing] layers 0-1: there is no {side}" for side in "kv"
    ]
    found = kvq("verify", checkpoint, "--json").json["findings"]
    assert len([finding for finding in found if finding["code"] == "scale.missing"]) == 4
    assert not any("layer 0" in finding["message"] for finding in found)


def test_rounded_scales_are_one_line_with_the_largest_deviation(kvq, variant):
    exact = scales(*NAMES["modelopt"])
    folder = variant(exact, FLAT, "fp8-static")
    off = {}
    for name, array in exact.items():
        held = float(array[0].astype(ml_dtypes.bfloat16))
        off[name] = abs(held - float(array[0])) / float(array[0])
    for side in "kv":
        largest = max(off[name] for name in off if f"{side}_scale" in name)
        lines = lines_of(kvq("verify", folder, "--engine", "vllm"), "engine.value")
        (line,) = [line for line in lines if f" uses {side} " in line]
        assert line.startswith("warning [engine.value] layers 0-1, off by at most ")
        shown = float(re.search(r"at most ([\d.]+) %, e.g. layer [01]: ", line)[1]) / 100
        assert abs(shown - largest) < 0.05 * largest
    (line,) = lines_of(kvq("verify", folder), "scale.rounded")
    assert line.startswith("warning [scale.rounded] layers 0-1, off by at most ")


def test_sixteen_bit_scales_are_one_line_and_name_one_of_them(kvq, variant):
    folder = variant(scales(dtype="BF16"), CT)
    (line,) = lines_of(kvq("verify", folder), "scale.precision")
    assert line.startswith(
        f"warning [scale.precision] layers 0-1, e.g. layer 0: `{BASE.format(0)}.k_scale` is BF16"
    )


def test_what_differs_in_words_is_not_one_line(kvq, variant):
    folder = variant(scales() | scales(layers=[0], dtype="BF16", sides="k"), CT)
    rounded = kvq("verify", folder)
    assert "warning [scale.precision] layer 0: `" in rounded.out
    mixed = variant(scales(dtype="BF16") | scales(layers=[0], dtype="F16"), CT)
    lines = lines_of(kvq("verify", mixed), "scale.precision")
    assert [line.partition(", e.g.")[0].partition(": ")[0] for line in lines] == [
        "warning [scale.precision] layer 0", "warning [scale.precision] layer 1",
    ]  # fmt: skip


def test_stray_scales_of_no_layer_are_counted(kvq, variant):
    folder = variant(scales() | scales(layers=[7, 8, 9], sides="k"), CT)
    (line,) = lines_of(kvq("verify", folder), "scale.stray")
    assert line.startswith(
        f"error [scale.stray] 3 times, e.g. `{BASE.format(7)}.k_scale` is no scale"
    )


def test_a_warning_is_a_failure_in_junit_only_where_it_fails(kvq, exported):
    checkpoint = exported()
    edit_config(checkpoint, lambda c: c["quantization_config"].pop("config_groups"))
    for strict, code in ([], 0), (["--strict"], 1):
        result = kvq("verify", checkpoint, "--report", "junit", *strict)
        suite = ElementTree.fromstring(result.out)
        assert result.code == code
        assert (suite.get("tests"), suite.get("failures")) == ("1", str(code))
        assert len(suite.findall(".//failure")) == code
        text = "".join(suite.itertext()) or suite.find(".//failure").get("message")
        assert "[config.groups]" in text


def test_an_error_beside_a_warning_fails_alone_in_junit(kvq, exported):
    checkpoint = exported()
    edit_config(checkpoint, lambda c: c["quantization_config"].pop("config_groups"))
    name = "model.layers.0.self_attn.k_scale"
    rewrite(checkpoint, lambda s, m: (s.update({name: np.zeros(1, np.float32)}), m.pop("kvq")))
    suite = ElementTree.fromstring(kvq("verify", checkpoint, "--report", "junit").out)
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert suite.find("testcase/failure/..").get("classname") == "scale.nonpositive"
