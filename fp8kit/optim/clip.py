"""Gradient clipping by global norm, and the learning-rate schedule that transformers are trained with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fp8kit import arrays
from fp8kit.arguments import integer, listed, number
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError
from fp8kit.formats import HIGH_PRECISION, float32, uint8
from fp8kit.optim.base import want_writable
from fp8kit.optim.scaler import GradScaler


def clip_grad_norm_(params: Iterable[Tensor], max_norm: float, scaler: GradScaler | None = None) -> Any:
    """Scale all gradients by ``min(1, max_norm / (norm + 1e-6))``, norm the 2-norm of all of them together
    (Pascanu et al. 2013).

    ``scaler``: the gradients carry its factor; the norm is that without it, and they keep it. Returns the
    norm before clipping as a float32 0-dimensional array of the device's library, without waiting for the
    device. Fp8kitError where no parameter has a gradient, where they lie on several devices, are strided or
    read-only, or ``max_norm`` is not finite and positive.
    """
    operation = "clip_grad_norm_"
    limit = number(operation, "max_norm", max_norm, above=0.0)
    found = listed(operation, "params", params, "tensors, such as model.parameters()")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ArgumentError(operation, "scaler", type(scaler).__name__, "a GradScaler or None")
    for param in found:
        if not isinstance(param, Tensor):
            raise ArgumentError(operation, "params", type(param).__name__, "Tensors")
    grads = [arrays.as_view(param.grad, operation, "params") for param in found if param.grad is not None]
    if not grads:
        got = f"{len(found)} tensors, none with a gradient"
        raise ArgumentError(operation, "params", got, "at least one gradient")
    for grad in grads:
        want_writable(operation, "params", grad)  # backward's are; a user may have set any array
        if grad.dtype not in HIGH_PRECISION:
            wanted = "float32, bfloat16 or float16"
            raise ArgumentError(operation, "params", f"a gradient of {grad.dtype.name}", wanted)
    devices = {grad.device for grad in grads}
    if len(devices) != 1:
        where = ", ".join(sorted(map(str, devices)))
        raise ArgumentError(operation, "params", f"gradients on {where}", "gradients on one device")
    (device,) = devices
    kernels, stream, norm = dispatch.kernels(device), arrays.current_stream(device), norm_of(grads)
    if scaler is not None and scaler.inv_scale is not None:
        kernels.scale_([norm], scaler.inv_scale, None, stream)
    kernels.clip_(grads, norm, limit, stream)
    return arrays.native(norm.reshape())


def norm_of(parts: Sequence[ArrayView]) -> ArrayView:
    """Returns the norm of all numbers in arrays of one device, float32 (1,)."""
    device = parts[0].device
    norm, kernels = arrays.empty((1,), float32, device), dispatch.kernels(device)
    space = max(kernels.l2norm_workspace([part.size for part in parts]), 1)
    workspace = arrays.empty((space,), uint8, device)
    kernels.l2norm(parts, norm, workspace, arrays.current_stream(device))
    return norm


def warmup_cosine(step: int, lr: float, warmup_steps: int, total_steps: int, min_lr: float = 0.0) -> float:
    """Learning rate of ``step`` (0, 1, ...): linear from lr / warmup_steps up to ``lr``, then half a cosine
    down to ``min_lr`` at ``total_steps``, and ``min_lr`` beyond (Loshchilov & Hutter 2017, one cycle).
    Fp8kitError unless 0 <= warmup_steps <= total_steps."""
    operation = "warmup_cosine"
    integer(operation, "step", step, 0)
    integer(operation, "warmup_steps", warmup_steps, 0, integer(operation, "total_steps", total_steps, 0))
    lr, min_lr = number(operation, "lr", lr), number(operation, "min_lr", min_lr)
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if step >= total_steps:
        return min_lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
