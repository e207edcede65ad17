"""``Fused``: what ``FusedAdam`` and ``FusedSGD`` share: steps, local and contiguous tensors, gradients by
name, ``zero_grad``, checks of saved states; and ``adam_``, the kernel call of ``FusedAdam`` and
``multi_tensor_adam``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fp8kit.arguments import NamedWell, listed
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, CheckpointError, FormatError, Fp8kitError, ShapeError
from fp8kit_torch import optimizer_state as stored
from fp8kit_torch.checks import OPTIMISED, check, shown
from fp8kit_torch.held_values import HeldTensor
from fp8kit_torch.sharded_rows import note_written
from fp8kit_torch.state import stream_of
from fp8kit_torch.views import FLOATS, as_view, optional_view

Entry = tuple[Tensor, Tensor, Tensor]  # a parameter, its local data, its contiguous gradient
# a step at which beta**step is 0, so that the kernel's bias correction is a division by 1
NO_CORRECTION = 2**60


class Fused(NamedWell, torch.optim.Optimizer):
    """Base of the fused optimisers. ``grad_name``: the parameters' attribute that holds gradients."""

    grad_name = "grad"
    numbers: tuple[str, ...]  # what every group has
    states: frozenset[str]  # names of the states that are as large as their parameter
    _own = ("grad_name", "set_grad_none")  # attributes that a copy or a pickle has beside torch's own

    def __init__(self, params: Any, given: Mapping[str, Any]) -> None:
        """``given``: the constructor's arguments by name, checked."""
        name, set_grad_none = type(self).__name__, given["set_grad_none"]
        wanted = "parameters, (name, parameter)s, or groups of them"
        if isinstance(params, Tensor):
            raise ArgumentError(name, "params", shown(params), wanted)
        params = listed(name, "params", params, wanted)
        if not params:
            raise ArgumentError(name, "params", "none", wanted)
        self.set_grad_none = set_grad_none
        if set_grad_none is not None:
            said = f"{name}: set_grad_none is deprecated, use zero_grad(set_to_none)"
            warnings.warn(said, DeprecationWarning, 3)
        super().__init__(params, {name: given[name] for name in self.numbers})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; FormatError for parameters that are not float32, bfloat16 or float16, ShapeError for
        strided ones."""
        name = type(self).__name__
        if not isinstance(param_group, dict) or "params" not in param_group:
            wanted = "parameters, or groups, dicts with their params"
            raise ArgumentError(name, "params", shown(param_group), wanted)
        check(name, OPTIMISED, param_group)
        before = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            for param in self.param_groups[-1]["params"]:
                if param.dtype not in FLOATS:
                    raise FormatError(name, "params", param.dtype, "float32, bfloat16 or float16")
                want_contiguous(name, stored.local(param.detach()))
        except (TypeError, ValueError, AttributeError) as error:
            del self.param_groups[before:]
            if isinstance(error, Fp8kitError):
                raise
            got = shown(param_group["params"])
            raise ArgumentError(name, "params", got, f"parameters ({error})") from None

    def check_state_dict(self, state_dict: Any) -> None:
        """CheckpointError for what is no state of this optimizer with its groups, whose ``states`` have the
        shapes of their parameters, ArgumentError for a number that no group can have: before anything is
        taken over."""
        op = f"{type(self).__name__}.load_state_dict"
        saved = state_dict if isinstance(state_dict, Mapping) else {}
        states, groups = saved.get("state"), saved.get("param_groups")
        groups = groups if isinstance(groups, list | tuple) else []
        params = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
        held = [len(own) if isinstance(own, list) else -1 for own in params]
        wanted = [len(group["params"]) for group in self.param_groups]
        if not isinstance(states, Mapping) or held != wanted:
            got = f"groups of {held} parameters" if groups else shown(state_dict)
            wanted = f"state and param_groups, of groups of {wanted} parameters"
            raise CheckpointError(op, "state_dict", got, wanted)
        for group in groups:
            self.check_group(op, group, CheckpointError)
        for param, index in self.indexed(groups):
            state = states.get(index, {})
            if not isinstance(state, Mapping):
                raise CheckpointError(op, f"state[{index!r}]", shown(state), "a mapping of names to states")
            for name in self.states & state.keys():
                self.check_state(op, param, name, f"state[{index!r}][{name!r}]", state)

    def check_group(
        self, operation: str, group: Mapping[str, Any], error: type[Fp8kitError] = ArgumentError
    ) -> None:
        """ArgumentError for a number that a group cannot have, ``error`` for one that it lacks."""
        for name in self.numbers:
            if name not in group:
                wanted = f"one with {', '.join(self.numbers)}"
                raise error(operation, "param_groups", f"a group without {name!r}", wanted)
        check(operation, OPTIMISED, group)

    def check_state(
        self, operation: str, param: Tensor, name: str, shown_as: str, state: Mapping[str, Any]
    ) -> None:
        """CheckpointError for a saved state that the parameter cannot have."""
        value = state[name]
        right = isinstance(value, Tensor) and value.shape == param.shape and value.layout is torch.strided
        if not right or not (value.is_floating_point() or value.dtype is torch.int16) or value.is_meta:
            raise CheckpointError(operation, shown_as, shown(value), f"numbers of shape {tuple(param.shape)}")

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self._own}

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Drop all gradients, or write zeros over them with ``set_to_none=False``. Fp8kitError where
        ``set_grad_none`` said otherwise."""
        name = f"{type(self).__name__}.zero_grad"
        OPTIMISED["set_grad_none"](name, "set_to_none", set_to_none)
        if self.set_grad_none is not None:
            if set_to_none not in (None, self.set_grad_none):
                wanted = f"{self.set_grad_none}, as set_grad_none"
                raise ArgumentError(name, "set_to_none", set_to_none, wanted)
            set_to_none = self.set_grad_none
        for group in self.param_groups:
            for param in group["params"]:
                grad = getattr(param, self.grad_name, None)
                if grad is not None and set_to_none is False:
                    grad.detach_().zero_()
                elif grad is not None:
                    setattr(param, self.grad_name, None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient, in stream order. Returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.check_group(f"{type(self).__name__}.step", group)
        # what any group cannot take a step with is refused before one does
        for group, taking in [(group, self.taking(group)) for group in self.param_groups]:
            self.update_group(group, taking)
        return loss

    def update_group(self, group: dict[str, Any], taking: dict[torch.device, list[Entry]]) -> None:
        """One update of a group's parameters, by device."""
        raise NotImplementedError

    def indexed(self, groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Tensor, Any]]:
        """(parameter, its index in a state dict whose "param_groups" these are)."""
        params = [param for group in self.param_groups for param in group["params"]]
        return zip(params, [index for group in groups for index in group["params"]], strict=True)

    def taking(self, group: Mapping[str, Any]) -> dict[torch.device, list[Entry]]:
        """(parameter, its local data, its contiguous gradient) of those that have a gradient, by device.
        ShapeError for what cannot take a step."""
        op = type(self).__name__
        found: dict[torch.device, list[Entry]] = {}
        for param in group["params"]:
            grad = getattr(param, self.grad_name, None)
            if grad is None:
                continue
            data, g = stored.local(param.detach()), stored.local(grad.detach())
            want_contiguous(op, data)
            for name, state in self.state.get(param, {}).items():
                if name in self.states and state is not None and state.shape != param.shape:
                    raise ShapeError(op, "params", shown(param), f"{tuple(state.shape)}, as its {name}")
            if g.is_sparse or g.dtype not in FLOATS or g.shape != data.shape or g.device != data.device:
                got = f"{g.layout} {g.dtype} {tuple(g.shape)} on {g.device}"
                wanted = f"dense, floating, {tuple(data.shape)} on {data.device}"
                raise ShapeError(op, self.grad_name, got, wanted)
            found.setdefault(data.device, []).append((param, data, g.contiguous()))
        return found


def written(param: Tensor, values: Tensor) -> None:
    """What a step does after the kernel, which wrote by address: autograd sees that, and a parameter that is
    held in FP8, or a part of such a one, becomes the cast of its new ``values``."""
    increment_version(param)
    if hasattr(param, "to_local"):
        note_written(stored.local(param.detach()))
    if isinstance(param, HeldTensor):
        param.copy_(values)


def want_contiguous(operation: str, data: Tensor) -> None:
    """ShapeError for parameters in strides."""
    if not data.is_contiguous():
        raise ShapeError(operation, "params", f"strides {data.stride()}", "contiguous parameters")


class AdamNumbers(NamedTuple):
    """What a step of Adam takes beside its tensors, see ``FusedAdam``. ``count``, int64, ``inv_scale`` and
    ``found_inf``, float32: (1,) on the device."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    decay: float
    decoupled: bool
    count: int | Tensor
    inv_scale: Tensor | None
    found_inf: Tensor | None

    def of_kernel(self, params: Sequence[Tensor]) -> tuple[Any, ...]:
        """The kernels' arguments from ``lr`` to ``found_inf``."""
        lr, count = self.lr, self.count
        there = isinstance(lr, Tensor) and lr.device == params[0].device
        return (
            as_view(lr.float().reshape(1)) if there else float(lr),  # type: ignore[union-attr]
            *map(float, self.betas),
            float(self.eps),
            [self.decay] * len(params),
            as_view(count) if isinstance(count, Tensor) else count,
            optional_view(self.inv_scale),
            optional_view(self.found_inf),
        )


def adam_(
    params: list[Tensor],
    grads: list[Tensor],
    moments: Sequence[list[Tensor]],
    masters: Sequence[Tensor | None],
    numbers: AdamNumbers,
) -> None:
    """One step of Adam on contiguous tensors of one device. ``moments``: first and second."""
    decay, inv_scale = numbers.decay, numbers.inv_scale
    if decay and not numbers.decoupled:
        wide = [g.float() if inv_scale is None else g.float() * inv_scale for g in grads]
        values = [(p if m is None else m).float() for p, m in zip(params, masters, strict=True)]
        grads = [g.add(w, alpha=decay) for g, w in zip(wide, values, strict=True)]
        numbers = numbers._replace(decay=0.0, inv_scale=None)
    place = as_view(params[0]).device
    dispatch.kernels(place).adamw_(
        *([as_view(t) for t in kept] for kept in (params, grads, *moments)),
        [*map(optional_view, masters)],
        *numbers.of_kernel(params),
        stream_of(place),
    )
