"""The inspector for JAX: the native one's rows, from within jit, by static choice."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from fp8kit_jax import flax as fl
from fp8kit_jax import nnx as fn

import fp8kit as fk
from fp8kit.errors import ArgumentError
from tests.adapters.jax.filled import filled
from tests.support.combinations import combinations
from tests.support.inspected import (
    HIDDEN,
    OUT,
    RECIPES,
    STATS,
    TWIN_STATS,
    W1,
    W2,
    W3,
    G,
    Native,
    X,
    by_name,
    logged,
    section,
)
from tests.support.inspected_flax import Linen, Nnx

CONFIG = section(logged(STATS) | {"LogFp8TensorStats": TWIN_STATS})
WEIGHTS = jnp.asarray(W1)[None], jnp.asarray(W2), jnp.asarray(W3)


def loss(x, weights, sets, g=G):
    """The model of ``tests.support.inspected``, whose output gradient is ``g``."""
    ones, zeros = jnp.ones(HIDDEN), jnp.zeros(HIDDEN)
    h = fj.layernorm_mlp(
        *(x, ones, zeros, weights[:2]), epsilon=1e-6, quantizer_sets=sets[:2], kernel_layout="oi", name="mlp"
    )
    y = fj.dense(h, weights[2], contracting_dims=((-1,), (1,)), quantizer_set=sets[2], name="out")
    return (y * g).sum()


def sets_of(name):
    return fj.create_set(RECIPES[name], 3) if RECIPES[name] is not None else (fj.noop_quantizer_set,) * 3


def same(rows, wanted, rel=1e-6):
    assert [{**row, "value": 0} for row in rows] == [{**row, "value": 0} for row in wanted]
    for row, want in zip(rows, wanted, strict=True):
        exact = isinstance(want["value"], list | int)
        assert row["value"] == (
            want["value"] if exact else pytest.approx(want["value"], rel=rel, nan_ok=True)
        )


@combinations({"name": ["delayed", "current", "mxfp8", "high precision"]}, usual=["delayed"])
def test_same_rows_as_natively(name):
    native = Native()
    with fk.inspect(native, CONFIG) as want:
        native.train_step(RECIPES[name])
        want.step()
    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2), allow_int=True))
    plain = step(jnp.asarray(X), WEIGHTS, sets_of(name))
    with fj.inspect(CONFIG) as log:
        looked_at = step(jnp.asarray(X), WEIGHTS, sets_of(name))
        log.step()
    same(log.rows(), want.rows())
    assert all(map(np.array_equal, jax.tree.leaves(plain), jax.tree.leaves(looked_at)))


def test_only_steps_that_are_looked_at_are_another_program():
    traced = []

    @jax.jit
    def step(x):
        traced.append(x)
        return jax.grad(loss)(x, WEIGHTS, sets_of("mxfp8"))

    x = jnp.asarray(X)
    step(x)
    with fj.inspect(section(logged(["max"], ("activation", "gradient"), freq=3))) as log:
        for _ in range(7):
            step(x)
            log.step()
    step(x)
    assert len(traced) == 2
    assert [row["step"] for row in log.rows() if row["layer"] == "out"] == [0, 0, 3, 3, 6, 6]


def test_scan_vmap_and_devices():
    """What is traced once and runs several times is put together; a tensor that lies on several devices is
    one."""
    config = section(logged(["l1_norm", "max"], ("activation",)), {"exact_layer_names": ["out"]})
    weight = jnp.asarray(W3)

    def one(x):
        return fj.dense(x, weight, contracting_dims=((-1,), (1,)), name="out").sum()

    parts = jnp.asarray(X).reshape(4, 8, HIDDEN)
    ways = {
        "scan": lambda: jax.jit(lambda p: jax.lax.scan(lambda c, x: (c + one(x), None), 0.0, p)[0])(parts),
        "vmap": lambda: jax.jit(jax.vmap(one))(parts),
        "once": lambda: jax.jit(one)(jnp.asarray(X)),
    }
    mesh = jax.make_mesh((4,), ("data",))
    split = jax.device_put(jnp.asarray(X), jax.NamedSharding(mesh, jax.P("data")))
    ways["devices"] = lambda: jax.jit(one)(split)
    mapped = jax.shard_map(
        lambda x: one(x)[None], mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False
    )
    ways["shard_map"] = lambda: jax.jit(mapped)(split)
    for name, run in ways.items():
        with fj.inspect(config) as log:
            run()
            log.step()
        found = by_name(log.rows())
        want = float(np.abs(X.astype(np.float64)).sum())
        assert found["out", "activation", "l1_norm"] == pytest.approx(want, rel=1e-6), name
        assert found["out", "activation", "max"] == X.max(), name


def test_names_of_flax():
    x = jnp.asarray(X)
    model = Linen()
    variables = linen.unbox(filled(model.init, jax.random.key(0), x))
    named = fn.name_layers(Nnx())
    for run in (lambda: model.apply(variables, x), lambda: named(x)):
        with fj.inspect(section(logged(["max"], ("activation",)))) as log:
            with fj.autocast(enabled=True, recipe=RECIPES["mxfp8"]):
                run()
            log.step()
        assert {row["layer"] for row in log.rows()} == {"mlp.fc1", "mlp.fc2", "out"}


def test_a_model_that_is_one_layer_has_its_own_name():
    x, layer = jnp.asarray(X), fl.DenseGeneral(OUT, name="head")
    variables = linen.unbox(filled(layer.init, jax.random.key(0), x))
    recipe = fk.recipe.PerLayer(RECIPES["mxfp8"], (("head", None),))
    config = section(logged(["max"], ("activation",)) | {"LogFp8TensorStats": SQNR})
    for chosen, stats in ((RECIPES["mxfp8"], {"max", "sqnr"}), (recipe, {"max"})):
        with fj.inspect(config) as log:
            with fj.autocast(enabled=True, recipe=chosen):
                layer.apply(variables, x)
            log.step()
        assert {(row["layer"], row["stat"]) for row in log.rows()} == {("head", stat) for stat in stats}


SQNR = {"enabled": True, "tensors": ["activation"], "stats": ["sqnr"]}


@combinations({"name": ["current", "mxfp8", "delayed"]}, usual=["delayed"])
def test_changes_of_the_recipe(name):
    """A layer in high precision beside others, also where it has a state: that stays as it is."""
    off, sets = section({"DisableFP8Layer": {"enabled": True}}), sets_of(name)
    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2), allow_int=True))
    want = step(jnp.asarray(X), WEIGHTS, sets_of("high precision"))
    with fj.inspect(off) as log:
        got = step(jnp.asarray(X), WEIGHTS, sets)
        log.step()
    assert all(map(np.array_equal, jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2])))
    if name == "delayed":
        kept = jax.tree.leaves(got[2])
        assert all(map(np.array_equal, kept, jax.tree.leaves(sets)))


def test_within_jit_it_is_refused():
    config, x, w = section(logged(["max"], ("activation",))), jnp.asarray(X), jnp.asarray(W3.T)

    def opens(x):
        with fj.inspect(config):
            return fj.dense(x, w, name="out")

    def steps(x):
        y = fj.dense(x, w, name="out")
        log.step()
        return y

    with pytest.raises(ArgumentError, match=r"one within jax\.jit, expected one around"):
        jax.jit(opens)(x)
    with pytest.raises(ArgumentError, match=r"step: got one within jax\.jit"), fj.inspect(config) as log:
        jax.jit(steps)(x)
    with fj.inspect(config) as log:  # nothing is left open
        jax.jit(lambda x: fj.dense(x, w, name="out"))(x)
        log.step()
    assert [(row["step"], row["layer"]) for row in log.rows()] == [(0, "out")]


def test_layers_without_a_name_are_said(caplog):
    with fj.inspect(section(logged(["max"], ("activation",)))) as log:
        for _ in range(2):
            fj.dense(jnp.asarray(X), jnp.asarray(W3.T))
            log.step()
    assert [row["layer"] for row in log.rows()] == ["", ""]
    assert caplog.messages == ["inspect: layers without a name are one, '': name= and name_layers give names"]


def test_experts_are_said(caplog):
    kernel, sizes = jnp.ones((2, HIDDEN, OUT)), jnp.asarray([20, 12])
    with fj.inspect(section(logged(["max"], ("activation",)))) as log:
        for _ in range(2):
            fj.grouped_dense(jnp.asarray(X), kernel, sizes, name="experts")
            log.step()
    assert log.rows() == []
    assert sum("layer experts shows nothing" in message for message in caplog.messages) == 1


def test_names():
    with pytest.raises(ValueError, match="name"):
        fj.dense(jnp.asarray(X), jnp.asarray(W3.T), name=3)
