"""Functions for ``CustomRecipe`` that mix formats (``custom_recipes.quantizer_factory_zoo``). Those that want
a scale of each row of NVFP4, or another format for attention, are not among them."""

from __future__ import annotations

from fp8kit.layer_recipes import QuantizerRole
from fp8kit_torch.te_compat.block_tensors import NVFP4Quantizer
from fp8kit_torch.te_compat.custom_recipes import (
    HybridQuantizer,
    IdentityQuantizer,
    mxfp8_factory,
    nvfp4_factory,
)
from fp8kit_torch.te_compat.quantizers import Quantizer


def _forward_and_backward(role: QuantizerRole, forward: Quantizer, backward: Quantizer) -> Quantizer:
    """``forward`` for fprop, ``backward`` for dgrad and wgrad."""
    if role.operand == "grad_output":
        return backward
    return HybridQuantizer(rowwise_quantizer=forward, columnwise_quantizer=backward)


def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole) -> Quantizer:
    """fprop in high precision, dgrad and wgrad in MXFP8."""
    return _forward_and_backward(role, IdentityQuantizer(), mxfp8_factory(role))


def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole) -> Quantizer:
    """fprop in MXFP8, dgrad and wgrad in high precision."""
    return _forward_and_backward(role, mxfp8_factory(role), IdentityQuantizer())


def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole) -> Quantizer:
    """fprop in MXFP8, dgrad and wgrad in NVFP4."""
    return _forward_and_backward(role, mxfp8_factory(role), nvfp4_factory(role))


def nvfp4_1d_weight_factory(role: QuantizerRole) -> Quantizer:
    """As ``NVFP4BlockScaling``, with weights by blocks of a row."""
    return NVFP4Quantizer() if role.operand == "weight" else nvfp4_factory(role)
