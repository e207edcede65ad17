"""Gradient clipping by global norm, and the learning-rate schedule that transformers are trained with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fp8kit import arrays
from fp8kit.autograd import Tensor
from fp8kit.backends import dispatch
from fp8kit.errors import Fp8kitError, expected
from fp8kit.formats import float32, uint8
from fp8kit.optim.scaler import GradScaler


def clip_grad_norm_(params: Iterable[Tensor], max_norm: float, scaler: GradScaler | None = None) -> Any:
    """Scale all gradients by ``min(1, max_norm / (norm + 1e-6))``, norm the 2-norm of all of them together (Pascanu et al. 2013).

    ``scaler``: the gradients carry its factor; the norm is that without it, and they keep it.
    Returns the norm before clipping as a float32 0-dimensional array of the device's library, without waiting for the device.
    Fp8kitError where no parameter has a gradient, where they lie on several devices, or ``max_norm`` is not positive.
    """
    if not max_norm > 0:
        raise Fp8kitError(expected("clip_grad_norm_", "max_norm", max_norm, "a positive number"))
    grads = [arrays.as_view(param.grad) for param in params if param.grad is not None]
    for grad in grads:
        if not grad.contiguous:  # backward's never are; a user may have set any array
            raise Fp8kitError(expected("clip_grad_norm_", "params", f"a gradient of strides {grad.strides}", "C-contiguous gradients"))
    devices = {grad.device for grad in grads}
    if len(devices) != 1:
        raise Fp8kitError(expected("clip_grad_norm_", "params", f"gradients on {len(devices)} devices", "gradients on one device"))
    (device,) = devices
    kernels, stream = dispatch.kernels(device), arrays.current_stream(device)
    norm = arrays.empty((1,), float32, device)
    workspace = arrays.empty((max(kernels.l2norm_workspace([grad.size for grad in grads]), 1),), uint8, device)
    kernels.l2norm(grads, norm, workspace, stream)
    if scaler is not None and scaler.inv_scale is not None:
        kernels.scale_([norm], scaler.inv_scale, None, stream)
    kernels.clip_(grads, norm, max_norm, stream)
    return arrays.provider(device).native(norm.reshape())


def warmup_cosine(step: int, lr: float, warmup_steps: int, total_steps: int, min_lr: float = 0.0) -> float:
    """Learning rate of ``step`` (0, 1, ...): linear from lr / warmup_steps up to ``lr``, then half a cosine down to ``min_lr`` at
    ``total_steps``, and ``min_lr`` beyond (Loshchilov & Hutter 2017, one cycle). Fp8kitError unless 0 <= warmup_steps <= total_steps."""
    if not 0 <= warmup_steps <= total_steps:
        raise Fp8kitError(expected("warmup_cosine", "warmup_steps", warmup_steps, f"in [0, total_steps = {total_steps}]"))
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if step >= total_steps:
        return min_lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
