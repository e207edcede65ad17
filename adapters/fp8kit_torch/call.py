"""``apply``: an operation on tensors, in one of two ways that give the same bits.

Eagerly it runs at once, and one node of torch's graph holds what its backward needs. Amaxes are written into
the layer's own history. Where an operation passes an input through, such as a residual, the result is that
input itself, with no copy. Under ``torch.compile`` the operation's torch op is called instead (``library``).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fp8kit.autocast import checking_finite, finite_checks
from fp8kit.backends.dispatch import kernels
from fp8kit.errors import UnsupportedError, on_behalf_of
from fp8kit.execution.codec import decode
from fp8kit.execution.refusals import want_call
from fp8kit.spec import Operation
from fp8kit_torch.bound import TorchOp, addresses, bind, want_no_transform
from fp8kit_torch.distributed_weights import arrived
from fp8kit_torch.finite import Look
from fp8kit_torch.library import trace
from fp8kit_torch.main_grad import MainGrads, StackedMainGrads
from fp8kit_torch.once import once
from fp8kit_torch.state import NO_STATE, StateBinding, finish_backward
from fp8kit_torch.torch_compat import (
    alike,
    applier,
    calls_backward,
    dispatch_modes,
    held_alone,
    traced_by_make_fx,
)
from fp8kit_torch.views import dtype_of

_PLAIN = (Tensor, torch.nn.Parameter)
_NOWHERE: Mapping[str, Tensor] = {}
_requires_grad, _kind = attrgetter("requires_grad"), attrgetter("shape", "dtype", "device")
_is_contiguous = Tensor.is_contiguous


def apply(operation: Operation, spec: Any, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The outputs by name of an operation of fp8kit or of your own (``fp8kit.register_operation``), eagerly
    or within ``torch.compile``, differentiable where the operation is.

    * ``spec``: its static arguments, as the operation takes them. Plans are found by this object: keep it,
      and make no new one for each call. Within ``torch.compile`` it is made of numbers, texts, formats and
      registered dataclasses.
    * ``inputs``: tensors by name, in any strides; None where absent.

    Raises, before anything runs, what the operation's ``infer`` raises, with the names that the operation
    gives its inputs; ShapeError for an input that is missing, ArgumentError for one that the operation does
    not have, for one that is no tensor and for a spec of another class; BackendError for tensors on several
    devices, AutogradError for a gradient that there is none of.
    """
    if torch.compiler.is_compiling():
        return trace(operation, spec, {name: tensor for name, tensor in inputs.items() if tensor is not None})
    try:
        present = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        for name, tensor in present.items():
            if type(tensor) not in _PLAIN and hasattr(tensor, "held_in_fp8"):
                present[name] = tensor.dequantize()
        if isinstance(spec, str):
            with on_behalf_of(operation.name, text="spec"):
                spec = decode(spec)
        prepared = prepare(operation, spec, present)
    except (AttributeError, TypeError, IndexError):
        want_call(operation, spec, inputs, torch.is_tensor, "a torch.Tensor")
        raise
    return run(*prepared)


def prepare(
    operation: Operation,
    spec: Any,
    inputs: Mapping[str, Tensor],
    scales: tuple[str, ...] = (),
    last: TorchOp | None = None,
) -> tuple[TorchOp, list[Tensor]]:
    """Check an eager call and make it ready for ``run``: its bound operation, and its tensors, contiguous.
    ``scales``: names of the inputs that a ``StateBinding`` will add. ``last``: what this gave for a call
    before, which is mostly what it gives again. Raises what ``apply`` raises; ``run`` then refuses nothing
    more."""
    names, tensors = tuple(inputs), [*inputs.values()]
    if dispatch_modes() and traced_by_make_fx():
        want_no_transform(operation, names, tensors)
        got, wanted = "a call that make_fx traces, which sees a constant", "torch.compile, or a call outside"
        raise UnsupportedError(operation.name, operation.argument(names[0], names), got, wanted)
    asked = torch.is_grad_enabled(), names, scales
    same = last is not None and last.spec is spec and last.asked == asked
    if last is not None and same and last.fits(*tensors) and last.kernels is kernels(last.device):
        return last, tensors
    if not all(map(_is_contiguous, tensors)):
        whole = {name: t if _is_contiguous(t) else t.contiguous() for name, t in inputs.items()}
        return prepare(operation, spec, whole, scales, last)
    needs = tuple(compress(names, map(_requires_grad, tensors))) if asked[0] else ()
    found = bind(operation, spec, needs, names, [*map(_kind, tensors)], scales)
    if found.renewals and (found is last or found.asked != asked):
        found.asked, found.fits, found.renewals = asked, alike(tensors), found.renewals - 1
    return found, tensors


def run(
    op: TorchOp,
    tensors: list[Tensor],
    state: StateBinding = NO_STATE,
    main: MainGrads | StackedMainGrads | None = None,
) -> dict[str, Tensor]:
    """The outputs by name of a call that was prepared. ``state``: of delayed scaling; ``main``: the
    parameters whose gradients go into their ``main_grad``."""
    look = None
    if finite_checks.ever and checking_finite():
        look = Look(op.operation.name, dict(zip(op.inputs, tensors, strict=False)))
    tensors, inputs = addresses(op, tensors)
    outputs, held = op.call(inputs, state)
    results: Any = outputs
    if op.needs:
        if op.kept_at:
            held = [*map([*outputs, *tensors].__getitem__, op.kept_at), *held]
        results = _record((op, state, main), outputs, held, *tensors)
    elif op.through:
        results = [*outputs, *[tensors[at] for at in op.through]]
    found = dict(zip(op.results, results, strict=True))
    if look is not None:
        look.follow(found, () if main is None else main.buffers(op.needs))
    return found


class _Node(torch.autograd.Function):
    """The graph's node of a call. The operation has run before: ``forward`` here only records. ``call``:
    (bound operation, state, parameters with a ``main_grad``); ``held``: the tensors that backward reads."""

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[TorchOp, StateBinding, MainGrads | StackedMainGrads | None],
        outputs: list[Tensor],
        held: list[Tensor],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*held)
        ctx.set_materialize_grads(False)
        ctx.call = call
        through = call[0].through
        return (*outputs, *[tensors[at] for at in through]) if through else tuple(outputs)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        op, state, main = ctx.call
        saved = list(ctx.saved_tensors)
        # first of all, so that a pass that fails later knows which recorded amaxes to drop
        if state.tokens and op.grad_amaxes:
            finish_backward(state.tokens)
        into = _NOWHERE if main is None else main.buffers(op.needs)
        # drop the graph's references, so that each buffer is freed after its last use; a retained graph keeps
        # them for another pass
        lends = op.lends and not into
        if lends or op.saved.streamed:
            ctx.maybe_clear_saved_tensors()
        count = len(op.kept_at)
        kept = saved[:count]
        del saved[:count]
        consumed = lends and held_alone(saved)
        try:
            made = op.call_backward(kept, saved, [*map(_plain, grads)], state, into, consumed)
        except RuntimeError:
            names = [f"the gradient of {name}" for name in op.results]
            wanted = "one gradient at a time: no is_grads_batched, vectorize or vmap"
            want_no_transform(op.operation, names, grads, wanted)
            raise
        for i, name in enumerate(op.needs) if into else ():
            if name in into:
                made[i] = main.placeholder(name, into[name], dtype_of(op.inputs[name].dtype))
        return None, None, None, *map([*made, None].__getitem__, op.wanted)


_record = applier(_Node)
calls_backward(_Node)


def _plain(grad: Tensor | None) -> Tensor | None:
    """A gradient as backward takes it: contiguous, by its values where a layer with ``fp8_grad`` gave it in
    FP8, and once a collective of DTensor has filled it."""
    if grad is None:
        return None
    if type(grad) is not Tensor:
        grad = grad.dequantize() if hasattr(grad, "held_in_fp8") else arrived(grad)
    return grad if grad.is_contiguous() else grad.contiguous()
