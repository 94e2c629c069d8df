"""The table of backends, held against what vLLM's own classes said of GPUs that were made up."""

import json
from pathlib import Path

import pytest

from kvq.engines.vllm_kernels import backends

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "vllm_backends.json").read_text())


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4"])
@pytest.mark.parametrize("platform", GOLDEN)
def test_backends_are_those_that_vllm_names(platform, dtype):
    said = {int(head): tuple(names) for head, names in GOLDEN[platform][dtype].items()}
    assert {head: backends(dtype, platform, head) for head in said} == said


def test_what_was_asked_tells_gpus_heads_and_formats_apart():
    assert GOLDEN["sm86"]["fp8"]["128"] == ["FlashInfer"]
    assert GOLDEN["sm86"]["fp8"]["96"] == []
    assert GOLDEN["sm90"]["fp8"]["128"] == ["FlashAttention", "FlashInfer", "Triton"]
    assert GOLDEN["sm90"]["fp8_e5m2"]["96"] == ["Triton"]
    assert GOLDEN["sm90"]["nvfp4"]["64"] == []
    assert GOLDEN["sm100"]["nvfp4"]["64"] == ["FlashInfer"]


@pytest.mark.parametrize(
    ("dtype", "platform"),
    [("auto", "sm90"), ("int8_per_token_head", "sm90"), ("fp8", "cpu"), ("fp8", "gfx942")],
)
def test_nothing_is_said_of_other_caches_and_platforms(dtype, platform):
    assert backends(dtype, platform, 128) is None
