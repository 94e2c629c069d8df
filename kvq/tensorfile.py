"""Safetensors files without torch: headers, small tensors, canonical writing.

Format: eight bytes of little-endian header length, that many bytes of JSON, raw tensor data.
https://github.com/huggingface/safetensors#format
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from kvq.errors import CheckpointError
from kvq.files import parse_json, regular_size, shorten

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_SMALL_TENSOR_BYTES = 64 << 20
MAX_DIMENSIONS = 32  # of numpy 1
_MAX_COUNT = 1 << 58  # elements, so that bits are counted in 64 bits

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "I64": "int64", "U64": "uint64",
    "F64": "float64",
}  # fmt: skip
_ML_DTYPES = {
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


class TensorInfo(NamedTuple):
    """Where one tensor lies: dtype as safetensors spells it, absolute byte range in `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorFile:
    """The parsed header of one safetensors file."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def read_header(path: Path) -> TensorFile:
    """Read and validate a safetensors header; memory is bounded by the header's own limit.

    Raises:
        CheckpointError: the file is unreadable, truncated, or its header contradicts itself.
    """
    try:
        size = regular_size(path)
        with path.open("rb") as file:
            header = parse_json(_header_bytes(file, size, path), where=f"header of `{path.name}`")
            return _parse(header, path, data_start=file.tell(), size=size)
    except OSError as error:
        raise CheckpointError(
            f"cannot read `{path}`: {error.strerror}", code="file.unreadable"
        ) from error


def _header_bytes(file: BinaryIO, size: int, path: Path) -> bytes:
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
    if length < 2 or length > MAX_HEADER_BYTES or length + 8 > size:
        found = f"header length {length}" if length >= 0 else f"{len(prefix)} bytes"
        raise CheckpointError(
            f"`{path.name}` is not a whole safetensors file: {found}, file size {size}",
            code="tensorfile.truncated",
            hint="fetch or write the file again",
        )
    return file.read(length)


def _parse(header: dict[str, Any], path: Path, *, data_start: int, size: int) -> TensorFile:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            f"`__metadata__` of `{path.name}` is not a map of strings", code="tensorfile.metadata"
        )
    tensors = {name: _info(name, entry, path, data_start) for name, entry in header.items()}
    position = data_start
    for info in sorted(tensors.values(), key=_RANGE):
        if info.start != position:
            raise CheckpointError(
                f"`{info.name}` in `{path.name}` starts at byte {info.start - data_start}, "
                f"expected {position - data_start}: tensors overlap or leave a hole",
                code="tensorfile.offsets",
            )
        position = info.end
    if position != size:
        raise CheckpointError(
            f"`{path.name}` has {size} bytes, its header describes {position}",
            code="tensorfile.truncated",
            hint="fetch or write the file again",
        )
    return TensorFile(path, tensors, metadata)


_RANGE = itemgetter(TensorInfo._fields.index("start"), TensorInfo._fields.index("end"))


def _info(name: str, entry: Any, path: Path, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if len(shape) > MAX_DIMENSIONS:
            raise TypeError(f"expected at most {MAX_DIMENSIONS} dimensions, found {len(shape)}")
        for value in (*shape, start, end):
            if type(value) is not int or not 0 <= value < 1 << 63:
                raise TypeError(f"expected a count, found {shorten(value)}")
        count = math.prod(shape)
        if count > _MAX_COUNT or (not count and math.prod(filter(None, shape)) > _MAX_COUNT):
            raise TypeError(f"shape {shorten(shape)} is too large")
        bits = BITS[dtype] * count
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"entry {shorten(name)} of `{path.name}` is not a safetensors entry: {shorten(error)}",
            code="tensorfile.entry",
        ) from error
    if bits % 8 or bits // 8 != end - start:
        raise CheckpointError(
            f"`{name}` in `{path.name}` has {end - start} bytes, "
            f"expected {bits / 8:g} for {dtype} {tuple(shape)}",
            code="tensorfile.size",
        )
    return TensorInfo(name, dtype, tuple(shape), path, data_start + start, data_start + end)


def read_bytes(info: TensorInfo, offset: int = 0, length: int | None = None) -> bytes:
    """Read raw bytes of one tensor, `offset` and `length` counted inside it."""
    size = info.end - info.start
    length = size - offset if length is None else min(length, size - offset)
    try:
        with info.path.open("rb") as file:
            file.seek(info.start + offset)
            data = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"cannot read `{info.path}`: {error.strerror}", code="file.unreadable"
        ) from error
    if len(data) != max(0, length):
        raise ended_early(info.path.name)
    return data


def ended_early(name: str) -> CheckpointError:
    """Return the error of a file that is shorter than its header said."""
    return CheckpointError(
        f"`{name}` ended early", code="tensorfile.truncated",
        hint="copy or download the file again",
    )  # fmt: skip


def read_tensor(info: TensorInfo) -> np.ndarray:
    """Return a small tensor as numpy; reduced-precision floats arrive as exact float32.

    Raises:
        CheckpointError: larger than 64 MiB, or a dtype whose values have no numpy form.
    """
    if info.end - info.start > MAX_SMALL_TENSOR_BYTES:
        raise CheckpointError(
            f"`{info.name}` has {info.end - info.start} bytes, too large for a scale",
            code="tensorfile.large_tensor",
        )
    data = read_bytes(info)
    if info.dtype in _NUMPY:
        return np.frombuffer(data, np.dtype(_NUMPY[info.dtype]).newbyteorder("<")).reshape(
            info.shape
        )
    if info.dtype in _ML_DTYPES:
        import ml_dtypes

        values = np.frombuffer(data, getattr(ml_dtypes, _ML_DTYPES[info.dtype]))
        return values.astype(np.float32).reshape(info.shape)
    raise CheckpointError(
        f"`{info.name}` has dtype {info.dtype}, which holds no scale", code="tensorfile.dtype"
    )


def header_bytes(entries: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str]) -> bytes:
    """Serialize a header with sorted keys, padded so that the data starts 8-byte aligned."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    header.update(sorted(entries.items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_float32(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write float32 tensors in name order; same input, same bytes.

    The safetensors library writes several metadata keys in random order, hence our own writer.
    """
    entries, chunks, position = {}, [], 0
    for name in sorted(tensors):
        data = np.ascontiguousarray(tensors[name], dtype="<f4").tobytes()
        offsets = [position, position + len(data)]
        shape = list(tensors[name].shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        chunks.append(data)
        position += len(data)
    path.write_bytes(header_bytes(entries, metadata) + b"".join(chunks))


def copy_without(source: TensorFile, target: Path, drop: Iterable[str]) -> None:
    """Write `source` without some tensors, streaming every other byte for byte."""
    dropped = set(drop)
    kept = sorted(
        (info for info in source.tensors.values() if info.name not in dropped),
        key=lambda info: info.start,
    )
    entries, position = {}, 0
    for info in kept:
        offsets = [position, position + info.end - info.start]
        entries[info.name] = {
            "dtype": info.dtype, "shape": list(info.shape), "data_offsets": offsets,
        }  # fmt: skip
        position = offsets[1]
    with source.path.open("rb") as reader, target.open("wb") as writer:
        metadata = {key: value for key, value in source.metadata.items() if key != "kvq"}
        writer.write(header_bytes(entries, metadata))
        for info in kept:
            reader.seek(info.start)
            _copy(reader, writer, info.end - info.start)


def _copy(reader: BinaryIO, writer: BinaryIO, length: int) -> None:
    while length:
        chunk = reader.read(min(length, 16 << 20))
        if not chunk:
            raise ended_early(str(reader.name))
        writer.write(chunk)
        length -= len(chunk)
