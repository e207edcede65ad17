"""Children that are forked beside a thread that has computed: the same bits, whether or not TBB could end its
threads before."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, threading
import numpy as np
import fp8kit as fk

x = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)

def computed():
    return fk.quantize(x, fk.E4M3).data.tobytes()

def thread():
    computed()
    ready.set()
    over.wait()

ready, over, want = threading.Event(), threading.Event(), computed()
other = threading.Thread(target=thread)
other.start()
ready.wait()
for _ in range(10):
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(0 if computed() == want else 3)
    assert os.waitpid(child, 0)[1] == 0
over.set()
other.join()
assert computed() == want
"""


@pytest.mark.programs
def test_a_child_forked_beside_a_thread_that_has_computed():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert {line for line in done.stdout.splitlines() if line} <= {
        "Unable to join threads to shut down before fork(). This can break multithreading in child processes."
    }
