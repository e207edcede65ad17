"""What ``fk.save`` does to the disk: one file, whole, with the old one's mode, and nothing beside it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import serialization
from fp8kit.errors import CheckpointError

STATE = {"a": np.arange(3.0)}


def beside(path, token="0123abcd"):
    return path.with_name(f"{serialization._prefix(path)}{token}{serialization._BESIDE}")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o400])
def test_a_file_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "x"
    old = os.umask(0o022)
    try:
        fk.save(path, STATE)
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        path.chmod(mode)
        fk.save(path, {"a": np.ones(2)})
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert serialization.read(path)[0]["a"].tolist() == [1, 1]


def test_a_file_is_never_more_open_than_the_old_one(tmp_path, monkeypatch):
    path, modes = tmp_path / "x", []
    fk.save(path, STATE)
    path.chmod(0o600)
    write = serialization.checkpoint_format.write

    def watched(file, *given):
        modes.append(stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        write(file, *given)

    monkeypatch.setattr(serialization.checkpoint_format, "write", watched)
    fk.save(path, STATE)
    assert modes == [0o600]


@pytest.mark.parametrize("name", ["x", "x" * 255, "ü" * 127, "[x]*"])
def test_leftovers_are_swept_by_the_next_save_of_the_same_path(tmp_path, name):
    path = tmp_path / name
    others = [tmp_path / ".other", beside(path, "0123"), beside(tmp_path / "y"), beside(tmp_path / "y.x")]
    for left in (*others, beside(path)):
        left.touch(0o400)
    fk.save(path, STATE)
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])
    assert serialization.read(path)[0]["a"].tolist() == [0, 1, 2]


def test_what_another_process_is_writing_stays(tmp_path):
    path = tmp_path / "x"
    with open(beside(path), "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        fk.save(path, STATE)
        serialization.sweep(path)
        assert beside(path).exists()
    serialization.sweep(path)
    assert os.listdir(tmp_path) == ["x"]


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """Another process's sweep comes between a save's open and its lock."""
    path, lock, swept = tmp_path / "x", fcntl.flock, []

    def late(file, how):
        if how == fcntl.LOCK_EX and not swept:
            swept.extend(tmp_path.iterdir())
            serialization.sweep(path)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    fk.save(path, STATE)
    assert len(swept) == 1
    assert os.listdir(tmp_path) == ["x"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    path = tmp_path / "x"
    monkeypatch.setattr(fcntl, "flock", none)
    beside(path).touch()
    fk.save(path, STATE)
    assert sorted(tmp_path.iterdir()) == sorted([path, beside(path)])


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_an_error_names_the_file_that_was_asked_for(tmp_path, monkeypatch, call):
    path = tmp_path / "x"
    fk.save(path, STATE)
    before = path.read_bytes()

    def fails(*given, **more):
        raise OSError(errno.ENOSPC, "No space left on device", str(given[0]))

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="No space left on device") as caught:
        fk.save(path, {"a": np.ones(2)})
    monkeypatch.undo()
    assert caught.value.filename == str(path)
    assert caught.value.errno == errno.ENOSPC
    assert serialization._BESIDE not in str(caught.value)
    assert caught.value.__suppress_context__
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]


def test_a_link_to_itself_is_refused(tmp_path):
    loop, pair = tmp_path / "loop", [tmp_path / "one", tmp_path / "two"]
    loop.symlink_to(loop)
    pair[0].symlink_to(pair[1])
    pair[1].symlink_to(pair[0])
    for path in (loop, *pair):
        with pytest.raises(CheckpointError, match=r"save: path: got .*, expected a file, old or new"):
            fk.save(path, STATE)
        assert path.is_symlink()


def test_a_link_to_nothing_yet_is_followed(tmp_path):
    (tmp_path / "latest").symlink_to("real")
    fk.save(tmp_path / "latest", STATE)
    assert (tmp_path / "latest").is_symlink()
    assert not (tmp_path / "real").is_symlink()
    assert serialization.read(tmp_path / "real")[0]["a"].tolist() == [0, 1, 2]


def test_savers_of_one_path_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "x"

    def saver(first):
        for number in range(first, first + 40):
            fk.save(path, {"a": np.full(1000, number)})

    with ThreadPoolExecutor(4) as pool:
        for work in [pool.submit(saver, first) for first in range(0, 400, 100)]:
            work.result()
    assert len(set(serialization.read(path)[0]["a"])) == 1
    assert os.listdir(tmp_path) == ["x"]
