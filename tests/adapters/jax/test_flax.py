"""The Flax modules: Transformer Engine's README example, the functions' bits, and every module's shapes,
names and training."""

from __future__ import annotations

import flax
import fp8kit_jax as te
import fp8kit_jax.flax as te_flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from fp8kit import recipe
from fp8kit.errors import RecipeError
from fp8kit.testing import assert_close, assert_same_bits
from tests.adapters.jax.filled import filled
from tests.support.combinations import combinations

RECIPES = {
    "high": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}


def test_the_readme_example_of_transformer_engine():
    """Ten steps of DenseGeneral under delayed scaling, value and gradients over parameters and FP8
    variables."""
    rng, data_rng = jax.random.split(jax.random.PRNGKey(0))
    inp = jax.random.normal(data_rng, [4, 16, 64], jnp.float32)
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.HYBRID)
    with te.autocast(enabled=True, recipe=fp8_recipe):
        model = te_flax.DenseGeneral(features=64)

        def loss_fn(params, other_vars, inp):
            out = model.apply({"params": params, **other_vars}, inp)
            return jnp.mean(out**2)

        variables = model.init(rng, inp)
        other_variables, params = flax.core.pop(variables, "params")
        fwd_bwd_fn = jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1)))
        losses = []
        for _ in range(10):
            loss, (param_grads, other_grads) = fwd_bwd_fn(params, other_variables, inp)
            other_variables = te.update_collections(other_grads, other_variables)
            params = jax.tree.map(lambda p, g: p - 0.5 * g, params, param_grads)
            losses.append(float(loss))
    metas = other_variables[te.FP8_COLLECTION_NAME]
    assert sorted(metas) == [f"{n}_{f}" for n in ("grad", "kernel", "x") for f in ("amax_history", "scale")]
    assert losses == sorted(losses, reverse=True)
    amax = np.abs(np.asarray(inp)).max()
    np.testing.assert_array_equal(np.asarray(metas["x_amax_history"])[-10:], amax)
    assert np.asarray(metas["x_scale"])[0] == np.float32(448) / amax


@combinations({"name": RECIPES.keys()}, usual=["high", "delayed"])
def test_modules_are_the_functions(name):
    x = jax.random.normal(jax.random.key(1), (2, 16, 32))
    with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        sets = te.create_set()
        module = te_flax.LayerNormDenseGeneral((2, 24), use_bias=True, return_layernorm_output=True)
        variables = filled(module.init, jax.random.key(0), x)
        p = nn.unbox(variables["params"])
        y, normed = jax.jit(module.apply)(variables, x)
        want = te.layernorm_dense(
            x,
            p["kernel"],
            p["scale"],
            p["ln_bias"],
            p["bias"],
            quantizer_set=sets,
            return_layernorm_output=True,
        )
        assert_same_bits("y", np.asarray(y), np.asarray(want[0]))
        assert_same_bits("norm(x)", np.asarray(normed), np.asarray(want[1]))
        mlp = te_flax.LayerNormMLP(48, activations=("silu", "linear"), use_bias=True)
        variables = filled(mlp.init, jax.random.key(0), x)
        p = nn.unbox(variables["params"])
        assert {n: v.shape for n, v in p.items()} == {
            "scale": (32,),
            "ln_bias": (32,),
            "wi_kernel": (32, 2, 48),
            "wo_kernel": (48, 32),
            "wi_bias": (2, 48),
            "wo_bias": (32,),
        }
        kernels, biases = (p["wi_kernel"], p["wo_kernel"]), (p["wi_bias"], p["wo_bias"])
        options = {"activation_type": ("silu", "linear"), "quantizer_sets": (sets, sets)}
        want = te.layernorm_mlp(x, p["scale"], p["ln_bias"], kernels, biases, **options)
        assert_same_bits("mlp", np.asarray(jax.jit(mlp.apply)(variables, x)[0]), np.asarray(want))


LAYERS = {
    "encoder": {},
    "gqa": {
        "num_gqa_groups": 2,
        "enable_relative_embedding": False,
        "enable_rotary_pos_emb": True,
        "layernorm_type": "rmsnorm",
    },
    "post": {
        "apply_residual_connection_post_layernorm": True,
        "fuse_qkv_params": False,
        "mlp_activations": ("silu", "linear"),
    },
    "decoder": {
        "layer_type": te_flax.TransformerLayerType.DECODER,
        "use_bias": True,
        "intermediate_dropout": 0.1,
    },
    "output_norm": {"output_layernorm": True, "transpose_batch_sequence": True},
}


def test_a_layer_whose_state_was_not_made_says_so():
    layer, x = te_flax.DenseGeneral(16), jnp.ones((2, 8, 32))
    variables = layer.init(jax.random.key(0), x)
    with te.autocast(enabled=True, recipe=RECIPES["delayed"]):
        with pytest.raises(
            RecipeError,
            match=r"^DenseGeneral: _overwrite_with_gradient: got none of this layer, expected the variables",
        ):
            layer.apply(variables, x)
        y, made = layer.apply(variables, x, mutable=[te.FP8_COLLECTION_NAME])  # there it may be made
        assert_same_bits("y", np.asarray(layer.apply(variables | made, x)), np.asarray(y))
        axes = {"params": 0, "fp8_metas": 0}
        scanned = nn.scan(lambda layer, x, _: (layer(x), None), axes, split_rngs={"params": True}, length=2)
        stack = nn.init(lambda layer, x: scanned(layer, x, None), te_flax.DenseGeneral(32))
        with pytest.raises(
            RecipeError, match=r"_overwrite_with_gradient: .* variable_axes of a scan or vmap"
        ):
            jax.eval_shape(stack, jax.random.key(0), x)


@combinations({"kind": LAYERS.keys()}, usual=["gqa"])
def test_a_transformer_layer_learns(kind):
    """A random regression with dropout off at measuring: the loss falls by half in 12 steps of Adam, in FP8,
    the state threaded on."""
    layer = te_flax.TransformerLayer(32, 48, 4, hidden_dropout=0.02, attention_dropout=0.02, **LAYERS[kind])
    x, want, encoded = (jax.random.normal(jax.random.key(i), (2, 8, 32)) for i in range(3))
    encoded = encoded if kind == "decoder" else None
    with te.autocast(enabled=True, recipe=RECIPES["delayed"]):
        keys = {"params": jax.random.key(3), "dropout": jax.random.key(4)}
        variables = jax.jit(layer.init)(keys, x, encoded)
        other, params = flax.core.pop(variables, "params")
        opt = optax.adam(2e-2)
        state = jax.jit(opt.init)(params)

        def loss(params, other, key, deterministic=False):
            y = layer.apply(
                {"params": params, **other}, x, encoded, deterministic=deterministic, rngs={"dropout": key}
            )
            return jnp.mean((y - want) ** 2)

        @jax.jit
        def step(params, other, state, key):
            (grads, fresh) = jax.grad(loss, (0, 1))(params, other, key)
            updates, state = opt.update(grads, state)
            return optax.apply_updates(params, updates), te.update_collections(fresh, other), state

        measured = jax.jit(loss, static_argnums=3)
        first = measured(params, other, jax.random.key(9), True)
        for i in range(12):
            params, other, state = step(params, other, state, jax.random.key(i))
        assert measured(params, other, jax.random.key(9), True) < 0.5 * first
    scales = [
        v
        for path, v in jax.tree_util.tree_leaves_with_path(other)
        if jax.tree_util.keystr(path).endswith("_scale']")
    ]
    assert len(scales) == 3 * {"encoder": 4, "gqa": 5, "post": 6, "decoder": 7, "output_norm": 4}[kind]
    assert all(float(s[0]) != 1.0 for s in scales)


def test_relative_position_biases_and_masks():
    module = te_flax.RelativePositionBiases(8, 16, 2)
    variables = module.init(jax.random.key(0), 4, 6)
    bias = module.apply(variables, 4, 6)
    table = np.asarray(nn.unbox(variables["params"])["rel_embedding"])
    np.testing.assert_array_equal(np.asarray(bias)[0, :, 0, 0], table[:, 0])
    np.testing.assert_array_equal(np.asarray(bias)[0, :, 1, 0], table[:, 1])
    np.testing.assert_array_equal(np.asarray(bias)[0, :, 0, 1], table[:, 5])
    q = jax.random.normal(jax.random.key(1), (2, 8, 4, 16))
    causal = te_flax.DotProductAttention(16, 4).apply({}, q, q, q)
    hidden = jnp.zeros((1, 1, 8, 8), bool)
    masked = te_flax.DotProductAttention(16, 4).apply({}, q, q, q, mask=hidden)
    assert_close("values", np.asarray(masked), np.asarray(causal), "float32", 2.0 ** (-20))
    lengths = jnp.array([8, 5])
    padded = te_flax.DotProductAttention(16, 4, attn_mask_type="padding").apply({}, q, q, q, lengths)
    assert not np.asarray(padded)[1, 5:].any()
    short = te_flax.DotProductAttention(16, 4, attn_mask_type="no_mask").apply(
        {}, q[1:, :5], q[1:, :5], q[1:, :5]
    )
    assert_close("values", np.asarray(padded)[1:, :5], np.asarray(short), "float32", 2.0 ** (-20))


CAUSAL = ("causal", "causal_bottom_right", "padding_causal", "causal_padding", "padding_causal_bottom_right")


@combinations({"kind": CAUSAL, "rows": [8, 5], "window": [None, (3, 0), (2, -1)]})
def test_a_mask_adds_to_what_a_causal_type_and_a_window_hide(kind, rows, window):
    """Values of "arbitrary" with all of it in one mask; no row is changed by a token that it may not see."""
    q, k, v = (jax.random.normal(jax.random.key(i), (2, n, 4, 16)) for i, n in enumerate((rows, 8, 8)))
    mask = jnp.zeros((2, 1, 1, 8), bool).at[0, ..., 6:].set(True).at[1, ..., 0].set(True)
    place = np.arange(rows)[:, None] + (8 - rows if kind.endswith("bottom_right") else 0)
    hidden = np.arange(8) > place
    if window is not None:
        hidden |= np.arange(8) < place - window[0]
    core = te_flax.DotProductAttention(16, 4, attn_mask_type=kind, window_size=window)
    whole = te_flax.DotProductAttention(16, 4, attn_mask_type="arbitrary")
    got, want = core.apply({}, q, k, v, mask=mask), whole.apply({}, q, k, v, mask=mask | hidden)
    assert_close("values", np.asarray(got), np.asarray(want), "float32", 2.0 ** (-20))
    narrow = core.apply({}, q, k, v, mask=jnp.broadcast_to(mask, (2, 1, rows, 8)))
    assert_same_bits("a mask of every row", np.asarray(narrow), np.asarray(got))
    other = core.apply({}, q, k.at[:, 5].add(1.0), v.at[:, 5].set(9.0), mask=mask)
    sees = (np.asarray(got) != np.asarray(other)).any((0, 2, 3))
    np.testing.assert_array_equal(sees, ~hidden[:, 5])


@combinations({"kind": CAUSAL}, usual=["causal", "padding_causal_bottom_right"])
def test_a_layer_with_a_causal_mask_and_padding_sees_no_later_token(kind):
    x = jax.random.normal(jax.random.key(1), (2, 8, 32))
    mask = jnp.broadcast_to(jnp.arange(8) >= 6, (2, 1, 8, 8))
    layer = te_flax.TransformerLayer(32, 48, 4, self_attn_mask_type=kind, enable_relative_embedding=False)
    variables = filled(layer.init, jax.random.key(0), x, None, mask, deterministic=True)
    got, other = (
        np.asarray(layer.apply(variables, a, None, mask, deterministic=True))
        for a in (x, x.at[:, 4].set(3.0))
    )
    np.testing.assert_array_equal((got != other).any((0, 2)), np.arange(8) >= 4)
