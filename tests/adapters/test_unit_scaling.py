"""Unit-scaled operations have the native bits in torch, eager and compiled, and in JAX."""

from __future__ import annotations

import subprocess
import sys

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax
import numpy as np
import pytest
import torch
from fp8kit_jax import unit_scaling as in_jax
from fp8kit_torch import unit_scaling as in_torch

import fp8kit as fk
from fp8kit.layers.unit_scaling import FUNCTIONS
from fp8kit.nn import unit_scaling as native
from fp8kit.recipes import NAMED
from fp8kit.testing import assert_same_bits, relative_error
from tests.support.combinations import combinations

STATIC = NAMED["static"].recipe
IDS = np.random.default_rng(3).integers(0, 48, (2, 16))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def residual(own, x):
    branch, skip = own.residual_split(x, 0.5)
    return own.residual_add(own.gelu(branch), skip, 0.5)


def attention(own, q, k, v):
    return own.attention(q, k, v)


# name -> the function of a frontend's module and arrays, the arrays
CASES = {
    "scale_fwd": (lambda own, x: own.scale_fwd(x, 0.3), [normal(0, 8, 16)]),
    "scale_bwd": (lambda own, x: own.scale_bwd(x, 0.3), [normal(0, 8, 16)]),
    "gelu": (lambda own, x: own.gelu(x), [normal(0, 8, 16)]),
    "silu": (lambda own, x: own.silu(x, None), [normal(0, 8, 16)]),
    "silu_glu": (lambda own, x: own.silu_glu(x), [normal(0, 8, 32)]),
    "gelu of 2 x": (lambda own, x: own.gelu(x, mult=2.0), [normal(0, 8, 16)]),
    "silu_glu of 2 x": (lambda own, x: own.silu_glu(x, mult=2.0), [normal(0, 8, 32)]),
    "softmax": (lambda own, x: own.softmax(x, None, 2.0), [normal(0, 8, 16)]),
    "matmul": (lambda own, a, b: own.matmul(a, b, None), [normal(0, 2, 8, 16), normal(1, 16, 4)]),
    "mse": (lambda own, a, b: own.mse(a, b).reshape(1), [normal(0, 8, 16), normal(1, 8, 16)]),
    "add": (lambda own, a, b: own.add(a, b, None), [normal(0, 8, 16), normal(1, 16)]),
    "residual": (residual, [normal(0, 8, 16)]),
    "norm": (lambda own, x, w, b: own.norm(x, w, b), [normal(0, 8, 16), normal(1, 16), normal(2, 16)]),
    "rms": (lambda own, x, w: own.norm(x, w), [normal(0, 8, 16), normal(1, 16)]),
    "attention": (attention, [normal(i, 2, 16, 2, 8) for i in range(3)]),
}


def native_call(function, values):
    given = [fk.tensor(value, requires_grad=True, device="cpu") for value in values]
    y = function(native, *given)
    g = normal(7, *y.shape)
    y.backward(g)
    return [y.numpy(), *(value.grad.numpy() for value in given)], g


def torch_call(function, values, g, compiled=False):
    def call(*given):
        return function(in_torch, *given)

    given = [torch.from_numpy(value.copy()).requires_grad_() for value in values]
    y = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(*given)
    y.backward(torch.from_numpy(g.copy()))
    return [y.detach().numpy(), *(value.grad.numpy() for value in given)]


def jax_call(function, values, g):
    @jax.jit
    def step(values, g):
        y, pull = jax.vjp(lambda *given: function(in_jax, *given), *values)
        return y, *pull(g)

    return [np.asarray(array) for array in step(values, g)]


def same(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(f"array {i}", a, b)


@pytest.mark.parametrize(("own", "product"), [(native, "Linear"), (in_torch, "Linear"), (in_jax, "dense")])
def test_a_frontend_exports_every_function(own, product):
    assert set(own.__all__) == {product, "learning_rate_factor", *FUNCTIONS}
    assert all(callable(getattr(own, name)) for name in own.__all__)


@pytest.mark.parametrize("name", CASES)
def test_a_function(name):
    function, values = CASES[name]
    want, g = native_call(function, values)
    same(torch_call(function, values, g), want)
    same(jax_call(function, values, g), want)


# test_products and test_own_operation compile, too
@combinations({"name": ["residual", "softmax", "matmul", "mse", "silu_glu of 2 x"]}, usual=())
def test_functions_within_torch_compile(name):
    function, values = CASES[name]
    want, g = native_call(function, values)
    same(torch_call(function, values, g, compiled=True), want)


def test_dropout_and_dropout_in_attention():
    """The same numbers from one pair, by each frontend's own source."""
    x, q = normal(0, 8, 16), [normal(i, 2, 16, 2, 8) for i in range(3)]
    key = jax.random.key(3)

    def both(own, array, random):
        first = own.dropout(array(x), 0.4, **random("key"))
        return first, own.attention(*map(array, q), dropout_p=0.3, **random("dropout_key"))

    found = both(in_jax, np.asarray, lambda name: {name: key})
    pair = fj.dropout_seed(key)
    with fk.draw_from(lambda device: fk.tensor(pair, device=device)):
        want = both(native, lambda array: fk.tensor(array, device="cpu"), lambda name: {})
    for a, b in zip(found, want, strict=True):
        assert_same_bits("y", np.asarray(a), b.numpy())
    torch.manual_seed(0)
    given = both(in_torch, torch.from_numpy, lambda name: {})
    torch.manual_seed(0)
    with fk.draw_from(ft.dropout_seed):
        want = both(native, lambda array: fk.tensor(array, device="cpu"), lambda name: {})
    for a, b in zip(given, want, strict=True):
        assert_same_bits("y", a.numpy(), b.numpy())
    assert (want[0].numpy() == 0).any()


def test_embedding_and_loss():
    table, logits = normal(0, 48, 16), normal(1, 2, 16, 48)
    want = {}
    given = fk.tensor(table, requires_grad=True, device="cpu")
    native.embedding(fk.tensor(IDS, device="cpu"), given).backward(normal(7, 2, 16, 16))
    want["table"] = given.grad.numpy()
    given = fk.tensor(logits, requires_grad=True, device="cpu")
    native.cross_entropy(given, fk.tensor(IDS, device="cpu")).backward()
    want["logits"] = given.grad.numpy()
    ours = torch.from_numpy(table.copy()).requires_grad_()
    in_torch.embedding(torch.from_numpy(IDS), ours).backward(torch.from_numpy(normal(7, 2, 16, 16)))
    assert_same_bits("table", ours.grad.numpy(), want["table"])
    ours = torch.from_numpy(logits.copy()).requires_grad_()
    in_torch.cross_entropy(ours, torch.from_numpy(IDS)).backward()
    assert_same_bits("logits", ours.grad.numpy(), want["logits"])
    ids = IDS.astype(np.int32)
    y, pull = jax.vjp(lambda table: in_jax.embedding(ids, table), table)
    assert_same_bits("table", np.asarray(pull(normal(7, *y.shape))[0]), want["table"])
    grad = jax.grad(lambda logits: in_jax.cross_entropy(logits, ids))(logits)
    assert_same_bits("logits", np.asarray(grad), want["logits"])


@combinations({"recipe": ["high", "static"], "compiled": {"eager": False, "fullgraph": True}})
def test_products(recipe, compiled):
    """``Linear`` natively and in torch; ``dense`` with the same weight the other way round is near it."""
    x, g, own = normal(0, 32, 48), normal(1, 32, 64), STATIC if recipe == "static" else None
    layer = native.Linear(48, 64, device="cpu")
    ours = in_torch.Linear(48, 64, device="cpu")
    ours.load_state_dict({"weight": torch.from_numpy(layer.weight.numpy().copy()), "bias": torch.zeros(64)})
    given = fk.tensor(x, requires_grad=True, device="cpu")
    with fk.autocast(enabled=own is not None, recipe=own):
        y = layer(given)
    y.backward(g)
    want = [y.numpy(), given.grad.numpy(), layer.weight.grad.numpy(), layer.bias.grad.numpy()]
    tx = torch.from_numpy(x.copy()).requires_grad_()
    call = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    with ft.autocast(enabled=own is not None, recipe=own):
        ty = call(tx)
    ty.backward(torch.from_numpy(g.copy()))
    same([ty.detach().numpy(), tx.grad.numpy(), ours.weight.grad.numpy(), ours.bias.grad.numpy()], want)
    kernel = np.ascontiguousarray(layer.weight.numpy().T)
    with fj.autocast(enabled=own is not None, recipe=own):
        y, pull = jax.vjp(in_jax.dense, x, kernel, np.zeros(64, np.float32))
        dx, dkernel, dbias = pull(g)
    for a, b in zip((y, dx, np.asarray(dkernel).T, dbias), want, strict=True):
        assert relative_error(np.asarray(a), b) < 1e-5  # sums in another order


@pytest.mark.programs
@pytest.mark.parametrize("package", ["fp8kit.nn", "fp8kit_torch", "fp8kit_jax"])
def test_it_is_there_when_it_is_first_used(package: str) -> None:
    there = f"assert '{package}.unit_scaling' not in sys.modules\n{package}.unit_scaling.gelu"
    code = f"import sys, {package}\n{there}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
