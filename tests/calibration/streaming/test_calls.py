"""What a model must not do between its layers, on models made for that."""

from collections import UserDict

import pytest
import torch
from torch import nn

from kvq.calibration.streaming.calls import BodyFails, Caller, Calls, Kept, filled
from kvq.calibration.streaming.errors import NotStreamable
from kvq.calibration.streaming.step import call, hidden_states

INPUTS = {"input_ids": torch.arange(6)[None]}


class Layer(nn.Module):
    def forward(self, states, mask=None, **_):
        return states


class Body(nn.Module):
    """Two layers around `between`, which tests exchange."""

    def __init__(self, between=lambda states: states, layers=2):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.between = between

    def arguments(self, states):
        return {"mask": torch.ones(states.shape[1], states.shape[1])}

    def forward(self, input_ids, past_key_values=None, use_cache=None):
        states = self.embed(input_ids)
        for layer in self.layers:
            states = self.between(layer(states, **self.arguments(states)))
        return states


def caller(body):
    return Caller(body, body.layers, lambda: None)


def found_form(body):
    made = caller(body)
    made.find_form(INPUTS)
    return made


@pytest.mark.parametrize(
    ("between", "form"),
    [
        (lambda out: out, "tensor"),
        (lambda out: out[0], "tuple"),
        (lambda out: (lambda states, weights: states)(*out), "tuple, None"),
    ],
)
def test_the_form_of_what_layers_return_is_found(between, form):
    assert found_form(Body(between)).form == form


@pytest.mark.parametrize(
    "between", [lambda states: states + 1, lambda states: states.clone(), lambda s: s.detach()]
)
def test_anything_between_layers_is_found(between):
    with pytest.raises(NotStreamable, match="something comes between layers 0 and 1"):
        found_form(Body(between))


def test_arguments_that_depend_on_an_earlier_layer_are_found():
    class Dependent(Body):
        def arguments(self, states):
            return {"mask": states.mean(-1)}

    made = found_form(Dependent())
    assert not made.run(INPUTS).same(made.run(INPUTS, changed=True))
    made = found_form(Body())
    assert made.run(INPUTS).same(made.run(INPUTS, changed=True))


def test_arguments_that_depend_on_the_tokens_differ_between_batches():
    class Dependent(Body):
        def forward(self, input_ids, past_key_values=None, use_cache=None):
            self.ids = input_ids
            return super().forward(input_ids)

        def arguments(self, states):
            return {"mask": self.ids * 2}

    made = found_form(Dependent())
    assert not made.run(INPUTS).same(made.run({"input_ids": INPUTS["input_ids"] + 1}))


def test_layers_in_another_order_or_called_twice_are_found():
    body = Body()
    body.layers = nn.ModuleList([*body.layers, body.layers[0]])
    with pytest.raises(NotStreamable, match="layer 2 is called when layer 0 is due"):
        found_form(body)

    class Twice(Body):
        def forward(self, input_ids, past_key_values=None, use_cache=None):
            states = self.embed(input_ids)
            for layer in self.layers:
                states = layer(layer(states))
            return states

    with pytest.raises(NotStreamable, match="layer 0 is called when layer 1 is due"):
        found_form(Twice())


def test_a_layer_that_is_never_called_is_found():
    class Short(Body):
        def forward(self, input_ids, past_key_values=None, use_cache=None):
            return self.layers[0](self.embed(input_ids))

    with pytest.raises(NotStreamable, match="it calls 1 of 2 layers"):
        found_form(Short())


def test_an_object_that_cannot_be_noted_is_found():
    class Odd(Body):
        def arguments(self, states):
            return {"mask": object()}

    with pytest.raises(NotStreamable, match="it hands its layers a `object`"):
        found_form(Odd())


def test_a_body_that_fails_before_its_layers_is_told_from_one_that_fails_within():
    class Pixels(Body):
        def forward(self, input_ids, past_key_values=None, use_cache=None):
            raise ValueError("pixel_values are needed")

    with pytest.raises(BodyFails, match="pixel_values are needed"):
        found_form(Pixels())


def test_further_values_that_layers_return_are_ignored_only_where_the_model_does_so():
    def reads_them(out):
        body.arguments = lambda states: {"mask": out[1] if len(out) > 1 else None}
        return out[0]

    assert found_form(Body(lambda out: out[0])).ignores(INPUTS, 1)
    body = Body(reads_them)
    assert not found_form(body).ignores(INPUTS, 1)
    assert not found_form(Body()).ignores(INPUTS, 1)


def test_attributes_and_forward_of_the_layers_are_as_before():
    body = Body()
    before = [vars(layer).copy() for layer in body.layers]
    found_form(body)
    assert [vars(layer) for layer in body.layers] == before
    assert torch.equal(body(**INPUTS), body.embed(INPUTS["input_ids"]))


def test_shared_dicts_are_one_object_per_batch():
    class Sharing(Body):
        def forward(self, input_ids, past_key_values=None, use_cache=None):
            self.shared = UserDict()
            return super().forward(input_ids)

        def arguments(self, states):
            return {"mask": self.shared}

    calls = found_form(Sharing()).run(INPUTS)
    states, batches = torch.zeros(1), [{}, {}]
    first, second = (filled(calls.arguments[i][1], states, None, batches[0]) for i in (0, 1))
    other = filled(calls.arguments[0][1], states, None, batches[1])
    assert type(first["mask"]) is UserDict
    assert first["mask"] is second["mask"]
    assert first["mask"] is not other["mask"]


def test_a_layer_that_writes_into_its_mask_is_found():
    class Writing(nn.Module):
        def forward(self, states, mask):
            mask += 1
            return states

    calls = found_form(Body()).run(INPUTS)
    states = torch.zeros(1, 6, 4)
    with (
        torch.inference_mode(),
        pytest.raises(NotStreamable, match="a `Writing` writes into what other layers receive"),
    ):
        call(Writing(), calls.arguments[0], states, None, {}, check=True)
    assert call(Layer(), calls.arguments[1], states, None, {}, check=True) is states


@pytest.mark.parametrize(
    ("returned", "form", "others"),
    [
        (torch.zeros(1), "tensor", 0),
        ((torch.zeros(1),), "tuple", 0),
        ((torch.zeros(1), None), "tuple", 0),
        ((torch.zeros(1), None, torch.ones(1)), "tuple", 2),
        ((torch.zeros(1), None), "tuple, None", 0),
    ],
)
def test_hidden_states_are_taken_from_what_a_layer_returns(returned, form, others):
    states, found = hidden_states(returned, form, 0)
    assert (states.tolist(), found) == ([0.0], others)


@pytest.mark.parametrize(("returned", "form"), [((torch.zeros(1),), "tensor"), ("x", "tuple"),
                                                (torch.zeros(1), "tuple")])  # fmt: skip
def test_another_form_than_the_model_takes_is_found(returned, form):
    with pytest.raises(NotStreamable, match="layer 3 returns a"):
        hidden_states(returned, form, 3)


def test_arguments_are_kept_within_their_bytes():
    kept = Kept(limit=1000)
    made = [Calls([((torch.zeros(100),), {})]) for _ in range(3)]
    for shape, calls in enumerate(made):
        kept.put(shape, calls)
        assert kept.get(shape) is calls
    assert [kept.get(shape) is not None for shape in range(3)] == [False, True, True]
