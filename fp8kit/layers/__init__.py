"""Transformer Engine's modules, once for every frontend: arguments, checks, parameters, and what a forward
pass is made of."""

from fp8kit.layers.attention import MultiheadAttention
from fp8kit.layers.dot_product_attention import DotProductAttention
from fp8kit.layers.grouped import GroupedLinearBase, GroupedMLP
from fp8kit.layers.linear import Linear
from fp8kit.layers.norm import L2Normalization, LayerNorm, RMSNorm
from fp8kit.layers.norm_linear import LayerNormLinear
from fp8kit.layers.norm_mlp import LayerNormMLP
from fp8kit.layers.transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "GroupedLinearBase",
    "GroupedMLP",
    "L2Normalization",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "TransformerLayer",
]
