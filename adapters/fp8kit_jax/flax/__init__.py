"""Flax (linen) modules with Transformer Engine's names, fields, parameter names and FP8 collection. Needs
Flax (extra ``flax``)."""

from fp8kit import errors as _errors

if _why := _errors.not_installed("fp8kit_jax.flax", "flax", "flax"):
    raise ImportError(_why, name="flax")

from fp8kit_jax.flax.attention import DotProductAttention, MultiHeadAttention, RelativePositionBiases
from fp8kit_jax.flax.common import extend_logical_axis_rules
from fp8kit_jax.flax.dense import DenseGeneral, LayerNorm, LayerNormDenseGeneral, LayerNormMLP
from fp8kit_jax.flax.dot_general import make_dot_general_cls
from fp8kit_jax.flax.grouped import GroupedDense
from fp8kit_jax.flax.moe import GroupedMLP
from fp8kit_jax.flax.transformer import TransformerLayer, TransformerLayerType

__all__ = [
    "DenseGeneral",
    "DotProductAttention",
    "GroupedDense",
    "GroupedMLP",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "MultiHeadAttention",
    "RelativePositionBiases",
    "TransformerLayer",
    "TransformerLayerType",
    "extend_logical_axis_rules",
    "make_dot_general_cls",
]
