"""Layers that one call stands for, in scans and vmaps, say which they are: by ``fj.layer_index`` their rows
are those of a loop over the layers."""

from __future__ import annotations

import functools

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from fp8kit_jax import flax as fl
from fp8kit_jax import nnx as fn

from fp8kit.errors import ArgumentError
from fp8kit.inspection import TENSORS
from tests.support.combinations import combinations
from tests.support.inspected import HIDDEN, RECIPES, X, by_name, logged, section

LAYERS = 3
CONFIG = section(logged(["max", "std", "exponents"], TENSORS))
RNG = np.random.default_rng(3)
KERNELS = jnp.asarray(RNG.standard_normal((LAYERS, HIDDEN, HIDDEN)) * 0.1, jnp.float32)


def dense(x, kernel, name):
    return jnp.tanh(fj.dense(x, kernel, name=name))


def in_a_loop(kernels, x):
    for i in range(LAYERS):
        x = dense(x, kernels[i], f"layers.{i}.mlp")
    return x


def scanned(kernels, x, wrap=lambda f: f):
    def body(x, own):
        kernel, i = own
        with fj.layer_index(i, "layers"):
            return dense(x, kernel, "layers.mlp"), None

    return jax.lax.scan(wrap(body), x, (kernels, jnp.arange(LAYERS)))[0]


def looked_at(function, *args, recipe="mxfp8", checked=True):
    """The rows of a step of a loss of ``function`` and its gradients, which are (``checked``) those of a step
    that is not looked at."""
    step = jax.jit(jax.grad(lambda *args: jnp.square(function(*args)).sum(), argnums=(0, 1)))
    with fj.autocast(enabled=recipe is not None, recipe=RECIPES[recipe or "high precision"]):
        plain = step(*args) if checked else None
        with fj.inspect(CONFIG) as log:
            seen = step(*args)
            log.step()
    if checked:
        assert all(map(np.array_equal, jax.tree.leaves(plain), jax.tree.leaves(seen)))
    return log.rows()


@functools.cache
def loop_rows():
    return looked_at(in_a_loop, KERNELS, jnp.asarray(X), checked=False)


@functools.cache
def scan_rows():
    return looked_at(scanned, KERNELS, jnp.asarray(X))


def same(rows, wanted):
    assert len(rows) == len(wanted)
    found, want = by_name(rows), by_name(wanted)
    assert found.keys() == want.keys()
    for key, value in want.items():
        exact = isinstance(value, list) or key[2] == "max"
        assert found[key] == (value if exact else pytest.approx(value, rel=1e-6)), key


def test_a_scan_has_the_rows_of_a_loop():
    same(scan_rows(), loop_rows())


def test_recomputed_layers_keep_their_number():
    """``jax.checkpoint`` computes the forward pass twice: counts count twice, the largest value stays."""
    x = jnp.asarray(X)
    rows = looked_at(lambda kernels, x: scanned(kernels, x, jax.checkpoint), KERNELS, x)
    found, want = by_name(rows), by_name(loop_rows())
    assert found.keys() == want.keys()
    for key, value in want.items():
        if key[2] == "max":
            assert found[key] == value


def test_layers_side_by_side():
    """vmap over layers, with the same input: each has its own rows; one stack within another."""
    x = jnp.asarray(X)

    def each(kernel, i, x):
        with fj.layer_index(i, "experts"):
            return dense(x, kernel, "experts.fc")

    def all_of(kernels, x):
        return jax.vmap(each, (0, 0, None))(kernels, jnp.arange(LAYERS), x)

    def alone(kernels, x):
        return jnp.stack([dense(x, kernels[i], f"experts.{i}.fc") for i in range(LAYERS)])

    same(looked_at(all_of, KERNELS, x), looked_at(alone, KERNELS, x, checked=False))

    def nested(kernels, x):
        with fj.layer_index(7, "layers"), fj.layer_index(1, "layers.experts"):
            x = dense(x, kernels[0], "layers.experts.fc")
        with fj.layer_index(2), fj.layer_index(5, "layers"):
            return dense(x, kernels[1], "head")

    names = {row["layer"] for row in looked_at(nested, KERNELS, x)}
    assert names == {"layers.7.experts.1.fc", "head.2.5"}


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, i):
        with fj.layer_index(i, ".".join(self.path)):
            return jnp.tanh(fl.DenseGeneral(HIDDEN, name="mlp")(x)), None


class Scanned(linen.Module):
    @linen.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": 0}
        stack = linen.scan(Block, length=LAYERS, metadata_params={linen.PARTITION_NAME: None}, **axes)
        return stack(name="layers")(x, jnp.arange(LAYERS))[0]


class Printing(linen.Module):
    """Flax and JAX alone: a scan whose body calls back."""

    @linen.compact
    def __call__(self, x):
        def body(module, carry, i):
            jax.debug.callback(lambda i: None, i)
            return carry, None

        return linen.scan(body, length=2, in_axes=0)(self, x, jnp.arange(2))[0]


def test_linen_scan():
    """As Flax takes every callback in a scan: that of 0.12.12 refuses Flax's and JAX's own, and ours by the
    same words."""
    stacked = {"kernel": KERNELS, "bias": jnp.zeros((LAYERS, HIDDEN))}
    variables, refused = {"params": {"layers": {"mlp": stacked}}}, ""
    given = lambda v, x: Scanned().apply(v, x), variables, jnp.asarray(X)
    try:
        jax.eval_shape(lambda x: Printing().apply({}, x), jnp.asarray(X))
    except ValueError as error:
        refused = str(error)
    if refused:
        assert "data dependency on the scan body" in refused
        with pytest.raises(ValueError, match="data dependency on the scan body"):
            looked_at(*given)
    else:
        same(looked_at(*given), loop_rows())


class Stack(nnx.Module):
    """Layers that ``nnx.vmap`` made and ``nnx.scan`` runs."""

    def __init__(self):
        def one(rngs):
            return fn.DenseGeneral(HIDDEN, HIDDEN, rngs=rngs)

        self.layers = nnx.vmap(one)(nnx.Rngs(0).split(LAYERS))

    def __call__(self, x):
        def body(x, layer, i):
            with fj.layer_index(i, "layers"):
                return jnp.tanh(layer(x))

        run = nnx.scan(body, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        return run(x, self.layers, jnp.arange(LAYERS))


def test_nnx_scan():
    model = fn.name_layers(Stack())
    nnx.update(model.layers, {"kernel": KERNELS})
    graph, params = nnx.split(model)
    rows = looked_at(lambda params, x: nnx.merge(graph, params)(x), params, jnp.asarray(X))
    same([{**row, "layer": row["layer"] + ".mlp"} for row in rows], loop_rows())


class Expert(linen.Module):
    @linen.compact
    def __call__(self, x, i):
        with fj.layer_index(i, "experts"):
            return fl.DenseGeneral(HIDDEN, name="fc")(x)


class Experts(linen.Module):
    @linen.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": (None, 0)}
        made = linen.vmap(Expert, axis_size=LAYERS, metadata_params={linen.PARTITION_NAME: None}, **axes)
        return made(name="experts")(x, jnp.arange(LAYERS))


def test_vmap_of_modules():
    x, kernels = jnp.asarray(X), KERNELS
    own = {"kernel": kernels, "bias": jnp.zeros((LAYERS, HIDDEN))}
    rows = looked_at(lambda v, x: Experts().apply(v, x), {"params": {"experts": {"fc": own}}}, x)

    def alone(kernels, x):
        return jnp.stack([fj.dense(x, kernels[i], name=f"experts.{i}.fc") for i in range(LAYERS)])

    wanted = looked_at(alone, kernels, x, checked=False)
    same(rows, wanted)
    model = fn.name_layers(Stack())
    nnx.update(model.layers, {"kernel": kernels})
    graph, params = nnx.split(model)

    def each(params, x):
        def one(layer, i):
            with fj.layer_index(i):
                return layer(x)

        return nnx.vmap(one)(nnx.merge(graph, params).layers, jnp.arange(LAYERS))

    found = looked_at(each, params, x)
    same(found, [{**row, "layer": row["layer"].replace("experts", "layers")[:-3]} for row in wanted])


def test_delayed_scaling_in_a_scan():
    """The state of each layer goes through as it does without."""
    x = jnp.asarray(X)
    sets = jax.tree.map(lambda a: jnp.stack([a] * LAYERS), fj.create_set(RECIPES["delayed"]))

    def run(kernels, x, sets):
        def body(x, own):
            kernel, fp8, i = own
            with fj.layer_index(i):
                return jnp.tanh(fj.dense(x, kernel, quantizer_set=fp8, name="fc")), None

        return jax.lax.scan(body, x, (kernels, sets, jnp.arange(LAYERS)))[0]

    step = jax.jit(jax.grad(lambda *args: jnp.square(run(*args)).sum(), argnums=(0, 2), allow_int=True))
    plain = step(KERNELS, x, sets)
    with fj.inspect(CONFIG) as log:
        seen = step(KERNELS, x, sets)
        log.step()
    assert all(map(np.array_equal, jax.tree.leaves(plain), jax.tree.leaves(seen)))
    assert {row["layer"] for row in log.rows()} == {f"fc.{i}" for i in range(LAYERS)}


@combinations({"kind": jax.sharding.AxisType}, usual=["AxisType.Manual"])
def test_over_devices(kind):
    """On axes of every kind: types stay what they are when nothing is looked at; in a shard_map (Manual) the
    devices' parts are put together."""
    manual = kind is jax.sharding.AxisType.Manual
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto if manual else kind,))
    x = jax.device_put(jnp.asarray(X), jax.NamedSharding(mesh, jax.P("data", None)))
    function = scanned
    if manual:
        specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data")}
        function = jax.shard_map(scanned, mesh=mesh, **specs)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(lambda kernels, x: jnp.square(function(kernels, x)).sum()))
        with fj.inspect(section(logged(["max", "l1_norm"], ("activation", "weight")))) as log:
            jax.block_until_ready(step(KERNELS, x))
            log.step()
    wanted = looked_at(in_a_loop, KERNELS, jnp.asarray(X), recipe=None, checked=False)
    found, want = by_name(log.rows()), by_name(wanted)
    for key, value in found.items():
        if key[2] == "max":
            assert value == pytest.approx(want[key], rel=1e-5), key
    whole = np.abs(X.astype(np.float64)).sum()
    assert found["layers.0.mlp", "activation", "l1_norm"] == pytest.approx(whole, rel=1e-6)
    assert len(found) == 4 * LAYERS


def test_layers_that_nothing_tells_apart_are_said(caplog):
    """They have one name: activations of all, and the weight of one of them."""

    def unnumbered(kernels, x):
        return jax.lax.scan(lambda x, k: (dense(x, k, "layers.mlp"), None), x, kernels)[0]

    found = by_name(looked_at(unnumbered, KERNELS, jnp.asarray(X)))
    each = by_name(scan_rows())
    largest = [each[f"layers.{i}.mlp", "activation", "max"] for i in range(LAYERS)]
    assert found["layers.mlp", "activation", "max"] == max(largest)
    weights = [each[f"layers.{i}.mlp", "weight", "max"] for i in range(LAYERS)]
    assert found["layers.mlp", "weight", "max"] in weights
    (message,) = caplog.messages
    assert message.startswith("inspect: layer layers.mlp: its weight differs from call to call within a step")
    assert "fp8kit_jax.layer_index tells" in message


def test_nothing_is_in_the_program_when_nothing_is_looked_at():
    def without(kernels, x):
        return jax.lax.scan(
            lambda x, own: (dense(x, own[0], "layers.mlp"), None), x, (kernels, jnp.arange(3))
        )[0]

    def text(function):
        made = jax.make_jaxpr(jax.grad(lambda k, x: function(k, x).sum()))(KERNELS, jnp.asarray(X))
        return made.pretty_print(source_info=False, name_stack=False)

    assert text(scanned) == text(without)


def test_what_is_no_index():
    for index in (1.5, True, "3", jnp.arange(3), jnp.float32(1)):
        wanted = r"index: got .*, expected an int, or an integer array \(\)"
        with pytest.raises(ArgumentError, match=wanted), fj.layer_index(index):
            pass
    with pytest.raises(ArgumentError, match="name: got 3"), fj.layer_index(0, 3):
        pass
