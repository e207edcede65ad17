"""The safetensors format: 8 bytes that hold the header's size, the header in JSON, and the arrays' bytes
without gaps.

Arrays are written and read one by one, so that a file costs its own size in memory and no more. What a header
says is checked against the file before anything is allocated for it. Format:
https://huggingface.co/docs/safetensors; benchmarks/NOTES.md says why its package is used in tests only.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from fp8kit import formats
from fp8kit.arguments import shown
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

# A member of the header's JSON object: a name, and the metadata's strings or an array's description. Of 64
# dimensions, NumPy's most, that has 1,500 characters; one of more than 4,000 is not parsed.
_MEMBER = re.compile(
    r"[{,]_(STRING)_:_(\{(?:_STRING_:_STRING_,?+)*+\}|\{[^{}]{0,4000}\})_".replace(
        "STRING", r'"(?:[^"\\]++|\\.)*+"'
    ).replace("_", r"[ \t\n\r]*+")
)
_parse = json.JSONDecoder(object_pairs_hook=list).decode  # an object as pairs: a name may come twice


def write(file: BinaryIO, host: Mapping[str, HostArray], metadata: Mapping[str, str]) -> None:
    """Write C-contiguous arrays and metadata. The header is padded to 8 bytes and wide elements come first,
    so that each array is aligned. Equal states make equal files."""
    order = sorted(host, key=lambda name: (-host[name].dtype.itemsize, name))
    codes = {kind.numpy: code for code, kind in CODES.items()}
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + host[name].nbytes
        header[name] = {
            "dtype": codes[host[name].dtype],
            "shape": host[name].shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(host[name].reshape(-1).view(np.uint8).data)


def read(path: str) -> tuple[dict[str, HostArray], dict[str, str]]:
    """Returns the arrays and the metadata of a file. CheckpointError that says what is wrong: it cannot be
    read, is truncated or foreign, or has a dtype that is not known here."""
    try:
        _want_file(os.stat(path))  # opening a device may do something
        # opening a pipe, put there meanwhile, would wait for its writer
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            _want_file(os.fstat(file.fileno()))
            return read_from(file)
    except OSError as error:
        raise CheckpointError("load", "path", path, f"a readable file ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"load: path: {path} is not a whole safetensors file: truncated or foreign ({error})"
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _want_file(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


def read_from(file: BinaryIO) -> tuple[dict[str, HostArray], dict[str, str]]:
    """As ``read``, of an open file; ValueError says what is wrong with it."""
    whole = file.seek(0, os.SEEK_END)
    file.seek(0)
    if whole < 8:
        raise ValueError(f"{whole} bytes are too few")
    size = int.from_bytes(file.read(8), "little")
    if size > min(_LONGEST_HEADER, whole - 8):
        raise ValueError(f"a header of {size} bytes in a file of {whole}")
    header = _header(file.read(size).decode())
    metadata = header.pop(METADATA, {})
    order, end = sorted(header, key=lambda name: header[name][2]), 0
    for name in order:
        start, after = header[name][2]
        if start != end:
            raise ValueError(f"{shown(name)} starts at byte {start} after the header, expected {end}")
        end = after
    if 8 + size + end != whole:
        raise ValueError(f"the header and its arrays have {8 + size + end} bytes, the file {whole}")
    return {name: _array(file, name, *header[name][:2]) for name in order}, metadata


def _header(text: str) -> dict[str, Any]:
    """Returns the metadata, and dtype, shape and place of each array. Every member is checked before the next
    is parsed, so that absurd ones cost neither time nor memory."""
    header: dict[str, Any] = {}
    at = 0
    while (member := _MEMBER.match(text, at)) and text.startswith("," if at else "{", at):
        name, pairs = _parse(member[1]), _parse(member[2])
        value = dict(pairs)
        if name in header or len(value) < len(pairs):
            raise ValueError(f"a name that comes twice: {shown(name)}, or one in it")
        if name == METADATA and not all(isinstance(entry, str) for entry in value.values()):
            raise ValueError("metadata that are no strings")
        header[name] = value if name == METADATA else _entry(name, value)
        at = member.end()
    if text[at:].rstrip() != ("}" if at else "{}"):
        raise ValueError(f"the header is no JSON object of arrays from {shown(text[at : at + 60])} on")
    return header


def _entry(name: str, value: dict[str, Any]) -> tuple[formats.DType, tuple[int, ...], tuple[int, int]]:
    """Returns what the header says of an array, checked: dtype, shape, first byte after the header and the
    one after its last."""
    if value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown(name)} is not described by dtype, shape and data_offsets")
    shape, place = value["shape"], value["data_offsets"]
    for numbers in (shape, place):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise ValueError(f"{shown(name)} has shape {shown(shape)} at bytes {shown(place)}")
    dtype = CODES.get(str(value["dtype"]))
    if dtype is None:
        raise CheckpointError("load", name, f"dtype {value['dtype']}", f"one of {', '.join(CODES)}")
    if len(place) != 2 or place[1] - place[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{shown(name)}, {dtype.name} {shown(tuple(shape))}, lies at bytes {shown(place)}")
    return dtype, tuple(shape), (place[0], place[1])


def _array(file: Any, name: str, dtype: formats.DType, shape: tuple[int, ...]) -> HostArray:
    """Returns the next array of a file."""
    try:
        array = np.empty(shape, dtype.numpy)
    except ValueError as error:  # more dimensions, or longer ones, than NumPy has
        raise ValueError(f"{shown(name)} has shape {shown(shape)}: {error}") from None
    missing = array.nbytes - file.readinto(array.reshape(-1).view(np.uint8).data)
    if missing:  # the file was cut since its size was asked
        raise ValueError(f"{shown(name)} ends {missing} bytes early")
    return array
