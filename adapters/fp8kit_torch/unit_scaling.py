"""Unit scaling in torch: ``Linear`` as a module, the other operations as functions, and ``scale_fwd`` and
``scale_bwd``, which multiply in one direction only. Formulas and sources: ``fp8kit.layers.unit_scaling``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8kit.layers import unit_scaling as shared
from fp8kit.ops.activation import activation
from fp8kit.ops.dropout_add import add as add_op
from fp8kit.ops.norm import norm as norm_op
from fp8kit.ops.scale_lines import scale_lines
from fp8kit_torch import functional
from fp8kit_torch.call import apply
from fp8kit_torch.dot_product_attention import DotProductAttention
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.specs import spec_for


class _Own(shared.UnitScaling):
    """The functions on tensors."""

    def own_scale(self, x: Tensor, forward: float, backward: float) -> Tensor:
        return apply(scale_lines, spec_for("ScaleLinesSpec", forward, backward), {"x": x})["y"]

    def own_activation(self, x: Tensor, kind: str) -> Tensor:
        return apply(activation, spec_for("ActivationSpec", kind, x.shape[-1]), {"x": x})["y"]

    def own_sum(self, a: Tensor, b: Tensor) -> Tensor:
        return apply(add_op, spec_for("AddSpec"), {"a": a, "b": b})["y"]

    def own_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        spec = spec_for("NormSpec", x.shape[-1], "RMSNorm" if bias is None else "LayerNorm", eps)
        return apply(norm_op, spec, {"x": x, "norm_weight": weight, "norm_bias": bias})["y"]

    def own_embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return functional.embedding(ids, table)

    def own_cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits, targets)

    def own_attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
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


class Linear(shared.Linear, TransformerEngineBaseModule):
    __doc__ = shared.Linear.__doc__

    def unit_init(self) -> Any:
        return partial(torch.nn.init.normal_, std=1.0)


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
