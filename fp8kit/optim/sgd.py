"""SGD with momentum on lists of tensors: one kernel call for all parameters that share their hyperparameters.

Source: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning"; PyTorch's
form of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fp8kit.arguments import number
from fp8kit.autograd import Tensor
from fp8kit.errors import ArgumentError
from fp8kit.optim.base import Batch, Group, Hyper, Optimizer, rate


class SGD(Optimizer):
    """Stochastic gradient descent ::

        g = grad + weight_decay w
        b = g at the parameter's first step, then momentum b + (1 - dampening) g
        w = w - lr (g + momentum b with nesterov, else b)

    ``params``, ``lr``, ``write_fp8_weights``, masters and errors: see ``Optimizer``. b (``momentum_buffer``)
    is float32; without momentum there is none, and b = g. ``nesterov`` needs a momentum and no dampening.
    """

    columns = ("lr", "momentum", "dampening", "nesterov", "weight_decay")

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        write_fp8_weights: bool = False,
    ) -> None:
        own = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**own, "nesterov": nesterov}, write_fp8_weights)

    def flat(self, group: Mapping[str, Any]) -> Hyper:
        names, nesterov = ("momentum", "dampening", "weight_decay"), group["nesterov"]
        momentum, dampening, decay = (number("SGD", name, group[name]) for name in names)
        if (
            not isinstance(nesterov, int | float | np.bool_)
            or nesterov not in (0, 1)
            or (nesterov and (momentum == 0 or dampening != 0))
        ):
            wanted = "a bool; True needs a momentum and no dampening"
            raise ArgumentError("SGD", "nesterov", repr(nesterov), wanted)
        return rate("SGD", group["lr"]), momentum, dampening, bool(nesterov), decay

    def nest(self, values: Sequence[float]) -> Group:
        return {
            "momentum": values[1],
            "dampening": values[2],
            "nesterov": values[3] == 1 if values[3] in (0, 1) else values[3],
            "weight_decay": values[4],
        }

    def slots(self, values: Sequence[float]) -> tuple[str, ...]:
        return ("momentum_buffer",) if values[1] else ()

    def update(self, kernels: Any, batch: Batch, stream: int) -> None:
        slots = self.slots((0.0, *batch.hyper))
        params, grads, *buffers, masters = batch.columns(*slots)
        kernels.sgd_(
            params, grads, buffers[0] if buffers else [None] * len(params), masters, *batch.numbers(), stream
        )
