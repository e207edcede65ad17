"""Modules with Transformer Engine's names, arguments and parameter names, on the native tape.

=========================  ========================================================================
module                     what it computes
=========================  ========================================================================
Linear                     y = x W^T + b
LayerNormLinear            y = norm(x) W^T + b, in one operation
LayerNormMLP               y = act(norm(x) W1^T + b1) W2^T + b2, in one operation
GroupedLinear              groups of rows, each times a weight of its own: experts
GroupedMLP                 y = (act(x W1^T + b1) p) W2^T + b2 of such groups
LayerNorm, RMSNorm         norms with weights; ``L2Normalization`` without
DotProductAttention        softmax(q k^T) v: masks, windows, biases, groups of heads, dropout
MultiheadAttention         attention with its projections, to itself or across
TransformerLayer           attention and MLP, each with norm, dropout and residual
RotaryPositionEmbedding    angles for ``apply_rotary_pos_emb`` and for attention's ``rotary_pos_emb``
Embedding                  rows of a table
Dropout                    elements dropped, the others scaled up
ModuleList, Sequential     modules in a row: kept, or called one after the other
Module, Parameter          the bases of modules of your own, and what they train
=========================  ========================================================================

``fp8kit.nn.moe`` has the functions of mixtures of experts: the router, tokens to rows by expert and back.
``fp8kit.nn.unit_scaling`` has ``Linear`` and functions whose outputs and gradients have a size near 1.

Functions: ``cross_entropy`` (the loss), ``apply_rotary_pos_emb``. ``InferenceParams`` keeps keys and values
between the steps of a generation. Random numbers: ``manual_seed``, ``get_rng_state``, ``set_rng_state``,
``RandomState`` for checkpoints; ``draw_from`` gives dropout another source, such as torch's generator;
``normal_init`` fills weights.
"""

import importlib as _importlib
import sys as _sys
from typing import Any as _Any

from fp8kit import errors as _errors
from fp8kit.layers.names import name_layers
from fp8kit.nn.embedding import Dropout, Embedding, cross_entropy
from fp8kit.nn.grouped import GroupedLinear, GroupedMLP
from fp8kit.nn.inference import InferenceParams
from fp8kit.nn.layer import NativeLayer as _NativeLayer
from fp8kit.nn.layers import (
    DotProductAttention,
    L2Normalization,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerLayer,
)
from fp8kit.nn.module import Module, ModuleList, Parameter, Sequential
from fp8kit.nn.random import RandomState, draw_from, get_rng_state, manual_seed, normal_init, set_rng_state
from fp8kit.nn.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

_NativeLayer.frontend = _sys.modules[__name__]

__all__ = [
    "DotProductAttention",
    "Dropout",
    "Embedding",
    "GroupedLinear",
    "GroupedMLP",
    "InferenceParams",
    "L2Normalization",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "Module",
    "ModuleList",
    "MultiheadAttention",
    "Parameter",
    "RMSNorm",
    "RandomState",
    "RotaryPositionEmbedding",
    "Sequential",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "cross_entropy",
    "draw_from",
    "get_rng_state",
    "manual_seed",
    "name_layers",
    "normal_init",
    "set_rng_state",
]


def __getattr__(name: str) -> _Any:
    if name in ("moe", "unit_scaling"):
        return _importlib.import_module(f"{__name__}.{name}")
    why = _errors.meant(name, __all__)
    raise AttributeError(f"module 'fp8kit.nn' has no attribute {name!r}{why}", name=name)
