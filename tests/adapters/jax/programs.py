"""Programs that a test runs in a process of their own: ``python -m tests.adapters.jax.programs NAME
[FILE]``."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from pathlib import Path

if __name__ == "__main__":  # tvm_ffi imports torch where it is installed, which takes as long as all the rest
    sys.modules["torch"] = None

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from fp8kit.recipe import DelayedScaling


def example():
    """A step of FP8 training as a pure function, and its arguments."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in ((32, 48), (48, 16)))
    sets = fj.create_set(DelayedScaling(amax_history_len=4))

    def step(w, sets, x):
        return jax.value_and_grad(lambda w, sets: (fj.dense(x, w, quantizer_set=sets) ** 2).sum(), (0, 1))(
            w, sets
        )

    return step, (w, sets, x)


def digest(tree):
    """The sum of every leaf, as text: the same bits give the same text."""
    return " ".join(float(np.asarray(leaf).astype(np.float32).sum()).hex() for leaf in jax.tree.leaves(tree))


def run(path):
    """The example, compiled; with JAX_COMPILATION_CACHE_DIR set, from the cache of an earlier process."""
    step, args = example()
    print(digest(jax.jit(step)(*args)))


def save(path):
    """Write the example as a compiled program."""
    step, args = example()
    flat, form = jax.tree.flatten(args)
    compiled = (
        jax.jit(lambda *flat: jax.tree.leaves(step(*jax.tree.unflatten(form, flat)))).lower(*flat).compile()
    )
    Path(path).write_bytes(pickle.dumps(serialize(compiled)))
    print(digest(step(*args)))


def load(path):
    """Run a compiled program that this process has never traced."""
    _, args = example()
    print(digest(deserialize_and_load(*pickle.loads(Path(path).read_bytes()))(*jax.tree.leaves(args))))


def write(path):
    """Write a Flax layer's inference, in FP8 and by its state, as an exported program with its arguments."""
    from flax import linen
    from fp8kit_jax import flax

    layer, x = flax.LayerNormMLP(48, intermediate_dropout_rate=0.0), example()[1][2]

    @jax.jit
    def infer(variables, x):
        with fj.autocast(True, DelayedScaling(amax_history_len=4)):
            return layer.apply(variables, x)[0]

    with fj.autocast(True, DelayedScaling(amax_history_len=4)):
        variables = layer.init(jax.random.key(0), x)
    variables = jax.tree.map(lambda leaf: leaf * 1.5, linen.unbox(variables))
    args = jax.tree.map(np.asarray, (variables, x))
    Path(path).write_bytes(pickle.dumps((bytes(fj.export(infer)(*args).serialize()), args)))
    print(digest(infer(*args)))


def read(path):
    """Run an exported program that this process has never traced."""
    program, args = pickle.loads(Path(path).read_bytes())
    print(digest(jax.export.deserialize(bytearray(program)).call(*args)))


def leave(path):
    """End while calls are in flight on all devices."""
    x, w = jnp.ones((256, 512)), jnp.ones((512, 512))
    step = jax.jit(lambda x, w: fj.dense(jnp.tanh(fj.dense(x, w) / 512), w))
    placed = [(jax.device_put(x, device), jax.device_put(w, device)) for device in jax.devices()]
    for _ in range(4):
        for pair in placed:
            step(*pair)
    print("left")


def launch_slow():
    """Launch calls on all devices that wait for one that sleeps, nothing of this process running
    meanwhile. The results of the first device."""

    def slow(x, y):
        time.sleep(0.3)
        y.numpy()[...] = x.numpy()

    fj.register("test.slow", slow)
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    step = jax.jit(lambda x: fj.dense(fj.call("test.slow", shape, x @ x), x))
    return [step(jax.device_put(jnp.ones((64, 64)), device)) for _ in range(2) for device in jax.devices()][
        : 1 - 2 * jax.device_count()
    ]


def leave_slow(path):
    """End while slow calls are in flight."""
    launch_slow()
    print("left")


def leave_held(path):
    """End while slow calls are in flight, holding a result and a device: XLA's client stays."""
    global held
    held = launch_slow(), jax.devices()[0]
    print("left")


def leave_in_a_thread(path):
    """End while slow calls are in flight that a thread of before has launched."""
    thread = threading.Thread(target=launch_slow)
    thread.start()
    thread.join()
    print("left")


def fail(path):
    """An error in a handler, then work as usual."""
    from tests.support.jax_calls import PlusSpec, plus

    said, step = (
        "nothing",
        jax.jit(lambda x, amount: fj.apply(plus, PlusSpec(amount), {"x": x})["y"], static_argnums=1),
    )
    try:
        step(jnp.ones(3), -1.0).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        said = "failed" if "test_plus: amount" in str(error) else str(error)
    print(f"{said}, and went on:", float(step(jnp.ones(3), 1.0)[0]))


if __name__ == "__main__":
    programs = (run, save, load, write, read, leave, leave_slow, leave_held, leave_in_a_thread, fail)
    {f.__name__: f for f in programs}[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "")
