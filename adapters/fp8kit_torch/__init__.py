"""The PyTorch door of fp8kit: modules under Transformer Engine's names, on torch tensors, autograd and ``torch.compile``."""

from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from fp8kit_torch.autocast import autocast, fp8_autocast
from fp8kit_torch.linear import Linear
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.norm import LayerNorm, RMSNorm
from fp8kit_torch.norm_linear import LayerNormLinear
from fp8kit_torch.norm_mlp import LayerNormMLP
from fp8kit_torch.views import as_view, dtype_of, empty_like_metas

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "TransformerEngineBaseModule",
    "as_view",
    "autocast",
    "dtype_of",
    "empty_like_metas",
    "fp8_autocast",
]
