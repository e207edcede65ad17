"""Unit scaling in torch: ``Linear`` as a module, the other operations as functions, and ``scale_fwd`` and
``scale_bwd``, which multiply in one direction only. Formulas and sources: ``fp8kit.layers.unit_scaling``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fp8kit.layers import unit_scaling as shared
from fp8kit.layers.unit_scaling import learning_rate_factor
from fp8kit_torch.call import apply
from fp8kit_torch.dot_product_attention import DotProductAttention
from fp8kit_torch.functional import dropout_add
from fp8kit_torch.module import TransformerEngineBaseModule
from fp8kit_torch.specs import spec_for


class _OfTensors(shared.UnitScaling):
    core_attention = DotProductAttention

    def operation(self, operation: Any, spec: tuple[Any, ...], inputs: Any) -> Any:
        return next(iter(apply(operation, spec_for(*spec), inputs).values()))

    def dtype_name(self, x: torch.Tensor) -> str:
        return str(x.dtype).removeprefix("torch.")

    def own_dropout(self, x: torch.Tensor, p: float, **random: Any) -> torch.Tensor:
        return dropout_add(x, p=p, **random)

    def constants(self, values: list[float], like: torch.Tensor) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=like.device)


class Linear(shared.Linear, TransformerEngineBaseModule):
    def unit_init(self) -> Any:
        return partial(torch.nn.init.normal_, std=1.0)


made = _OfTensors()
scale_fwd, scale_bwd, gelu, silu, silu_glu = (
    made.scale_fwd,
    made.scale_bwd,
    made.gelu,
    made.silu,
    made.silu_glu,
)
add, residual_split, residual_add, norm = made.add, made.residual_split, made.residual_add, made.norm
embedding, cross_entropy, attention = made.embedding, made.cross_entropy, made.attention
softmax, matmul, dropout, mse = made.softmax, made.matmul, made.dropout, made.mse
del made

# the names of `shared.FUNCTIONS` as strings, which the site's reference wants
__all__ = [
    "Linear",
    "add",
    "attention",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "learning_rate_factor",
    "matmul",
    "mse",
    "norm",
    "residual_add",
    "residual_split",
    "scale_bwd",
    "scale_fwd",
    "silu",
    "silu_glu",
    "softmax",
]
