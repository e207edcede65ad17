"""Unit scaling on the native tape: ``Linear`` as a module, the other operations as functions, and
``scale_fwd`` and ``scale_bwd``, which multiply in one direction only. Formulas and sources:
``fp8kit.layers.unit_scaling``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8kit.autograd import Tensor, apply, tensor
from fp8kit.layers import unit_scaling as shared
from fp8kit.layers.base import spec_object
from fp8kit.layers.unit_scaling import learning_rate_factor
from fp8kit.nn.embedding import Dropout
from fp8kit.nn.fp8 import Fp8Module
from fp8kit.nn.layers import DotProductAttention
from fp8kit.nn.module import as_tensor
from fp8kit.nn.random import normal_init
from fp8kit.spec import Operation


class _Functions(shared.UnitScaling):
    """Unit scaling's functions on native tensors."""

    core_attention = DotProductAttention

    def operation(self, operation: Operation, spec: tuple[Any, ...], inputs: Mapping[str, Any]) -> Tensor:
        given = {
            name: None if value is None else as_tensor("unit_scaling", name, value)
            for name, value in inputs.items()
        }
        return next(iter(apply(operation, spec_object(*spec), given).values()))

    def dtype_name(self, x: Tensor) -> str:
        return x.dtype.name

    def own_dropout(self, x: Any, p: float, **random: Any) -> Any:
        return Dropout(p, **random)(x)

    def constants(self, values: list[float], like: Tensor) -> Tensor:
        return tensor(np.array(values, np.float32), device=like.device)


class Linear(shared.Linear, Fp8Module):
    def unit_init(self) -> Any:
        return normal_init(std=1.0)


_own = _Functions()
scale_fwd, scale_bwd = _own.scale_fwd, _own.scale_bwd
gelu, silu, silu_glu = _own.gelu, _own.silu, _own.silu_glu
softmax, matmul, dropout = _own.softmax, _own.matmul, _own.dropout
add, residual_split, residual_add = _own.add, _own.residual_split, _own.residual_add
norm, embedding, attention = _own.norm, _own.embedding, _own.attention
cross_entropy, mse = _own.cross_entropy, _own.mse

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
