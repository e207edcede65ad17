"""Two GPUs of one machine, by shard_map and by jit with NamedSharding: one GPU's results, the FP8 state's to
the last bit.

Products of FP8 codes are summed in the tensor cores' 14 bits, in an order that depends on the sizes: the
bound of values is relative to the largest. Gradients see y by its codes of 2 bits (E5M2), neighbours 2^-2
apart: a rounding of 2^-8 moves one code in 2^6 by 2^-2 of it, which is 2^-5 of them all in the 2-norm; twice
that is allowed. One element may be off by more, where a large one of y meets a large one of x.
"""

from __future__ import annotations

import gc
import time

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax import program
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8kit as fk
from fp8kit.backends.cuda import attention, cudnn_plans, flash
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fp8kit.testing import assert_close, assert_same_bits
from tests.adapters.jax import ahead

pytestmark = [pytest.mark.gpu, pytest.mark.gpu2, pytest.mark.usefixtures("ends_when_stuck")]
RECIPES = {
    "high": None,
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
S, H, F = 64, 256, 1024
VALUES, GRADIENTS = 2.0**-9, 2.0**-4


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(
        jnp.bfloat16
    )


def mesh():
    found = jax.devices("gpu")
    assert len(found) >= 2, f"a gpu2 test needs 2 CUDA devices, JAX finds {len(found)}"
    return Mesh(np.array(found[:2]), ("both",))


def near(got, want, bound):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert_close("values", got, want, "float32", bound * max(np.abs(want).max(), 1e-30))


def alike(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.linalg.norm(got - want) <= GRADIENTS * np.linalg.norm(want)


def same_state(got, want):
    for path, leaf in jax.tree_util.tree_leaves_with_path(want):
        assert_same_bits(
            jax.tree_util.keystr(path),
            np.asarray(dict(jax.tree_util.tree_leaves_with_path(got))[path]),
            np.asarray(leaf),
        )


def two(recipe):
    return (fj.noop_quantizer_set,) * 2 if RECIPES[recipe] is None else fj.create_set(RECIPES[recipe], 2)


def loss(k1, k2, sets, x):
    y = fj.layernorm_mlp(
        x,
        jnp.ones(H, x.dtype),
        None,
        (k1, k2),
        norm_type="rmsnorm",
        activation_type=("silu", "linear"),
        quantizer_sets=sets,
    )
    return (y.astype(jnp.float32) ** 2).sum()


@pytest.mark.parametrize("way", ["rows", "columns", "shard_map"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_mlp(recipe, way):
    args = draw(1, H, 2, F) / 16, draw(2, F, H) / 32, two(recipe), draw(0, 4, S, H)
    step = jax.value_and_grad(loss, (0, 1, 2))
    specs = [P(None, None, "both"), P("both"), P(), P()] if way == "columns" else [P(), P(), P(), P("both")]
    placed = [jax.device_put(a, NamedSharding(mesh(), own)) for a, own in zip(args, specs, strict=True)]
    with fk.deterministic():
        want, (*kernels, state) = jax.jit(step)(*args)
        if way == "shard_map":
            local = jax.shard_map(
                lambda *a: jax.lax.psum(loss(*a), "both"), mesh=mesh(), in_specs=tuple(specs), out_specs=P()
            )
            step = jax.value_and_grad(local, (0, 1, 2))
        compiled = jax.jit(step).lower(*placed).compile()
        got, (*found, fresh) = compiled(*placed)
    assert "all-gather" not in compiled.as_text()
    near(got, want, VALUES)
    for a, b in zip(found, kernels, strict=True):
        alike(a.astype(jnp.float32), b.astype(jnp.float32))
    if recipe == "delayed":
        for own, other in zip(fresh, state, strict=True):
            same_state(own.kernel, other.kernel)
        same_state(fresh[0].x, state[0].x)


@pytest.mark.parametrize("spec", [("both",), (None, None, "both")], ids=["batches", "heads"])
def test_attention(spec):
    layers = [draw(i, 4, S, 4, 64) for i in range(3)]
    step = jax.jit(
        jax.value_and_grad(
            lambda *a: (fj.dot_product_attention(*a).astype(jnp.float32) ** 2).sum(), (0, 1, 2)
        )
    )
    placed = jax.device_put(layers, NamedSharding(mesh(), P(*spec)))
    compiled = step.lower(*placed).compile()
    assert "all-gather" not in compiled.as_text()
    for got, want in zip(jax.tree.leaves(compiled(*placed)), jax.tree.leaves(step(*layers)), strict=True):
        alike(got.astype(jnp.float32), want.astype(jnp.float32))


def test_attention_with_dropout():
    """Split by batches or by heads, in float32: the weights that one GPU drops. In bfloat16 cuDNN would draw
    there, but not for parts: both splits drop the same weights."""

    def dropped(*layers):
        return (
            fj.dot_product_attention(*layers, dropout_rate=0.5, dropout_key=jax.random.key(1)).astype(
                jnp.float32
            )
            ** 2
        ).sum()

    step = jax.jit(jax.value_and_grad(dropped, (0, 1, 2)))
    for dtype in (jnp.float32, jnp.bfloat16):
        layers, found = [draw(i, 4, S, 4, 64).astype(dtype) for i in range(3)], []
        for spec in (("both",), (None, None, "both")):
            placed = jax.device_put(layers, NamedSharding(mesh(), P(*spec)))
            compiled = step.lower(*placed).compile()
            assert "all-gather" not in compiled.as_text()
            found.append(compiled(*placed))
        want = step(*layers) if dtype is jnp.float32 else found[1]
        for result in found:
            for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(want), strict=True):
                alike(a.astype(jnp.float32), b.astype(jnp.float32))


def test_a_gpu_that_is_behind(monkeypatch):
    """One GPU's first calls take a second longer. The other one is at a collective by then, and its next
    call, a first one too, must keep nothing that the late one needs, the interpreter above all: all would
    stand still."""
    prepare = program.prepare

    def late(text, device):
        if device.index:
            time.sleep(1)
        return prepare(text, device)

    monkeypatch.setattr(program, "prepare", late)
    layers = [draw(i, 4, S, 2, 64) for i in range(3)]
    # the logarithm's gradient is 1 / sum: backward needs what all GPUs have summed
    step = jax.jit(
        jax.value_and_grad(
            lambda *a: jnp.log((fj.dot_product_attention(*a).astype(jnp.float32) ** 2).sum()), (0, 1, 2)
        )
    )
    found = step(*jax.device_put(layers, NamedSharding(mesh(), P("both"))))
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(step(*layers)), strict=True):
        alike(got.astype(jnp.float32), want.astype(jnp.float32))


@pytest.mark.parametrize("rows", [64, 4096], ids=["ours", "cudnn"])
def test_a_gpu_that_is_thousands_of_launches_ahead(rows, monkeypatch):
    """One GPU sleeps within a call in front of two collectives, while the other one's thread has a thousand
    attentions to launch behind them: more than its queue takes, by kernels of our own, and by cuDNN."""
    monkeypatch.setattr(flash, "on_hopper", lambda *about: False)  # which would take both
    attention.forget()
    before = cudnn_plans.launches[0]
    ahead.check(jax.devices("gpu")[:2], rows, layers=1000, seconds=5)
    assert (cudnn_plans.launches[0] - before >= 2000) == (rows == 4096)


def test_garbage_within_a_call():
    """It holds a program of both GPUs. To unload that waits for both, and one of them stands at a collective
    and waits for the other's thread, which collects garbage."""
    devices = jax.devices("gpu")[:2]
    held = ahead.garbage(devices)
    ahead.check(devices, rows=64, layers=2, seconds=1, within=gc.collect)
    gc.collect()
    assert held() is None


def test_both_gpus_at_once():
    """The same program on both, launched without waiting: each gives the bits of the first."""
    args = draw(1, H, 2, F) / 16, draw(2, F, H) / 32, two("delayed"), draw(0, 4, S, H)
    with fk.deterministic():
        step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
        placed = [jax.device_put(args, device) for device in jax.devices("gpu")[:2]]
        results = [step(*own) for _ in range(10) for own in placed]
    for result in results[1:]:
        same_state(result, results[0])
