"""``fp8_output`` and ``fp8_grad``: what a layer hands over in FP8, the next one its output, the one before
its input's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8kit.layers.recompute import Kept
from fp8kit.quantization import Quantization
from fp8kit.scaling import FORWARD_SLOTS
from fp8kit_torch.once import once
from fp8kit_torch.operand_tensor import OperandTensor
from fp8kit_torch.quantized import held_as
from fp8kit_torch.state import NO_STATE, ScalingState, StateBinding, finish_backward, slot_addresses

_OUTPUT, _GRAD_INPUT = 2, 1  # slots of a GEMM: input, weight, output; grad_output, grad_input


def _bound(scale: Tensor, history: Tensor | None, slot: int) -> StateBinding:
    """The cast's binding to a slot of a state."""
    slots, held = {"w": slot}, (scale,) if history is None else (scale, history)
    amaxes = {} if history is None else slot_addresses(slots, history, "amax")
    return StateBinding(slot_addresses(slots, scale, "scale"), amaxes, held=held)


def cast_output(
    y: Tensor,
    fp8: Quantization,
    states: Mapping[str, ScalingState] | None,
    gemm: int,
    record: bool,
    kept: Kept | None,
) -> Tensor:
    """h (..., N), the output of the layer's GEMM number ``gemm``, in FP8; differentiable, the gradient passes
    through.

    ``states``: of delayed scaling, None for other recipes; ``record``: whether the amax is recorded;
    ``kept``: what a pass that is done again found the first time, whose scale it is then, and which has
    recorded already.
    """
    binding = NO_STATE
    if states is not None:
        forward = states["scaling_fwd"]
        scale = forward.scale if kept is None or kept.scales is None else kept.scales
        history = forward.amax_history if record and kept is None else None
        binding = _bound(scale, history, FORWARD_SLOTS * gemm + _OUTPUT)
    return _Output.apply(y, held_as(fp8, "x"), binding)


def cast_gradient(
    x: Tensor, fp8: Quantization, states: Mapping[str, ScalingState] | None, token: tuple[Any, ...] | None
) -> Tensor:
    """``x``, h (..., K), whose gradient will be in FP8. ``token``: what ``finish_backward`` is called with,
    None where no amax is recorded."""
    return _Gradient.apply(x, held_as(fp8, "g"), None if states is None else states["scaling_bwd"], token)


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, fp8: Quantization, state: StateBinding) -> Tensor:
        return OperandTensor.cast(y, fp8, state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None, None


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fp8: Quantization, state: ScalingState | None, token: tuple[Any, ...] | None
    ) -> Tensor:
        ctx.fp8, ctx.state, ctx.token = fp8, state, token
        return x.detach()

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        binding, state = NO_STATE, ctx.state
        if state is not None:
            if ctx.token is not None:
                finish_backward([ctx.token])
            binding = _bound(state.scale, None if ctx.token is None else state.amax_history, _GRAD_INPUT)
        return OperandTensor.cast(grad, ctx.fp8, binding), None, None, None
