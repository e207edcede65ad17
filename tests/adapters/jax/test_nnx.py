"""The NNX modules learn in FP8, their state handed on, and compute what the functions compute."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from fp8kit_jax import flax as flax_modules
from fp8kit_jax import nnx as modules

from fp8kit import recipe
from fp8kit.errors import RecipeError
from fp8kit.testing import assert_same_bits
from tests.support.combinations import combinations

RECIPES = {"delayed": recipe.DelayedScaling(amax_history_len=4), "current": recipe.Float8CurrentScaling()}


@combinations({"name": RECIPES.keys()}, usual=["delayed"])
def test_a_transformer_layer_learns(name):
    x, want = (jax.random.normal(jax.random.key(i), (2, 8, 32)) for i in range(2))
    with fj.autocast(enabled=True, recipe=RECIPES[name]):
        model = modules.TransformerLayer(32, 48, 4, rngs=nnx.Rngs(0), use_bias=True)
        optimizer = nnx.Optimizer(model, optax.adam(2e-2), wrt=nnx.Param)

        def loss_fn(model, x):
            return jnp.mean((model(x) - want) ** 2)

        @nnx.jit
        def step(model, optimizer, x):
            wrt = nnx.DiffState(0, nnx.Any(nnx.Param, modules.Fp8Meta))
            loss, grads = nnx.value_and_grad(loss_fn, argnums=wrt)(model, x)
            modules.update_fp8(model, grads)
            optimizer.update(model, nnx.filter_state(grads, nnx.Param))
            return loss

        losses = [float(step(model, optimizer, x)) for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]
    metas = jax.tree.leaves(nnx.state(model, modules.Fp8Meta))
    assert len(metas) == (4 * 6 if name == "delayed" else 0)
    if name == "delayed":
        amax = np.asarray(model.attention.qkv.quantizers.grad_amax_history[...])
        assert (amax[1:] > 0).all()


def test_modules_are_the_functions():
    x = jax.random.normal(jax.random.key(1), (2, 16, 32))
    with fj.autocast(enabled=True, recipe=RECIPES["delayed"]):
        sets = fj.create_set()
        module = modules.LayerNormDenseGeneral(32, (2, 24), rngs=nnx.Rngs(0), layernorm_type="rmsnorm")
        want = fj.layernorm_dense(
            x, module.kernel[...], module.norm.scale[...], None, None, "rmsnorm", quantizer_set=sets
        )
        assert_same_bits("y", np.asarray(module(x)), np.asarray(want))
    norm = modules.LayerNorm(32)
    assert_same_bits(
        "norm", np.asarray(norm(x)), np.asarray(fj.layernorm(x, norm.scale[...], norm.ln_bias[...]))
    )


def test_an_mlp_with_an_activation_that_no_kernel_has():
    """Is a Flax one, with delayed scaling, whose state goes on too."""
    x, kinds = jax.random.normal(jax.random.key(1), (2, 16, 32)), ("Tanh", "swish")
    with fj.autocast(enabled=True, recipe=RECIPES["delayed"]):
        module = modules.LayerNormMLP(32, 48, rngs=nnx.Rngs(0), activations=kinds, layernorm_type="rmsnorm")
        other = flax_modules.LayerNormMLP(48, activations=kinds, layernorm_type="rmsnorm")
        variables = other.init(jax.random.key(0), x)
        kernels = {name: getattr(module, name)[...] for name in ("wi_kernel", "wo_kernel")}
        own = nn.unbox(variables) | {"params": {"scale": module.norm.scale[...], **kernels}}
        assert_same_bits("y", np.asarray(module(x)), np.asarray(other.apply(own, x)[0]))

        def loss(own):
            return (other.apply(own, x)[0] ** 2).sum()

        state = jax.grad(loss, allow_int=True)(own)[fj.FP8_COLLECTION_NAME]
    for postfix in ("_0", "_1"):
        assert np.asarray(state[f"x{postfix}_amax_history"]).max() > 0
        assert np.asarray(state[f"grad{postfix}_amax_history"]).max() > 0


def test_attention_is_the_function():
    """Self attention, packed, is ``dot_product_attention`` of the projections."""
    x = jax.random.normal(jax.random.key(1), (2, 16, 32))
    options = {"attn_mask_type": "no_mask", "softcap": 0.5}
    plain = modules.MultiHeadAttention(32, 4, rngs=nnx.Rngs(0), **options)
    q, k, v = (plain.qkv(x)[:, :, i].reshape(2, 16, 4, 8) for i in range(3))
    want = plain.out(fj.dot_product_attention(q, k, v, **options).reshape(2, 16, 32))
    assert_same_bits("packed", np.asarray(plain(x)), np.asarray(want))


@combinations(
    {"kind": ["L2Normalization", "RMSNorm", "LayerNorm"], "first": [False, True]},
    usual=["L2Normalization-False", "RMSNorm-True", "LayerNorm-False"],
)
def test_cross_attention_is_the_function(kind, first):
    x, e = (jax.random.normal(jax.random.key(i), (2, 16, 32)) for i in (1, 2))
    layer = modules.MultiHeadAttention(
        32,
        4,
        rngs=nnx.Rngs(0),
        num_gqa_groups=2,
        rotary=True,
        qk_norm_type=kind,
        qk_norm_before_rope=first,
        cross=True,
        attn_mask_type="no_mask",
    )
    q, kv = layer.query(x).reshape(2, 16, 4, 8), layer.kv(e).reshape(2, 16, 2, 2, 8)

    def norm(a):
        if kind == "L2Normalization":
            return fj.l2norm(a)
        return fj.layernorm(a, jnp.ones(8), jnp.zeros(8) if kind == "LayerNorm" else None, kind.lower())

    def rotate(a):
        return fj.rope(a, fj.rope_frequencies(8, 16))

    q, k = (rotate(norm(a)) if first else norm(rotate(a)) for a in (q, kv[:, :, 0]))
    o = fj.dot_product_attention(q, k, kv[:, :, 1], attn_mask_type="no_mask").reshape(2, 16, 32)
    assert_same_bits(kind, np.asarray(layer(x, e)), np.asarray(layer.out(o)))


def test_dropout_trains_and_not_evaluates():
    x = jax.random.normal(jax.random.key(1), (4, 8, 32))
    options = {"hidden_dropout": 0.5, "attention_dropout": 0.5, "drop_path": 0.5}
    wild = modules.TransformerLayer(32, 48, 4, rngs=nnx.Rngs(0, dropout=1), **options)
    calm = modules.TransformerLayer(32, 48, 4, rngs=nnx.Rngs(0))
    first, second = wild(x), wild(x)
    assert not np.array_equal(first, second)
    same = modules.TransformerLayer(32, 48, 4, rngs=nnx.Rngs(0, dropout=1), **options)
    assert_same_bits("one seed", np.asarray(nnx.jit(lambda m, x: m(x))(same, x)), np.asarray(first))
    wild.eval()
    assert_same_bits("evaluation", np.asarray(wild(x)), np.asarray(calm(x)))
    dropped = modules.TransformerLayer(32, 48, 4, rngs=nnx.Rngs(0, dropout=3), drop_path=0.5)
    many = np.concatenate([x] * 8)
    y = nnx.jit(lambda m, x: m(x))(dropped, many)
    kept = [np.array_equal(a, b) for a, b in zip(y, many, strict=True)]
    assert 0 < sum(kept) < 32  # a quarter of the samples lose both branches: 8 +- 2.4


def test_a_module_that_was_made_without_state():
    layer = modules.DenseGeneral(16, 32, rngs=nnx.Rngs(0))
    with (
        fj.autocast(enabled=True, recipe=RECIPES["delayed"]),
        pytest.raises(RecipeError, match="Fp8Meta: got none of this module"),
    ):
        layer(jnp.ones((4, 16)))
    with fj.autocast(enabled=True, recipe=RECIPES["current"]):
        assert layer(jnp.ones((4, 16))).shape == (4, 32)


@pytest.mark.parametrize("shape", [(0, 8, 32), (2, 0, 32)])
def test_an_attention_layer_of_nothing_gives_nothing(shape):
    x, packed = jnp.ones(shape), modules.TransformerLayer(32, 48, 4, rngs=nnx.Rngs(0))
    for layer in (packed, modules.MultiHeadAttention(32, 4, rotary=True, rngs=nnx.Rngs(0))):
        assert layer(x).shape == shape
    y, _ = flax_modules.MultiHeadAttention(8, 4).init_with_output(jax.random.key(0), x, x)[0]
    assert y.shape == shape


def test_tabulate_takes_every_layer():
    x = jnp.ones((2, 8, 32))
    with fj.autocast(enabled=True, recipe=RECIPES["delayed"]):
        options = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "rotary": True}
        layer = modules.TransformerLayer(32, 48, 4, rngs=nnx.Rngs(0), **options)
        assert "attention/core" in nnx.tabulate(layer, x, console_kwargs={"width": 200})
