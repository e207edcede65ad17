"""The functions of ``transformer_engine.jax`` with its signatures. Products are in high precision without a
``quantizer_set``, also within ``autocast``, as there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fp8kit.arguments import choice
from fp8kit.errors import FormatError, UnsupportedError
from fp8kit_jax import activations, functional, layers
from fp8kit_jax.arguments import as_array
from fp8kit_jax.flax.common import constrained, constrains
from fp8kit_jax.grouped import grouped_dense as _grouped_dense
from fp8kit_jax.quantizers import QuantizerSet, noop_quantizer_set
from fp8kit_jax.te_compat.collectives import (
    CollectiveOp,
    CollectiveOpSet,
    noop_collective_op_set,
    want_collectives,
)

_Axes = Sequence[Any] | None
_NORMS = {"layernorm": "layernorm", "layer_norm": "layernorm", "rmsnorm": "rmsnorm", "rms_norm": "rmsnorm"}


class SoftmaxFusionType(Enum):
    """What a softmax masks."""

    SCALED = "scaled"
    SCALED_MASKED = "scaled_masked"
    SCALED_UPPER_TRIANG_MASKED = "scaled_upper_triang_masked"


def is_softmax_kernel_available(*arguments: Any, **named: Any) -> bool:
    """True: every call runs."""
    return True


def canonicalize_norm_type(norm_type: str) -> str:
    """ "layernorm" or "rmsnorm" of any of their spellings. FormatError for others."""
    known = str(norm_type).lower().strip().replace("-", "_")
    return _NORMS[choice("canonicalize_norm_type", "norm_type", known, _NORMS, FormatError)]


def dense(
    x: Any,
    kernel: Any,
    bias: Any = None,
    contracting_dims: Any = ((1,), (0,)),
    transpose_batch_sequence: bool = False,
    input_axes: _Axes = None,
    kernel_axes: _Axes = None,
    output_axes: _Axes = None,
    collective_op_set: CollectiveOpSet = noop_collective_op_set,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> Any:
    """``fp8kit_jax.dense``; ``..._axes``: logical axes. ``transpose_batch_sequence`` and
    ``collective_op_set`` change nothing here: see ``collectives``."""
    want_collectives("dense", collective_op_set)
    x, kernel = constrained(x, input_axes), constrained(kernel, kernel_axes)
    y = layers.dense(x, kernel, bias, contracting_dims, quantizer_set)
    return constrained(y, output_axes)


def gemm(
    lhs: Any,
    rhs: Any,
    bias: Any = None,
    contracting_dims: Any = ((-1,), (0,)),
    lhs_quantizer: Any = None,
    rhs_quantizer: Any = None,
    transpose_batch_sequence: bool = False,
    collective_op: CollectiveOp = CollectiveOp.NONE,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> Any:
    """``dense``, as ``transformer_engine.jax.cpp_extensions`` has it. UnsupportedError for quantizers of one
    operand each."""
    for name, given in (("lhs_quantizer", lhs_quantizer), ("rhs_quantizer", rhs_quantizer)):
        if given is not None:
            raise UnsupportedError("gemm", name, type(given).__name__, "None, and quantizer_set")
    collectives = CollectiveOpSet.create(collective_op)
    return dense(lhs, rhs, bias, contracting_dims, collective_op_set=collectives, quantizer_set=quantizer_set)


def grouped_dense(*args: Any, quantizer_set: QuantizerSet = noop_quantizer_set, **kwargs: Any) -> Any:
    """``fp8kit_jax.grouped_dense``."""
    return _grouped_dense(*args, quantizer_set=quantizer_set, **kwargs)


def layernorm_dense(
    x: Any,
    kernel: Any,
    gamma: Any,
    beta: Any,
    bias: Any = None,
    norm_type: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    transpose_batch_sequence: bool = False,
    layernorm_input_axes: _Axes = None,
    dot_input_axes: _Axes = None,
    kernel_axes: _Axes = None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> Any:
    """``fp8kit_jax.layernorm_dense``; ``..._axes``: logical axes, of which those of norm(x) make two
    operations of it."""
    x, kernel = constrained(x, layernorm_input_axes), constrained(kernel, kernel_axes)
    norm = canonicalize_norm_type(norm_type), zero_centered_gamma, epsilon
    if not constrains(dot_input_axes):
        return layers.layernorm_dense(x, kernel, gamma, beta, bias, *norm, quantizer_set)
    normed = constrained(functional.layernorm(x, gamma, beta, *norm), dot_input_axes)
    return layers.dense(normed, kernel, bias, quantizer_set=quantizer_set)


def layernorm_mlp(
    x: Any,
    gamma: Any,
    beta: Any,
    kernels: Sequence[Any],
    biases: Sequence[Any],
    norm_type: str,
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    transpose_batch_sequence: bool = False,
    norm_input_axes: _Axes = None,
    dot_1_input_axes: _Axes = None,
    dot_2_input_axes: _Axes = None,
    kernel_1_axes: _Axes = None,
    kernel_2_axes: _Axes = None,
    ffn1_ckpt_name: str = "ffn1",
    ffn2_ckpt_name: str = "ffn2",
    activation_type: Sequence[str] = ("gelu",),
    activation_params: Mapping[str, float] | None = None,
    collective_op_sets: Sequence[CollectiveOpSet] = (noop_collective_op_set, noop_collective_op_set),
    quantizer_sets: Sequence[QuantizerSet] = (noop_quantizer_set, noop_quantizer_set),
) -> Any:
    """``fp8kit_jax.layernorm_mlp``; ``..._axes``: logical axes, of which those between its parts make several
    operations of it; only then there is something to be called ``ffn1_ckpt_name``."""
    for each in collective_op_sets:
        want_collectives("layernorm_mlp", each)
    x = constrained(x, norm_input_axes)
    k1, k2 = (constrained(k, axes) for k, axes in zip(kernels, (kernel_1_axes, kernel_2_axes), strict=True))
    norm = canonicalize_norm_type(norm_type), zero_centered_gamma, epsilon
    sets = tuple(quantizer_sets)
    if not constrains(dot_1_input_axes) and not constrains(dot_2_input_axes):
        options = {"activation_params": activation_params, "quantizer_sets": sets}
        y = layers.layernorm_mlp(x, gamma, beta, (k1, k2), biases, *norm, activation_type, **options)
        return checkpoint_name(y, ffn2_ckpt_name)
    normed = constrained(functional.layernorm(x, gamma, beta, *norm), dot_1_input_axes)
    h = checkpoint_name(layers.dense(normed, k1, biases[0], quantizer_set=sets[0]), ffn1_ckpt_name)
    act = constrained(activations.activation(h, activation_type, activation_params), dot_2_input_axes)
    return checkpoint_name(layers.dense(act, k2, biases[1], quantizer_set=sets[1]), ffn2_ckpt_name)


def layernorm(
    x: Any,
    gamma: Any,
    beta: Any,
    norm_type: str,
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    quantizer: Any = None,
) -> Any:
    """``fp8kit_jax.layernorm``."""
    _no_quantizer("layernorm", quantizer)
    return functional.layernorm(
        x, gamma, beta, canonicalize_norm_type(norm_type), zero_centered_gamma, epsilon
    )


def activation(
    x: Any,
    activation_type: Sequence[str],
    quantizer: Any = None,
    act_params: Mapping[str, float] | None = None,
) -> Any:
    """``fp8kit_jax.activation``."""
    _no_quantizer("activation", quantizer)
    return activations.activation(x, activation_type, act_params)


def softmax(
    logits: Any,
    mask: Any = None,
    scale_factor: float = 1.0,
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED,
) -> Any:
    """``fp8kit_jax.softmax`` of logits (..., s_q, s_kv): with ``mask``, of SCALED_MASKED, or of what is not
    above the diagonal."""
    if softmax_fusion_type is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED:
        mask = ~jnp.tri(*as_array("softmax", "logits", logits).shape[-2:], dtype=bool)
    elif softmax_fusion_type is SoftmaxFusionType.SCALED:
        mask = None
    return functional.softmax(logits, mask, scale_factor)


def _no_quantizer(operation: str, quantizer: Any) -> None:
    if quantizer is not None:
        wanted = "None: what a product reads it casts itself"
        raise UnsupportedError(operation, "quantizer", type(quantizer).__name__, wanted)
