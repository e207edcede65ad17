"""The PyTorch frontend of fp8kit: modules under Transformer Engine's names, on torch tensors, autograd and
``torch.compile``."""

import importlib as _importlib
import sys as _sys
from typing import Any

from fp8kit import errors as _errors

if _why := _errors.not_installed("fp8kit_torch", "torch", "torch"):
    raise ImportError(_why, name="torch")

from fp8kit import recipe
from fp8kit.layers.names import name_layers
from fp8kit.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from fp8kit_torch import common, optimizers
from fp8kit_torch.attention import MultiheadAttention
from fp8kit_torch.autocast import autocast, fp8_autocast
from fp8kit_torch.availability import (
    get_cudnn_version,
    get_default_recipe,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from fp8kit_torch.call import apply
from fp8kit_torch.capture import capture
from fp8kit_torch.checkpoint_state import keep_extra_state
from fp8kit_torch.convert import convert, revert
from fp8kit_torch.coverage import coverage
from fp8kit_torch.cpu_offload import ManualOffloadSynchronizer, get_cpu_offload_context, mark_not_offload
from fp8kit_torch.cross_entropy import parallel_cross_entropy
from fp8kit_torch.dot_product_attention import DotProductAttention
from fp8kit_torch.functional import cross_entropy, dropout_add, dropout_seed, embedding
from fp8kit_torch.graphs import make_graphed_callables
from fp8kit_torch.grouped_linear import GroupedLinear
from fp8kit_torch.grouped_mlp import GroupedMLP
from fp8kit_torch.inference import InferenceParams
from fp8kit_torch.inspection import inspect
from fp8kit_torch.layer import TorchLayer as _TorchLayer
from fp8kit_torch.linear import Linear
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.moe import (
    grouped_dense,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
    token_dispatch,
)
from fp8kit_torch.norm import L2Normalization, LayerNorm, RMSNorm
from fp8kit_torch.norm_linear import LayerNormLinear
from fp8kit_torch.norm_mlp import LayerNormMLP
from fp8kit_torch.padding import Fp8Padding, Fp8Unpadding
from fp8kit_torch.quantized import Float8Tensor, QuantizedTensor, fp8_model_init, quantized_model_init
from fp8kit_torch.recompute import checkpoint, checkpoint_contexts
from fp8kit_torch.rng import CudaRNGStatesTracker
from fp8kit_torch.rope import RotaryPositionEmbedding, apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from fp8kit_torch.te_compat.export import onnx_export, te_translation_table
from fp8kit_torch.te_compat.names import as_transformer_engine, found_in, modules_within
from fp8kit_torch.transformer import TransformerLayer
from fp8kit_torch.views import as_view, dtype_of, empty_like_metas

__all__ = [
    "CudaRNGStatesTracker",
    "CustomRecipe",
    "DelayedScaling",
    "DotProductAttention",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8Tensor",
    "Format",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "GroupedMLP",
    "InferenceParams",
    "L2Normalization",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8BlockScaling",
    "ManualOffloadSynchronizer",
    "MultiheadAttention",
    "NVFP4BlockScaling",
    "QuantizedTensor",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerEngineBaseModule",
    "TransformerLayer",
    "apply",
    "apply_fused_qkv_rotary_pos_emb",
    "apply_rotary_pos_emb",
    "as_transformer_engine",
    "as_view",
    "autocast",
    "capture",
    "checkpoint",
    "checkpoint_contexts",
    "common",
    "convert",
    "coverage",
    "cross_entropy",
    "dropout_add",
    "dropout_seed",
    "dtype_of",
    "embedding",
    "empty_like_metas",
    "fp8_autocast",
    "fp8_model_init",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "grouped_dense",
    "inspect",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "keep_extra_state",
    "make_graphed_callables",
    "mark_not_offload",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "name_layers",
    "onnx_export",
    "optimizers",
    "parallel_cross_entropy",
    "quantized_model_init",
    "recipe",
    "revert",
    "te_translation_table",
    "token_dispatch",
]


_within = modules_within(_sys.modules[__name__])
_TorchLayer.frontend = _sys.modules[__name__]


def __getattr__(name: str) -> Any:
    """``unit_scaling``, and a few names of Transformer Engine, when they are first used. AttributeError
    otherwise, which for a name of Transformer Engine that there is nothing for says why; under Transformer
    Engine's name such a name is there and says it when it is called."""
    if name == "unit_scaling":
        return _importlib.import_module(f"{__name__}.{name}")
    return found_in(__name__, name, globals())
