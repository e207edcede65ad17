"""Buffers of a caller that a layer's result, and its input's gradient, are copied into: ``out`` and
``dgrad_out``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import ShapeError
from fp8kit_torch.arguments import not_compiled
from fp8kit_torch.bound import TensorMeta
from fp8kit_torch.checks import shown
from fp8kit_torch.once import once


class Into(torch.autograd.Function):
    """y, copied into the memory of ``out``, an alias that nobody else has."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, out: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        return out.copy_(y)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class GradientInto(torch.autograd.Function):
    """x, whose gradient is copied into ``out`` as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor) -> Tensor:
        ctx.out = out
        return x.view_as(x)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.out.copy_(grad)
        return grad, None


def want_buffer(name: str, buffer: Tensor | None, x: Tensor | TensorMeta, features: int) -> None:
    """Fp8kitError for what is no tensor like (x's rows, ``features``), and within ``torch.compile``."""
    if buffer is None:
        return
    if torch.compiler.is_compiling():
        raise not_compiled(f"{name} of GroupedLinear")
    wanted = (*x.shape[:-1], features)
    is_like = isinstance(buffer, Tensor) and buffer.shape == wanted and buffer.device == x.device
    if not is_like or buffer.requires_grad or buffer.dtype is not x.dtype:
        said = f"a {x.dtype} tensor of shape {tuple(wanted)} on {x.device} without a gradient, or None"
        raise ShapeError("GroupedLinear", name, shown(buffer), said)
