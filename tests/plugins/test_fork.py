"""A forked child has its parent's implementations and policy, and computes on the CPU; no lock stays held in
it."""

from __future__ import annotations

import pytest

from tests.support.plugin import Run

CODE = """
import os, sys, threading
import numpy as np
import fp8kit as fk
from fp8kit.backends import registry as tables
from fp8kit.plugins import *

def add(a, b, out, stream):
    out.numpy()[...] = 7

x = fk.tensor(np.ones((64, 64), np.float32), device="cpu")
layer = fk.nn.LayerNormMLP(64, 128, device="cpu")
want = layer(x).numpy()  # Numba's threads are running now
registry.register_impl(OpImpl("add", "acme.add", Kind.DEFAULT, add))
version = registry.version

def hold():  # another thread in the middle of a change
    while not done:
        with tables.LOCK:
            registry.restore(registry.snapshot())

done = []
thread = threading.Thread(target=hold)
thread.start()
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
for inside in (None, with_strict_mode()):
    if inside is not None:
        inside.__enter__()
    child = os.fork()
    if not child:
        try:
            policy = get_policy()
            assert policy.strict == (inside is not None)
            assert (x + x).numpy()[0, 0] == 7
            assert np.array_equal(layer(x).numpy(), want)
            assert get_discovered_plugin() == ()
            with with_denied_vendors("acme"), fk.use_backend("acme"):
                assert get_default_manager().get_selected_impl_id("add") == "acme.add"
            registry.register_impl(OpImpl("add", "child.add", Kind.DEFAULT, add, priority=999))
            assert get_default_manager().get_selected_impl_id("add") == "child.add"
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
done.append(True)
thread.join()
assert get_default_manager().get_selected_impl_id("add") == "acme.add"
print("survived")
"""


@pytest.mark.combinations
def test_a_child_goes_on(python: Run) -> None:
    assert python("-c", CODE, NUMBA_NUM_THREADS="2").stdout == "survived\n"
