"""Transformer Engine's modules, once for every frontend: arguments, checks, parameters, and what a forward
pass is made of."""

from fp8kit.layers.linear import Linear
from fp8kit.layers.norm import L2Normalization, LayerNorm, RMSNorm
from fp8kit.layers.norm_linear import LayerNormLinear
from fp8kit.layers.norm_mlp import LayerNormMLP

__all__ = ["L2Normalization", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm"]
