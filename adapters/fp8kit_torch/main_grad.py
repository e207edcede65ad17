"""``main_grad``: parameters whose gradient the operation itself puts into a buffer of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.errors import FormatError
from fp8kit_torch.views import kind_of


class MainGrads(NamedTuple):
    """Parameters, by the name of their input, whose gradient goes into ``main_grad``: it is added, or, with
    ``overwrite``, written there. ``dtype``: of those buffers; ``aligned``: they must lie at multiples of 16
    bytes."""

    parameters: Mapping[str, Tensor]
    overwrite: bool
    dtype: torch.dtype
    aligned: bool

    @property
    def fields(self) -> tuple[tuple[str, Any], ...]:
        """The fields of a product's spec that this asks for."""
        return ("main_grad", kind_of(self.dtype).name), ("overwrite_grad", self.overwrite)

    def buffers(self, needs: Sequence[str]) -> dict[str, Tensor]:
        """The buffers of the wanted gradients by name. FormatError where one is not what it was in
        forward."""
        found = {}
        for name in needs:
            if name in self.parameters:
                parameter: Any = self.parameters[name]
                main = parameter.main_grad
                alike = main.dtype is self.dtype and main.shape == parameter.shape and main.is_contiguous()
                if not alike or (self.aligned and main.data_ptr() % 16):
                    got = f"address {main.data_ptr():#x}" if alike else f"{main.dtype} {tuple(main.shape)}"
                    place = " at a multiple of 16 bytes" * self.aligned
                    wanted = f"contiguous {self.dtype} {tuple(parameter.shape)}{place}, as at forward"
                    raise FormatError("main_grad", name, f"{got} at backward", wanted)
                found[name] = main
        return found

    def placeholder(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """What autograd gets instead of the gradient: nothing, or, where the parameter has the flag
        ``grad_added_to_main_grad``, which is set, a gradient that says nothing, so that hooks on the
        parameter run."""
        parameter: Any = self.parameters[name]
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None
        parameter.grad_added_to_main_grad = True
        return torch.zeros((), dtype=dtype, device=parameter.device).expand(shape)


class MemberGrad:
    """Matrix ``i`` of a parameter (N, M, K), as ``MainGrads`` sees it: its part of ``main_grad``, and the
    parameter's flag."""

    def __init__(self, whole: Any, i: int) -> None:
        self.__dict__.update(whole=whole, i=i, shape=whole.shape[1:])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.whole, name)
        return found[self.i] if name == "main_grad" and isinstance(found, Tensor) else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.whole, name, value)
