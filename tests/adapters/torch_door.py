"""The torch door of ``doors.py``: a functional torch.library op with its autograd, and a mutating one for the
FP8 state."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fp8kit_torch import as_view, empty_like_metas
from torch import Tensor

from .doors import (
    FP8_MAX,
    GRADS,
    HISTORY,
    INPUTS,
    OUTPUTS,
    SIGNATURE,
    Problem,
    run_backward,
    run_forward,
    update,
)


@torch.library.custom_op("fp8kit_proof::linear", mutates_args=())
def op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    g_scale: Tensor,
    g_history: Tensor,
) -> list[Tensor]:
    out = empty_like_metas(SIGNATURE.outputs | SIGNATURE.saved, x)
    run_forward(
        {n: as_view(t) for n, t in zip(INPUTS, (x, weight, bias, x_scale, w_scale), strict=True)},
        dict(zip(OUTPUTS, map(as_view, out), strict=True)),
    )
    return out


@op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    g_scale: Tensor,
    g_history: Tensor,
) -> list[Tensor]:
    return empty_like_metas(SIGNATURE.outputs | SIGNATURE.saved, x)


@torch.library.custom_op("fp8kit_proof::linear_backward", mutates_args=())
def backward_op(g: Tensor, saved: list[Tensor], g_scale: Tensor) -> list[Tensor]:
    out = empty_like_metas(SIGNATURE.grads, g)
    run_backward(
        dict(zip(SIGNATURE.saved, map(as_view, saved), strict=True)),
        as_view(g),
        as_view(g_scale),
        dict(zip(GRADS, map(as_view, out), strict=True)),
    )
    return out


@backward_op.register_fake
def _(g: Tensor, saved: list[Tensor], g_scale: Tensor) -> list[Tensor]:
    return empty_like_metas(SIGNATURE.grads, g)


@torch.library.custom_op("fp8kit_proof::update_scale", mutates_args=("scale", "history"))
def update_op(scale: Tensor, history: Tensor, amax: Tensor, fp8_max: float) -> None:
    history[0] = amax
    update(as_view(scale), as_view(history), fp8_max)


@update_op.register_fake
def _(scale: Tensor, history: Tensor, amax: Tensor, fp8_max: float) -> None:
    return None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*output[len(SIGNATURE.outputs) :])
    # not saved: backward reads, then changes, what they are by then
    ctx.g_scale, ctx.g_history = inputs[5], inputs[6]


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    dx, dw, db, amax = backward_op(grads[0].contiguous(), list(ctx.saved_tensors), ctx.g_scale)
    update_op(ctx.g_scale, ctx.g_history, amax, FP8_MAX["g"])
    return dx, dw, db, None, None, None, None


op.register_autograd(_backward, setup_context=_setup)


class Linear(torch.nn.Module):
    """One FP8 linear layer with delayed scaling; its state is buffers."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(problem.weight.copy()))
        self.bias = torch.nn.Parameter(torch.from_numpy(problem.bias.copy()))
        for n in FP8_MAX:
            self.register_buffer(f"{n}_scale", torch.ones(1))
            self.register_buffer(f"{n}_history", torch.zeros(HISTORY, 1))

    def forward(self, x: Tensor) -> Tensor:
        y, x_amax, w_amax, *_ = op(
            x, self.weight, self.bias, self.x_scale, self.w_scale, self.g_scale, self.g_history
        )
        update_op(self.x_scale, self.x_history, x_amax, FP8_MAX["x"])
        update_op(self.w_scale, self.w_history, w_amax, FP8_MAX["w"])
        return y


def steps(problem: Problem, compiled: bool) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Every step of the problem, eagerly or under torch.compile(fullgraph=True)."""
    layer = Linear(problem)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    results = []
    for x, g in problem.batches:
        tx = torch.from_numpy(x.copy()).requires_grad_()
        layer.zero_grad()
        y = call(tx)
        y.backward(torch.from_numpy(g.copy()))
        got = {"y": y, "dx": tx.grad, "dweight0": layer.weight.grad, "dbias0": layer.bias.grad}
        results.append(
            {n: t.detach().numpy().copy() for n, t in got.items()}
            | {n: t.numpy().copy() for n, t in layer.named_buffers()}
        )
    return results
