"""fp8kit for JAX: FP8 layers as pure functions and as Flax modules, on the CPU and on CUDA, inside
``jax.jit``.

``dense``, ``layernorm_dense``, ``layernorm_mlp``, ``dot_product_attention`` and the functions beside them are
made of fp8kit's operations, run by one XLA custom call. Under ``jax.jit`` with shardings, on mesh axes of the
kinds ``Auto`` and ``Explicit``, they split by the arrays' first dimension (by attention's batch), by heads,
by a product's features and its contraction, with the results of one device: what is moved are sums, and
amaxes before casts. Sequences and ``gemm`` are not split.

Importing this package initialises no device. ``fp8kit_jax.flax`` and ``fp8kit_jax.nnx``, which need Flax,
``fp8kit_jax.optimizers`` and ``fp8kit_jax.unit_scaling`` are imported when they are used.
"""

import importlib
from typing import Any

from fp8kit import errors as _errors

if _why := _errors.not_installed("fp8kit_jax", "jax", "jax", "jax_tvm_ffi", "tvm_ffi"):
    raise ImportError(_why, name="jax")

from fp8kit.ops.registry import register_operation
from fp8kit_jax.activations import activation
from fp8kit_jax.attention import dot_product_attention, running_sums
from fp8kit_jax.calls import call, register, shape_struct
from fp8kit_jax.capture import capture
from fp8kit_jax.exporting import export
from fp8kit_jax.float8 import ScaledTensor, dequantize, gemm, quantize
from fp8kit_jax.functional import (
    drop_path,
    dropout_add,
    fused_cross_entropy,
    l2norm,
    layernorm,
    rmsnorm,
    rope,
    rope_frequencies,
    softmax,
)
from fp8kit_jax.grouped import grouped_dense, ragged_dot
from fp8kit_jax.inspection import inspect, layer_index
from fp8kit_jax.keys import dropout_seed
from fp8kit_jax.layers import dense, layernorm_dense, layernorm_mlp
from fp8kit_jax.moe import (
    fused_moe_aux_loss,
    fused_topk_with_score_function,
    scaled_swiglu,
    sort_chunks_by_index,
    token_combine,
    token_dispatch,
)
from fp8kit_jax.quantizers import QuantizerSet, create_set, join_states, noop_quantizer_set, split_states
from fp8kit_jax.rules import apply
from fp8kit_jax.scopes import MeshResource, autocast, global_shard_guard
from fp8kit_jax.sequences import SequenceDescriptor
from fp8kit_jax.state import FP8_COLLECTION_NAME, NVTE_FP8_COLLECTION_NAME, Slot, update_collections
from fp8kit_jax.te_compat.names import as_transformer_engine

__all__ = [
    "FP8_COLLECTION_NAME",
    "NVTE_FP8_COLLECTION_NAME",
    "MeshResource",
    "QuantizerSet",
    "ScaledTensor",
    "SequenceDescriptor",
    "Slot",
    "activation",
    "apply",
    "as_transformer_engine",
    "autocast",
    "call",
    "capture",
    "create_set",
    "dense",
    "dequantize",
    "dot_product_attention",
    "drop_path",
    "dropout_add",
    "dropout_seed",
    "export",
    "fused_cross_entropy",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "gemm",
    "global_shard_guard",
    "grouped_dense",
    "inspect",
    "join_states",
    "l2norm",
    "layer_index",
    "layernorm",
    "layernorm_dense",
    "layernorm_mlp",
    "noop_quantizer_set",
    "quantize",
    "ragged_dot",
    "register",
    "register_operation",
    "rmsnorm",
    "rope",
    "rope_frequencies",
    "running_sums",
    "scaled_swiglu",
    "shape_struct",
    "softmax",
    "sort_chunks_by_index",
    "split_states",
    "token_combine",
    "token_dispatch",
    "update_collections",
]


# Transformer Engine's names that stand elsewhere, or for which there is nothing
_ALIAS = "as_transformer_engine() makes Transformer Engine's modules of that name"
_INSTEAD = {
    "recipe": "fp8kit.recipe has the recipes",
    "fp8_autocast": "it is autocast",
    "fused_attn": "it is dot_product_attention",
    "grouped_gemm": "it is grouped_dense",
    "cpp_extensions": _ALIAS,
    "sharding": _ALIAS,
    "quantizer": _ALIAS,
}


def __getattr__(name: str) -> Any:
    if name not in ("flax", "nnx", "optimizers", "unit_scaling"):
        why = f": {_INSTEAD[name]}" if name in _INSTEAD else _errors.meant(name, __all__)
        raise AttributeError(f"module 'fp8kit_jax' has no attribute {name!r}{why}", name=name)
    return importlib.import_module(f"fp8kit_jax.{name}")
