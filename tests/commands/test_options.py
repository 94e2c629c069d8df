"""An option that would change nothing is refused: a check that did not run must not hold."""

import pytest

OF_ENGINES = [
    ("--engine-version", "0.32.0"),
    ("--kv-cache-dtype", "bfloat16"),
    ("--kv-cache-dtype", "auto"),  # the default, if typed
    ("--kv-cache-dtype-skip-layers", "0"),
    ("--platform", "gfx942"),
    ("--tp", "4"),
]


def refused(result, option, needed):
    error = result.json["error"]
    code = f"option.{option.removeprefix('--').replace('-', '_')}"
    assert (result.code, error["code"]) == (2, code)
    assert option in error["message"]
    assert needed in error["message"]


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize(("option", "value"), OF_ENGINES)
def test_an_option_of_engines_needs_one(kvq, checkpoints, command, option, value):
    argv = [command, checkpoints("llama"), option, value, "--json"]
    refused(kvq(*argv), option, "--engine")
    assert kvq(*argv, "--engine", "vllm").code in (0, 1)


@pytest.mark.parametrize(
    ("option", "value", "needed"),
    [("--python", "python3", "--live"), ("--rtol", "0.1", "--against")],
)
def test_an_option_of_another_needs_that(kvq, checkpoints, option, value, needed):
    argv = ["verify", checkpoints("llama"), "--engine", "vllm", option, value, "--json"]
    refused(kvq(*argv), option, needed)
