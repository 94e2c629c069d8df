"""Long sequences: no tensor of length x length, and the maxima of attention in one piece."""

import json
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

import kvq as api
from kvq.calibration import blocks
from kvq.calibration.batches import Sequence, plan_batches
from kvq.calibration.blocks import Unmade, in_blocks
from kvq.errors import CalibrationError
from kvq.pipeline.job import Job
from tests import zoo
from tests.models import build

WINDOWED = {"sliding_window": 24}
MODELS = {  # a model of each way to attend
    "mistral": lambda: build("mistral", **WINDOWED),
    "gemma2": lambda: build("gemma2", **WINDOWED, attn_implementation="eager"),  # softcap
    "gemma3": lambda: build("gemma3", **WINDOWED),
    "llama": lambda: build("llama"),
    "llama eager": lambda: build("llama", attn_implementation="eager"),
    "gpt_oss": lambda: zoo.tiny_model("causal", "gpt_oss"),  # sinks
    "llama4": lambda: zoo.tiny_model("causal", "llama4_text"),  # chunks
    "deepseek_v3": lambda: zoo.tiny_model("causal", "deepseek_v3"),  # other sizes of K and V
    # these look at the name of their attention implementation
    **{
        name: lambda name=name: zoo.tiny_model("causal", name)
        for name in ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "falcon", "minimax_m3_vl_text")
    },
    "doge eager": lambda: eager(zoo.tiny_model("causal", "doge")),  # looks at the mask's dtype
}
QUICK = ("mistral", "gemma2", "llama eager", "deepseek_v3", "deepseek_v32", "falcon", "doge eager")
NO_MASK = ("llama", "minimax_m3_vl_text")


def eager(model):
    model.set_attn_implementation("eager")
    return model


def ids(length, rows=1):
    return torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(0))


def amax(calibration):
    return np.concatenate([a for x in calibration.layers for a in x.amax.values()])


@pytest.fixture
def short(monkeypatch):
    """Have sequences of 60 tokens count as long, in blocks of 7 queries; counts blocks."""
    found = []
    monkeypatch.setattr(blocks, "LONG", 1000)
    monkeypatch.setattr(blocks, "_FEWEST", 7)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 0)
    part = Unmade.part
    monkeypatch.setattr(Unmade, "part", lambda self, *at: found.append(at) or part(self, *at))
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in MODELS]
)
def test_maxima_are_those_of_attention_in_one_piece(monkeypatch, request, name):
    model = MODELS[name]().float()
    batches = [ids(60), ids(51, rows=2)]
    expected = api.calibrate(model, batches)
    found = request.getfixturevalue("short")
    calibration = api.calibrate(model, batches)
    assert bool(found) is (name not in NO_MASK)
    np.testing.assert_allclose(amax(calibration), amax(expected), rtol=1e-5)
    assert [x.tokens for x in calibration.layers] == [162] * len(calibration.layers)
    assert "blocks of queries" in calibration.run["attention"]
    assert "blocks of queries" not in expected.run["attention"]


def test_queries_are_observed_in_blocks_too(monkeypatch, request):
    model = MODELS["mistral"]().float()
    expected = api.calibrate(model, [ids(60)], kv_cfg="FP8_ATTN_CFG")
    found = request.getfixturevalue("short")
    calibration = api.calibrate(model, [ids(60)], kv_cfg="FP8_ATTN_CFG")
    assert found
    assert all("q_bmm_quantizer" in layer.amax for layer in calibration.layers)
    np.testing.assert_allclose(amax(calibration), amax(expected), rtol=1e-5)


@pytest.mark.parametrize("kv_cfg", ["FP8_KV_CFG", "FP8_ATTN_CFG"])
def test_an_attention_function_of_the_users_own_stays_in_place(short, kv_cfg):
    called = []

    def mine(module, *args, **kwargs):
        called.append(type(module).__name__)
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("mine", mine)
    AttentionMaskInterface.register("mine", sdpa_mask)
    model = zoo.tiny_model("image-text", "gemma3").float()
    model.set_attn_implementation({"text_config": "mine"})
    config = model.config
    calibration = api.calibrate(model, [ids(60)], kv_cfg=kv_cfg)
    assert called
    assert calibration.run["attention"] == "mine"
    names = [c._attn_implementation for c in (config, config.text_config, config.vision_config)]
    assert [(type(name), name) for name in names] == [(str, "sdpa"), (str, "mine"), (str, "sdpa")]


def test_a_mask_inside_a_list_is_made_whole(short):
    given = {"batch_size": 1, "q_length": 60, "kv_length": 60, "device": "cpu",
             "mask_function": causal_mask_function}  # fmt: skip
    joined = torch.cat([Unmade.of(sdpa_mask, given), torch.ones(1, 1, 60, 4, dtype=bool)], dim=-1)
    assert torch.equal(joined[..., :60], sdpa_mask(**given, allow_is_causal_skip=False))


def test_a_long_batch_behind_a_longer_sequence_is_recorded():
    """On CUDA, where batches are run whole, the longest sequence need not be in a long batch."""
    sequences = [Sequence(np.arange(n)) for n in (4000, *[3900] * 8)]
    job = SimpleNamespace(device=torch.device("cuda"), data=SimpleNamespace(sequences=sequences),
                          whole_plan=plan_batches(sequences, 8))  # fmt: skip
    assert Job.long_tokens.fget(job) == 3900
    job.device = torch.device("cpu")
    assert Job.long_tokens.fget(job) is None


def test_blocks_cover_every_query_once_and_the_keys_of_its_window(short):
    function = sliding_window_causal_mask_function(10)
    given = {"batch_size": 1, "q_length": 60, "kv_length": 60, "device": "cpu",
             "mask_function": function, "local_size": 10}  # fmt: skip
    mask = Unmade.of(sdpa_mask, given)
    whole = sdpa_mask(**given)
    states = torch.zeros(1, 2, 60, 4)
    rebuilt = torch.zeros_like(whole)
    for queries, keys in blocks._blocks(mask, states, states):
        part = mask.part(queries, keys)
        rebuilt[..., slice(*queries), slice(*keys)] |= part
        assert keys[1] - keys[0] <= 7 + 10
    assert torch.equal(rebuilt, whole)


def test_a_mask_that_nobody_knows_gets_all_keys_and_equal_ones_are_equal():
    given = {"batch_size": 1, "q_length": 8, "kv_length": 8, "device": "cpu"}

    def mask(function):
        return Unmade.of(sdpa_mask, {**given, "mask_function": function})

    assert mask(lambda b, h, q, kv: kv >= q).window is None
    assert mask(causal_mask_function).window == 8
    assert mask(sliding_window_causal_mask_function(3)).window == 3
    one, same, other = (mask(sliding_window_causal_mask_function(n)) for n in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(one & True, one.part((0, 8), (0, 8)))
    assert (one & True).sum() == 8 * 3 - 3


def test_what_cannot_be_divided_and_does_not_fit_is_refused(monkeypatch):
    size = {"batch_size": 1, "q_length": 1 << 17, "kv_length": 1 << 17, "device": "cpu"}
    mask = Unmade.of(sdpa_mask, {**size, "mask_function": causal_mask_function})
    monkeypatch.setattr(blocks, "available_bytes", lambda device: 1 << 34)
    with pytest.raises(CalibrationError, match="makes attention masks of 131072 x 131072") as error:
        mask.logical_not()
    assert error.value.code == "calibrate.long_context"


def test_the_model_is_left_as_it_was(short):
    model = build("mistral", **WINDOWED)
    before = model.config._attn_implementation
    with in_blocks(model.model, {"input_ids": ids(60)}):
        assert model.config._attn_implementation is not before
    assert model.config._attn_implementation is before
    with in_blocks(model.model, {"input_ids": ids(20)}):
        assert model.config._attn_implementation is before


@pytest.mark.parametrize("family", ["mistral", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_streamed_and_whole_give_the_same_bytes_and_say_so(
    kvq, checkpoints, tmp_path, short, family
):
    model = checkpoints(family, sliding_window=24)
    rows = [{"input_ids": row} for row in ids(60, rows=3).tolist() + ids(20, rows=1).tolist()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 64, "--min-tokens", 1]
    for name, options in (("whole", []), ("streamed", ["--streaming"])):
        short.clear()
        result = kvq("calibrate", model, *argv, *options, "-o", tmp_path / name)
        assert result.code == 0, result.err
        assert "attention over 60 tokens runs in blocks of queries" in result.err
        assert short
    folders = [{p.name: p.read_bytes() for p in (tmp_path / n).iterdir()}
               for n in ("whole", "streamed")]  # fmt: skip
    assert folders[0] == folders[1]
    recorded = json.loads(folders[0]["config.json"])["run"]["attention"]
    assert recorded.endswith(", in blocks of queries where a long mask can be divided")


class Largest(TorchDispatchMode):
    """Remembers the largest memory of any tensor made inside of it."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else [found]:
            if isinstance(one, torch.Tensor) and one.device.type != "meta":
                self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return found


SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
         "num_hidden_layers": 1, "max_position_embeddings": 1 << 18}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "length", "changes"),
    [
        ("llama", 9000, {}),
        ("mistral", 9000, {"sliding_window": 512}),
        pytest.param("gemma3", 9000, {"sliding_window": 512}, marks=pytest.mark.slow),
        pytest.param("gemma2", 9000, {"sliding_window": 512, "attn_implementation": "eager"},
                     marks=pytest.mark.slow),
        pytest.param("mistral", 32768, {"sliding_window": 4096}, marks=pytest.mark.slow),
        pytest.param("llama", 32768, {}, marks=pytest.mark.slow),
        pytest.param("mistral", 131072, {"sliding_window": 1024}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_no_tensor_of_length_times_length_is_made(family, length, changes):
    model = build(family, **{**SMALL, **changes})
    with Largest() as largest:
        calibration = api.calibrate(model, [ids(length)])
    assert calibration.layers[0].tokens == length
    assert 0 < largest.bytes < length * length
    assert largest.bytes <= 2 * blocks.BLOCK_BYTES


@pytest.mark.slow
def test_streaming_makes_no_such_tensor_either(kvq, checkpoints, tmp_path):
    model = checkpoints("mistral", **{**SMALL, "num_hidden_layers": 2}, sliding_window=512)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": ids(9000)[0].tolist()}))
    argv = ["--dataset", tmp_path / "rows.jsonl", "--seq-len", 9000, "--streaming"]
    with Largest() as largest:
        result = kvq("calibrate", model, *argv, "-o", tmp_path / "c")
    assert result.code == 0, result.err
    assert "Streaming" in result.err
    assert 0 < largest.bytes < 9000 * 9000


def test_the_recorder_of_allocations_sees_a_mask_that_is_made():
    model = build("mistral", **SMALL, sliding_window=512)
    with Largest() as largest, torch.inference_mode():
        model.model(input_ids=ids(2000), use_cache=False)
    assert largest.bytes >= 2000 * 2000


def test_masks_are_let_go_of_after_the_run(short):
    made = []
    of = Unmade.of
    blocks_of = lambda *args: made.append(weakref.ref(mask := of(*args))) or mask  # noqa: E731
    Unmade.of = staticmethod(blocks_of)
    try:
        api.calibrate(build("mistral", **WINDOWED), [ids(60)])
    finally:
        Unmade.of = staticmethod(of)
    assert made
    assert all(one() is None for one in made)
