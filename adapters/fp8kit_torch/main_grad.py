"""``main_grad``: parameters whose gradient the operation itself puts into a buffer of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.errors import FormatError
from fp8kit.ops.expert_linear import ExpertLinearSpec
from fp8kit_torch.once import once
from fp8kit_torch.torch_compat import applier, foreach_add_, foreach_copy_
from fp8kit_torch.views import dtype_of, kind_of


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

    def placeholder(self, name: str, gradient: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What autograd gets instead of the gradient that ``buffers`` was filled with: nothing, or, where the
        parameter has the flag ``grad_added_to_main_grad``, which is set, one like ``gradient`` that says
        nothing, so that hooks on the parameter run."""
        parameter: Any = self.parameters[name]
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None
        parameter.grad_added_to_main_grad = True
        return _nothing(gradient, dtype)


def _nothing(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=gradient.device).expand(gradient.shape)


class StackedMainGrads:
    """``MainGrads`` of parameters that an operation takes as one input "weight" (N, ...): it makes their
    gradient anew, which is then added to each ``main_grad``, or put there. ``each``: the parameters', named
    by their place, "0_weight0" ...; ``count``: N."""

    def __init__(self, each: MainGrads, count: int) -> None:
        self.each, self.count, self.dtype = each, count, each.dtype

    def made_by(self, spec: ExpertLinearSpec, dtype: torch.dtype) -> None:
        """Take note of the operation, and of the dtype of its weight."""
        self.dtype = dtype_of(spec.wgrad_dtype(kind_of(dtype)))

    def buffers(self, needs: Sequence[str]) -> dict[str, Tensor]:
        """Fresh memory for the gradient, where it is wanted."""
        if "weight" not in needs:
            return {}
        one = next(iter(self.each.parameters.values()))
        shape = self.count, *one.shape
        return {"weight": torch.empty(shape, dtype=self.dtype, device=one.device)}

    def placeholder(self, name: str, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Put ``gradient`` where it belongs; what goes on to ``filling`` says nothing."""
        mains = self.each.buffers(tuple(self.each.parameters))
        parts = [gradient[int(name.partition("_")[0])] for name in mains]
        with torch.no_grad():
            put = foreach_copy_ if self.each.overwrite else foreach_add_
            put([*mains.values()], parts)
        return _nothing(gradient, dtype)


class _Filling(torch.autograd.Function):
    """See ``filling``."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, main: StackedMainGrads, *parameters: Tensor) -> Tensor:
        ctx.main, ctx.parameters = main, parameters
        return whole.detach()

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given = zip(ctx.parameters, ctx.needs_input_grad[2:], strict=True)
        each = ctx.main.each.placeholder
        made = [each(f"{i}_weight0", p, p.dtype) if wanted else None for i, (p, wanted) in enumerate(given)]
        return None, None, *made


# (the parameters as one tensor, without a gradient; StackedMainGrads; the parameters) -> the first, as a
# function of the last, which get what ``MainGrads.placeholder`` says
filling = applier(_Filling)


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
