import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save_file

from kvq.errors import CheckpointError
from kvq.tensorfile import read_header, read_tensor, write_float32


def file_of(path, header: bytes, data: bytes = b"", length: int | None = None):
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "length", "code"),
    [
        (b"", b"", 0, "tensorfile.truncated"),
        (b"{}", b"", 2**63, "tensorfile.truncated"),
        (b"{}", b"", 3, "tensorfile.truncated"),
        (b"[]", b"", None, "json.not_object"),
        (b"{nonsense", b"", None, "json.invalid"),
        (b'{"a": 1, "a": 2}', b"", None, "json.duplicate_key"),
        (b'{"a": NaN}', b"", None, "json.nonfinite"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", None, "json.invalid"),
        (b'{"__metadata__": {"a": 1}}', b"", None, "tensorfile.metadata"),
        (b'{"a": {"dtype": "F32"}}', b"", None, "tensorfile.entry"),
        (json.dumps({"a": entry("F99")}).encode(), b"0000", None, "tensorfile.entry"),
        (json.dumps({"a": entry(shape=(-1,))}).encode(), b"0000", None, "tensorfile.entry"),
        (json.dumps({"a": entry(shape=(True,))}).encode(), b"0000", None, "tensorfile.entry"),
        (json.dumps({"a": entry(shape=(2,))}).encode(), b"0000", None, "tensorfile.size"),
        (json.dumps({"a": entry(), "b": entry()}).encode(), b"0000", None, "tensorfile.offsets"),
        (json.dumps({"a": entry(offsets=(4, 8))}).encode(), b"0" * 8, None, "tensorfile.offsets"),
        (json.dumps({"a": entry()}).encode(), b"00", None, "tensorfile.truncated"),
        (json.dumps({"a": entry()}).encode(), b"000000", None, "tensorfile.truncated"),
    ],
)
def test_a_hostile_header_is_one_clear_error(tmp_path, header, data, length, code):
    with pytest.raises(CheckpointError) as caught:
        read_header(file_of(tmp_path / "x.safetensors", header, data, length))
    assert caught.value.code == code


NAMES = st.text(min_size=1).filter(lambda name: name != "__metadata__")
VALUES = st.lists(st.floats(width=32, allow_nan=False), max_size=4)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_what_is_written_the_safetensors_library_reads(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    tensors = {name: np.array(numbers, np.float32) for name, numbers in values.items()}
    write_float32(path, tensors, {"format": "pt"})
    found = load(path.read_bytes())
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)
        np.testing.assert_array_equal(read_tensor(read_header(path).tensors[name]), tensor)


def test_same_tensors_in_any_order_give_the_same_bytes(tmp_path):
    a, b = np.ones(2, np.float32), np.zeros(1, np.float32)
    write_float32(tmp_path / "1", {"a": a, "b": b}, {"x": "1", "y": "2", "z": "3"})
    write_float32(tmp_path / "2", {"b": b, "a": a}, {"z": "3", "y": "2", "x": "1"})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32", "uint8"])
def test_small_tensors_are_decoded_as_numpy_has_them(tmp_path, dtype):
    values = np.arange(6, dtype=dtype).reshape(2, 3)
    save_file({"x": values}, tmp_path / "x.safetensors")
    found = read_tensor(read_header(tmp_path / "x.safetensors").tensors["x"])
    np.testing.assert_array_equal(found, values)
    assert found.dtype == values.dtype


@pytest.mark.parametrize(
    ("spelled", "dtype", "bits"),
    [("BF16", ml_dtypes.bfloat16, 0x3C34), ("F8_E4M3", ml_dtypes.float8_e4m3fn, 0x5B)],
)
def test_reduced_floats_arrive_as_exact_float32(tmp_path, spelled, dtype, bits):
    data = np.array([bits], np.uint16 if spelled == "BF16" else np.uint8).tobytes()
    header = json.dumps({"x": entry(spelled, (1,), (0, len(data)))}).encode()
    found = read_tensor(read_header(file_of(tmp_path / "x", header, data)).tensors["x"])
    assert found.dtype == np.float32
    assert found[0] == np.float32(np.frombuffer(data, dtype)[0])
