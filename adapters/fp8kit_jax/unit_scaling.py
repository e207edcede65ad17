"""Unit scaling in JAX, as pure functions: ``dense`` for products, the other operations, and ``scale_fwd`` and
``scale_bwd``, which multiply in one direction only. Formulas and sources: ``fp8kit.layers.unit_scaling``."""

from __future__ import annotations

import math
from typing import Any

from fp8kit import formats
from fp8kit.layers import unit_scaling as shared
from fp8kit.ops.activation import ActivationSpec
from fp8kit.ops.activation import activation as activation_op
from fp8kit.ops.dropout_add import AddSpec
from fp8kit.ops.dropout_add import add as add_op
from fp8kit.ops.embedding import EmbeddingSpec
from fp8kit.ops.embedding import embedding as embedding_op
from fp8kit.ops.scale_lines import ScaleLinesSpec, scale_lines
from fp8kit_jax import functional, layers
from fp8kit_jax.arguments import as_rows
from fp8kit_jax.attention import dot_product_attention
from fp8kit_jax.rules import apply


class _Own(shared.UnitScaling):
    """The functions on JAX's arrays."""

    def own_scale(self, x: Any, forward: float, backward: float) -> Any:
        x = as_rows("unit_scaling", "x", x)
        return apply(scale_lines, ScaleLinesSpec(forward, backward), {"x": x})["y"]

    def own_activation(self, x: Any, kind: str) -> Any:
        return apply(activation_op, ActivationSpec(kind, x.shape[-1]), {"x": x})["y"]

    def own_sum(self, a: Any, b: Any) -> Any:
        return apply(add_op, AddSpec(), {"a": a, "b": b})["y"]

    def own_norm(self, x: Any, weight: Any, bias: Any, eps: float) -> Any:
        return functional.layernorm(x, weight, bias, "rmsnorm" if bias is None else "layernorm", False, eps)

    def own_embedding(self, ids: Any, table: Any) -> Any:
        spec = EmbeddingSpec(*table.shape, formats.DTYPES[table.dtype.name])
        return apply(embedding_op, spec, {"ids": ids, "table": table})["y"]

    def own_cross_entropy(self, logits: Any, targets: Any) -> Any:
        return functional.fused_cross_entropy(logits, targets)

    def own_attention(self, query: Any, key: Any, value: Any, scale: float, causal: bool) -> Any:
        mask = "causal" if causal else "no_mask"
        o = dot_product_attention(query, key, value, attn_mask_type=mask, scale_factor=scale)
        return o.reshape(*o.shape[:-2], -1)


_own = _Own()
scale_fwd, scale_bwd = _own.scale_fwd, _own.scale_bwd
gelu, silu, silu_glu = _own.gelu, _own.silu, _own.silu_glu
add, residual_split, residual_add = _own.add, _own.residual_split, _own.residual_add
norm, embedding, cross_entropy, attention = _own.norm, _own.embedding, _own.cross_entropy, _own.attention


def dense(
    x: Any,
    kernel: Any,
    bias: Any = None,
    *,
    readout: bool = False,
    constraint: str | None = shared.OUTPUT,
    quantizer_set: Any = None,
) -> Any:
    """y = (x kernel + bias) / sqrt(fan_in), in FP8 as the autocast in force says: ``fp8kit_jax.dense`` with
    the factors of ``fp8kit.nn.unit_scaling.Linear``.

    ``x``: h (..., K); ``kernel``: h (K, N) of deviation 1; ``bias``: h (N,) or None; ``quantizer_set``: see
    ``fp8kit_jax.dense``. Returns h (..., N).
    """
    factors = shared.linear_factors(*kernel.shape, math.prod(x.shape[:-1]), readout, constraint)
    kernel = scale_bwd(kernel, factors.parameter)
    bias = None if bias is None else scale_bwd(bias, factors.parameter)
    y = layers.dense(scale_bwd(x, factors.input), kernel, bias, quantizer_set=quantizer_set)
    return scale_fwd(y, factors.output)


__all__ = [
    "add",
    "attention",
    "cross_entropy",
    "dense",
    "embedding",
    "gelu",
    "norm",
    "residual_add",
    "residual_split",
    "scale_bwd",
    "scale_fwd",
    "silu",
    "silu_glu",
]
