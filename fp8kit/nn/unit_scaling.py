"""Unit scaling on the native tape: ``Linear`` as a module, the other operations as functions, and
``scale_fwd`` and ``scale_bwd``, which multiply in one direction only. Formulas and sources:
``fp8kit.layers.unit_scaling``."""

from __future__ import annotations

from typing import Any

from fp8kit.autograd import Tensor, apply
from fp8kit.layers import unit_scaling as shared
from fp8kit.layers.base import spec_object
from fp8kit.nn.embedding import cross_entropy as _cross_entropy
from fp8kit.nn.fp8 import Fp8Module
from fp8kit.nn.layers import DotProductAttention
from fp8kit.nn.module import as_tensor
from fp8kit.nn.random import normal_init
from fp8kit.ops.activation import activation
from fp8kit.ops.dropout_add import add as add_op
from fp8kit.ops.embedding import embedding as embedding_op
from fp8kit.ops.norm import norm as norm_op
from fp8kit.ops.scale_lines import scale_lines


class _Own(shared.UnitScaling):
    """The functions on native tensors."""

    def own_scale(self, x: Any, forward: float, backward: float) -> Tensor:
        spec = spec_object("ScaleLinesSpec", forward, backward)
        return apply(scale_lines, spec, {"x": as_tensor("unit_scaling", "x", x)})["y"]

    def own_activation(self, x: Any, kind: str) -> Tensor:
        return apply(activation, spec_object("ActivationSpec", kind, x.shape[-1]), {"x": x})["y"]

    def own_sum(self, a: Any, b: Any) -> Tensor:
        return apply(add_op, spec_object("AddSpec"), {"a": a, "b": b})["y"]

    def own_norm(self, x: Any, weight: Any, bias: Any, eps: float) -> Tensor:
        spec = spec_object("NormSpec", x.shape[-1], "RMSNorm" if bias is None else "LayerNorm", eps)
        return apply(norm_op, spec, {"x": x, "norm_weight": weight, "norm_bias": bias})["y"]

    def own_embedding(self, ids: Any, table: Any) -> Tensor:
        ids = as_tensor("unit_scaling.embedding", "ids", ids)
        spec = spec_object("EmbeddingSpec", *table.shape, table.dtype.name)
        return apply(embedding_op, spec, {"ids": ids, "table": table})["y"]

    def own_cross_entropy(self, logits: Any, targets: Any) -> Tensor:
        return _cross_entropy(logits, targets)

    def own_attention(self, query: Any, key: Any, value: Any, scale: float, causal: bool) -> Tensor:
        mask, sizes = "causal" if causal else "no_mask", (query.shape[2], query.shape[3])
        core = DotProductAttention(
            *sizes,
            num_gqa_groups=key.shape[2],
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type=mask,
            softmax_scale=scale,
        )
        return core(query, key, value)  # type: ignore[no-any-return]


class Linear(shared.Linear, Fp8Module):
    __doc__ = shared.Linear.__doc__

    def unit_init(self) -> Any:
        return normal_init(std=1.0)


_own = _Own()
scale_fwd, scale_bwd = _own.scale_fwd, _own.scale_bwd
gelu, silu, silu_glu = _own.gelu, _own.silu, _own.silu_glu
add, residual_split, residual_add = _own.add, _own.residual_split, _own.residual_add
norm, embedding, cross_entropy, attention = _own.norm, _own.embedding, _own.cross_entropy, _own.attention

__all__ = [
    "Linear",
    "add",
    "attention",
    "cross_entropy",
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
