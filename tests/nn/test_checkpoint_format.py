"""The safetensors format as fp8kit reads it: in memory for one copy, and never believing a file about its
sizes."""

from __future__ import annotations

import json
import re
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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


def test_files_of_the_format_s_own_library_are_read(tmp_path):
    given = {
        "a": np.arange(7, dtype=np.float16),
        "b/c": np.zeros((0, 3), np.int64),
        "d": np.array(2.5, np.float64),
        "e": np.array([[True, False]]),
    }
    save_file(given, tmp_path / "theirs", {"step": "3"})
    state, metadata = serialization.read(tmp_path / "theirs")
    assert metadata == {"step": "3"}
    assert sorted(state) == sorted(given)
    fk.save(tmp_path / "ours", given)
    for name, values in given.items():
        assert_same_bits(name, state[name], values)
        assert_same_bits(name, load_file(tmp_path / "ours")[name], values)
    state["a"][0] = 9  # an array of one's own: the file stays as it is
    assert serialization.read(tmp_path / "theirs")[0]["a"][0] == 0


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
    "no words": ({"a": [1]}, 8, "'a' is not described by"),
    "another dtype": ({"a": entry("F6_E9")}, 8, "a: got dtype F6_E9, expected one of F64"),
    "no dtype": ({"a": entry(None)}, 8, "a: got dtype None"),
    "metadata": ({"__metadata__": {"a": 1}}, 0, "metadata that are no strings"),
    "a list": ("[1, 2]", 0, "the header is no JSON object"),
    "no JSON": ("{", 0, "no JSON in the header"),
    "twice": ('{"a": {}, "a": {}}', 0, "a name that comes twice"),
    "deep": ("[" * 100_000, 0, "no JSON in the header"),
    "a long number": ('{"a": ' + "9" * 10_000 + "}", 0, "no JSON in the header"),
    "no text": (b"\xff\xfe{}", 0, "no JSON in the header"),
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
    fk.save(path, {"a": np.arange(1000, dtype=np.float32)})
    header = checkpoint_format._header

    def cut(file):
        found = header(file)
        with open(path, "r+b") as other:
            other.truncate(2000)
        return found

    monkeypatch.setattr(checkpoint_format, "_header", cut)
    with pytest.raises(CheckpointError, match=r"truncated or foreign \(it ends \d+ bytes early\)"):
        serialization.read(path)
