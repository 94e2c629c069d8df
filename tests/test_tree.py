import numpy as np
from torch import nn

from kvq.calibration.modules import module_list
from kvq.quantizers import QuantizerConfig, describe
from kvq.tree import render_tree
from tests.models import build


class TensorQuantizer(nn.Module):
    def __init__(self, text):
        super().__init__()
        self.text = text

    def extra_repr(self):
        return self.text


def test_the_tree_is_what_pytorch_prints_for_a_model_with_such_quantizers():
    model = build("llama")
    modules = module_list(model, [f"model.layers.{i}.self_attn" for i in (0, 1)])
    lines = {}
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.__class__ = type("QuantLlamaAttention", (type(attention),), {})
        for j, name in enumerate(("q_bmm_quantizer", "k_bmm_quantizer", "v_bmm_quantizer")):
            quantizer = TensorQuantizer(f"(4, 3) bit fake per-tensor amax={i}.{j}000 quant")
            setattr(attention, name, quantizer)
            lines[f"model.layers.{i}.self_attn.{name}"] = repr(quantizer)
    assert render_tree(modules, lines) == repr(model)


def test_each_branch_of_a_quantizer_line():
    amax = np.array([1.5, 7.53125], np.float32)
    line = "TensorQuantizer({} calibrator=MaxCalibrator quant)".format
    blocks = "block_sizes={{-1: {}, 'type': 'dynamic', 'scale_bits': {}}},".format
    expected = {
        QuantizerConfig("fp8_e4m3"): "(4, 3) bit fake per-tensor amax=7.5312",
        QuantizerConfig("int8"): "8 bit fake per-tensor amax=7.5312",
        QuantizerConfig("fp8_e4m3", "head"): "(4, 3) bit fake axis=1 amax=[1.5000, 7.5312](2)",
        QuantizerConfig("fp8_e4m3", "tensor", 448.0): "(4, 3) bit fake per-tensor "
        "amax=448.0000(const)",
        QuantizerConfig("nvfp4"): f"(2, 1) bit fake {blocks(16, (4, 3))} amax=7.5312",
        QuantizerConfig("mxfp8"): f"(4, 3) bit fake {blocks(32, (8, 0))} amax=None",
    }
    for config, text in expected.items():
        assert describe(config, amax) == line(text)
    assert describe(None, amax) == "TensorQuantizer(disabled)"
