"""Residual connections of Flax and NNX modules: what they return for one, and what they add themselves.

``test_residual`` has the functions.
"""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from fp8kit_jax import flax as flax_modules
from fp8kit_jax import nnx as nnx_modules
from fp8kit_jax.flax.common import add_residual
from jax.sharding import Mesh

from fp8kit.testing import assert_close, assert_same_bits
from tests.adapters.jax.filled import filled
from tests.support.combinations import combinations
from tests.support.sharding import BITS, draw, gradients, near

KEY = jax.random.key(3)


def layers(bias):
    options = {"use_bias": bias, "dtype": jnp.bfloat16}
    flax = flax_modules.TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, enable_relative_embedding=False, **options
    )
    x = jax.ShapeDtypeStruct((2, 16, 64), jnp.bfloat16)
    variables = jax.eval_shape(lambda x: flax.init(KEY, x, deterministic=True), x)
    made = nnx.eval_shape(lambda: nnx_modules.TransformerLayer(64, 128, 4, rngs=nnx.Rngs(0), **options))
    definition, state = nnx.split(made)
    return x, (
        (lambda v, x: flax.apply(v, x, deterministic=True), variables),
        (lambda v, x: nnx.merge(definition, v)(x), state),
    )


@combinations({"bias": [False, True]}, usual=["True"])
def test_a_layer_leaves_xla_nothing_to_add_or_to_copy(bias):
    x, found = layers(bias)
    for function, variables in found:
        step = jax.jit(
            lambda v, x, g, function=function: (lambda y, pull: (y, pull(g)))(*jax.vjp(function, v, x))
        )
        lowered = step.lower(variables, x, x)
        assert not re.findall(r"stablehlo\.add .*tensor<2x16x64x", lowered.as_text())
        assert not re.findall(r"= bf16\[2,16,64\]\S* copy\(", lowered.compile().as_text())


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize(("dims", "path"), [((), 0.0), ((1,), 0.0), ((), 0.5), ((1,), 0.5)])
def test_a_deferred_bias_is_dropped_with_its_branch(rate, dims, path):
    keys = iter(jax.random.split(KEY, 2))
    module = SimpleNamespace(
        hidden_dropout=rate,
        hidden_dropout_dims=dims,
        dropout_rng_name="dropout",
        transpose_batch_sequence=False,
        make_rng=lambda name: next(keys),
    )
    x, bias, residual = draw(0, 16, 4, 8), draw(1, 8), draw(2, 16, 4, 8)
    branch = np.asarray(add_residual(module, x, bias, residual, False, path) - residual)
    whole = np.asarray(x + bias) / ((1 - rate) * (1 - path))
    kept = np.abs(branch) > 2.0**-12 * np.abs(whole)
    assert_close("values", branch, kept * whole, "float32", 2.0 ** (-20))
    assert kept.all() == (rate == path == 0)
    if dims:
        assert (kept == kept[:, :1]).all()
    if path:
        samples = kept.any((1, 2))
        assert samples.any()
        assert not samples.all()
    near(add_residual(module, x, bias, residual, True, path), x + bias + residual, BITS)


@combinations(
    {"name": ["DenseGeneral", "LayerNormDenseGeneral", "LayerNormMLP", "MultiHeadAttention"]},
    usual=["DenseGeneral"],
)
def test_modules_return_them(name):
    """Whatever splits a module into several operations: y is the same with the bias added, x comes back as it
    is."""
    x = draw(0, 2, 16, 64)
    kinds = {
        "DenseGeneral": (
            ("return_bias",),
            [{"features": 48}, {"features": 48, "enable_low_rank_adaptation": True}],
        ),
        "LayerNormDenseGeneral": (
            ("return_residual",),
            [{"features": 48}, {"features": 48, "enable_layernorm": False}],
        ),
        "LayerNormMLP": (
            ("return_residual", "return_bias"),
            [{}, {"enable_layernorm": False}, {"enable_low_rank_adaptation": True}],
        ),
        "MultiHeadAttention": (
            ("return_residual", "return_bias"),
            [{}, {"num_gqa_groups": 2}, {"input_layernorm": False}],
        ),
    }
    asked, cases = kinds[name]
    for options in cases:
        given = (
            {"use_bias": True}
            | options
            | ({"head_dim": 16, "num_attention_heads": 4} if name == "MultiHeadAttention" else {})
        )
        inputs = (x, x) if name == "MultiHeadAttention" else (x,)
        plain, more = (
            getattr(flax_modules, name)(**given, **dict.fromkeys(own, True)) for own in ((), asked)
        )
        variables = filled(functools.partial(plain.init, KEY, *inputs))
        want, got = plain.apply(variables, *inputs), list(more.apply(variables, *inputs))
        bias = got.pop() if "return_bias" in asked else 0.0
        near(got.pop(0) + bias, want if name == "DenseGeneral" else want[0], BITS)
        if "return_residual" in asked:
            assert_same_bits("x", np.asarray(got.pop()), np.asarray(x))
        assert name == "DenseGeneral" or got == [None]


SEPARATE = {
    "one operation": {},
    "dropout": {"intermediate_dropout_rate": 0.5},
    "adaptation": {"enable_low_rank_adaptation": True},
    "no norm": {"enable_layernorm": False},
    "logical axes": {"dot_1_input_axes": ("rows", None), "dot_2_input_axes": ("rows", None)},
}


@combinations({"case": SEPARATE.keys(), "bias": [False, True]}, usual=["dropout-True"])
def test_a_module_that_adds_its_residual(case, bias):
    """Whatever splits it into several operations: y is what it is without, and x; so are the gradients."""
    x, g, options = (
        draw(0, 16, 64),
        draw(7, 16, 64),
        {"intermediate_dim": 128, "use_bias": bias, "return_layernorm_output": True},
    )
    plain, joins = (
        flax_modules.LayerNormMLP(**options, **SEPARATE[case], join_residual=join) for join in (False, True)
    )
    variables = linen.unbox(filled(plain.init, {"params": KEY, "dropout": KEY}, x))

    def pulled(variables, x, join):
        def function(variables, x):
            y, normed = (joins if join else plain).apply(variables, x, rngs={"dropout": KEY})
            return (y if join else y + x) + jnp.tanh(normed)

        y, back = jax.vjp(function, variables, x)
        return y, back(g)

    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    with jax.set_mesh(mesh), linen.logical_axis_rules((("rows", "data"),)):
        got, want = (jax.jit(pulled, static_argnums=2)(variables, x, join) for join in (True, False))
    jax.tree.map(lambda a, b: near(a, b, BITS), got, want)


@pytest.mark.parametrize("bias", [False, True])
def test_an_nnx_module_that_adds_its_residual(bias):
    x = draw(0, 16, 64)
    module = nnx_modules.LayerNormMLP(64, 128, rngs=nnx.Rngs(0), use_bias=bias)
    near(module(x, join_residual=True), module(x) + x, BITS)


PRODUCTS = {
    "one": {"features": 48},
    "adaptation": {"features": 48, "enable_low_rank_adaptation": True},
    "of three": {"features": (3, 16)},
    "two summed": {"features": 48, "axis": (0, 2)},
    "of three, adaptation": {"features": (3, 16), "enable_low_rank_adaptation": True},
}


@combinations({"case": PRODUCTS.keys(), "bias": [False, True]}, usual=["one-False", "adaptation-True"])
def test_a_flax_product_that_adds_a_residual(case, bias):
    x, module = draw(0, 4, 16, 64), flax_modules.DenseGeneral(**PRODUCTS[case], use_bias=bias)
    variables = filled(module.init, KEY, x)
    residual = draw(3, *module.apply(variables, x).shape)
    got, want = (
        gradients(
            lambda v, x, r, join=join: module.apply(v, x, r) if join else module.apply(v, x) + r,
            (variables, x, residual),
        )
        for join in (True, False)
    )
    jax.tree.map(lambda a, b: near(a, b, BITS), got, want)


@pytest.mark.parametrize("bias", [False, True])
def test_an_nnx_product_that_adds_a_residual(bias):
    x, module = draw(0, 16, 64), nnx_modules.DenseGeneral(64, (3, 16), rngs=nnx.Rngs(0), use_bias=bias)
    residual = draw(3, 16, 3, 16)
    near(module(x, residual=residual), module(x) + residual, BITS)


ATTENTIONS = {
    "packed": {},
    "groups": {"num_gqa_groups": 2},
    "three kernels": {"fuse_qkv_params": False},
    "no norm": {"input_layernorm": False},
    "rotary": {"enable_rotary_pos_emb": True},
    "adaptation": {"low_rank_adaptation_scope": "all"},
}


@combinations(
    {"case": ATTENTIONS.keys(), "cross": [False, True], "what": ["join_residual", "join_layernorm_output"]},
    usual=["packed-False-join_residual"],
)
def test_an_attention_that_adds_its_residual(case, cross, what):
    """Whatever its projections are: y is what it is without, and x or norm(x); so are the gradients."""
    x, encoded, g = draw(0, 2, 16, 64), draw(1, 2, 16, 64), draw(7, 2, 16, 64)
    options = {
        "head_dim": 16,
        "num_attention_heads": 4,
        "use_bias": True,
        "return_layernorm_output": True,
    } | ATTENTIONS[case]
    plain, joins = (flax_modules.MultiHeadAttention(**options, **more) for more in ({}, {what: True}))
    variables = linen.unbox(filled(lambda x: plain.init(KEY, x, encoded if cross else x), x))

    def pulled(variables, x, encoded, join):
        def function(variables, x, encoded):
            y, normed = (joins if join else plain).apply(variables, x, encoded if cross else x)
            return (y if join else y + (x if what == "join_residual" else normed)) + jnp.tanh(normed)

        y, back = jax.vjp(function, variables, x, encoded)
        return y, back(g)

    got, want = (jax.jit(pulled, static_argnums=3)(variables, x, encoded, join) for join in (True, False))
    jax.tree.map(lambda a, b: near(a, b, BITS), got, want)


@pytest.mark.parametrize(
    "options", [{}, {"num_gqa_groups": 2}, {"input_layernorm": False}, {"cross": True}], ids=str
)
def test_an_nnx_attention_that_adds_its_residual(options):
    x, module = (
        draw(0, 2, 16, 64),
        nnx_modules.MultiHeadAttention(64, 4, rngs=nnx.Rngs(0), use_bias=True, **options),
    )
    inputs = (x, draw(1, 2, 8, 64)) if "cross" in options else (x,)
    near(module(*inputs, join_residual=True), module(*inputs) + x, BITS)
