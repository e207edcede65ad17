"""Random bits of Flax's linen modules: their keys from the rng collection ``sr_rng``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from fp8kit_jax import autocast
from fp8kit_jax import flax as modules
from fp8kit_jax.te_compat.functions import dense
from fp8kit_jax.te_compat.modules import TransformerEngineBase

from fp8kit import recipe
from fp8kit.errors import RecipeError
from fp8kit.recipes import named
from tests.support.combinations import combinations

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 32, 64)), jnp.float32)
NVFP4 = named("nvfp4")
_FLASH = named("flash_attention_3")
DRAWN = recipe.DataRecipe(_FLASH.quantization, "drawn", replace(_FLASH.attention, signs="random"))


class Attention(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        heads = jnp.tile(x.reshape(2, 32, 1, 64), (1, 1, 2, 2))
        return modules.DotProductAttention(128, 2, transpose_batch_sequence=False)(heads, heads, heads)


class Own(TransformerEngineBase):
    """A program's module around a function."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", linen.initializers.lecun_normal(), (64, 48))
        return dense(x, kernel, None, ((2,), (0,)), quantizer_set=self.generate_quantizer_set())


MODULES = {
    "DenseGeneral": (modules.DenseGeneral(48), NVFP4),
    "LayerNormDenseGeneral": (modules.LayerNormDenseGeneral(48), NVFP4),
    "LayerNormMLP": (modules.LayerNormMLP(96), NVFP4),
    "make_dot_general_cls": (linen.Dense(48, dot_general_cls=modules.make_dot_general_cls(NVFP4)), NVFP4),
    "DotProductAttention": (Attention(), DRAWN),
    "TransformerEngineBase": (Own(), NVFP4),
}


@combinations({"name": MODULES.keys()}, usual=["LayerNormMLP"])
def test_keys_of_the_collection(name: str) -> None:
    """The bits are the key's, eager and jitted; an autocast's own key counts first; no key is an error, but
    of ``init``. Keys of "params" stand for those of a collection that is not given."""
    module, how = MODULES[name]

    def gradient(rngs: Any, key: Any = None) -> Any:
        def loss(x: Any) -> Any:
            with autocast(enabled=True, recipe=how, rng=key):
                y = module.apply(variables, x, rngs=rngs)
            return ((y[0] if isinstance(y, tuple) else y) ** 2).sum()

        return jax.grad(loss)(X)

    with autocast(enabled=True, recipe=how):
        variables = jax.jit(module.init)(jax.random.key(0), X)
    one, other = ({"sr_rng": jax.random.key(i)} for i in (1, 2))
    first = gradient(one)
    jitted = jax.jit(gradient)
    np.testing.assert_array_equal(jitted(one), first)
    assert not np.array_equal(jitted(other), first)
    own = jitted({}, jax.random.key(5))
    np.testing.assert_array_equal(jitted(one, jax.random.key(5)), own)
    assert not np.array_equal(own, first)
    assert not np.array_equal(
        gradient({"params": jax.random.key(6)}), gradient({"params": jax.random.key(7)})
    )
    wanted = r"expected a key: autocast\(\.\.\., rng=key\), or apply\(\.\.\., rngs={'sr_rng': key}\)"
    with pytest.raises(RecipeError, match=wanted):
        gradient({"dropout": jax.random.key(1)})


def test_layers_draw_bits_of_their_own() -> None:
    """Layers one after the other, and those of a scan whose keys are split."""
    layer = modules.DenseGeneral(64, use_bias=False)
    params = layer.init(jax.random.key(0), X)["params"]["kernel"]

    class Stack(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return [modules.DenseGeneral(64, use_bias=False)(x) for _ in range(2)]

    class Body(linen.Module):
        @linen.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return x, modules.DenseGeneral(64, use_bias=False)(x)

    class Around(TransformerEngineBase):
        """Whose own keys are the same in every step."""

        split: bool

        @linen.compact
        def __call__(self, x: Any) -> Any:
            split = {"sr_rng": self.split}
            return linen.scan(Body, variable_axes={"params": 0}, split_rngs=split, length=2)(name="own")(
                x, None
            )

    how = recipe.DataRecipe(
        NVFP4.quantization.map(lambda own: replace(own, stochastic_bits=8), "xwg"), "all stochastic"
    )
    key = {"sr_rng": jax.random.key(1)}
    with autocast(enabled=True, recipe=how):
        both = {"params": {f"DenseGeneral_{i}": {"kernel": params} for i in range(2)}}
        a, b = Stack().apply(both, X, rngs=key)
        assert not np.array_equal(a, b)
        stacked = {"params": {"DenseGeneral_0": {"kernel": jnp.stack([params] * 2)}}}
        for split in (True, False):
            scan = linen.scan(Body, variable_axes={"params": 0}, split_rngs={"sr_rng": split}, length=2)
            _, ys = scan().apply(stacked, X, None, rngs=key)
            assert np.array_equal(ys[0], ys[1]) != split
            _, ys = Around(split).apply({"params": {"own": stacked["params"]}}, X, rngs=key)
            assert np.array_equal(ys[0], ys[1]) != split
