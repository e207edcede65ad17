"""The safetensors format as fp8kit reads it: in memory for one copy, and never believing a file about its
sizes."""

from __future__ import annotations

import json
import os
import re
import socket
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

import fp8kit as fk
from fp8kit import checkpoint_format, serialization
from fp8kit.errors import CheckpointError
from fp8kit.testing.compare import assert_same_bits

MIB = 1 << 20


def test_a_file_costs_its_own_size_in_memory(tmp_path):
    """The bytes that are allocated while it is read and written."""
    path = tmp_path / "x"
    given = {
        name: np.random.default_rng(seed).standard_normal(MIB // 4).astype(np.float32)
        for seed, name in enumerate("abcdefgh")
    }
    peaks = []
    tracemalloc.start()
    try:
        for work in (lambda: fk.save(path, given), lambda: serialization.read(path)):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            kept = work()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert peaks[0] < MIB // 4
    assert 8 * MIB <= peaks[1] < 8.25 * MIB
    for name, values in given.items():
        assert_same_bits(name, kept[0][name], values)


def test_files_of_the_safetensors_package_are_read_and_ours_by_it(tmp_path):
    given = {
        dtype.name: np.arange(6).reshape(2, 3).astype(dtype.numpy)
        for dtype in checkpoint_format.CODES.values()
    }
    given |= {"b/ü": np.zeros((0, 3), np.int64), "d": np.array(2.5), "\n": np.array([[True, False]])}
    metadata = {"step": "3", "{": '"}'}
    save_file(given, tmp_path / "theirs", metadata)
    fk.save(tmp_path / "ours", given, metadata)
    for path in tmp_path.iterdir():
        state, said = serialization.read(path)
        assert said == metadata
        assert sorted(state) == sorted(given)
        for name, values in given.items():
            assert_same_bits(name, state[name], values)
    state["d"][()] = 9  # an array of one's own: the file stays as it is
    assert serialization.read(path)[0]["d"] == 2.5
    # array by array: the package makes no NumPy arrays of the FP8 formats
    found = dict(safetensors.deserialize((tmp_path / "ours").read_bytes()))
    assert sorted(found) == sorted(given)
    for name, values in given.items():
        assert checkpoint_format.CODES[found[name]["dtype"]].numpy == values.dtype
        assert tuple(found[name]["shape"]) == values.shape
        assert bytes(found[name]["data"]) == values.tobytes()
    with safetensors.safe_open(tmp_path / "ours", "np") as ours:
        assert ours.metadata() == metadata
        assert ours.offset_keys() == list(serialization.read(tmp_path / "ours")[0])


def test_headers_with_spaces_and_in_another_order_are_read(tmp_path):
    described = '\n { "data_offsets" : [ 0 , 8 ] ,\t"dtype":"F32" , "shape":[2 ] } '
    text = (
        f'{{ "a" : {described} , "__metadata__" : {{ "x" : "y" , "z" : "" }} , "\\u0062" : {described} }}  '
    )
    text = text.replace("0 , 8", "8 , 16", 1).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + np.arange(4, dtype="f4").tobytes())
    state, metadata = serialization.read(tmp_path / "x")
    assert metadata == {"x": "y", "z": ""}
    assert {name: array.tolist() for name, array in state.items()} == {"b": [0, 1], "a": [2, 3]}
    (tmp_path / "x").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert serialization.read(tmp_path / "x") == ({}, {})


def entry(dtype="F32", shape=(2,), places=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(places), **more}


# header (an object, or text), bytes after it, what the error says
HOSTILE = {
    "a hole": ({"a": entry(places=(4, 12))}, 12, "'a' starts at byte 4 after the header, expected 0"),
    "an overlap": (
        {"a": entry(), "b": entry(places=(4, 12))},
        12,
        "'b' starts at byte 4 after the header, expected 8",
    ),
    "the same bytes twice": (
        {"a": entry(), "b": entry()},
        8,
        "'b' starts at byte 0 after the header, expected 8",
    ),
    "too short": ({"a": entry()}, 7, "the header and its arrays have"),
    "too long": ({"a": entry()}, 9, "the header and its arrays have"),
    "another size": ({"a": entry(shape=(3,))}, 8, "'a', float32 (3,), lies at bytes [0, 8]"),
    "a terabyte": ({"a": entry(shape=(1 << 38,), places=(0, 1 << 40))}, 8, "the header and its arrays have"),
    "beyond 64 bits": (
        {"a": entry(shape=(1 << 64,), places=(0, 1 << 66))},
        8,
        "'a' has shape [18446744073709551616]",
    ),
    "negative": ({"a": entry(shape=(-2,), places=(0, -8))}, 8, "'a' has shape [-2] at bytes [0, -8]"),
    "backwards": ({"a": entry(shape=(0,), places=(8, 0))}, 8, "lies at bytes [8, 0]"),
    "fractions": ({"a": entry(shape=(2.0,))}, 8, "'a' has shape [2.0]"),
    "a flag": ({"a": entry(shape=(True, 2))}, 8, "'a' has shape [True, 2]"),
    "many dimensions": ({"a": entry(shape=(1,) * 200, places=(0, 4))}, 4, "'a' has shape (1, 1,"),
    "nothing, but long": (
        {"a": entry(shape=(0, 1 << 62, 4), places=(0, 0))},
        0,
        "'a' has shape (0, 4611686018427387904, 4)",
    ),
    "three places": ({"a": entry(places=(0, 8, 8))}, 8, "lies at bytes [0, 8, 8]"),
    "more words": ({"a": entry(extra=1)}, 8, "'a' is not described by dtype, shape and data_offsets"),
    "no words": ({"a": {}}, 8, "'a' is not described by"),
    "a list for an array": ({"a": [1]}, 8, "the header is no JSON object of arrays from '{\"a\": [1]}' on"),
    "another dtype": ({"a": entry("F6_E9")}, 8, "a: got dtype F6_E9, expected one of F64"),
    "no dtype": ({"a": entry(None)}, 8, "a: got dtype None"),
    "a list of dtypes": ({"a": entry(["F32"])}, 8, "a: got dtype ['F32']"),
    "metadata": ({"__metadata__": {"a": 1}}, 0, "metadata that are no strings"),
    "a list": ("[1, 2]", 0, "the header is no JSON object"),
    "no JSON": ("{", 0, "the header is no JSON object of arrays from '{' on"),
    "an end without a beginning": ("}", 0, "the header is no JSON object"),
    "nothing": ("", 0, "the header is no JSON object"),
    "no end": (f'{{"a": {json.dumps(entry())}', 8, "the header is no JSON object of arrays from '' on"),
    "more after the end": (f'{{"a": {json.dumps(entry())}}}}}', 8, "the header is no JSON object"),
    "a comma before the end": (f'{{"a": {json.dumps(entry())},}}', 8, "the header is no JSON object"),
    "a comma before the beginning": (f',"a": {json.dumps(entry())}}}', 8, "the header is no JSON object"),
    "no comma": (f'{{"a": {json.dumps(entry())} "b": {{}}}}', 8, "the header is no JSON object"),
    "a brace for a comma": (f'{{"a": {json.dumps(entry())} {{"b": {{}}}}', 8, "the header is no JSON object"),
    "a name in two lines": (f'{{"a\n": {json.dumps(entry())}}}', 8, "Invalid control character"),
    "twice": (
        f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry())}}}',
        8,
        "a name that comes twice: 'a'",
    ),
    "metadata twice": ('{"__metadata__": {}, "__metadata__": {"a": "b"}}', 0, "a name that comes twice"),
    "a text twice": ('{"__metadata__": {"a": "b", "a": "c"}}', 0, "a name that comes twice"),
    "two dtypes": (
        f'{{"a": {json.dumps(entry())[:-1]}, "dtype": "I32"}}}}',
        8,
        "a name that comes twice: 'a'",
    ),
    "deep": ("[" * 100_000, 0, "the header is no JSON object"),
    "deep inside": (f'{{"a": {{"shape": {"[" * 1900}{"]" * 1900}}}}}', 8, "truncated or foreign ("),
    "a long number": ('{"a": ' + "9" * 10_000 + "}", 0, "the header is no JSON object"),
    "a long size": (
        f'{{"a": {{"shape": [{"9" * 3000}], "dtype": "F32", "data_offsets": [0, 8]}}}}',
        8,
        "'a' has shape [999",
    ),
    "no text": (b"\xff\xfe{}", 0, "'utf-8' codec can't decode"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_name(tmp_path, name):
    header, rest, said = HOSTILE[name]
    text = (
        header
        if isinstance(header, bytes)
        else (header if isinstance(header, str) else json.dumps(header)).encode()
    )
    path, target = tmp_path / "bad", {"a": np.ones(2, np.float32)}
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(rest))
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        fk.load(path, target)
    assert str(path) in str(caught.value)
    assert_same_bits("a", target["a"], np.ones(2, np.float32))


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x"
    fk.save(path, {"a": np.arange(100_000, dtype=np.float32)})  # more than a file's buffer has read by then
    header = checkpoint_format._header

    def cut(file):
        found = header(file)
        with open(path, "r+b") as other:
            other.truncate(200_000)
        return found

    monkeypatch.setattr(checkpoint_format, "_header", cut)
    with pytest.raises(CheckpointError, match=r"truncated or foreign \('a' ends \d+ bytes early\)"):
        serialization.read(path)


LONG = b"9223372036854775807,"
# of 20 million characters each: what a header says of an array, and then
ABSURD = {
    "dimensions": (b'{"a":{"dtype":"F32","data_offsets":[0,8],"shape":[', LONG, b"1]}}"),
    "ones": (b'{"a":{"dtype":"F32","data_offsets":[0,8],"shape":[', b"1,", b"1]}}"),
    "nothing": (b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[', b"0,", b"0]}}"),
    "objects": (b'{"a":[', b"{},", b"{}]}"),
    "lists": (b'{"a":{"dtype":"F32","data_offsets":[0,8],"shape":[2],"x":[', b"[],", b"[]]}}"),
    "a name": (b'{"', b"n", b'":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}'),
    "a dtype": (b'{"a":{"shape":[2],"data_offsets":[0,8],"dtype":"', b"F", b'"}}'),
    "a text": (b'{"a":"', b"a", b'"}'),
}


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_header_is_refused_at_once(tmp_path, name):
    """Not parsed first: the memory is that of the header's bytes, as such and as text; the refusal is
    short."""
    start, more, end = ABSURD[name]
    text = start + more * (20 * MIB // len(more)) + end
    path = tmp_path / "bad"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            serialization.read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3.5 * len(text)
    assert len(str(caught.value)) < 5000


@pytest.mark.combinations
def test_a_refusal_is_short_whatever_names_there_are(tmp_path):
    path = tmp_path / "x"
    fk.save(path, {letter * MIB: np.ones(2) for letter in "abcdefghij"}, {"m" * MIB: "x"})
    for target in (fk.nn.Linear(2, 2, device="cpu"), {"a" * MIB: np.ones(3)}, {"z" * MIB: np.ones(2)}):
        with pytest.raises(CheckpointError, match="load: ") as caught:
            fk.load(path, target)
        assert str(path) in str(caught.value)
        assert len(str(caught.value)) < 5000
    with pytest.raises(CheckpointError, match="metadata") as caught:
        fk.save(path, {}, {"a": b"x" * MIB})
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket", "link"])
def test_what_is_no_file_is_not_read(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(str(path))
    else:
        path.symlink_to("x")  # to itself
    before = os.path.lexists(path)
    for use in (serialization.read, lambda path: fk.load(path, {}), lambda path: fk.save(path, {})):
        with pytest.raises(CheckpointError, match=r"path: got .*(x|zero)'?, expected a"):
            use(path)
    assert os.path.lexists(path) == before


def test_a_pipe_that_comes_between_is_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "x"
    os.mkfifo(path)
    monkeypatch.setattr(checkpoint_format.os, "stat", lambda path: os.lstat(__file__))
    with pytest.raises(CheckpointError, match="not a regular file"):
        serialization.read(path)


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "link to a file", "folder"])
def test_a_save_neither_waits_for_nor_removes_what_only_looks_like_a_leftover(tmp_path, kind):
    left, other = tmp_path / ".x.01234567.tmp", tmp_path / "other"
    if kind == "folder":
        left.mkdir()
    elif kind == "link to a file":
        other.write_text("mine")
        left.symlink_to("other")
    else:
        os.mkfifo(other if kind.startswith("link") else left)
        if kind.startswith("link"):
            left.symlink_to("other")
    fk.save(tmp_path / "x", {"a": np.ones(2)})
    assert os.path.lexists(left)
    assert serialization.read(tmp_path / "x")[0]["a"].tolist() == [1, 1]
