"""The safetensors format: 8 bytes that say the header's size, the header in JSON, and the arrays' bytes
without gaps.

Written and read array by array, so that a file costs its own size in memory and no more. What a file says of
itself is believed only after it was checked against the file: sizes are compared before anything is
allocated. Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fp8kit import formats
from fp8kit.errors import CheckpointError

HostArray = np.ndarray[Any, Any]
_LONGEST_HEADER = 100_000_000  # bytes, the format's own limit
METADATA = "__metadata__"

# the format's dtype codes; float4 has none there
CODES = {
    "F64": formats.float64,
    "F32": formats.float32,
    "F16": formats.float16,
    "BF16": formats.bfloat16,
    "I64": formats.int64,
    "I32": formats.int32,
    "I16": formats.int16,
    "I8": formats.int8,
    "U64": formats.uint64,
    "U32": formats.uint32,
    "U16": formats.uint16,
    "U8": formats.uint8,
    "BOOL": formats.bool_,
    "F8_E4M3": formats.float8_e4m3fn,
    "F8_E5M2": formats.float8_e5m2,
    "F8_E8M0": formats.float8_e8m0fnu,
}


class _Entry(NamedTuple):
    """An array's place: first byte after the header, and the one after its last."""

    dtype: formats.DType
    shape: tuple[int, ...]
    start: int
    end: int


class _Bad(Exception):
    """What is wrong with a file."""


def write(file: BinaryIO, host: Mapping[str, HostArray], texts: Mapping[str, str]) -> None:
    """Write C-contiguous arrays and metadata. The header is padded to 8 bytes and wide elements come first,
    so that each is aligned. (The safetensors library's own ``save_file`` leaves files of unknown names behind
    when it is killed.)"""
    order = sorted(host, key=lambda name: (-host[name].dtype.itemsize, name))
    codes = {kind.numpy: code for code, kind in CODES.items()}
    header: dict[str, Any] = {METADATA: dict(texts)} if texts else {}
    end = 0
    for name in order:
        start, end = end, end + host[name].nbytes
        header[name] = {
            "dtype": codes[host[name].dtype],
            "shape": list(host[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(host[name].reshape(-1).view(np.uint8).data)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, HostArray], dict[str, str]]:
    """The arrays and the metadata of a file. CheckpointError that says what is wrong: it cannot be read, is
    truncated or foreign, or has a dtype that is not known here."""
    try:
        with open(path, "rb", buffering=0) as file:
            entries, metadata, first = _header(file)
            return {name: _array(file, name, entry, first) for name, entry in entries.items()}, metadata
    except OSError as error:
        raise CheckpointError(
            "load", "path", os.fspath(path), f"a readable file ({error.strerror})"
        ) from error
    except _Bad as bad:
        raise CheckpointError(
            f"load: path: {os.fspath(path)} is not a whole safetensors file: truncated or foreign ({bad})"
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f"{os.fspath(path)}: {error}") from None


def _header(file: Any) -> tuple[dict[str, _Entry], dict[str, str], int]:
    """The arrays' places in the order of the file, the metadata, and where the header ends."""
    whole = os.fstat(file.fileno()).st_size
    if whole < 8:
        raise _Bad(f"{whole} bytes are too few")
    size = int.from_bytes(_bytes(file, 8), "little")
    if size > min(_LONGEST_HEADER, whole - 8):
        raise _Bad(f"a header of {size} bytes in a file of {whole}")
    try:
        header = json.loads(_bytes(file, size).decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _Bad(f"no JSON in the header: {error}") from None
    if not isinstance(header, dict):
        raise _Bad("the header is no JSON object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _Bad("metadata that are no strings")
    entries = {name: _entry(name, said) for name, said in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    end = 0
    for name, entry in entries.items():
        if entry.start != end:
            raise _Bad(f"{name!r} starts at byte {entry.start} after the header, expected {end}")
        end = entry.end
    if 8 + size + end != whole:
        raise _Bad(f"the header and its arrays have {8 + size + end} bytes, the file {whole}")
    return entries, metadata, 8 + size


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name that comes twice")
    return found


def _entry(name: str, said: Any) -> _Entry:
    """What the header says of an array, checked."""
    if not isinstance(said, dict) or set(said) != {"dtype", "shape", "data_offsets"}:
        raise _Bad(f"{name!r} is not described by dtype, shape and data_offsets")
    code, shape, places = said["dtype"], said["shape"], said["data_offsets"]
    for numbers in (shape, places):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise _Bad(f"{name!r} has shape {shape!r} at bytes {places!r}")
    if not isinstance(code, str) or code not in CODES:
        raise CheckpointError("load", name, f"dtype {code}", f"one of {', '.join(CODES)}")
    dtype = CODES[code]
    if len(places) != 2 or places[1] - places[0] != math.prod(shape) * dtype.itemsize:
        raise _Bad(f"{name!r}, {dtype.name} {tuple(shape)}, lies at bytes {places}")
    return _Entry(dtype, tuple(shape), *places)


def _array(file: Any, name: str, entry: _Entry, first: int) -> HostArray:
    file.seek(first + entry.start)
    content = np.empty(entry.end - entry.start, np.uint8)
    _fill(file, content.data)
    try:
        return content.view(entry.dtype.numpy).reshape(entry.shape)
    except ValueError as error:  # more dimensions, or longer ones, than NumPy has
        raise _Bad(f"{name!r} has shape {entry.shape}: {error}") from None


def _bytes(file: Any, size: int) -> bytearray:
    content = bytearray(size)
    _fill(file, memoryview(content))
    return content


def _fill(file: Any, to: memoryview) -> None:
    """Read on until it is full: the file may have been cut since its size was asked."""
    while to:
        count = file.readinto(to)
        if not count:
            raise _Bad(f"it ends {len(to)} bytes early")
        to = to[count:]
