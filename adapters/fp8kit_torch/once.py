"""Backward passes that cannot be differentiated themselves say so where it is tried."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fp8kit_torch.torch_compat import DelayedError

_REFUSAL = (
    b"fp8kit_torch: double backward is not supported: this differentiates a gradient that a layer of "
    b"fp8kit_torch computed (under create_graph=True)"
)


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward`` of a ``torch.autograd.Function``, whose gradients, under ``create_graph``, raise a
    RuntimeError when they are differentiated. torch's ``once_differentiable`` does so only where what comes
    in requires a gradient, though they depend on what forward saved in any case: a penalty on the gradient of
    y.sum() would be dropped in silence."""

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        # so that what asks for their gradients passes here
        through = [grad for grad in grads if grad is not None and grad.requires_grad]
        fail = DelayedError(_REFUSAL, len(found) + len(through))
        own = [None if grad is None else grad.detach().requires_grad_() for grad in found]
        return fail(*own, *through)[: len(found)]

    return refusing
