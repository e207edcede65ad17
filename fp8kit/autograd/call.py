"""Operations on the tape: the native frontend's memory, and ``apply``, its way to call an ``Operation``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Device
from fp8kit.autograd import tape
from fp8kit.autograd.tape import Node
from fp8kit.autograd.tensors import Tensor, name_in, on_tape, owned, unchanged
from fp8kit.backends import dispatch
from fp8kit.buffers import nbytes_of
from fp8kit.errors import AutogradError, BackendError, Fp8kitError
from fp8kit.execution import plans
from fp8kit.execution.bound import BoundOp
from fp8kit.execution.memory import Arena, Scratch
from fp8kit.execution.refusals import refuse_no_inputs, want_call, want_spec
from fp8kit.formats import float32, int64
from fp8kit.ops.dropout_add import AddSpec, add
from fp8kit.spec import Meta, Operation

Inputs = Mapping[str, Tensor | ArrayView | None]
Finish = tuple[Callable[[list[Any]], None], Any]
_NOTHING: dict[str, Any] = {}

scratch = Scratch(lambda nbytes, device: arrays.provider(device).alloc(nbytes, device))


class NativeMemory:
    """``execution.Memory`` of a device: its arrays are views."""

    address = staticmethod(operator.attrgetter("ptr"))

    def __init__(self, device: Device) -> None:
        self.device = device
        self._alloc = arrays.provider(device).alloc
        self._nothing = Arena(0, 0, None, device, False)

    def maker(self, meta: Meta) -> Callable[[], ArrayView]:
        device, shape, dtype = self.device, meta.shape, meta.dtype
        if meta.zero:
            return lambda: arrays.zeros(shape, dtype, device)
        alloc, nbytes = self._alloc, nbytes_of(meta)

        def make() -> ArrayView:
            address, owner = alloc(nbytes, device)
            return ArrayView(address, shape, dtype, device, owner)

        return make

    def view(self, meta: Meta) -> ArrayView:
        array = self.maker(meta)()
        return ArrayView(array.ptr, array.shape, array.dtype, array.device, array)

    def stream(self) -> int:
        return arrays.current_stream(self.device)

    def arena(self, nbytes: int, stream: int) -> Arena:
        return scratch.arena(nbytes, self.device, stream) if nbytes else self._nothing

    def release(self, arena: Arena, stream: int) -> None:
        scratch.release(arena, stream)


class NativeOp(BoundOp):
    """A bound operation with the functions that allocate its outputs and gradients."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        make = self.memory.maker
        self.make_outputs = [make(meta) for meta in self.outputs.values()]
        own = {name: meta for name, meta in self.grads.items() if name not in self.streamed_grads}
        self.make_grads = {name: make(meta) for name, meta in own.items()}
        floating = {name: meta.dtype.floating for name, meta in {**self.inputs, **self.outputs}.items()}
        # which results a cotangent may come to
        self.floating = [floating[self.passes.get(name, name)] for name in self.results]
        assert self.floating[0] or not self.needs  # the others may be integers: no cotangent comes to them


memory_of = lru_cache(maxsize=64)(NativeMemory)


def amaxes_at(
    names: Mapping[str, Meta], out: Mapping[str, ArrayView], device: Device
) -> dict[str, ArrayView]:
    """Returns arrays for amaxes by name: those of ``out``, else new ones, zeroed together."""
    found = {name: out[name] for name in names if name in out}
    if len(found) < len(names):
        row = arrays.zeros((len(names),), float32, device)
        found = {name: out[name] if name in out else row.slice(0, i, 1) for i, name in enumerate(names)}
    return found


def bound(
    operation: Operation,
    spec: Any,
    views: Mapping[str, ArrayView],
    device: Device,
    needs: tuple[str, ...],
    kernels: Any,
) -> NativeOp:
    """Returns the bound operation for these views, on one device, under the kernels in force; made once.
    Raises what ``infer`` raises."""
    kinds = [(name, view.shape, view.dtype) for name, view in views.items()]
    key = plans.key_of(operation, spec, needs, kernels, ("native", device, *kinds))
    found = plans.plans.get(key)
    if found is None:
        metas = {name: Meta(view.shape, view.dtype) for name, view in views.items()}
        found = plans.keep(key, NativeOp(operation, spec, metas, needs, memory_of(device), kernels))
    return found  # type: ignore[return-value]


def apply(
    operation: Operation,
    spec: Any,
    inputs: Inputs,
    out: Mapping[str, ArrayView] = _NOTHING,
    backward_inputs: Mapping[str, ArrayView] = _NOTHING,
    finish: Finish | None = None,
    owner: object = None,
    draw: Callable[[Device], ArrayView] | None = None,
) -> dict[str, Tensor]:
    """Run an operation on tensors and record it on the tape.

    * ``inputs`` by name: Tensors (differentiable where they require a gradient) or views, of the shapes and
      dtypes that it wants; None where absent.
    * ``out``: arrays to write amaxes and gradients to, instead of new ones: a history's row, a ``main_grad``.
    * ``backward_inputs``: what backward reads besides, with the values it has then (the gradients' scales).
    * ``finish``: (function, item), called once after a whole backward pass; see ``tape.Node``.
    * ``owner``: the object whose attributes the parameters are: errors call them by the attributes' names.
    * ``draw``: gives the input ``rng``, int64 [2]. It is asked last: a call that is refused leaves the random
      state alone.

    Returns the outputs by name, amaxes that are not in ``out`` among them. Raises what ``infer`` raises,
    ShapeError for an input that is missing, ArgumentError for one that the operation does not have, for one
    that is not an array and for a spec of another class, BackendError when the inputs are on different
    devices, and AutogradError for a gradient that the operation does not have. All before anything runs.
    """
    views: dict[str, ArrayView] = {}
    needs: list[str] = []
    recording = tape.is_grad_enabled()
    try:
        for name, value in inputs.items():
            if value is None:
                continue
            if isinstance(value, Tensor):
                if recording and value.requires_grad:
                    needs.append(name)
                value = value.view
            if value._strides is not None and not value.contiguous:
                value = arrays.contiguous(value)
            views[name] = value
        device = _one_device(operation, spec, views, inputs, owner)
    except AttributeError:
        want_call(operation, spec, inputs, _is_array, "a Tensor, such as fp8kit.tensor(array)")
        raise
    if draw is not None:
        views["rng"] = ArrayView(0, (2,), int64, device)  # stands for what is drawn below
    probe = tape.probe()
    if probe is not None:
        _tell(probe, operation.name, inputs, owner)
    try:
        op = bound(operation, spec, views, device, tuple(needs), dispatch.kernels(device))
    except Fp8kitError as error:
        raise _as_the_user_calls_it(error, operation.name, inputs, owner) from None
    except AttributeError:
        want_spec(operation, spec)
        raise
    read_later = [backward_inputs[name] for name in op.backward_inputs] if needs else []
    outputs = [make() for make in op.make_outputs]
    amaxes = amaxes_at(op.amaxes, out, device) if op.amaxes else _NOTHING
    if draw is not None:
        views["rng"] = draw(device)
    saved = op.forward(
        [view.ptr for view in views.values()],
        [view.ptr for view in outputs],
        [view.ptr for view in amaxes.values()],
    )
    results = {name: Tensor(view) for name, view in zip(op.outputs, outputs, strict=True)}
    for name, source in op.passes.items():
        results[name] = _passed(inputs[source], views[source])
    watcher = tape.watcher()
    where = None if watcher is None else watcher.forward(operation.name, inputs, results)
    if needs:
        call = RecordedCall(op, inputs, views, saved, results, out, read_later, owner, where)
        own = [results[n] for n, floating in zip(op.results, op.floating, strict=True) if floating]
        on_tape(Node(operation.name, len(own), call.edges, call.backward, finish), own)
    for name, view in amaxes.items():
        if name not in out:
            results[name] = Tensor(view)
    return results


class RecordedCall:
    """A call on the tape: what its backward needs."""

    def __init__(
        self,
        op: NativeOp,
        inputs: Inputs,
        views: Mapping[str, ArrayView],
        saved: list[Any],
        results: Mapping[str, Tensor],
        out: Mapping[str, ArrayView],
        backward_inputs: list[ArrayView],
        owner: object,
        where: object,
    ) -> None:
        self.op, self.saved, self.saved_count, self.out = op, saved, len(saved), out
        kept = op.kept.items()
        self.kept = [results[n].view if source.is_output else views[n] for n, source in kept]
        self.backward_inputs = backward_inputs
        name = op.operation.name
        held = [(n, inputs.get(n)) for n in op.kept]
        self.checks = [unchanged(name, n, value, owner) for n, value in held if isinstance(value, Tensor)]
        self.checks += [unchanged(name, n, results[n]) for n in op.kept if n in results]
        self.edges = [inputs[n].edge() for n in op.needs]  # type: ignore[union-attr]
        self.watcher, self.where = tape.watcher(), where

    def backward(self, cotangents: list[ArrayView | None]) -> list[ArrayView | None]:
        """Returns the gradients of the inputs that want one."""
        op, out = self.op, self.out
        for check in self.checks:
            check()
        arrived = iter(cotangents)
        incoming = [next(arrived) if floating else None for floating in op.floating]
        incoming = [g if g is None or g.contiguous else arrays.contiguous(g) for g in incoming]
        if self.watcher is not None:
            self.watcher.backward(self.where, dict(zip(op.results, incoming, strict=True)), {})
        if len(self.saved) < self.saved_count:
            raise AutogradError(
                f"{op.operation.name}: an earlier backward failed half-way; run forward again, "
                "or pass retain_graph=True"
            )
        grads = {name: out.get(name) for name in op.grads}
        grads |= {name: make() for name, make in op.make_grads.items() if name not in out}
        amaxes = amaxes_at(op.grad_amaxes, out, op.device) if op.grad_amaxes else _NOTHING
        if op.signature.grads:
            saved, consumed = list(self.saved) if tape.retaining() else self.saved, False
            if op.lends and not tape.retaining():
                saved, self.saved, consumed = self.saved, [], not out.keys() & op.grads.keys()
            grads |= op.backward(
                [view.ptr for view in self.kept],
                [view.ptr for view in self.backward_inputs],
                saved,
                [None if g is None else g.ptr for g in incoming],
                [None if g is None else g.ptr for g in grads.values()],
                [view.ptr for view in amaxes.values()],
                consumed,
            )
        if self.watcher is not None:
            own = {name: grads[name] for name in op.needs if name in grads}
            self.watcher.backward(self.where, {}, own)
        made = list(grads.values())
        return [
            owned(edge, incoming[passed]) if passed is not None else made[index]  # type: ignore[index]
            for edge, (index, passed) in zip(self.edges, op.gradients, strict=True)
        ]


def validate(
    operation: Operation,
    spec: Any,
    inputs: Inputs,
    owner: object = None,
    needs: tuple[str, ...] = (),
    implied: Mapping[str, ArrayView] = _NOTHING,
) -> None:
    """Raise the errors that ``apply`` would raise for these inputs' shapes, dtypes and devices, and run
    nothing. A layer calls it before its first operation, about those that follow.

    Views of arrays that are not there yet, with address 0, may be among ``inputs``. ``needs``: names of those
    whose gradient will be wanted, where that matters; ``implied``: further inputs that always are as ``spec``
    wants them.
    """
    views = {n: v.view if isinstance(v, Tensor) else v for n, v in inputs.items() if v is not None}
    _one_device(operation, spec, views, inputs, owner)
    metas = {name: Meta(view.shape, view.dtype) for name, view in {**views, **implied}.items()}
    try:
        plans.validate(operation, spec, metas, needs)
    except Fp8kitError as error:
        raise _as_the_user_calls_it(error, operation.name, inputs, owner) from None


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor | ArrayView)


def _one_device(
    operation: Operation, spec: Any, views: Mapping[str, ArrayView], inputs: Inputs, owner: object
) -> Device:
    """Returns where all inputs are. BackendError where they are on several devices, ShapeError where there
    are none."""
    device: Device | None = None
    for name, view in views.items():
        if device is None:
            device = view.device
        elif view.device != device:
            argument = name_in(owner, name, inputs[name])
            wanted = f"device {device}, where the other inputs are"
            called = _called(operation.name, owner)
            raise BackendError(called, argument, f"device {view.device}", wanted)
    if device is None:
        refuse_no_inputs(operation, spec)
    return device


def _passed(value: Tensor | ArrayView | None, view: ArrayView) -> Tensor:
    """Returns a result that is the input ``value``, whose view is ``view``: changes in place of one are
    changes of the other."""
    return value._sharing(Tensor(view)) if isinstance(value, Tensor) and value.view is view else Tensor(view)


def _as_the_user_calls_it(error: Fp8kitError, operation: str, inputs: Inputs, owner: object) -> Fp8kitError:
    """Returns a refusal of ``infer`` with the user's name of what was called, an operation or the layer
    ``owner``, and of the input, be it there or missing."""
    argument = error.argument
    if argument is None or error.operation != operation:
        return error
    if argument not in inputs and error.got is not None:
        return error.renamed(_called(operation, owner), argument)
    return error.renamed(_called(operation, owner), name_in(owner, argument, inputs.get(argument)))


def _called(operation: str, owner: object) -> str:
    """Returns what errors call a call of ``operation`` for ``owner``: the layer, where that is one."""
    return getattr(owner, "layer_name", operation)


def _tell(probe: tape.Probe, name: str, inputs: Inputs, owner: object) -> None:
    """Say what the tape would have recorded of an operation."""
    for argument, value in inputs.items():
        if isinstance(value, Tensor) and value.requires_grad:
            probe.wanted = True
            probe.used.append(unchanged(name, argument, value, owner))


def _plus(a: Tensor, b: Tensor | ArrayView) -> Tensor:
    return apply(add, _ADD, {"a": a, "b": b})["y"]


_ADD = AddSpec()
Tensor._plus = _plus
