"""What is asked of a scale depends on whether kvq recorded its own amax, not on any record."""

import json

import numpy as np
import pytest

from tests.commands.test_verify import K0, rewrite


def passed_on(status):
    """The record of an export from a file that says nothing of amax."""

    def change(_, metadata):
        record = json.loads(metadata["kvq"])
        record["status"] = {a: dict.fromkeys(sides, status) for a, sides in
                            record["status"].items()}  # fmt: skip
        del record["amax"]
        metadata["kvq"] = json.dumps(record)

    return change


def inverted(scales, _):
    scales.update({name: 1 / array for name, array in scales.items()})


def both(*changes):
    return lambda scales, metadata: [change(scales, metadata) for change in changes]


def codes(result):
    return {finding["code"] for finding in result.json["findings"]}


@pytest.mark.parametrize("status", ["unknown", "user"])
def test_inverted_scales_do_not_become_plausible_by_an_export(kvq, exported, status):
    checkpoint = exported()
    rewrite(checkpoint, both(inverted, passed_on(status)))
    result = kvq("verify", checkpoint, "--json")
    assert (result.code, codes(result)) == (1, {"scale.implausible"})


@pytest.mark.parametrize("status", ["unknown", "user"])
def test_a_lost_scale_does_not_become_calibrated_by_an_export(kvq, exported, status):
    checkpoint = exported()
    rewrite(checkpoint, both(lambda s, _: s.update({K0: np.ones(1, np.float32)}),
                             passed_on(status)))  # fmt: skip
    assert codes(kvq("verify", checkpoint, "--json")) == {"scale.one"}


def test_a_scale_with_an_amax_is_compared_whatever_its_status(kvq, exported):
    checkpoint = exported()

    def claim(scales, metadata):
        record = json.loads(metadata["kvq"])
        record["status"] = {a: dict.fromkeys(sides, "unknown") for a, sides in
                            record["status"].items()}  # fmt: skip
        metadata["kvq"] = json.dumps(record)
        scales[K0] = scales[K0] * np.float32(1.5)

    rewrite(checkpoint, claim)
    assert codes(kvq("verify", checkpoint, "--json")) == {"provenance.scale"}


def test_scales_without_a_recorded_amax_are_no_provenance(kvq, exported):
    checkpoint = exported()
    assert kvq("verify", checkpoint, "--require", "provenance").code == 0
    rewrite(checkpoint, passed_on("unknown"))
    assert kvq("verify", checkpoint).code == 0
    result = kvq("verify", checkpoint, "--require", "provenance", "--json")
    assert (result.code, codes(result)) == (1, {"require.provenance"})
    assert "4 of 4 scales" in result.json["findings"][0]["message"]


def test_a_constant_by_request_needs_no_amax(kvq, exported):
    checkpoint = exported(kv_cfg="FP8_CAST_KV_CFG")
    rewrite(checkpoint, passed_on("constant"))
    assert kvq("verify", checkpoint, "--strict", "--require", "provenance").code == 0
