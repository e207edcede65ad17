"""``BoundOp``: an operation with everything decided that does not depend on data, ready to run on addresses.

A frontend makes one for an operation, its spec, the shapes and dtypes of its inputs, the gradients that are
wanted, its memory on a device, and the kernels in force (``execution.plans`` keeps them). It then allocates
what forward and backward fill, by the lists below, and hands over addresses in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.buffers import Buffers, streamed
from fp8kit.errors import AutogradError
from fp8kit.execution.memory import Arena, Layout, Memory
from fp8kit.execution.refusals import plan_of, signature_of
from fp8kit.execution.replay import replays
from fp8kit.formats import DType
from fp8kit.spec import Meta, Operation, Signature, Views, WorkingSet

Addresses = Sequence[int]
Part = tuple[str, Shape, DType]


class Source(NamedTuple):
    """Where backward finds something: input or output (``is_output``) number ``place``."""

    place: int
    is_output: bool


def _parts(metas: Mapping[str, Meta]) -> list[Part]:
    return [(name, meta.shape, meta.dtype) for name, meta in metas.items()]


def views_at(parts: Sequence[Part], addresses: Sequence[int | None], device: Device) -> dict[str, Any]:
    """Views by name of what lies at ``addresses``; None for None."""
    return {
        name: None if address is None else ArrayView(address, shape, dtype, device)
        for (name, shape, dtype), address in zip(parts, addresses, strict=True)
    }


class Interface:
    """What goes into and comes out of an operation for one spec, input shapes and wanted gradients: what
    ``infer`` says, as lists. Needs no device.

    All lists are in the order in which arrays are handed over:

    * ``inputs``: name -> meta, as they were given. ``needs``: those whose gradient is wanted.
    * ``outputs``: what forward fills, name -> meta. ``amaxes``: accumulators that it maximises, float32 [1],
      zeroed or running: a frontend hands over a state's own slots, or zeros.
    * ``results``: names of what a caller gets: outputs, then inputs that pass through (``passes``: result ->
      input); ``result_metas``: their metas.
    * ``kept``: inputs and outputs that backward reads, name -> ``Source``; ``kept_metas``: their metas.
      ``backward_inputs``: what it reads besides, with the values of that moment (the gradients' scales).
    * ``grads``: what backward fills, input name -> meta; ``grad_amaxes``: its accumulators.
    * ``gradients``: for each of ``needs`` its index in ``grads``, or that of the result whose cotangent it
      is: (index, None) or (None, index).

    AutogradError where a gradient is wanted that the operation does not have; what ``refusals.signature_of``
    raises.
    """

    def __init__(
        self,
        operation: Operation,
        spec: Any,
        metas: Mapping[str, Meta],
        needs: tuple[str, ...],
        signature: Signature | None = None,
    ) -> None:
        self.operation, self.spec, self.needs = operation, spec, needs
        self.signature = s = signature or signature_of(operation, spec, metas, frozenset(needs))
        self.inputs = dict(metas)
        self.outputs = {name: meta for name, meta in s.outputs.items() if not meta.zero}
        self.amaxes = {name: meta for name, meta in s.outputs.items() if meta.zero}
        self.passes = dict(s.passes)
        self.results = (*self.outputs, *s.passes)
        self.result_metas = self.outputs | {name: self.inputs[source] for name, source in s.passes.items()}
        self.grads = {name: meta for name, meta in s.grads.items() if name in metas}
        self.grad_amaxes = {name: meta for name, meta in s.grads.items() if name not in metas}
        if any(meta.shape != (1,) for meta in self.grad_amaxes.values()):
            raise AutogradError(
                f"{operation.name}: backward fills {list(self.grad_amaxes)}, which are no inputs"
            )
        self.backward_inputs = dict(s.backward_inputs)
        places = {name: Source(i, True) for i, name in enumerate(self.outputs)}
        places |= {name: Source(i, False) for i, name in enumerate(metas)}
        self.kept = {name: places[name] for name in s.kept if name in places}
        known = {**self.inputs, **self.outputs}
        self.kept_metas = {name: known[name] for name in self.kept}
        self.gradients = [self._gradient(name) for name in needs]

    def _gradient(self, name: str) -> tuple[int | None, int | None]:
        s = self.signature
        if type(self.operation).backward is Operation.backward:
            raise AutogradError(f"{self.operation.name}: has no backward, but {name} requires a gradient")
        if name in self.grads:
            return list(self.grads).index(name), None
        if name in s.grad_passes:
            return None, self.results.index(s.grad_passes[name])
        raise AutogradError(
            f"{self.operation.name}: no gradient rule for its input {name!r}, which requires a gradient"
        )


class BoundOp(Interface):
    """One operation for one spec, input shapes, wanted gradients, device and set of kernels.

    ``memory``: a frontend's on a device; the device alone where the caller allocates everything
    (``run_forward``, ``run_backward``, ``run_measure``). Beside the lists of ``Interface``:

    * ``saved``, ``scratch``, ``backward_scratch``, ``measure_scratch``: ``Layout`` of those buffers.
    * ``streamed_grads``: those of ``grads`` that backward allocates itself, unless it is handed an address.

    With ``streaming`` the large buffers of an operation that ``streams`` are allocated one by one; with
    ``save_in_block`` not those that forward saves.
    """

    def __init__(
        self,
        operation: Operation,
        spec: Any,
        metas: Mapping[str, Meta],
        needs: tuple[str, ...],
        memory: Memory | Device,
        kernels: Any,
        streaming: bool = True,
        save_in_block: bool = False,
    ) -> None:
        self.plan = plan = plan_of(operation, spec, metas, frozenset(needs), kernels)
        super().__init__(operation, spec, metas, needs, plan.signature)
        s = plan.signature
        self.memory: Any = memory
        self.device: Device = memory if isinstance(memory, Device) else memory.device
        self.kernels = kernels  # held: the plan's key has their identity
        streaming = streaming and operation.streams
        self.streamed_grads = streamed(self.grads) if streaming else {}
        self.saved = Layout(s.saved, streaming and not save_in_block)
        self.scratch = Layout(plan.scratch, streaming)
        self.backward_scratch = Layout(plan.backward_scratch, streaming)
        self.measure_scratch = Layout(plan.measure_scratch)
        self._forward_parts = _parts(self.inputs), _parts(self.outputs), _parts(self.amaxes)
        self._filled_parts = [*self._forward_parts[1], *self._forward_parts[2]]
        self._read_parts = _parts(self.kept_metas | self.backward_inputs)
        self._result_parts = _parts(self.result_metas)
        self._grad_parts, self._grad_amax_parts = _parts(self.grads), _parts(self.grad_amaxes)
        fixed = not self.saved.streamed
        self._forward_replays = replays(kernels) if fixed and not self.scratch.streamed else None
        fixed = fixed and not self.streamed_grads and not self.backward_scratch.streamed
        self._backward_replays = replays(kernels) if fixed and s.grads else None

    # --- forward --------------------------------------------------------------------------------------------

    def forward(self, inputs: Addresses, outputs: Addresses, amaxes: Addresses) -> list[Any]:
        """Fill the outputs and maximise the amaxes. Returns what was saved for backward, as arrays of the
        frontend: the block, where there is one, then each streamed buffer."""
        memory, nbytes = self.memory, self.saved.nbytes
        stream = memory.stream()
        saved = [memory.block(nbytes)] if nbytes else []
        block = memory.address(saved[0]) if nbytes else 0
        arena = memory.arena(self.scratch.nbytes, stream)
        addresses = inputs, outputs, amaxes, block
        if self._forward_replays is None:
            ws = self._working_set(*addresses, arena, stream)
            self.operation.forward(self.plan, ws)
            if self.saved.streamed:
                kept: Any = ws.saved
                kept.allocate_all()
                saved += [kept[name].owner for name in self.saved.streamed]
        else:  # nothing is streamed then
            key = (stream, arena.address, block, *inputs, *outputs, *amaxes)
            self._forward_replays.run(key, self._forward, *addresses, arena, stream)
        return saved

    def _working_set(
        self, inputs: Addresses, outputs: Addresses, amaxes: Addresses, block: int, arena: Arena, stream: int
    ) -> WorkingSet:
        """What a forward call works on."""
        read = views_at(self._forward_parts[0], inputs, self.device)
        filled = views_at(self._filled_parts, [*outputs, *amaxes], self.device)
        saved, scratch = self.saved.views(block, self.memory), arena.views(self.scratch, self.memory)
        return WorkingSet(self.kernels, read, filled, saved, scratch, stream)

    def _forward(
        self, inputs: Addresses, outputs: Addresses, amaxes: Addresses, block: int, arena: Arena, stream: int
    ) -> None:
        """Run forward now."""
        ws = self._working_set(inputs, outputs, amaxes, block, arena, stream)
        self.operation.forward(self.plan, ws)

    def run_forward(
        self,
        inputs: Addresses,
        outputs: Addresses,
        amaxes: Addresses,
        saved: Views,
        scratch: Views,
        stream: int,
    ) -> None:
        """The operation's forward, for who has allocated ``saved`` and ``scratch`` too."""
        read = views_at(self._forward_parts[0], inputs, self.device)
        filled = views_at(self._filled_parts, [*outputs, *amaxes], self.device)
        self.operation.forward(self.plan, WorkingSet(self.kernels, read, filled, saved, scratch, stream))

    def run_measure(self, inputs: Addresses, amaxes: Addresses, scratch: Views, stream: int) -> None:
        """The operation's measure: maximises the amaxes, and runs no product."""
        ins, _, maxima = self._forward_parts
        read, filled = views_at(ins, inputs, self.device), views_at(maxima, amaxes, self.device)
        self.operation.measure(self.plan, WorkingSet(self.kernels, read, filled, {}, scratch, stream))

    # --- backward -------------------------------------------------------------------------------------------

    def backward(
        self,
        kept: Addresses,
        backward_inputs: Addresses,
        saved: list[Any],
        cotangents: Sequence[int | None],
        grads: Sequence[int | None],
        amaxes: Addresses,
    ) -> dict[str, Any]:
        """Fill ``grads`` and maximise the amaxes; returns arrays of the ``streamed_grads`` for which no
        address came.

        ``saved``: what ``forward`` returned. Its streamed buffers are taken out of the list, and freed as
        soon as they were read for the last time, if nobody else holds them. ``cotangents``: of ``results``;
        None is zero.
        """
        memory = self.memory
        stream = memory.stream()
        zeros = None
        if cotangents[0] is None:  # of the first output operations want numbers
            zeros = memory.maker(next(iter(self.outputs.values()))._replace(zero=True))()
            cotangents = [memory.address(zeros), *cotangents[1:]]
        block = memory.address(saved[0]) if self.saved.nbytes else 0
        arena = memory.arena(self.backward_scratch.nbytes, stream)
        given = (kept, backward_inputs, saved, cotangents, grads, amaxes, block, arena, stream)
        if self._backward_replays is None:
            return self._backward(*given)
        key = (stream, arena.address, block, *kept, *backward_inputs, *cotangents, *grads, *amaxes)
        self._backward_replays.run(key, self._backward, *given)
        return {}

    def _backward(
        self,
        kept: Addresses,
        backward_inputs: Addresses,
        saved: list[Any],
        cotangents: Sequence[int | None],
        grads: Sequence[int | None],
        amaxes: Addresses,
        block: int,
        arena: Arena,
        stream: int,
    ) -> dict[str, Any]:
        """Run backward now."""
        memory, layout, device = self.memory, self.saved, self.device
        held: Any = layout.at(block, device)
        if layout.streamed:
            own = saved[-len(layout.streamed) :]
            del saved[-len(layout.streamed) :]
            held |= {
                name: ArrayView(memory.address(array), meta.shape, meta.dtype, device, array)
                for (name, meta), array in zip(layout.streamed.items(), own, strict=True)
            }
            own.clear()
            held = Buffers(held, {}, memory.view)
        into: Any = views_at(self._grad_parts, grads, device)
        missing = [name for name in into if into[name] is None] if None in grads else ()
        if missing:
            filled = {name: view for name, view in into.items() if view is not None}
            into = Buffers(filled, {name: self.grads[name] for name in missing}, memory.view)
        temporaries = arena.views(self.backward_scratch, memory)
        self.run_backward(kept, backward_inputs, held, cotangents, into, amaxes, temporaries, stream)
        return {name: into[name].owner for name in missing} if missing else {}

    def run_backward(
        self,
        kept: Addresses,
        backward_inputs: Addresses,
        saved: Views,
        cotangents: Sequence[int | None],
        grads: dict[str, Any],
        amaxes: Addresses,
        scratch: Views,
        stream: int,
    ) -> None:
        """The operation's backward, for who has allocated everything; the amaxes are added to ``grads``."""
        device = self.device
        read = views_at(self._read_parts, [*kept, *backward_inputs], device)
        incoming = views_at(self._result_parts, cotangents, device)
        if self._grad_amax_parts:
            grads.update(views_at(self._grad_amax_parts, amaxes, device))
        ws = WorkingSet(self.kernels, read, grads, saved, scratch, stream)
        self.operation.backward(self.plan, ws, incoming)
