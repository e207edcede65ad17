"""Flax NNX modules with Transformer Engine's names. FP8 state lies in variables of type ``Fp8Meta``, beside
the ``nnx.Param``s.

A step takes gradients with respect to both, and hands the state's on ::

    wrt = nnx.DiffState(0, (nnx.Param, Fp8Meta))
    loss, grads = nnx.value_and_grad(loss_fn, argnums=wrt)(model, x)
    update_fp8(model, grads)                               # the "gradient" of the state is the next state
    optimizer.update(model, grads.filter(nnx.Param))

Modules with dropout take their keys from the ``nnx.Rngs`` stream "dropout" that they were made with;
``module.eval()`` switches it off. Modules are made under ``autocast`` with the recipe that they are to run
with: it decides which variables there are. Needs Flax.
"""

from fp8kit import errors as _errors

if _why := _errors.not_installed("fp8kit_jax.nnx", "flax", "flax"):
    raise ImportError(_why, name="flax")

from fp8kit_jax.nnx.attention import DotProductAttention, MultiHeadAttention
from fp8kit_jax.nnx.dense import (
    DenseGeneral,
    Fp8Meta,
    LayerNorm,
    LayerNormDenseGeneral,
    LayerNormMLP,
    name_layers,
    update_fp8,
)
from fp8kit_jax.nnx.grouped import GroupedDense
from fp8kit_jax.nnx.moe import GroupedMLP
from fp8kit_jax.nnx.transformer import TransformerLayer

__all__ = [
    "DenseGeneral",
    "DotProductAttention",
    "Fp8Meta",
    "GroupedDense",
    "GroupedMLP",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "MultiHeadAttention",
    "TransformerLayer",
    "name_layers",
    "update_fp8",
]
