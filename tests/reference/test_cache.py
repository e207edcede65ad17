"""The same bits from code that was just compiled and from code that Numba took from its cache, whatever the hash seed of the process."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.house.source import ROOT

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
    norm.norm_bwd(*map(view, (dy, x, w, mean, rstd)), None, *map(view, (dx, dw, db)), "LayerNorm", False, None, 0)
    for array in (y, mean, rstd, dx, dw, db):
        digest.update(array.tobytes())
print(digest.hexdigest())
"""


def test_norms_have_the_same_bits_from_a_cold_and_a_warm_cache(tmp_path):
    said = []
    for seed in ("1", "2"):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]
