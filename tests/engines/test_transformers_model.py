"""The model of transformers against what transformers itself did, for every recorded checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvq.checkpoint import open_checkpoint
from kvq.engines import get_engine
from kvq.engines.base import EngineOptions
from kvq.errors import KvqError
from kvq.geometry import read_geometry
from tests.engines.variants import VARIANTS, write

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "transformers.json").read_text())
ERROR_LENGTH = 240  # at which the golden cuts
UNINITIALISED = "uninitialised"
# kvq does not open these, but transformers loads them, since it never looks at an index beside
# model.safetensors; kvq's error code.
REFUSED = {
    "ct-files-index-empty": "geometry.no_attention",
    "ct-files-index-without-map": "index.no_weight_map",
    "ct-files-extra-file-index-scales": "geometry.no_attention",
}
# The reading of these is unknown; why.
NEEDS_A_PACKAGE = "the method needs a package beside transformers, and that decides"
NOT_MODELLED = dict.fromkeys(
    ("awq", "awq-attn-names", "awq-modelopt-names", "awq-modules-to-not-convert", "awq-no-scales",
     "gptq", "gptq-modelopt-names", "gptq-proj-scale", "quark-auto"), NEEDS_A_PACKAGE,
)  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("transformers")


def read(path):
    view = open_checkpoint(path)
    geometry = read_geometry(view.config, view.tensors)
    return get_engine("transformers").read(view, geometry, EngineOptions())


def found(reading):
    """The reading in the golden's form."""
    if reading.error:
        kind, _, text = reading.error.partition(": ")
        return {"error": f"{kind}: {text[:ERROR_LENGTH]}"}
    return {
        "error": None, "layers": {layer.engine_name: module_of(layer) for layer in reading.layers}
    }  # fmt: skip


def module_of(layer):
    """What the attention module holds: nothing where it reads the cache of another one."""
    if "reads the cache of" in layer.k.reason:
        return {"dtype": "auto", "k": None, "v": None}
    sides = {side: value_of(getattr(layer, side), layer.cache_dtype) for side in "kv"}
    return {"dtype": layer.cache_dtype, **sides}


def value_of(side, cache_dtype):
    if side.value is None:
        kind = side.reason.partition(":")[0]
        return {"uninitialised memory": UNINITIALISED, "dynamic": None}[kind]
    if cache_dtype == "auto":  # 1.0 stands for no scale at all
        assert (side.value, side.tensor) == ((1.0,), None)
        return None
    return side.value


def expected(golden):
    if golden["error"]:
        return {"error": golden["error"]}
    layers = {
        name: {"dtype": layer["dtype"], **{side: numbers(layer[side]) for side in "kv"}}
        for name, layer in golden["layers"].items()
    }
    return {"error": None, "layers": layers}


def numbers(values):
    return tuple(float(value) for value in values) if isinstance(values, list) else values


@pytest.mark.parametrize("name", sorted(GOLDEN["variants"]))
def test_the_model_predicts_what_transformers_did(name, folder):
    golden = GOLDEN["variants"][name]
    write(name, folder / name)
    if name in REFUSED:
        assert golden["error"] is None
        with pytest.raises(KvqError) as error:
            read(folder / name)
        assert error.value.code == REFUSED[name]
        return
    reading = read(folder / name)
    if name in NOT_MODELLED:
        sides = [side for layer in reading.layers for side in (layer.k, layer.v)]
        assert reading.error is None
        assert reading.cache_dtype is None
        assert sides
        assert all(side.value is None and "not modelled" in side.reason for side in sides)
        return
    np.testing.assert_equal(found(reading), expected(golden))


@pytest.mark.parametrize("name", ["gemma3n-ct", "gemma4-ct-heads", "gemma4-ct-names-attn"])
def test_a_layer_that_reads_the_cache_of_another_reads_what_that_one_rounded(name, folder):
    write(name, folder / f"{name}-shared")
    layers = read(folder / f"{name}-shared").layers
    for own, shared in zip(layers[:2], layers[2:], strict=True):
        assert shared.cache_dtype == own.cache_dtype == "fp8"
        for side in "kv":
            donor, reader = getattr(own, side), getattr(shared, side)
            assert (reader.value, reader.tensor) == (donor.value, donor.tensor)
            assert reader.reason == f"{donor.reason}; reads the cache of `{own.engine_name}`"


def test_experts_without_any_group_are_explained(folder):
    write("mixtral-ct", folder / "experts")
    reading = read(folder / "experts")
    assert reading.error == "IndexError: list index out of range"
    assert "`config_groups`" in reading.notes[-1]


def test_every_variant_without_options_of_vllm_was_recorded():
    plain = {name for name, variant in VARIANTS.items()
             if variant.kv_cache_dtype == "auto" and not variant.skip_layers}  # fmt: skip
    assert set(GOLDEN["variants"]) == plain


def test_the_version_is_the_one_that_was_recorded():
    versions = GOLDEN["versions"]
    text = f"{versions['transformers']} with compressed-tensors {versions['compressed-tensors']}"
    assert get_engine("transformers").version == text
