"""A reference is taken as it is, and a scale may be it or what the dialect stores of it."""

import json

import numpy as np
import pytest

from tests.engines.quantization import CT, FLAT
from tests.engines.tensors import NAMES, scales
from tests.exports import up_to_bf16

EXACT = scales(*NAMES["modelopt"])  # float32 numbers that bfloat16 does not have


def scales_file(folder, tensors):
    path = folder / "reference.json"
    numbers = {name: float(array[0]) for name, array in tensors.items()}
    path.write_text(json.dumps({"schema": 1, "scales": numbers}))
    return path


def test_modelopts_own_scales_are_those_of_themselves(verify, variant, tmp_path):
    """ModelOpt stores float32, whatever the model's dtype."""
    folder = variant(EXACT, FLAT, "fp8-static")
    for reference in (folder, scales_file(tmp_path, EXACT)):
        assert verify(folder, None, "--against", reference).codes <= {"scale.rounded"}


def test_a_scale_rounded_up_to_the_models_dtype_is_that_of_the_reference(verify, variant, tmp_path):
    stored = {name: np.array([up_to_bf16(float(a[0]))], np.float32) for name, a in EXACT.items()}
    assert all(stored[name] > EXACT[name] for name in EXACT)
    folder = variant(stored, FLAT, "fp8-static")
    assert verify(folder, None, "--against", scales_file(tmp_path, EXACT)).codes == set()


@pytest.mark.parametrize("step", [-1, 1])
def test_another_neighbour_in_the_models_dtype_differs(verify, variant, tmp_path, step):
    near = {}
    for name, array in EXACT.items():
        bits = np.array([up_to_bf16(float(array[0]))], np.float32).view(np.uint32)
        near[name] = (bits.astype(np.int64) + step * 2**16).astype(np.uint32).view(np.float32)
    found = verify(variant(near, FLAT, "fp8-static"), None, "--against",
                   scales_file(tmp_path, EXACT))  # fmt: skip
    assert found.errors == {"reference.differs"}
    assert len(found.findings) == len(EXACT)


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_two_names_with_two_values_are_a_conflict_with_both(verify, variant, engine):
    k, v = NAMES["modelopt"]
    other = scales(k, v, scale=1.5)
    found = verify(variant(scales() | other, CT), engine)
    conflicts = [finding for finding in found.findings if finding["code"] == "scale.conflict"]
    assert {finding["tensor"] for finding in conflicts} == set(other)
    assert "scale.stray" not in found.codes
    for finding in conflicts:
        assert finding["found"] == str(other[finding["tensor"]].tolist())
