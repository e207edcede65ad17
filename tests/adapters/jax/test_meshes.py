"""Training on meshes of two and four devices by Transformer Engine's logical axes, and by shard_map: the
losses of one device.

A sum over devices is made in another order, and one code that a sum moves is felt for some steps: losses are
compared in total. Scales of equal inputs, and codes, are the same to the last bit.
"""

from __future__ import annotations

import functools

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fp8kit.testing import assert_same_bits
from tests.support.combinations import combinations
from tests.support.meshes import LAYOUTS, MODELS, RECIPES, fp8_state, train
from tests.support.sharding import draw, placed, two

STEPS, TOTAL = 100, 1e-3  # the bar of the total of a hundred losses


@functools.cache
def alone(model, recipe, steps):
    return train(model, recipe, steps)


@combinations({"model": MODELS.keys(), "recipe": RECIPES.keys(), "layout": LAYOUTS.keys()}, usual=())
def test_a_hundred_steps(model, recipe, layout):
    want, one = alone(model, recipe, STEPS)
    got, state = train(model, recipe, STEPS, LAYOUTS[layout])
    assert want[-1] < 0.9 * want[0]
    assert abs(sum(got) - sum(want)) <= TOTAL * sum(want)
    kernels = [leaf for leaf in jax.tree.leaves(state.params["params"]) if leaf.ndim > 1]
    whole = not {"fsdp", "tp"} & LAYOUTS[layout].axes.keys()
    assert all(leaf.sharding.is_fully_replicated is whole for leaf in kernels)
    assert jax.tree.structure(state.params) == jax.tree.structure(one.params)


@combinations(
    {"model": MODELS.keys(), "layout": LAYOUTS.keys()},
    usual=["DenseGeneral-dp and tpsp", "DenseGeneral-fsdp and tp"],
)
def test_scales_after_a_step(model, layout):
    """Of every kernel and of the first product's input, which are one device's: to the last bit."""
    got, want = (
        fp8_state(train(model, "delayed", 1, LAYOUTS[layout])[1]),
        fp8_state(alone(model, "delayed", 1)[1]),
    )
    first = {"DenseGeneral": "['x_", "LayerNormMLP": "['x_0_", "TransformerLayer": "['attention']['qkv']['x_"}
    same = [name for name in want if "['kernel_" in name or name.startswith(first[model])]
    assert got.keys() == want.keys()
    assert len(same) == {"DenseGeneral": 4, "LayerNormMLP": 6, "TransformerLayer": 10}[model]
    for name in same:
        assert_same_bits(name, got[name], want[name])


@combinations(
    {"axes": [("data", None), (None, "tensor"), ("data", "tensor")], "recipe": ["delayed", "current"]}
)
def test_codes_of_a_product(recipe, axes):
    """What a product keeps for backward, the codes of both operands among it: split by rows, by columns, by
    both."""
    rows, columns = axes
    args = (draw(0, 4, 16, 32) * jnp.exp2(jnp.arange(4.0))[:, None, None], draw(1, 32, 64), two(recipe)[0])

    @jax.jit
    def kept(x, w, sets):
        return jax.tree.leaves(jax.vjp(lambda *a: fj.dense(*a, quantizer_set=sets), x, w)[1])

    want, got = kept(*args), kept(*placed(args, ((rows,), (None, columns), ())))
    codes = [leaf for leaf in want if leaf.dtype.itemsize == 1]
    assert len(codes) >= 2
    assert columns is None or any(P() != leaf.sharding.spec for leaf in got)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(str(b.dtype), np.asarray(a), np.asarray(b))
