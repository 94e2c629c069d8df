"""kvq calibrate --compile: what is compiled, what is refused, and that it is undone."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from kvq.calibration.amax import Observer
from kvq.calibration.compiling import compiled
from kvq.calibration.modules import attention_modules
from kvq.calibration.observe import observing
from kvq.errors import UnsupportedModelError
from kvq.pipeline.live import live_geometry
from tests import models


@pytest.fixture
def without_backend(monkeypatch):
    """Compile as ever, but run the graphs as they are: fast, and to the same bytes."""
    torch._dynamo.reset()
    counters.clear()

    compile_any = torch.compile

    def compile_function(function, *, dynamic, options):
        return compile_any(function, backend="eager", dynamic=dynamic)

    def compile_module(self, **how):
        self._compiled_call_impl = compile_function(self._call_impl, **how)

    monkeypatch.setattr(torch, "compile", compile_function)
    monkeypatch.setattr(nn.Module, "compile", compile_module)


def maxima(model, *, compile_layers):
    layers = live_geometry(model).layers
    attentions = attention_modules(model.model, [layer.attention for layer in layers])
    observer = Observer(layers, queries=True)
    with observing(model.model, attentions, observer) as run:
        batches = [{"input_ids": torch.arange(i, i + 40)[None]} for i in range(3)]
        if compile_layers:
            with compiled(model.model, attentions, run) as run_compiled:
                for batch in batches:
                    run_compiled(batch)
        else:
            for batch in batches:
                run(batch)
    return observer.results()


# before the attention (with and without a mask), after it, rotation, norms of Q and K
@pytest.mark.parametrize(("family", "graphs"), [("llama", 3), ("gemma3", 6), ("qwen3", 5)])
def test_layers_of_a_kind_are_compiled_once_and_left_as_they_were(without_backend, family, graphs):
    model = models.build(family, num_hidden_layers=12)
    expected = maxima(model, compile_layers=False)
    found = maxima(model, compile_layers=True)
    assert counters["stats"]["unique_graphs"] == graphs
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_layer_that_cannot_be_compiled_whole_is_an_error(without_backend, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def looking(self, x):
        return forward(self, x) if float(x.sum()) else x  # asks for a number amid the graph

    monkeypatch.setattr(LlamaMLP, "forward", looking)
    model = models.build("llama")
    with pytest.raises(UnsupportedModelError, match="`LlamaModel` cannot be compiled: ") as caught:
        maxima(model, compile_layers=True)
    assert caught.value.code == "calibrate.compile"
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_where_torch_compiles_nothing_it_is_an_error(without_backend, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: None)
    with pytest.raises(UnsupportedModelError, match="torch has compiled nothing"):
        maxima(models.build("llama"), compile_layers=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "cpu"], "for CUDA devices, and this runs on `cpu`"),
        (["--streaming"], "and --streaming says otherwise"),
        (["--device-map", "auto"], "and --device-map says otherwise"),
    ],
)
def test_compiling_is_refused_where_it_cannot_be(kvq, checkpoints, rows, tmp_path, options, said):
    argv = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c", "--json", "--compile"]
    result = kvq("calibrate", checkpoints("llama"), *argv, *options)
    assert (result.code, result.json["error"]["code"]) == (2, "option.compile")
    assert said in result.json["error"]["message"]


def test_many_shapes_of_batches_are_refused():
    import numpy as np

    from kvq.calibration.batches import Sequence, plan_batches
    from kvq.calibration.compiling import check_shapes
    from kvq.errors import InputError

    sequences = [Sequence(np.arange(n)) for n in (9, 9, 9, 8, 8, 7)]
    check_shapes(sequences, plan_batches(sequences, 2))  # 2 and 1 of 9, 2 of 8, 1 of 7
    sequences.append(Sequence(np.arange(6)))
    with pytest.raises(InputError, match="there are 5, expected at most 4"):
        check_shapes(sequences, plan_batches(sequences, 2))
