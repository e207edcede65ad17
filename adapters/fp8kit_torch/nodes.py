"""An eager operation as a node of torch's graph, past the dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.errors import FormatError
from fp8kit.quantization import AmaxHistory
from fp8kit_torch.memory import NOTHING, Placed
from fp8kit_torch.once import once
from fp8kit_torch.ready import Ready
from fp8kit_torch.state import ScalingState, finish_backward
from fp8kit_torch.views import dtype_of


class Wiring(NamedTuple):
    """How a layer's FP8 state hangs on its operation in an eager call."""

    scales: Placed  # inputs
    front: Placed = NOTHING  # where forward accumulates amaxes; NOTHING: nowhere that lasts
    late: Placed = NOTHING  # the gradients' scales, read at backward time
    back: Placed = NOTHING  # where backward accumulates amaxes
    ticket: tuple[AmaxHistory, ScalingState, int | None] | None = None  # what ``finish_backward`` is told


NO_STATE = Wiring(NOTHING)


class Fused(NamedTuple):
    """Parameters, by the name of their input, whose gradient the operation itself puts into ``main_grad``:
    adds, or, with ``overwrite``, writes there. ``dtype``: of those buffers; ``aligned``: they must lie at
    multiples of 16 bytes."""

    parameters: Mapping[str, Tensor]
    overwrite: bool
    dtype: torch.dtype
    aligned: bool

    def into(self, needs: Sequence[str]) -> dict[str, Tensor]:
        """The buffers of the wanted gradients by name. FormatError where one is not what it was in
        forward."""
        found = {}
        for name in needs:
            if name in self.parameters:
                parameter: Any = self.parameters[name]
                main = parameter.main_grad
                alike = main.dtype is self.dtype and main.shape == parameter.shape and main.is_contiguous()
                if not alike or (self.aligned and main.data_ptr() % 16):
                    got = (
                        f"address {main.data_ptr():#x} at backward"
                        if alike
                        else f"{main.dtype} {tuple(main.shape)} at backward"
                    )
                    place = " at a multiple of 16 bytes" * self.aligned
                    wanted = f"contiguous {self.dtype} {tuple(parameter.shape)}{place}, as at forward"
                    raise FormatError("main_grad", name, got, wanted)
                found[name] = main
        return found

    def stand_in(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """What autograd gets instead of the gradient: nothing, or, where the parameter has the flag
        ``grad_added_to_main_grad``, which is set, a gradient that says nothing, so that hooks on the
        parameter run."""
        parameter: Any = self.parameters[name]
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None
        parameter.grad_added_to_main_grad = True
        return torch.zeros((), dtype=dtype, device=parameter.device).expand(shape)


class Step(NamedTuple):
    """A call of an operation that backward goes back through."""

    ready: Ready
    wiring: Wiring
    fused: Fused | None

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Its outputs, those that are inputs aside, and what is to be saved."""
        ready, wiring, _ = self
        outputs, _, held = ready.forward(tensors, wiring.scales, wiring.front, True)
        if ready.kept:
            held = [*[outputs[i] if made else tensors[i] for _, i, made, _, _ in ready.kept], *held]
        return outputs, held

    def begin(self) -> dict[str, Tensor]:
        """What is asked and said before backward records anything: the buffers that gradients go into, by
        name. A pass that fails later finds what to drop."""
        if self.wiring.ticket is not None and self.ready.back:
            finish_backward(*self.wiring.ticket)
        return {} if self.fused is None else self.fused.into(self.ready.needs)

    def backward(
        self, saved: list[Tensor], grads: Sequence[Tensor | None], into: Mapping[str, Tensor]
    ) -> list[Tensor | None]:
        """The gradients of ``ready.needs``. ``saved``: what ``forward`` gave, nowhere else if it shall go
        early; emptied. ``grads``: of the outputs."""
        ready, wiring, fused = self
        kept = saved[: len(ready.kept)]
        del saved[: len(ready.kept)]
        # a layer with ``fp8_grad`` gives its input's gradient in FP8
        plain = [
            g.dequantize() if g is not None and type(g) is not Tensor and hasattr(g, "held_in_fp8") else g
            for g in grads
        ]
        made, _ = ready.backward(kept, saved, plain, wiring.late, wiring.back, into, True)
        saved.clear()
        for at, (i, name) in enumerate(zip(ready.wanted, ready.needs, strict=True)) if into else ():
            if name in into:
                _, shape, kind = ready.inputs[i]
                made[at] = fused.stand_in(name, shape, dtype_of(kind))  # type: ignore[union-attr]
        return made


class _One(torch.autograd.Function):
    """A node of one step."""

    @staticmethod
    def forward(ctx: Any, step: Step, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, held = step.forward(tensors)
        ctx.save_for_backward(*held)
        ctx.step = step
        ctx.materialize_grads = False
        return (*outputs, *[tensors[i] for i in step.ready.through])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # the gradient is to be differentiated itself: what is refused, when it is
        if torch.is_grad_enabled():
            return _one_once(ctx, *grads)  # type: ignore[no-any-return]
        step, saved = ctx.step, list(ctx.saved_tensors)
        into = step.begin()
        # unless the graph is kept for another pass, from here on only ``saved`` holds what forward saved
        if step.ready.saved_apart.apart:
            ctx.maybe_clear_saved_tensors()
        ready, made = step.ready, step.backward(saved, grads, into)
        if len(made) == len(ready.inputs):
            return (None, *made)
        found: list[Tensor | None] = [None] * (1 + len(ready.inputs))
        for i, grad in zip(ready.wanted, made, strict=True):
            found[1 + i] = grad
        return tuple(found)


_one_once = once(_One.backward)
# what torch's ``apply`` of a node comes to
_One._backward_cls.apply = _One.backward  # type: ignore[attr-defined]
# what ``_One.apply`` comes to outside of functorch's transforms
_enter = super(torch.autograd.Function, _One).apply
_within: Callable[[], bool] = torch._C._are_functorch_transforms_active
# a tensor that such a transform left behind: what it wraps
_alive: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


# what operations did, in order: step, inputs, outputs
Seen = list[tuple[Step, Sequence[Tensor], Sequence[Tensor]]]


class _Here(threading.local):
    seen: Seen | None = None


_here = _Here()


@contextmanager
def watched() -> Iterator[Seen]:
    """Context manager: what this thread's operations that go into the graph do within (``scripts``)."""
    before, _here.seen = _here.seen, []
    try:
        yield _here.seen
    finally:
        _here.seen = before


def run_step(step: Step, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The outputs of a step, those that are inputs last, in the graph."""
    outputs: Sequence[Tensor] = (
        _One.apply(step, *tensors) if _within() else _enter(step, *map(_alive, tensors))
    )
    if _here.seen is not None:
        _here.seen.append((step, tensors, outputs))
    return outputs
