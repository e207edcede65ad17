"""Meshes of ``jax.make_mesh``, whose axes are explicit: one device's results, types that say how outputs are
split, nothing gathered."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fp8kit.testing import assert_same_bits
from tests.support.combinations import combinations
from tests.support.sharding import (
    BITS,
    CODES,
    RECIPES,
    check_explicit,
    draw,
    explicit_mesh,
    mlp,
    near,
    placed,
    two,
)


@combinations({"recipe": RECIPES.keys()}, usual=["delayed"])
def test_an_mlp_and_its_state(recipe):
    s, h, f = (64, 256, 1024) if recipe == "block" else (16, 64, 128)
    args = (
        draw(0, 8, s, h),
        jnp.ones(h),
        draw(1, h, 2, f) / 8,
        draw(2, f, h) / 16,
        draw(3, 2, f),
        draw(4, h),
        two(recipe),
    )
    specs = ("data",), (), (None, None, "tensor"), ("tensor",), (None, "tensor"), (), ()

    got, want = check_explicit(mlp, args, specs, CODES if recipe == "block" else BITS)
    if recipe == "delayed":
        for slot in ("x", "kernel"):
            for a, b in zip(getattr(got[-1][0], slot), getattr(want[-1][0], slot), strict=True):
                assert_same_bits(slot, np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("split", ["rows", "columns", "contraction"])
def test_a_product(split):
    columns, inner = ("tensor" if split == name else None for name in ("columns", "contraction"))
    args = draw(0, 8, 16, 64), draw(1, 64, 64), draw(2, 64), two("current")[0]
    specs = ("data", None, inner), (inner, columns), (columns,), ()
    check_explicit(lambda x, w, b, sets: fj.dense(x, w, b, quantizer_set=sets), args, specs, CODES)


def test_attention_by_batches_and_heads():
    layers = [draw(i, 8, 16, heads, 8) for i, heads in enumerate((4, 2, 2))]
    check_explicit(fj.dot_product_attention, layers, (("data", None, "tensor"),) * 3)


def test_types_of_outputs():
    """Also where no mesh is set, and of what cannot be split as it is: then the output is whole, its gradient
    still of its type."""
    x, gamma = draw(0, 8, 16, 64), jnp.ones(64)
    (rows,), (sequence,) = (
        placed([x], [("data",)], explicit_mesh),
        placed([x], [(None, "data")], explicit_mesh),
    )
    for function, spec in (
        (lambda x: fj.rmsnorm(x, gamma), P("data", None, None)),
        (lambda x: fj.dropout_add(x, x), P("data", None, None)),
        (lambda x: fj.activation(x.reshape(8, 16, 2, 32), ("silu", "linear")), P("data", None, None)),
    ):
        split = jax.jit(function)(rows)
        assert (
            jax.typeof(split).sharding.spec
            == jax.typeof(jax.eval_shape(function, rows)).sharding.spec
            == spec
        )
        assert_same_bits("y", np.asarray(split), np.asarray(jax.jit(function)(x)))

    def loss(x):
        return (fj.dense(x, jnp.eye(64)) ** 2).sum()

    with jax.set_mesh(explicit_mesh()):
        got = jax.jit(jax.grad(loss))(sequence)
    assert got.sharding.spec == P(None, "data", None)
    near(got, jax.jit(jax.grad(loss))(x), BITS)


@pytest.mark.combinations
def test_layers_in_a_scan_with_remat():
    x, w, sets = draw(0, 8, 16, 64), draw(1, 3, 64, 64) / 8, two("delayed")[0]
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), sets)

    def deep(x, w, sets):
        body = jax.checkpoint(lambda h, own: (jnp.tanh(fj.dense(h, own[0], quantizer_set=own[1])), None))
        return jax.lax.scan(body, x, (w, sets))[0]

    check_explicit(deep, (x, w, stacked), (("data",), (), ()))
