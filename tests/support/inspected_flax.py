"""The model of ``tests.support.inspected`` as Flax's modules."""

from __future__ import annotations

from flax import linen, nnx
from fp8kit_jax import flax as fl
from fp8kit_jax import nnx as fn

from tests.support.inspected import HIDDEN, INNER, OUT


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x, _ = fl.LayerNormMLP(intermediate_dim=INNER, name="mlp")(x)
        return fl.DenseGeneral(OUT, name="out")(x)


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.mlp = fn.LayerNormMLP(HIDDEN, INNER, rngs=rngs)
        self.out = fn.DenseGeneral(HIDDEN, OUT, rngs=rngs)

    def __call__(self, x):
        return self.out(self.mlp(x))
