"""``fj.capture``: the operands that the native frontend captures from the same model."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from fp8kit_jax import nnx as fn
from jax.sharding import AxisType

import fp8kit as fk
from fp8kit import cli, inspection
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.numerics import Dump, GemmOperands, capture
from fp8kit.testing import assert_close, assert_same_bits, sum_slack
from tests.support.combinations import combinations
from tests.support.inspected import HIDDEN, OUT, RECIPES, W1, W2, W3, Native, X, logged, section
from tests.support.inspected_flax import Linen, Nnx

PARAMS = {"fc1": jnp.asarray(W1.T)[:, None, :], "fc2": jnp.asarray(W2.T), "out": jnp.asarray(W3.T)}
NAMES = ["mlp.fc1", "mlp.fc2", "out"]
TARGETS = np.arange(len(X)) % OUT


def forward(params, x, sets=(None, None, None)):
    """The model of ``tests.support.inspected``, with kernels as JAX has them, (in, out)."""
    gamma, kernels = jnp.ones(HIDDEN), (params["fc1"], params["fc2"])
    h = fj.layernorm_mlp(x, gamma, 0 * gamma, kernels, quantizer_sets=sets[:2], name="mlp")
    return fj.dense(h, params["out"], quantizer_set=sets[2], name="out")


def loss(y):
    picked = jax.nn.log_softmax(y)[jnp.arange(len(TARGETS)), TARGETS]
    return -picked.mean()


def native():
    return capture(Native(), fk.tensor(X), lambda y: fk.nn.cross_entropy(y, fk.tensor(TARGETS)))


def same(got, wanted):
    """The same activations and weights, bit by bit, and gradients of a loss that another library computes."""
    assert list(got.gemms) == list(wanted.gemms)
    for name, own in wanted.gemms.items():
        other = got.gemms[name]
        assert_same_bits(f"{name} activation", other.activation, own.activation)
        assert_same_bits(f"{name} weight", other.weight, own.weight)
        # both are float32's sums of as many terms at most, of softmaxes with other roundings
        slack = 1e-5 * np.abs(own.gradient).max()
        assert_close(f"{name} gradient", other.gradient, own.gradient, "float32", slack)


def test_the_operands_of_the_native_model(tmp_path):
    """In the form that ``fp8kit recipes compare`` reads; the recipe of the call and its state do not
    count."""
    wanted = native()
    assert list(wanted.gemms) == NAMES
    got = fj.capture(lambda params, x: loss(forward(params, x)), (PARAMS, X))
    same(got, wanted)
    same(fj.capture(forward, {"params": PARAMS, "x": X}, loss), wanted)
    for name in ("delayed", "current"):
        sets = fj.create_set(RECIPES[name], 3)
        same(fj.capture(lambda params, x, sets=sets: loss(forward(params, x, sets)), (PARAMS, X)), wanted)
    with fj.autocast(enabled=True, recipe=RECIPES["current"]):
        same(fj.capture(forward, (PARAMS, X), loss), wanted)
    path = tmp_path / "operands.safetensors"
    got.save(path)
    assert list(Dump.load(path).gemms) == NAMES
    assert cli.main(["recipes", "compare", str(path), "--recipes", "current", "mxfp8"]) == 0
    assert inspection.hooks.inspector is None


def test_kernels_as_pytorch_has_them():
    ones = jnp.ones(HIDDEN)

    def run(kernels, x):
        h = fj.layernorm_mlp(x, ones, 0 * ones, kernels[:2], kernel_layout="oi", name="mlp")
        return loss(fj.dense(h, kernels[2], contracting_dims=((-1,), (1,)), name="out"))

    same(fj.capture(run, ([W1[None], W2, W3], X)), native())


@combinations({"kind": ["linen", "nnx", "bfloat16"]}, usual=["nnx", "bfloat16"])
def test_modules(kind):
    """Each GEMM's g^T x is its weight's gradient; parameters and their state stay as they are."""
    x = jnp.asarray(X)
    if kind == "nnx":
        model = fn.name_layers(Nnx())
        graph, params = nnx.split(model)
        before = jax.tree.map(np.asarray, params)
        dump = fj.capture(model, x, loss)
        after = nnx.split(model)[1]
        assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))
        grads = jax.jit(jax.grad(lambda p: loss(nnx.merge(graph, p)(x))))(params)
        kernel, grad = model.out.kernel[...], grads["out"]["kernel"][...]
    else:
        model = Linen()
        x = x.astype(jnp.bfloat16) if kind == "bfloat16" else x
        variables = linen.unbox(jax.jit(model.init)(jax.random.key(0), x))
        dump = fj.capture(model, x, loss, variables=variables)
        gradient = jax.jit(jax.grad(lambda v: loss(model.apply(v, x)).astype(jnp.float32)))
        grads = gradient(variables)["params"]
        kernel, grad = variables["params"]["out"]["kernel"], grads["out"]["kernel"]
    assert list(dump.gemms) == NAMES
    own = dump.gemms["out"]
    assert own.activation.dtype == own.weight.dtype == x.dtype
    assert_same_bits("weight", own.weight, np.asarray(kernel.astype(x.dtype)).T)
    a, g = own.activation.astype(np.float64), own.gradient.astype(np.float64)
    slack = sum_slack(np.abs(g.T) @ np.abs(a), len(X))
    slack = slack + 2.0**-8 * np.abs(g.T @ a) if kind == "bfloat16" else slack  # dW is rounded to bfloat16
    assert_close("dW", np.asarray(grad, np.float32).T, g.T @ a, "float32", slack)


def test_stacked_layers_are_those_of_a_loop():
    kernels = jnp.asarray(np.random.default_rng(0).standard_normal((3, HIDDEN, HIDDEN)) * 0.1, jnp.float32)

    def block(x, kernel, name):
        x = jnp.tanh(fj.dense(x, kernel, name=f"{name}.fc1"))
        return jnp.tanh(fj.dense(x, kernel + 1, name=f"{name}.fc2"))

    def looped(kernels, x):
        x = fj.dense(x, kernels[0], name="first")
        for i in range(3):
            x = block(x, kernels[i], f"layers.{i}")
        return jnp.square(fj.dense(x, kernels[1], name="a_last")).sum()

    def scanned(kernels, x, indexed=True):
        def body(x, own):
            if not indexed:
                return block(x, own[0], "layers"), None
            with fj.layer_index(own[1], "layers"):
                return block(x, own[0], "layers"), None

        x = fj.dense(x, kernels[0], name="first")
        x, _ = jax.lax.scan(jax.checkpoint(body), x, (kernels, jnp.arange(3)))
        return jnp.square(fj.dense(x, kernels[1], name="a_last")).sum()

    got, wanted = (fj.capture(function, (kernels, X)) for function in (scanned, looped))
    inner = [f"layers.{i}.fc{j}" for i in range(3) for j in (1, 2)]
    assert list(got.gemms) == list(wanted.gemms) == ["first", *inner, "a_last"]
    for name, own in wanted.gemms.items():
        for operand in GemmOperands._fields:
            one, other = (np.asarray(getattr(each, operand)) for each in (got.gemms[name], own))
            # XLA compiles a scan's tanh otherwise than a loop's, layer by layer
            assert_close(f"{name} {operand}", one, other, "float32", 1e-5 * np.abs(other).max())
    with pytest.raises(UnsupportedError, match=r"layers.fc1: got a layer that ran several .* fj.layer_index"):
        fj.capture(lambda k, x: scanned(k, x, False), (kernels, X))


def test_calls_without_a_name_are_numbered():
    def run(weights, x):
        for weight in weights:
            x = fj.dense(x, weight)
        return jnp.square(x).sum()

    weights = [jnp.eye(HIDDEN) * (i + 1) for i in range(3)]
    dump = fj.capture(run, (weights, X))
    assert list(dump.gemms) == ["gemm_0", "gemm_1", "gemm_2"]
    assert [own.weight[0, 0] for own in dump.gemms.values()] == [1, 2, 3]


@combinations({"kind": {"auto": AxisType.Auto, "explicit": AxisType.Explicit}}, usual=["explicit"])
def test_over_devices(kind):
    """A tensor that lies on several devices is captured as a whole."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    split = jax.device_put(jnp.asarray(X), jax.NamedSharding(mesh, jax.P("data")))

    def whole(y):
        assert kind == AxisType.Auto or jax.typeof(y).sharding.spec[0] == "data"  # as without capture
        # the loss indexes by arrays
        return loss(y if kind == AxisType.Auto else jax.sharding.reshard(y, jax.NamedSharding(mesh, jax.P())))

    same(fj.capture(forward, (PARAMS, split), whole), native())


def test_what_cannot_be_captured():
    run = (PARAMS, X)
    with pytest.raises(ArgumentError, match=r"loss: got shape \(32, 96\), expected a function that gives"):
        fj.capture(forward, run)
    with pytest.raises(ArgumentError, match="loss: got 5, expected a function"):
        fj.capture(forward, run, 5)
    with pytest.raises(ArgumentError, match=r"loss: got .*, expected a function that gives an array"):
        fj.capture(lambda *a: None, run)
    with pytest.raises(ArgumentError, match="model: got 'model', expected a function, a linen module or an"):
        fj.capture("model", run)
    with pytest.raises(ArgumentError, match="variables: missing, expected what the linen module's init gave"):
        fj.capture(Linen(), X, loss)
    with pytest.raises(ArgumentError, match=r"variables: got .*, expected None: only linen modules"):
        fj.capture(forward, run, loss, variables={})
    with pytest.raises(ArgumentError, match="model: got a model that called no product"):
        fj.capture(lambda x: jnp.square(x).sum(), X)
    with pytest.raises(ArgumentError, match=r"no GEMM but those of experts, .* m_splits as a list"):
        fj.capture(
            lambda x, w: fj.grouped_dense(x, w, jnp.array([32]), name="experts").sum(), (X, W3.T[None])
        )
    with pytest.raises(ArgumentError, match="batch: got none, expected arrays of floating-point numbers"):
        fj.capture(lambda x: x.sum(), np.arange(3))
    with pytest.raises(UnsupportedError, match="out: got a GEMM without backward"):
        fj.capture(
            lambda x, w: (
                x.sum() + 0 * fj.dense(jax.lax.stop_gradient(x), jax.lax.stop_gradient(w), name="out").sum()
            ),
            (X, W3.T),
        )
    with pytest.raises(ArgumentError, match=r"capture: model: got one within jax\.jit"):
        jax.jit(lambda x: fj.capture(forward, (PARAMS, x), loss))(X)
    within = fj.inspect(section(logged(["max"])))
    with pytest.raises(ArgumentError, match="block: got one within another"), within:
        fj.capture(forward, run, loss)
    with pytest.raises(KeyError, match="mine"):
        fj.capture(lambda x: {}["mine"], X)
    assert inspection.hooks.inspector is None
    same(fj.capture(forward, run, loss), native())  # nothing is left open
