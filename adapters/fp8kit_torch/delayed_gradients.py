"""``delay_wgrad_compute``: gradients of weights that are handed over when ``backward_dw`` asks for them.

They are computed in the backward pass, by the operation that computes the input's, and wait until then; in
Transformer Engine, where they hide a pipeline's communication, their products wait too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8kit_torch.once import once


class Waiting:
    """Gradients of one module's weights that nobody has asked for yet, and what is called once they are
    there. Copies of the module have none."""

    def __init__(self) -> None:
        self.gradients: list[tuple[Tensor, Tensor]] = []
        self.hooks: list[Callable[[], Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Waiting:
        return Waiting()

    def __reduce__(self) -> Any:
        return Waiting, ()

    def held(self, weight: Tensor) -> Tensor:
        """``weight``, whose gradient goes to this object instead of its ``grad``."""
        return _Delayed.apply(weight, self) if weight.requires_grad else weight  # type: ignore[no-any-return]

    def hand_over(self) -> None:
        """Add what waits to the weights' ``grad``, then call the hooks."""
        gradients, self.gradients = self.gradients, []
        with torch.no_grad():
            for weight, gradient in gradients:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        for hook in self.hooks:
            hook()


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, waiting: Waiting) -> Tensor:
        ctx.weight, ctx.waiting = weight, waiting
        return weight.view_as(weight)

    @staticmethod
    @once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.waiting.gradients.append((ctx.weight, gradient))
        return None, None
