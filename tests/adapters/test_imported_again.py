"""All modules deleted, as notebooks do, and imported again: everything computes as before, and the process
ends well. glibc's malloc checks its heap, so that what still uses memory that went with a module is found."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.source import ROOT

PROGRAM = """
import gc, random, sys, threading
import numpy as np

x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)

def native():
    import fp8kit as fk
    fk.manual_seed(0)
    layer = fk.nn.Linear(64, 64, device="cpu")
    with fk.autocast(recipe=fk.recipe.DelayedScaling()):
        y = layer(fk.tensor(x, device="cpu"))
    y.backward(y.detach())
    found.append(y.numpy().tobytes() + layer.weight.grad.numpy().tobytes())

def in_threads():
    threads = [threading.Thread(target=native) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    native()

def in_torch():
    import torch
    import fp8kit_torch as te
    torch.manual_seed(0)
    layer = te.Linear(64, 64)
    with te.autocast(enabled=True):
        y = layer(torch.from_numpy(x))
    y.sum().backward()
    found.append(y.detach().numpy().tobytes() + layer.weight.grad.numpy().tobytes())

def in_jax():
    import jax
    import fp8kit_jax as fj
    from fp8kit_jax import flax
    layer = flax.LayerNorm()
    variables = layer.init(jax.random.PRNGKey(0), x)
    found.append(np.asarray(jax.jit(layer.apply)(variables, x)).tobytes())

def adam_in_jax():
    import jax
    from fp8kit_jax.optimizers import adamw
    made = adamw(1e-2, master_weights=True)
    params = {"w": x.astype("bfloat16"), "b": x[0]}
    updates, _ = jax.jit(made.update)(params, made.init(params), params)
    found.append(b"".join(np.asarray(update).tobytes() for update in jax.tree.leaves(updates)))

def forked():
    import os
    native()
    child = os.fork()
    if not child:
        native()
        os._exit(0 if found[-1] == found[-2] else 3)
    assert os.waitpid(child, 0)[1] == 0

found, kept, order = [], [], random.Random(int(sys.argv[2]))
for round in range(3):
    globals()[sys.argv[1]]()
    names = [name for name in sys.modules if name.partition(".")[0].startswith("fp8kit")]
    order.shuffle(names)
    for name in names:
        module = sys.modules.pop(name)
        if order.random() < 0.3:
            kept.append(module)
    del module
    if order.random() < 0.7:
        gc.collect()
assert len(set(found)) == 1, [hash(each) for each in found]
print("again")
"""


@pytest.mark.programs
@pytest.mark.parametrize("how", ["native", "in_threads", "in_torch", "in_jax", "adam_in_jax", "forked"])
def test_modules_are_imported_again(how):
    for seed in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, how, str(seed)],
            env=os.environ
            | {
                "PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}",
                "LD_PRELOAD": "libc_malloc_debug.so.0",
                "MALLOC_CHECK_": "3",
            },
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert (done.returncode, done.stdout) == (0, "again\n"), done.stderr
