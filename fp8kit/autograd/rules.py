"""Hanging operations on the tape: the native front door's way to call an ``Operation``.

``apply`` finds or makes the plan, allocates what the operation fills, runs it, and records a node whose
backward is the operation's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fp8kit import arrays
from fp8kit.arrays import ArrayView
from fp8kit.autograd import tape
from fp8kit.autograd.tape import Edge, Node
from fp8kit.autograd.tensors import Tensor, name_in, owned, unchanged
from fp8kit.backends import dispatch
from fp8kit.errors import AutogradError, BackendError, FormatError, ShapeError
from fp8kit.formats import DType, int64, uint8
from fp8kit.replays import Replays, replays
from fp8kit.scratch import Buffers, large, scratch
from fp8kit.spec import Meta, Operation, Plan, Views

_PLANS: dict[Any, Ready] = {}
_REHEARSED: dict[Any, Any] = {}  # what was rehearsed -> its spec, which is held, so that its id stays its own
_PLAN_LIMIT = 4096
_NOTHING: dict[str, Any] = {}

_ALIGNMENT = 256  # bytes, of every buffer

Finish = tuple[Callable[[list[Any]], None], Any]


class Block:
    """Buffers that live and die together, laid out in one piece of memory: one allocation instead of many.
    For an operation that is ``early`` the ``large`` ones lie apart."""

    __slots__ = ("apart", "parts", "size")

    def __init__(self, metas: Mapping[str, Meta], early: bool = False) -> None:
        self.size = 0
        self.parts: list[tuple[str, int, arrays.Shape, DType]] = []
        self.apart: dict[str, Meta] = large(metas) if early else {}
        for name, meta in metas.items():
            if name in self.apart:
                continue
            self.parts.append((name, self.size, meta.shape, meta.dtype))
            self.size += -(-math.prod(meta.shape) * meta.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def carve(self, device: arrays.Device) -> Views:
        """Fresh buffers by name, contents undefined."""
        if not self.parts and not self.apart:
            return {}
        ptr, owner = arrays.provider(device).alloc(self.size, device)
        views = self.at(ptr, device, owner)
        return Buffers(views, self.apart, maker(device)) if self.apart else views

    def at(self, ptr: int, device: arrays.Device, owner: object) -> dict[str, ArrayView]:
        """The buffers by name in memory that ``owner`` keeps; without those that lie apart."""
        return {
            name: ArrayView(ptr + offset, shape, dtype, device, owner)
            for name, offset, shape, dtype in self.parts
        }

    def room(self, device: arrays.Device, stream: int) -> Views:
        """Buffers for one operation's temporaries on ``stream``, contents undefined, in ``fp8kit.scratch``;
        not to be changed."""
        if not self.parts:
            return Buffers({}, self.apart, maker(device)) if self.apart else {}
        room = scratch.room(self.size, device, stream)
        views: dict[str, ArrayView] | None = room.carved.get(self)
        if views is None:
            views = {
                n: ArrayView(room.ptr + at, shape, dtype, device, room.owner)
                for n, at, shape, dtype in self.parts
            }
            room.keep(self, views)
        return Buffers(views, self.apart, maker(device)) if self.apart else views


def first(views: Views) -> int:
    """Address of the first of buffers in one piece of memory, which says where all lie; 0 where there are
    none."""
    for view in views.values():
        return view.ptr  # type: ignore[union-attr]
    return 0


def maker(device: arrays.Device) -> Callable[[Meta], ArrayView]:
    """A function that allocates an array of a meta there."""
    return lambda meta: arrays.empty(meta.shape, meta.dtype, device)


class Ready(NamedTuple):
    """A plan as the native door keeps it: with the layout of its temporaries, and with what its key names by
    identity kept alive. ``grads``, ``grads_apart``: gradients that are allocated together, and those that are
    when backward comes to them. ``names``: outputs that a cotangent may come to: what is no amax. ``again``,
    ``backward_again``: what was done already, None where that is not recorded, as where buffers lie apart."""

    plan: Plan
    saved: Block
    scratch: Block
    backward_scratch: Block
    grads: dict[str, Meta]
    grads_apart: dict[str, Meta]
    names: list[str]
    kernels: Any
    again: Replays | None
    backward_again: Replays | None


def plan_for(
    operation: Operation,
    spec: Any,
    views: Mapping[str, ArrayView | None],
    needs: tuple[str, ...],
    kernels: Any,
) -> Ready:
    """The plan for these static arguments, shapes, dtypes and wanted gradients under the kernels that the
    policy chose; made once, then cached.

    ``spec`` is known by identity: modules keep theirs, so that a look-up need not hash it.
    """
    key = (
        operation.name,
        id(spec),
        id(kernels),
        needs,
        *[None if v is None else (n, v.shape, v.dtype) for n, v in views.items()],
    )
    found = _PLANS.get(key)
    if found is None:
        metas = {name: None if v is None else Meta(v.shape, v.dtype) for name, v in views.items()}
        plan = operation.plan(spec, metas, frozenset(needs), kernels)
        if type(operation).backward is Operation.backward and plan.signature.grads:
            raise AutogradError(
                f"{operation.name}: has no backward, but {', '.join(plan.signature.grads)} require a gradient"
            )
        if len(_PLANS) >= _PLAN_LIMIT:
            _PLANS.clear()
        apart = large(plan.signature.grads) if operation.early else {}
        grads = {name: meta for name, meta in plan.signature.grads.items() if name not in apart}
        saved, forward, back = (
            Block(m, operation.early) for m in (plan.signature.saved, plan.scratch, plan.backward_scratch)
        )
        outputs, passes = plan.signature.outputs, plan.signature.passes
        names = [name for name, meta in outputs.items() if meta.dtype.floating and not meta.zero]
        names += [
            name
            for name, source in passes.items()
            if metas[source].dtype.floating  # type: ignore[union-attr]
        ]
        again = None if saved.apart or forward.apart else replays(kernels)
        backward_again = None if saved.apart or apart or back.apart else replays(kernels)
        found = _PLANS[key] = Ready(
            plan, saved, forward, back, grads, apart, names, kernels, again, backward_again
        )
    return found


def allocate(
    metas: Mapping[str, Meta], device: arrays.Device, given: Mapping[str, ArrayView] = _NOTHING
) -> dict[str, ArrayView]:
    """A buffer for each meta; ``given`` ones are used as they are. Those that want zeros lie in one piece of
    memory, zeroed at once."""
    provider = arrays.provider(device)
    alloc = provider.alloc
    out: dict[str, ArrayView] = {}
    zeroed: list[tuple[ArrayView, int]] = []
    size = 0
    for name, meta in metas.items():
        own = given.get(name)
        if own is None:
            shape, dtype = meta.shape, meta.dtype
            nbytes = math.prod(shape) * dtype.itemsize
            if meta.zero:
                own = ArrayView(0, shape, dtype, device)
                zeroed.append((own, size))
                size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            else:
                ptr, owner = alloc(nbytes, device)
                own = ArrayView(ptr, shape, dtype, device, owner)
        out[name] = own
    if zeroed:
        ptr, owner = alloc(size, device)
        provider.fill_zero(ArrayView(ptr, (size,), uint8, device, owner), provider.current_stream(device))
        for own, offset in zeroed:
            own.ptr, own.owner = ptr + offset, owner
    return out


def apply(
    operation: Operation,
    spec: Any,
    inputs: Mapping[str, Tensor | ArrayView | None],
    given: Mapping[str, ArrayView] = _NOTHING,
    late: Mapping[str, ArrayView] = _NOTHING,
    finish: Finish | None = None,
    owner: object = None,
    draw: Callable[[arrays.Device], ArrayView] | None = None,
) -> dict[str, Tensor]:
    """Run an operation on tensors and record it.

    * ``inputs`` by name: Tensors (differentiable where they require a gradient) or views, of the shapes and
      dtypes that it wants.
    * ``given``: buffers to use for amaxes and backward outputs instead of fresh ones, such as a history's
      row.
    * ``late``: what backward reads beside the kept inputs, with the values it has then (the gradients'
      scales).
    * ``finish``: (function, item), called once after a whole backward walk; see ``tape.Node``.
    * ``owner``: the object whose attributes the parameters are: errors call them by the attributes' names.
    * ``draw``: gives the input ``rng``, int64 [2]. It is asked last: a call that is refused leaves the random
      state where it was.

    Returns the outputs by name. Raises what ``infer`` raises, and BackendError when the inputs live on
    different devices.
    """
    views: dict[str, ArrayView | None] = {}
    needs: list[str] = []
    recording = tape.is_grad_enabled()
    device = None
    for name, value in inputs.items():
        if value is None:
            continue
        if isinstance(value, Tensor):
            if recording and value.requires_grad:
                needs.append(name)
            view = value.view
        else:
            view = value
        if view._strides is not None and not view.contiguous:
            view = arrays.contiguous(view)
        views[name] = view
        if device is None:
            device = view.device
        elif view.device != device:
            argument = name_in(owner, name, value)
            raise BackendError(
                operation.name,
                argument,
                f"device {view.device}",
                f"device {device}, where the other inputs are",
            )
    assert device is not None
    if draw is not None:
        views["rng"] = ArrayView(0, (2,), int64, device)  # stands for what is drawn below
    wanted = tuple(needs)
    unrecorded = tape.probe()
    if unrecorded is not None:
        _tell(unrecorded, operation.name, inputs, owner)
    kernels = dispatch.kernels(device)
    try:
        ready = plan_for(operation, spec, views, wanted, kernels)
    except (ShapeError, FormatError) as error:
        raise _renamed(error, operation.name, inputs, owner) from None
    plan = ready.plan
    signature = plan.signature
    outputs = allocate(signature.outputs, device, given)
    saved = ready.saved.carve(device)
    stream = arrays.current_stream(device)
    temporaries = ready.scratch.room(device, stream)
    if draw is not None:
        views["rng"] = draw(device)
    again = ready.again
    if again is None:
        operation.forward(plan, views, outputs, saved, temporaries, stream)
        if type(saved) is Buffers:
            saved.whole()
    else:
        known = (
            stream,
            *[v.ptr for v in views.values() if v is not None],
            *[v.ptr for v in outputs.values()],
            first(saved),
            first(temporaries),
        )
        again.run(known, operation.forward, plan, views, outputs, saved, temporaries, stream)
    results = {name: Tensor(view) for name, view in outputs.items() if name not in given}
    for name, source in signature.passes.items():
        results[name] = _passed(inputs[source], views[source])
    watcher = tape.watcher()
    where = None if watcher is None else watcher.forward(operation.name, inputs, results)
    if wanted:
        _record(
            operation,
            ready,
            inputs,
            views,
            outputs,
            saved,
            results,
            wanted,
            device,
            given,
            late,
            finish,
            watcher,
            where,
            owner,
        )
    return results


def rehearse(
    operation: Operation,
    spec: Any,
    inputs: Mapping[str, Tensor | ArrayView | None],
    owner: object = None,
    needs: tuple[str, ...] = (),
    implied: Mapping[str, ArrayView] = _NOTHING,
) -> None:
    """Raise the ShapeError, FormatError or BackendError that ``apply`` would raise for these inputs' shapes,
    dtypes and devices, and run nothing: what a layer asks before its first operation about those that follow.

    Views that stand for arrays which are not there yet, with pointer 0, may be among ``inputs``; ``needs``:
    names of those whose gradient will be wanted, where that matters; ``implied``: further inputs that always
    are as ``spec`` wants them. What was found right is remembered.
    """
    views: dict[str, ArrayView] = {}
    for name, value in inputs.items():
        if value is not None:
            views[name] = value.view if isinstance(value, Tensor) else value
    key = (
        operation.name,
        id(spec),
        needs,
        *[(name, view.shape, view.dtype, view.device) for name, view in views.items()],
    )
    if key in _REHEARSED:
        return
    device = next(iter(views.values())).device
    for name, view in views.items():
        if view.device != device:
            argument = name_in(owner, name, inputs[name])
            raise BackendError(
                operation.name,
                argument,
                f"device {view.device}",
                f"device {device}, where the other inputs are",
            )
    try:
        operation.infer(
            spec,
            {name: Meta(view.shape, view.dtype) for name, view in {**views, **implied}.items()},
            frozenset(needs),
        )
    except (ShapeError, FormatError) as error:
        raise _renamed(error, operation.name, inputs, owner) from None
    if len(_REHEARSED) >= _PLAN_LIMIT:
        _REHEARSED.clear()
    _REHEARSED[key] = spec


def _passed(value: Tensor | ArrayView | None, view: ArrayView | None) -> Tensor:
    """An output that is the input ``value``, whose view is ``view``: changes in place of one are changes of
    the other."""
    assert view is not None
    return value._sharing(Tensor(view)) if isinstance(value, Tensor) and value.view is view else Tensor(view)


def _renamed(
    error: ShapeError | FormatError, operation: str, inputs: Mapping[str, Any], owner: object
) -> ShapeError | FormatError:
    """A refusal of ``infer``, ``operation: input: ...``, with the user's name of the input, be it there or
    missing."""
    argument = error.argument
    if argument is None or error.operation != operation or (argument not in inputs and error.got is not None):
        return error
    return error.renamed(operation, name_in(owner, argument, inputs.get(argument)))


def _tell(unrecorded: tape.Probe, name: str, inputs: Mapping[str, Any], owner: object) -> None:
    """Say what the tape would have recorded of an operation."""
    for argument, value in inputs.items():
        if isinstance(value, Tensor) and value.requires_grad:
            unrecorded.wanted = True
            unrecorded.used.append(unchanged(name, argument, value, owner))


def _record(
    operation: Operation,
    ready: Ready,
    inputs: Mapping[str, Any],
    views: dict[str, ArrayView | None],
    outputs: dict[str, ArrayView],
    saved: Views,
    results: dict[str, Tensor],
    wanted: tuple[str, ...],
    device: arrays.Device,
    given: Mapping[str, ArrayView],
    late: Mapping[str, ArrayView],
    finish: Finish | None,
    watcher: tape.Watcher | None,
    where: Any,
    owner: object,
) -> None:
    plan, signature = ready.plan, ready.plan.signature
    for name in wanted:
        if name not in signature.grads and name not in signature.grad_passes:
            raise AutogradError(
                f"{operation.name}: no gradient rule for its input {name!r}, which requires a gradient"
            )
    kept: dict[str, ArrayView | None] = {
        name: views[name] if name in views else outputs.get(name) for name in signature.kept
    }
    kept.update(late)
    watched = []
    for name in signature.kept:
        if isinstance(inputs.get(name), Tensor):
            watched.append(unchanged(operation.name, name, inputs[name], owner))
        if name in results:
            watched.append(unchanged(operation.name, name, results[name]))
    names = ready.names
    main = signature.outputs[names[0]]  # not the array: nobody may need that any more
    edges = [inputs[name].edge() for name in wanted]
    left = True  # what was saved is still there

    def backward(cotangents: list[ArrayView | None]) -> list[ArrayView | None]:
        nonlocal left
        by_name = {
            name: g if g is None or g.contiguous else arrays.contiguous(g)
            for name, g in zip(names, cotangents, strict=True)
        }
        if by_name[names[0]] is None:
            by_name[names[0]] = arrays.zeros(main.shape, main.dtype, device)
        for check in watched:
            check()
        if watcher is not None:
            watcher.backward(where, by_name, {})
        grads: Any = allocate(ready.grads, device, given)
        if ready.grads_apart:
            grads = Buffers({**grads, **given}, ready.grads_apart, maker(device))
        held = saved
        if type(saved) is Buffers:  # what backward is done with is given up, unless another one is to come
            if not left:
                raise AutogradError(
                    f"{operation.name}: an earlier backward failed half-way; run forward again, "
                    "or pass retain_graph=True"
                )
            left = tape.retaining()
            held = dict(saved) if left else saved
        stream = arrays.current_stream(device)
        temporaries, again = ready.backward_scratch.room(device, stream), ready.backward_again
        if again is None:
            operation.backward(plan, kept, held, by_name, grads, temporaries, stream)
        else:
            known = (
                stream,
                *[0 if v is None else v.ptr for v in (*kept.values(), *by_name.values())],
                *[v.ptr for v in grads.values()],
                first(saved),
                first(temporaries),
            )
            again.run(known, operation.backward, plan, kept, held, by_name, grads, temporaries, stream)
        if watcher is not None:
            watcher.backward(where, {}, {name: grads[name] for name in wanted if name in signature.grads})
        return [
            grads[name] if name in signature.grads else owned(edge, by_name[signature.grad_passes[name]])
            for name, edge in zip(wanted, edges, strict=True)
        ]

    node = Node(operation.name, len(names), edges, backward, finish)
    for index, name in enumerate(names):
        results[name]._edge = Edge(node, index)
        results[name].requires_grad = True
