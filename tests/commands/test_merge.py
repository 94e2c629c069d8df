import json

import numpy as np
import pytest

from kvq.state import read_calibration

OPTIONS = ("--seq-len", 64, "--num-samples", 24, "--min-tokens", 1)


@pytest.fixture
def parts(kvq, checkpoints, rows, tmp_path):
    """Calibrations of one model on the whole of some rows, and on parts of them."""
    lines = rows.read_text().splitlines()
    model = checkpoints("gemma3")

    def calibrate(name, chosen, *options, source=model):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("\n".join(chosen) + "\n")
        target = tmp_path / name
        result = kvq(
            "calibrate", source, "--dataset", data, *OPTIONS, "-o", target, "--no-pack", *options
        )
        assert result.code == 0, result.err
        return target

    calibrate.lines = lines
    return calibrate


def statistics(path):
    return (path / "calibration.safetensors").read_bytes()


def test_merged_parts_have_the_maxima_of_the_whole(kvq, parts, tmp_path):
    lines = parts.lines
    whole = parts("whole", lines)
    some = [parts(f"part{i}", lines[i::3]) for i in range(3)]
    result = kvq("merge", *some, "-o", tmp_path / "merged", "--json")
    assert result.code == 0, result.err
    assert statistics(tmp_path / "merged") == statistics(whole)
    merged, one = (read_calibration(tmp_path / name) for name in ("merged", "whole"))
    assert (merged.data["tokens"], merged.data["sequences"]) == (
        one.data["tokens"], one.data["sequences"],
    )  # fmt: skip
    assert [layer.tokens for layer in merged.layers] == [layer.tokens for layer in one.layers]
    assert {part["calibration"] for part in merged.data["merged"]} == {
        read_calibration(path).digest for path in some
    }
    assert "3 calibrations" in kvq("inspect", tmp_path / "merged").out


def test_order_and_steps_change_no_byte(kvq, parts, tmp_path):
    a, b, c = (parts(f"part{i}", parts.lines[i::3]) for i in range(3))
    assert kvq("merge", a, b, c, "-o", tmp_path / "abc").code == 0
    assert kvq("merge", c, a, b, "-o", tmp_path / "cab").code == 0
    assert kvq("merge", a, b, "-o", tmp_path / "ab").code == 0
    assert kvq("merge", c, tmp_path / "ab", "-o", tmp_path / "c-ab").code == 0
    for name in ("config.json", "calibration.safetensors"):
        assert len({(tmp_path / n / name).read_bytes() for n in ("abc", "cab", "c-ab")}) == 1


def test_a_merged_calibration_exports_and_verifies(kvq, parts, checkpoints, tmp_path):
    some = [parts(f"part{i}", parts.lines[i::2]) for i in range(2)]
    kvq("merge", *some, "-o", tmp_path / "merged")
    argv = ["--scales", tmp_path / "merged", "-o", tmp_path / "checkpoint"]
    assert kvq("export", checkpoints("gemma3"), *argv).code == 0
    argv = ["verify", tmp_path / "checkpoint", "--engine", "vllm"]
    assert kvq(*argv, "--against", tmp_path / "merged").code == 0
    larger = np.array([x.amax["k_bmm_quantizer"].max() for x in read_calibration(some[0]).layers])
    merged = read_calibration(tmp_path / "merged").layers
    assert (np.array([x.amax["k_bmm_quantizer"].max() for x in merged]) >= larger).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-cfg", "FP8_ATTN_CFG"], "another"),
        (["--margin", "1.5"], "another --margin"),
        (["--skip-layers", "1"], "another --skip-layers"),
    ],
)
def test_other_options_are_refused_with_the_difference(kvq, parts, tmp_path, options, message):
    one, other = parts("one", parts.lines), parts("other", parts.lines[:6], *options)
    result = kvq("merge", one, other, "-o", tmp_path / "merged", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "merge.differs")
    assert message in result.json["error"]["message"]
    assert not (tmp_path / "merged").exists()


def test_other_weights_are_refused(kvq, parts, checkpoints, tmp_path):
    one = parts("one", parts.lines)
    other = parts("other", parts.lines, source=checkpoints("gemma3", sliding_window=4))
    result = kvq("merge", one, other, "-o", tmp_path / "merged", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "merge.differs")


def test_what_is_given_twice_counts_once(kvq, parts, tmp_path):
    one, other = parts("one", parts.lines[:9]), parts("other", parts.lines[9:])
    assert kvq("merge", one, other, "-o", tmp_path / "both").code == 0
    for again in ([one, one], [one, tmp_path / "both"]):
        result = kvq("merge", *again, "-o", tmp_path / "merged", "--json")
        assert (result.code, result.json["error"]["code"]) == (2, "merge.twice")
    result = kvq("merge", one, "-o", tmp_path / "merged", "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "merge.too_few")


def test_damaged_sources_are_one_clear_error(kvq, parts, tmp_path):
    one, other = parts("one", parts.lines[:9]), parts("other", parts.lines[9:])
    path = other / "config.json"
    config = json.loads(path.read_text())
    for broken in ([1], [{"calibration": "x", "data": {"tokens": "9"}}], 3):
        config["data"]["merged"] = broken
        path.write_text(json.dumps(config))
        result = kvq("merge", one, other, "-o", tmp_path / "merged", "--json")
        assert (result.code, result.json["error"]["code"]) == (2, "calibration.damaged")
