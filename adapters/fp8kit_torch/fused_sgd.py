"""``FusedSGD``: SGD with momentum, one kernel call for all parameters of a group on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8kit.arguments import number
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError
from fp8kit_torch import optimizer_state as stored
from fp8kit_torch.checks import OPTIMISED, check
from fp8kit_torch.fused_optimizer import Entry, Fused, written
from fp8kit_torch.state import stream_of
from fp8kit_torch.views import as_view


class FusedSGD(Fused):
    """Stochastic gradient descent with momentum (Sutskever et al. 2013, in PyTorch's form) ::

        g = grad + weight_decay w
        b = g at the parameter's first step, then momentum b + (1 - dampening) g
        w = w - lr (g + momentum b with nesterov, else b)

    * ``params``, ``lr`` (needed), ``momentum``, ``dampening``, ``weight_decay``, ``nesterov``: as
      ``torch.optim.SGD``.
    * ``wd_after_momentum``: the decay does not enter the momentum: w = w - lr (... + weight_decay w), with g
      = grad.
    * ``materialize_master_grads``: accepted; it is about the master weights that apex's amp hands over, and
      changes nothing where there are none, as in Transformer Engine.
    * ``set_grad_none``: deprecated, see ``zero_grad``.

    b (``momentum_buffer``) is float32. Raises Fp8kitError, FormatError and ShapeError for wrong arguments.
    """

    _own = (*Fused._own, "wd_after_momentum")
    numbers = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    states = frozenset(("momentum_buffer",))

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        given = locals()
        check("FusedSGD", OPTIMISED | {"lr": number}, given)
        if nesterov and (momentum == 0 or dampening != 0):
            raise ArgumentError("FusedSGD", "nesterov", nesterov, "False, or a momentum and no dampening")
        self.wd_after_momentum = bool(wd_after_momentum)
        super().__init__(params, given)

    def update_group(self, group: dict[str, Any], taking: dict[torch.device, list[Entry]]) -> None:
        for entries in taking.values():
            # the kernel asks only whether a step is the first: one call for those, one for the others
            started = ["momentum_buffer" in self.state[param] for param, *_ in entries]
            for running in (False, True):
                some = [entry for entry, own in zip(entries, started, strict=True) if own is running]
                if some:
                    self._update(group, some, not running)

    def _update(self, group: dict[str, Any], entries: list[Entry], first: bool) -> None:
        device = as_view(entries[0][1]).device
        lr, momentum, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
        buffers, masters = [], []
        for param, data, _ in entries:
            buffer = None
            if momentum:
                if first:
                    self.state[param]["momentum_buffer"] = torch.zeros_like(param, dtype=torch.float32)
                buffer = as_view(stored.local(self.state[param]["momentum_buffer"]))
            buffers.append(buffer)
            master = None
            if self.wd_after_momentum and decay:  # w - lr (change + decay w) = (1 - lr decay) w - lr change
                if data.dtype is torch.float32:
                    data.mul_(1 - lr * decay)
                else:
                    master = as_view(data.float().mul_(1 - lr * decay))
            masters.append(master)
        decays = [0.0 if self.wd_after_momentum else decay] * len(entries)
        dispatch.kernels(device).sgd_(
            [as_view(data) for _, data, _ in entries],
            [as_view(grad) for *_, grad in entries],
            buffers,
            masters,
            lr,
            momentum,
            float(group["dampening"]),
            bool(group["nesterov"]),
            decays,
            1 if first else 2,
            None,
            None,
            stream_of(device),
        )
        for param, data, _ in entries:
            written(param, data)

    def check_state(
        self, operation: str, param: Tensor, name: str, shown_as: str, state: Mapping[str, Any]
    ) -> None:
        if state[name] is not None:  # as torch's before the first step
            super().check_state(operation, param, name, shown_as, state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, with momentum kept in float32, not in the parameters' dtype."""
        self.check_state_dict(state_dict)
        super().load_state_dict(state_dict)
        for param, index in self.indexed(state_dict["param_groups"]):
            saved = state_dict["state"].get(index, {}).get("momentum_buffer")
            if saved is not None:
                own = saved.to(device=param.device, dtype=torch.float32).clone()
                self.state[param]["momentum_buffer"] = own
