"""One device that is late, while another one has a thousand calls to launch behind a collective."""

from __future__ import annotations

import time
import weakref
from unittest import mock

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
from fp8kit_jax import program
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.arrays import CPU, Device

MOST = 40.0  # seconds, beside those that the device is late


def check(devices, rows, layers, seconds, within=lambda: None):
    """A program of so many attentions over ``rows`` positions runs twice on two devices. The second time one
    of them comes ``seconds`` late to the collective that all attentions stand behind, and calls ``within``.

    XLA may sum a mean in another order each time, so that some factors and products round to a neighbour in
    bfloat16, 2^-8 apart; attention, which averages, does not make that more."""
    run, slept = program.XlaOp.run, []

    def late(self, pointers, stream):
        if self.device == second and self.operation.name == "norm" and not slept:
            slept.append(time.sleep(seconds))
            within()
        run(self, pointers, stream)

    def local(x):
        def step(x, _):
            return fj.dot_product_attention(x, x, x), None

        x = x * (1 + jax.lax.pmean(fj.l2norm(x), "both").mean())
        x = x * (1 + jax.lax.pmean(x, "both").mean())
        return jax.lax.scan(step, x, None, layers)[0]

    last = devices[-1]  # the CPU's are one to the library
    second = CPU if last.platform == "cpu" else Device("cuda", last.local_hardware_id)
    mesh, split = Mesh(np.array(devices), ("both",)), P("both")
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split))
    drawn = np.random.default_rng(0).standard_normal((4, rows, 2, 64), np.float32)
    placed = jax.device_put(jnp.asarray(drawn, jnp.bfloat16), NamedSharding(mesh, split))
    want = np.asarray(step(placed), np.float32)
    started = time.monotonic()
    with mock.patch.object(program.XlaOp, "run", late):
        got = np.asarray(step(placed), np.float32)
    assert slept
    assert time.monotonic() - started < seconds + MOST
    assert np.linalg.norm(got - want) <= 2**-7 * np.linalg.norm(want)


def garbage(devices):
    """Leave a cycle that holds a compiled program of those devices; returns a weak reference to it."""

    def local(x):
        return fj.l2norm(x) * jax.lax.pmean(x, "both")

    split = P("both")
    mesh = Mesh(np.array(devices), ("both",))
    x = jax.device_put(jnp.ones((2, 64), jnp.bfloat16), NamedSharding(mesh, split))
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)).lower(x).compile()
    jax.block_until_ready(step(x))
    cycle = [step]
    cycle.append(cycle)
    return weakref.ref(step)
