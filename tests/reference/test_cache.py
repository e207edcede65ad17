"""The same bits from code that was just compiled and from code that Numba took from its cache, whatever the
hash seed of the process; and nothing is kept where the cache cannot be written."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys

import pytest

from fp8kit.backends.reference import kept
from tests.support.source import ROOT

PROGRAM = """
import hashlib
import numpy as np
from fp8kit import arrays
from fp8kit.backends.reference import norm
rng, digest = np.random.default_rng(0), hashlib.sha256()
view = arrays.as_view
for columns in (5, 64, 130, 769):
    x, dy = (rng.standard_normal((70, columns)).astype(np.float32) for _ in range(2))
    w, b = (rng.standard_normal(columns).astype(np.float32) for _ in range(2))
    y, mean, rstd = np.empty_like(x), np.empty(70, np.float32), np.empty(70, np.float32)
    dx, dw, db = np.empty_like(x), np.empty_like(w), np.empty_like(w)
    norm.norm_fwd(*map(view, (x, w, b, y, mean, rstd)), None, None, "LayerNorm", 1e-5, False, 0)
    given, made = map(view, (dy, x, w, mean, rstd)), map(view, (dx, dw, db))
    norm.norm_bwd(*given, None, *made, "LayerNorm", False, None, 0)
    for array in (y, mean, rstd, dx, dw, db):
        digest.update(array.tobytes())
print(digest.hexdigest())
"""


def ran(program, environment, folder=ROOT):
    """The end of a program that another process runs in a folder, without a fault."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.programs
def test_norms_have_the_same_bits_from_a_cold_and_a_warm_cache(tmp_path):
    said = []
    for seed in ("1", "2"):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": seed}
        said.append(ran(PROGRAM, environment).stdout)
    assert said[0] == said[1]


QUANTISE = """
import numpy as np
import fp8kit as fk
q = fk.quantize(np.array([[1.0, -2.0], [448.0, 0.0]], np.float32), fk.E4M3)
assert q.data.tolist() == [[0x38, 0xC0], [0x7E, 0x00]]
"""


@pytest.mark.programs
@pytest.mark.parametrize("variable", ["FP8KIT_CACHE_DIR", "NUMBA_CACHE_DIR"])
def test_a_cache_that_cannot_be_written_is_told_of_and_nothing_is_kept(variable, tmp_path):
    """A file stands where the folder would be; the engine's sources are a copy, so that a stray file would be
    seen."""
    (tmp_path / "file").write_text("")
    shutil.copytree(ROOT / "fp8kit", tmp_path / "fp8kit", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NUMBA_CACHE_DIR", "FP8KIT_CACHE_DIR")
    }
    environment |= {
        variable: str(tmp_path / "file" / "cache"),
        "PYTHONPATH": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = ran(QUANTISE, environment, tmp_path)
    assert re.fullmatch(
        r"the cache folder \S*file/cache\S* cannot be written \(Not a directory\): what is compiled "
        r"lasts for this process alone; set FP8KIT_CACHE_DIR to a folder that can be written\n",
        done.stderr,
    )
    assert not list(tmp_path.rglob("*.nbi")) + list(tmp_path.rglob("__pycache__"))


def test_compiling_is_said_once_where_nothing_is_kept_yet(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kept, "_SAID", [])
    monkeypatch.setattr(kept.log, "filters", [])  # of all tests
    with caplog.at_level(logging.INFO, "fp8kit"):
        kept._say_that_it_compiles(tmp_path)
        kept._say_that_it_compiles(tmp_path)
        assert [(one.levelname, str(tmp_path) in one.getMessage()) for one in caplog.records] == [
            ("WARNING", True)
        ]
        monkeypatch.setattr(kept, "_SAID", [])
        (tmp_path / "some.nbi").write_text("")
        kept._say_that_it_compiles(tmp_path)
    assert len(caplog.records) == 1


@pytest.mark.programs
def test_a_program_says_that_it_compiles(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for times in (1, 0):
        done = ran(QUANTISE, environment)
        assert done.stderr.count("first use of the CPU engine: Numba compiles") == times
        assert done.stdout == ""
