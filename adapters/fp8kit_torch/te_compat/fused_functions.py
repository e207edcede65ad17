"""``transformer_engine.pytorch.jit``'s functions of tensors: elementwise ones that Transformer Engine has
compiled, written in torch, which differentiates them. Names that end in an underscore are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def bias_gelu_fused(inp: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(inp + bias), by the tanh; None adds nothing."""
    return functional.gelu(inp if bias is None or not bias.numel() else inp + bias, approximate="tanh")


def bgrad_dgelu_fused(grad_output: Tensor, inp: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """(the bias's gradient, the input's) of ``bias_gelu_fused``; None without a bias. Gradients are (..., n),
    the bias's (n,)."""
    there = bias is not None and bias.numel() > 0
    at = (inp + bias if there else inp).detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(functional.gelu(at, approximate="tanh"), at, grad_output)
    return (found.flatten(0, -2).sum(0) if there else None), found


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool) -> Tensor:
    """residual + dropout(x + bias), ``prob``: of an element that is dropped; None or an empty bias adds
    nothing."""
    x = x if bias is None or not bias.numel() else x + bias
    return residual + functional.dropout(x, prob, training)


def bias_dropout_add_fused_train(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float) -> Tensor:
    """``bias_dropout_add`` in training."""
    return bias_dropout_add(x, bias, residual, prob, True)


def bias_dropout_add_fused_inference(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float) -> Tensor:
    """``bias_dropout_add`` in inference, which drops nothing."""
    return bias_dropout_add(x, bias, residual, prob, False)


def get_bias_dropout_add(training: bool) -> Callable[..., Tensor]:
    """``bias_dropout_add`` for that mode: a function of (x, bias, residual, prob)."""
    return bias_dropout_add_fused_train if training else bias_dropout_add_fused_inference


def l2normalization_fused(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps) along the last dimension, computed in float32, of x's dtype."""
    return l2normalization_fwd_fused(x, eps)[0]


def l2normalization_fwd_fused(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(``l2normalization_fused``, 1 / sqrt(sum(x^2) + eps) in float32, (..., 1))."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (wide * inverse).to(x.dtype), inverse


def l2normalization_backward_fused(grad_output: Tensor, x: Tensor, rsqrt_norm: Tensor, eps: float) -> Tensor:
    """x's gradient, from what ``l2normalization_fwd_fused`` gave: (dy - y sum(y dy)) / norm."""
    y, grad = x.float() * rsqrt_norm, grad_output.float()
    return ((grad - y * (y * grad).sum(-1, keepdim=True)) * rsqrt_norm).to(x.dtype)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Nothing: there is no compilation to warm up."""


warmup_jit_bias_gelu = warmup_jit_bias_dropout_add = _nothing
warmup_jit_bias_gelu_all_dtypes = warmup_jit_bias_dropout_add_all_dtypes = _nothing
bias_gelu_fused_, bgrad_dgelu_fused_ = bias_gelu_fused, bgrad_dgelu_fused
bias_dropout_add_fused_train_ = bias_dropout_add_fused_train
bias_dropout_add_fused_inference_ = bias_dropout_add_fused_inference
l2normalization_fused_, l2normalization_fwd_fused_ = l2normalization_fused, l2normalization_fwd_fused
l2normalization_backward_fused_ = l2normalization_backward_fused
