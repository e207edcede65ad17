"""Decoding with a cache: tokens one by one, or some at a time, give what all of them at once give."""

from __future__ import annotations

import functools

import flax
import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax import flax as modules

from fp8kit.errors import Fp8kitError
from fp8kit.recipe import DelayedScaling, Float8BlockScaling
from fp8kit.testing import assert_close
from tests.adapters.jax.filled import filled
from tests.support.combinations import combinations

X = jax.random.normal(jax.random.key(1), (2, 12, 32))
BITS = 2.0**-19  # other numbers of columns and rows, so another order of the same float32 sums
LAYERS = {
    "plain": {"enable_relative_embedding": False},
    "relative": {},
    "rotary": {
        "enable_relative_embedding": False,
        "enable_rotary_pos_emb": True,
        "rotary_pos_emb_group_method": "alternate",
    },
    "groups": {"num_gqa_groups": 2, "qk_norm_type": "RMSNorm", "enable_rotary_pos_emb": True},
    "window": {"window_size": (3, 0), "fuse_qkv_params": False},
    "decoder": {"layer_type": modules.TransformerLayerType.DECODER},
    "transposed": {"transpose_batch_sequence": True, "enable_rotary_pos_emb": True},
}


def layer(**options):
    return modules.TransformerLayer(32, 48, 4, hidden_dropout=0.0, attention_dropout=0.0, **options)


def incremental(module, variables, parts, at, encoded=None):
    """What a jitted step gives for one part after the other, and the cache at the end."""
    kept, cache = flax.core.pop(variables, "cache")

    @jax.jit
    def step(cache, x):
        return module.apply(
            kept | {"cache": cache}, x, encoded, deterministic=True, decode=True, mutable=["cache"]
        )

    out = []
    for part in parts:
        y, fresh = step(cache, part)
        cache = fresh["cache"]
        out.append(y)
    return jnp.concatenate(out, at), cache


@combinations({"kind": LAYERS.keys()}, usual=["decoder"])
def test_tokens_in_turn_are_all_tokens(kind):
    """Five tokens at once, one, and one, and five: a prompt, and what follows."""
    module, at = layer(**LAYERS[kind]), int(kind != "transposed")
    x = X if at else X.swapaxes(0, 1)
    encoded = jax.random.normal(jax.random.key(2), x.shape) if kind == "decoder" else None
    variables = filled(module.init, jax.random.key(0), x, encoded, deterministic=True, decode=True)
    whole = jax.jit(functools.partial(module.apply, deterministic=True))
    want = whole({"params": variables["params"]}, x, encoded)
    got, cache = incremental(module, variables, jnp.split(x, (5, 6, 7), at), at, encoded)
    assert_close("values", np.asarray(got), np.asarray(want), "float32", BITS * float(jnp.abs(want).max()))
    own = cache["self_attention" if kind == "decoder" else "attention"]
    assert sorted(own) == ["cache_index", "cached_key", "cached_value"]
    assert int(own["cache_index"]) == 12


@combinations(
    {"recipe": {"delayed": DelayedScaling(amax_history_len=4), "block": Float8BlockScaling()}},
    usual=["delayed"],
)
def test_tokens_in_turn_in_fp8(recipe):
    """Scales that do not depend on the other tokens: the same codes; what differs are roundings before a
    cast, each a code at most."""
    module = layer(enable_relative_embedding=False)
    with fj.autocast(enabled=True, recipe=recipe):
        variables = module.init(jax.random.key(0), X, deterministic=True, decode=True)
        want = module.apply(
            {name: part for name, part in variables.items() if name != "cache"}, X, deterministic=True
        )
        got, _ = incremental(module, variables, jnp.split(X, 12, 1), 1)
    difference, largest = np.abs(np.asarray(got - want)), float(jnp.abs(want).max())
    assert difference.max() <= 2.0**-6 * largest
    assert (difference <= BITS * largest).mean() > 0.95


def test_a_mask_hides_cached_tokens_and_the_cache_ends():
    module = modules.MultiHeadAttention(8, 4)
    variables = filled(lambda key, x: module.init(key, x, x, decode=True), jax.random.key(0), X)
    hidden = jnp.zeros((2, 1, 1, 12), bool).at[:, :, :, 2].set(True)
    want = module.apply({"params": variables["params"]}, X, X, jnp.broadcast_to(hidden, (2, 1, 12, 12)))[0]
    kept, cache = flax.core.pop(variables, "cache")
    step = jax.jit(
        lambda cache, x: module.apply(kept | {"cache": cache}, x, x, hidden, decode=True, mutable=["cache"])
    )
    out = []
    for t in range(13):
        (y, _), fresh = step(cache, X[:, t % 12 : t % 12 + 1])
        cache = fresh["cache"]
        out.append(y)
    got = jnp.concatenate(out[:12], 1)
    assert_close("values", np.asarray(got), np.asarray(want), "float32", BITS * float(jnp.abs(want).max()))
    assert jnp.isnan(out[12]).all()


def test_what_has_no_cache_is_refused():
    for field, options in (
        ("attn_mask_type", {"attn_mask_type": "padding_causal"}),
        ("attn_bias_type", {"attn_bias_type": "alibi"}),
    ):
        with pytest.raises(Fp8kitError, match=rf"MultiHeadAttention: {field}: got"):
            modules.MultiHeadAttention(8, 4, **options).init(jax.random.key(0), X, X, decode=True)
