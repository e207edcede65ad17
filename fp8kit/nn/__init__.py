"""Modules with Transformer Engine's names, arguments and parameter names, on the native tape."""

from fp8kit.nn.attention import MultiheadAttention
from fp8kit.nn.dot_product_attention import DotProductAttention
from fp8kit.nn.embedding import Dropout, Embedding, cross_entropy
from fp8kit.nn.inference import InferenceParams
from fp8kit.nn.linear import Linear
from fp8kit.nn.module import Module, ModuleList, Parameter, Sequential
from fp8kit.nn.norm import L2Normalization, LayerNorm, RMSNorm
from fp8kit.nn.norm_linear import LayerNormLinear
from fp8kit.nn.norm_mlp import LayerNormMLP
from fp8kit.nn.random import RandomState, get_rng_state, manual_seed, normal_init, set_rng_state
from fp8kit.nn.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from fp8kit.nn.transformer import TransformerLayer

__all__ = [
    "DotProductAttention", "Dropout", "Embedding", "InferenceParams", "L2Normalization", "LayerNorm", "LayerNormLinear", "LayerNormMLP",
    "Linear", "Module", "ModuleList", "MultiheadAttention", "Parameter", "RMSNorm", "RandomState", "RotaryPositionEmbedding", "Sequential",
    "TransformerLayer", "apply_rotary_pos_emb", "cross_entropy", "get_rng_state", "manual_seed", "normal_init", "set_rng_state",
]
