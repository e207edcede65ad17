"""The cache's folders: whose they are, what killed writers left, entries with digests."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pickle
import subprocess
import sys
import time

import pytest

from fp8kit import cache, cli, slowness
from tests.support.source import ROOT


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """FP8KIT_CACHE_DIR, of this user alone."""
    monkeypatch.setenv("FP8KIT_CACHE_DIR", str(tmp_path / "cache"))
    slowness.forget()
    cache._SWEPT.clear()
    cache.make(tmp_path / "cache" / "kernels")
    return tmp_path / "cache"


def given_away(path, monkeypatch):
    """Another user's: really, where this one is root."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


# what somebody else may write -> (path in the cache's parent, mode, what is said)
OPEN = {
    "the folder": ("cache", 0o777, "everybody can write "),
    "the folder, sticky": ("cache", 0o1777, "everybody can write "),
    "its folder": ("cache/kernels", 0o757, "everybody can write "),
    "for a group": ("cache/kernels", 0o770, f"group {os.getgid()} can write "),
    "what it lies in": (".", 0o777, "everybody can rename what is in "),
}


@pytest.mark.parametrize("case", OPEN)
def test_a_folder_that_others_can_write_is_not_read(folder, caplog, monkeypatch, case):
    name, mode, said = OPEN[case]
    cache.write("kernels", "entry", b"planted")
    assert cache.read("kernels", "entry") == (folder / "kernels" / "entry", b"planted")
    (folder.parent / name).chmod(mode)
    monkeypatch.setattr(cache, "_alone", lambda user, group: False)
    assert cache.read("kernels", "entry") is None
    assert [said in record.message for record in caplog.records] == [True]
    assert "let nobody else write what the parentheses name (chmod go-w)" in caplog.text
    path = cache.write("kernels", "entry", b"own")
    assert folder not in path.parents
    assert cache.read("kernels", "entry") == (path, b"own")
    assert (folder / "kernels" / "entry").read_bytes() == b"planted"
    cache.check()  # as `fp8kit doctor`
    assert len(slowness.said()) == 1
    assert "is not used" in cli._cache()


def test_another_users_folder_and_file_are_not_read(folder, monkeypatch):
    for path in (folder / "kernels" / "entry", folder / "kernels"):
        cache.write("kernels", "entry", b"planted")
        with monkeypatch.context() as patch:
            given_away(path, patch)
            assert cache.read("kernels", "entry") is None
            assert "belongs to user" in str(cache.distrusted(path))
        os.chown(path, os.getuid(), -1)


def test_a_file_that_others_can_write_is_not_read(folder):
    path = cache.write("kernels", "entry", b"planted")
    path.chmod(0o666)
    assert cache.read("kernels", "entry") is None
    assert cache.why_not(folder) is None
    assert "everybody can write" in str(cache.why_not(folder, inside=True))
    cache.write("kernels", "entry", b"own")
    assert cache.read("kernels", "entry") == (path, b"own")


def test_folders_are_made_for_this_user_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        cache.write("products", "entry", b"x")
    finally:
        os.umask(before)
    assert cache.why_not(folder, inside=True) is None
    assert (folder / "products").stat().st_mode & 0o777 == 0o755


def test_a_group_of_ones_own_is_nobody_else(monkeypatch):
    user = cache.pwd.getpwuid(os.getuid())
    found = cache.grp.struct_group((user.pw_name, "x", user.pw_gid, []))
    monkeypatch.setattr(cache.grp, "getgrgid", lambda group: found)
    for members, alone in (([], True), ([user.pw_name], True), ([user.pw_name, "eve"], False)):
        cache._alone.cache_clear()
        found = cache.grp.struct_group((user.pw_name, "x", user.pw_gid, members))
        assert cache._alone(os.getuid(), user.pw_gid) is alone
    cache._alone.cache_clear()


def test_what_killed_writers_left_is_swept_and_a_live_ones_is_not(folder):
    kernels, old = folder / "kernels", time.time() - 7200
    for name in ("a.x.tmp", "numba.nbi.tmp.0123", "locked.tmp", "young.tmp", "entry.cubin"):
        (kernels / name).write_text("")
        if name != "young.tmp":
            os.utime(kernels / name, (old, old))
    with open(kernels / "locked.tmp") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache.write("kernels", "new", b"x")
    assert {path.name for path in kernels.iterdir()} == {"locked.tmp", "young.tmp", "entry.cubin", "new"}


def test_a_seal_is_json_and_nothing_else_is_parsed(monkeypatch):
    content = {"a": [1, {"b": None}], "text": "ü\n"}
    text = cache.seal(content)
    assert json.loads(text) == {"sha256": json.loads(text)["sha256"], **content}
    assert cache.unseal(text) == content
    monkeypatch.setattr(cache.json, "loads", lambda body: pytest.fail("parsed"))
    for damaged in (
        b"",
        b"{}",
        text[:-1],
        text[:-2] + b"\n",
        text + b" ",
        text.replace(b"1", b"2"),
        text[1:],
    ):
        assert cache.unseal(damaged) is None


# --- Numba's ------------------------------------------------------------------------------------------------

COMPILED = """
from fp8kit.backends.reference import threads

@threads.njit
def sum_of(x):
    total = 0
    for i in range(x):
        total += i * i
    return total

print(sum_of(10))
print(sum(sum_of.stats.cache_hits.values()))
"""


class Planted:
    def __reduce__(self):
        return open, (os.environ["PLANTED"], "w")


def run(folder, tmp_path, **more):
    """What the function gives, and how many signatures came from the cache."""
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"FP8KIT_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT), **more},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()], done.stderr


def entries(folder):
    return sorted(path for path in folder.rglob("compiled.sum_of*") if path.is_file())


@pytest.mark.programs
def test_numbas_damaged_entries_are_compiled_again(folder, tmp_path):
    found, said = run(folder, tmp_path)
    assert found == [285, 0]
    assert said.startswith("first use of the CPU engine")
    assert run(folder, tmp_path) == ([285, 1], "")
    index, code = sorted(entries(folder), key=lambda path: path.suffix, reverse=True)
    assert (index.suffix, code.suffix) == (".nbi", ".nbc")
    whole = {path: path.read_bytes() for path in (index, code)}
    for path, content in whole.items():
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damaged in (b"", content[:-5], bytes(flipped), pickle.dumps(Planted)):
            path.write_bytes(damaged)
            assert run(folder, tmp_path) == ([285, 0], "")
            assert run(folder, tmp_path) == ([285, 1], "")
        path.unlink()
        path.mkdir()
        assert run(folder, tmp_path) == ([285, 0], "")
        assert path.is_file()


@pytest.mark.programs
@pytest.mark.parametrize("opened", ["folder", "file"])
def test_numbas_planted_pickle_is_not_run(folder, tmp_path, monkeypatch, opened):
    """With a digest that fits; it is where it is that speaks against it."""
    run(folder, tmp_path)
    index = next(path for path in entries(folder) if path.suffix == ".nbi")
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    content = pickle.dumps(Planted())
    (tmp_path / "planted").unlink(missing_ok=True)
    index.write_bytes(hashlib.sha256(content).digest() + content)
    (index if opened == "file" else index.parent).chmod(0o777)
    found, said = run(folder, tmp_path)
    assert found == [285, 0]
    assert not (tmp_path / "planted").exists()
    assert "is not used (everybody can write " in said
    assert said.count("\n") == 1
