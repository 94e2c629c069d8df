"""How many numbers a scale has, and who takes them."""

import pytest

from tests.engines.quantization import CT, HEADS
from tests.engines.tensors import plus, scales


def test_vllm_39418_a_scalar_and_a_tensor_of_one_number(verify, variant, reading):
    """K40, vllm-project/vllm#39418, vllm-project/vllm#6761: a scale of shape [1] left a copy as a
    plain number unset, and a default that was no float was taken for several scales."""
    used = []
    for shape in ((), (1,), (1, 1)):
        folder = variant(scales(layers=[0], shape=shape) | scales(layers=[1]), CT)
        for engine in ("vllm", "sglang"):
            assert verify(folder, engine, "--strict").code == 0
        used.append([layer["k"]["value"] for layer in reading(folder, "vllm")["layers"]])
    assert used[0] == used[1] == used[2]
    two = variant(scales(layers=[0], shape=(2,)) | scales(layers=[1]), CT)
    finding = verify(two).one("scale.shape")
    assert (finding["layer_idx"], finding["expected"], finding["found"]) == (
        0, "1 (per tensor)", "(2,)",
    )  # fmt: skip
    for engine in ("vllm", "sglang"):
        assert verify(two, engine).errors == {"scale.shape", "engine.load"}


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (4,), (8,)], ids=str)
def test_sglang_26436_per_head_scales_of_one_length_only(verify, variant, shape):
    """K41, sgl-project/sglang#26436, vllm-project/vllm#30141: one backend takes scales per head,
    others silently use one head's number, or the first few of too many."""
    folder = variant(scales(shape=shape), HEADS)
    right = shape[0] == 2  # KV heads of this model
    assert verify(folder).errors == (set() if right else {"scale.shape"})
    vllm = verify(folder, "vllm")
    assert vllm.errors == (set() if right else {"scale.shape", "engine.value"})
    if not right:
        assert f"the first 2 of {shape[0]} numbers" in vllm.one("engine.value")["message"]
    assert "engine.unquantized" in verify(folder, "sglang").errors
    ampere = verify(folder, "vllm", "--platform", "sm80").one("engine.load")["message"]
    assert "FlashAttention 3 on sm90 alone" in ampere


@pytest.mark.parametrize(("tp", "note"), [(1, None), (2, None), (4, "replicated x2"), (3, None)])
def test_transformers_48307_more_gpus_than_kv_heads(verify, variant, reading, tp, note):
    """K42, huggingface/transformers#48307, vllm-project/vllm#46755: with more GPUs than KV heads a
    forward pass fails in the middle, or heads must be replicated."""
    folder = variant(scales(shape=(2, 1, 1)), HEADS)
    found = verify(folder, "vllm", "--tp", tp)
    used = reading(folder, "vllm", "--tp", tp)
    if tp == 3:
        assert "must be divisible by tensor parallel size (3)" in found.one("engine.load")["found"]
        return
    assert found.code == 0
    assert used["layers"][0]["k"]["value"] == [pytest.approx(0.011), pytest.approx(0.012)]
    assert any("replicated" in line for line in used["notes"]) == (note is not None)
    assert note is None or f"2 KV heads on {tp} GPUs: each is {note}" in " ".join(used["notes"])


def test_vllm_53105_a_wrong_shape_is_named_with_its_file(kvq, verify, variant):
    """K43, vllm-project/vllm#53105: a bare assertion names neither tensor nor shapes, and without
    assertions one number would be spread over all channels."""
    folder = variant(scales(shape=(3, 1, 1)), HEADS)
    for finding in verify(folder).findings:
        assert finding["code"] == "scale.shape"
        assert finding["tensor"].startswith(f"model.layers.{finding['layer_idx']}.self_attn.")
        assert finding["file"] == "model.safetensors"
        assert finding["expected"] == "2 (per head)"
        assert finding["found"] == "(3, 1, 1)"
    line = kvq("verify", folder).out.splitlines()[0]
    for part in ("layer 0", "k_scale", "model.safetensors", "2 (per head)", "(3, 1, 1)"):
        assert part in line


def test_llm_compressor_1294_scales_of_queries(verify, variant, reading):
    """K44, vllm-project/llm-compressor#1294, vllm-project/vllm#17414, vllm-project/vllm#25760: FP8
    attention quantizes queries too, and warns that their scale is 1.0."""
    without = variant(scales(), CT)
    assert verify(without, "vllm", "--strict").code == 0
    used = reading(without, "vllm")["layers"][0]["q"]
    assert used["value"] == [1.0]
    assert "matters where the backend quantizes queries" in used["reason"]
    queries = scales("model.layers.{}.self_attn.q_scale", sides="k", scale=10)
    folder = variant(scales() | queries, CT)
    assert verify(folder, "vllm", "--strict").code == 0
    assert reading(folder, "vllm")["layers"][0]["q"]["value"] == [pytest.approx(0.11)]
    some = variant(plus(scales(), q_scale=0.3), CT)
    assert verify(some).one("scale.missing")["tensor"] == "model.layers.1.self_attn.q_scale"
