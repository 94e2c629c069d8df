"""Quantized checkpoints calibrate as they are: the maxima of transformers' own forward pass."""

import json
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from kvq.state import read_calibration
from tests import bases, models
from tests.recorder import record_cache

pytestmark = pytest.mark.client_transformers
ROWS = np.random.default_rng(0).integers(3, 120, (3, 30)).tolist()


def int8_channels(weight):
    scale = np.abs(weight).max(1, keepdims=True) / 127
    return {"weight": np.rint(weight / scale).astype(np.int8),
            "weight_scale": scale.astype(bases.BF16)}  # fmt: skip


def _args(strategy, **others):
    return {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": True, **others}


CT_INT8 = bases._compressed(
    "int-quantized", _args("channel"), _args("token", dynamic=True)
)  # W8A8: activations are quantized at run time
KINDS = {
    **{name: bases.COMPRESSED[name] for name in
       ("ct-w4a16", "ct-fp8", "ct-fp8-dynamic", "ct-nvfp4")},
    "ct-int8": bases._quantized(int8_channels, CT_INT8),
    "fp8-blocks": bases.FP8["fp8-blocks"],
}  # fmt: skip


def torchao_int8():
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


# Made by transformers itself with these.
MADE = {
    "bitsandbytes-4bit": lambda: BitsAndBytesConfig(load_in_4bit=True),
    "bitsandbytes-8bit": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao-int8": torchao_int8,
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "model"
    models.save("llama", folder, **bases.SIZES, num_hidden_layers=bases.NUM_LAYERS)
    return folder


@pytest.fixture
def command(tmp_path, dense):
    """Arguments that calibrate a base of this kind, stored as `tmp_path / base`."""
    rows = "".join(json.dumps({"input_ids": row}) + "\n" for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(rows)

    def call(base):
        folder = tmp_path / "base"
        if callable(base):
            model = AutoModelForCausalLM.from_pretrained(
                dense, quantization_config=base(), dtype="auto", device_map="cpu"
            )
            model.save_pretrained(folder)
        else:
            bases.write(base, dense, folder)
            for name in bases.SIDE_FILES:
                (folder / name).unlink()
        return ["calibrate", folder, "--dataset", tmp_path / "rows.jsonl", "--seq-len", 40,
                "--min-tokens", 1, "-o", tmp_path / "calibration"]  # fmt: skip

    return call


@pytest.mark.filterwarnings("ignore")  # of compressed-tensors, about what it decompresses
@pytest.mark.parametrize("kind", KINDS | MADE)
def test_maxima_are_those_of_the_quantized_model(kvq, command, tmp_path, dense, kind):
    argv = command((KINDS | MADE)[kind])
    result = kvq(*argv, "--streaming")
    assert result.code == 0, result.err
    assert "Not streamed, since its weights are quantized" in result.err

    def recorded(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        return record_cache(model, [{"input_ids": torch.tensor([row])} for row in ROWS])

    expected, plain = recorded(tmp_path / "base"), recorded(dense)
    differs = False
    for layer in read_calibration(tmp_path / "calibration").layers:
        for side, quantizer in enumerate(("k_bmm_quantizer", "v_bmm_quantizer")):
            found = layer.amax[quantizer]
            np.testing.assert_array_equal(found, expected[layer.attention][side])
            differs |= not np.array_equal(found, plain[layer.attention][side])
    assert differs  # from the dense model's


@pytest.mark.filterwarnings("ignore")  # of bitsandbytes, about the dtype of its products
def test_a_bitsandbytes_checkpoint_that_does_not_name_its_method_is_loaded(kvq, command, tmp_path):
    argv = command(MADE["bitsandbytes-8bit"])
    assert kvq(*argv).code == 0
    path = tmp_path / "base" / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]["quant_method"]
    path.write_text(json.dumps(config))
    assert kvq(*argv[:-1], tmp_path / "again").code == 0
    first, again = (
        tmp_path / name / "calibration.safetensors" for name in ("calibration", "again")
    )
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    ("kind", "code", "named"),
    [
        ("awq", "dependency.model", "requires gptqmodel"),
        ("gptq", "dependency.model", "requires optimum"),
        ("fp8-tensor", "model.unused_tensors", "the maxima would be those of another model"),
        ("modelopt-fp8-flat", "model.quantization", "transformers does not know"),
        ("modelopt-fp8-legacy", "model.quantization", "hf_quant_config.json"),
    ],
)
def test_what_cannot_run_here_is_refused(kvq, command, kind, code, named):
    result = kvq(*command(bases.BASES[kind]), "--json")
    error = result.json["error"]
    assert (result.code, error["code"]) == (2, code)
    assert named in error["message"]


@pytest.mark.parametrize("base", [bases.COMPRESSED["ct-w4a16"], bases.FP8["fp8-blocks"]])
def test_unpacked_weights_count_with_their_size_in_memory(command, base):
    from kvq.calibration.memory import weight_bytes
    from kvq.checkpoint import open_checkpoint

    folder = command(base)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        with torch.no_grad():
            model(torch.tensor([[3, 4]]))
    weights = sum(p.numel() * p.element_size() for n, p in model.named_parameters()
                  if not n.endswith(("_scale", "_zero_point")))  # fmt: skip
    assert weights <= weight_bytes(open_checkpoint(folder), "auto") <= 1.02 * weights
