"""``fp8_output`` and ``fp8_grad``: what a layer hands over in FP8, the next one its output, the one before
its input's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8kit.layers import Kept
from fp8kit.quantization import Quantization
from fp8kit.scaling import FORWARD_SLOTS
from fp8kit_torch.memory import NOTHING, amax_views, scale_views
from fp8kit_torch.nodes import NO_STATE, Wiring
from fp8kit_torch.once import once
from fp8kit_torch.quantized import QuantizedTensor, held_as
from fp8kit_torch.state import ScalingState, finish_backward

_OUTPUT, _GRAD_INPUT = 2, 1  # slots of a GEMM: input, weight, output; grad_output, grad_input


def _wired(scale: Tensor, history: Tensor | None, slot: int, state: ScalingState) -> Wiring:
    """The cast's own views of a state's slot; x is not there, and has the same scale for form's sake."""
    front = NOTHING if history is None else amax_views({"w": slot}, history, state.device)
    return Wiring(scale_views({"x": slot, "w": slot}, scale, state.device), front)


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
    wiring = NO_STATE
    if states is not None:
        forward = states["scaling_fwd"]
        scale = forward.scale if kept is None or kept.scales is None else kept.scales
        wiring = _wired(
            scale,
            forward.amax_history if record and kept is None else None,
            FORWARD_SLOTS * gemm + _OUTPUT,
            forward,
        )
    return _Output.apply(y, held_as(fp8, "x"), wiring)


def cast_gradient(
    x: Tensor, fp8: Quantization, states: Mapping[str, ScalingState] | None, ticket: tuple[Any, ...] | None
) -> Tensor:
    """``x``, h (..., K), whose gradient will be in FP8. ``ticket``: what ``finish_backward`` is told, None
    where no amax is recorded."""
    return _Gradient.apply(x, held_as(fp8, "g"), None if states is None else states["scaling_bwd"], ticket)


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, fp8: Quantization, wiring: Wiring) -> Tensor:
        return QuantizedTensor.cast(y, fp8, wiring)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None, None


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fp8: Quantization, state: ScalingState | None, ticket: tuple[Any, ...] | None
    ) -> Tensor:
        ctx.fp8, ctx.state, ctx.ticket = fp8, state, ticket
        return x.detach()

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        wiring = NO_STATE
        if ctx.state is not None:
            if ctx.ticket is not None:
                finish_backward(*ctx.ticket)
            wiring = _wired(
                ctx.state.scale,
                None if ctx.ticket is None else ctx.state.amax_history,
                _GRAD_INPUT,
                ctx.state,
            )
        return QuantizedTensor.cast(grad, ctx.fp8, wiring), None, None, None
