"""The PyTorch door of fp8kit: modules under Transformer Engine's names, on torch tensors, autograd and ``torch.compile``."""

from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from fp8kit_torch.attention import MultiheadAttention
from fp8kit_torch.autocast import autocast, fp8_autocast
from fp8kit_torch.checkpoint import checkpoint
from fp8kit_torch.dot_product_attention import DotProductAttention
from fp8kit_torch.functional import cross_entropy, dropout_add, embedding, parallel_cross_entropy
from fp8kit_torch.linear import Linear
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.norm import LayerNorm, RMSNorm
from fp8kit_torch.norm_linear import LayerNormLinear
from fp8kit_torch.norm_mlp import LayerNormMLP
from fp8kit_torch.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from fp8kit_torch.transformer import TransformerLayer
from fp8kit_torch.views import as_view, dtype_of, empty_like_metas

__all__ = [
    "DelayedScaling",
    "DotProductAttention",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerEngineBaseModule",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "as_view",
    "autocast",
    "checkpoint",
    "cross_entropy",
    "dropout_add",
    "dtype_of",
    "embedding",
    "empty_like_metas",
    "fp8_autocast",
    "parallel_cross_entropy",
]
