"""``Fused``: what ``FusedAdam`` and ``FusedSGD`` share: local and contiguous tensors, gradients by name, ``zero_grad``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import ArgumentError, FormatError, ShapeError, expected
from fp8kit_torch import optimizer_state as stored

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Entry = tuple[Tensor, Tensor, Tensor]  # a parameter, its local data, its contiguous gradient


class Fused(torch.optim.Optimizer):
    """Base of the fused optimisers. ``grad_name``: the parameters' attribute that holds gradients."""

    grad_name = "grad"
    _own = ("grad_name", "set_grad_none")  # attributes that a copy or a pickle has beside torch's own

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool | None) -> None:
        self.set_grad_none = set_grad_none
        if set_grad_none is not None:
            warnings.warn(f"{type(self).__name__}: set_grad_none is deprecated, use zero_grad(set_to_none)", DeprecationWarning, 3)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; FormatError for parameters that are not float32, bfloat16 or float16, ShapeError for strided ones."""
        super().add_param_group(param_group)
        name = type(self).__name__
        for param in self.param_groups[-1]["params"]:
            if param.dtype not in _FLOATS:
                raise FormatError(expected(name, "params", param.dtype, "float32, bfloat16 or float16"))
            if not stored.local(param.detach()).is_contiguous():
                raise ShapeError(expected(name, "params", f"strides {param.stride()}", "contiguous parameters"))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self._own}

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Drop all gradients, or write zeros over them with ``set_to_none=False``. Fp8kitError where ``set_grad_none`` said otherwise."""
        if self.set_grad_none is not None:
            if set_to_none not in (None, self.set_grad_none):
                wanted = f"{self.set_grad_none}, as set_grad_none"
                raise ArgumentError(expected(f"{type(self).__name__}.zero_grad", "set_to_none", set_to_none, wanted))
            set_to_none = self.set_grad_none
        for group in self.param_groups:
            for param in group["params"]:
                grad = getattr(param, self.grad_name, None)
                if grad is not None and set_to_none is False:
                    grad.detach_().zero_()
                elif grad is not None:
                    setattr(param, self.grad_name, None)

    def taking(self, group: Mapping[str, Any]) -> dict[torch.device, list[Entry]]:
        """(parameter, its local data, its contiguous gradient) of those that have a gradient, by device."""
        found: dict[torch.device, list[Entry]] = {}
        for param in group["params"]:
            grad = getattr(param, self.grad_name, None)
            if grad is None:
                continue
            data, g = stored.local(param.detach()), stored.local(grad.detach())
            if g.is_sparse or g.dtype not in _FLOATS or g.shape != data.shape or g.device != data.device:
                got = f"{g.layout} {g.dtype} {tuple(g.shape)} on {g.device}"
                wanted = f"dense, floating, {tuple(data.shape)} on {data.device}"
                raise ShapeError(expected(type(self).__name__, self.grad_name, got, wanted))
            found.setdefault(data.device, []).append((param, data, g.contiguous()))
        return found
