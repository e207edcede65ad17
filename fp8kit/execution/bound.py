"""``BoundOp``: an operation with its spec, shapes and memory fixed, ready to run on addresses.

A frontend makes one from an operation, its spec, the shapes and dtypes of its inputs, the names of the inputs
whose gradient is wanted, its memory on a device, and the kernels in force; ``execution.plans`` keeps it. For
each call the frontend allocates outputs and gradients by the lists below, and passes their addresses in the
order of those lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from fp8kit.arrays import ArrayView, Device, Shape, provider
from fp8kit.buffers import Buffers, nbytes_of, streamed
from fp8kit.collectives import abandon
from fp8kit.errors import AutogradError
from fp8kit.execution import lifetimes
from fp8kit.execution.memory import ALIGNMENT, Arena, Layout, Memory, Region, Span, is_large
from fp8kit.execution.refusals import plan_of, signature_of
from fp8kit.execution.replay import Replays, replays
from fp8kit.execution.watching import Places
from fp8kit.formats import DType, float32, uint8
from fp8kit.inspection import is_watched
from fp8kit.spec import Meta, Operation, Signature, Views, WorkingSet

Addresses = Sequence[int]
Part = tuple[str, Shape, DType]
_AMAX = 4  # bytes


class Source(NamedTuple):
    """Where backward finds an array: it is output number ``place`` (``is_output``), or input number
    ``place``."""

    place: int
    is_output: bool


def _parts(metas: Mapping[str, Meta]) -> list[Part]:
    return [(name, meta.shape, meta.dtype) for name, meta in metas.items()]


def views_at(parts: Sequence[Part], addresses: Sequence[int | None], device: Device) -> dict[str, Any]:
    """Views by name of the arrays at ``addresses``; None for an address that is None."""
    return {
        name: None if address is None else ArrayView(address, shape, dtype, device)
        for (name, shape, dtype), address in zip(parts, addresses, strict=True)
    }


class Interface:
    """The arrays that an operation reads and fills for one spec, input shapes and wanted gradients, as lists
    in the order in which arrays are passed. Made from the answer of ``infer``; needs no device.

    * ``inputs``: name -> meta, in the order of the call. ``needs``: names of those whose gradient is wanted.
    * ``outputs``: name -> meta of what forward fills. ``amaxes``: name -> meta of the maxima that forward
      updates, float32 [1]: a state's own slots with earlier maxima in them, or zeros.
    * ``results``: names of what the caller gets: the outputs, then the results that are inputs themselves
      (``passes``: result -> input). ``result_metas``: metas of both.
    * ``kept``: name -> ``Source`` of the inputs and outputs that backward reads; ``kept_metas``: their metas.
      ``backward_inputs``: name -> meta of what backward reads besides, with the values that it has by then
      (the gradients' scales).
    * ``grads``: input name -> meta of what backward fills; ``grad_amaxes``: name -> meta of the maxima that
      it updates.
    * ``watched``, ``grad_watched``: name -> meta of what forward and backward fill for the inspector.
    * ``gradients``: where to find the gradient of each of ``needs``: (index in ``grads``, None), or (None,
      index in ``results``) where it is that result's cotangent.

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
        # what is for the inspector stands apart
        self.watched = {name: meta for name, meta in s.outputs.items() if is_watched(name)}
        self.grad_watched = {name: meta for name, meta in s.grads.items() if is_watched(name)}
        made = {name: meta for name, meta in s.outputs.items() if name not in self.watched}
        self.outputs = {name: meta for name, meta in made.items() if not meta.zero}
        self.amaxes = {name: meta for name, meta in made.items() if meta.zero}
        self.passes = dict(s.passes)
        self.results = (*self.outputs, *s.passes)
        self.result_metas = self.outputs | {name: self.inputs[source] for name, source in s.passes.items()}
        self.grads = {name: meta for name, meta in s.grads.items() if name in metas}
        other = {name: meta for name, meta in s.grads.items() if name not in metas}
        self.grad_amaxes = {name: meta for name, meta in other.items() if name not in self.grad_watched}
        if any(meta.shape != (1,) for meta in self.grad_amaxes.values()):
            raise AutogradError(
                f"{operation.name}: backward fills {list(self.grad_amaxes)}, which are no inputs"
            )
        self.backward_inputs = dict(s.backward_inputs)
        places = {name: Source(i, True) for i, name in enumerate(self.outputs)}
        places |= {name: Source(i, False) for i, name in enumerate(metas)}
        self.kept = {name: places[name] for name in s.kept if name in places}  # without absent inputs
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

    ``memory``: what a frontend supplies for a device. The device alone is enough for a caller that allocates
    everything itself and uses ``run_forward``, ``run_backward`` and ``run_measure``. In addition to the lists
    of ``Interface``:

    * ``saved``, ``scratch``, ``backward_scratch``, ``measure_scratch``: the ``Layout`` of those buffers.
    * ``streamed_grads``: name -> meta of the large gradients. Backward allocates each when it fills it,
      unless the caller passes an address.

    * ``lends``: backward takes less memory with ``consumed``.

    ``streaming``: large buffers of an operation that ``streams`` are allocated one by one, each when it is
    first needed. ``save_in_block``: what forward saves stays one block even then.
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
        self._shown = Places(operation, spec, self.watched) or None
        self._grad_shown = Places(operation, spec, self.grad_watched) or None
        # what is looked at must outlive its use, and what ranks communicate must be whole
        parallel = operation.communicates(spec)
        streaming = streaming and operation.streams and not (self._shown or self._grad_shown or parallel)
        self.streamed_grads = streamed(self.grads) if streaming else {}
        self.saved = Layout(s.saved, streaming and not save_in_block)
        self._lives = [
            lifetimes.lives(operation, plan, metas, frozenset(needs), backward) for backward in (False, True)
        ]
        # temporaries alone gain nothing: places that they share take as little, and in memory that is lent
        # less
        self._streaming = streaming and bool(self.saved.streamed or self.streamed_grads)
        self.scratch = Layout(plan.scratch, streaming, self._spans(False))
        self.measure_scratch = Layout(plan.measure_scratch)
        self._forward_parts = _parts(self.inputs), _parts(self.outputs), _parts(self.amaxes)
        self._filled_parts = [*self._forward_parts[1], *self._forward_parts[2], *_parts(self.watched)]
        self._read_parts = _parts(self.kept_metas | self.backward_inputs)
        self._result_parts = _parts(self.result_metas)
        self._grad_parts = _parts(self.grads)
        self._grad_amax_parts = _parts(self.grad_amaxes | self.grad_watched)
        # of maxima that do not last: behind the temporaries
        rows = [_AMAX * len(names) for names in (self.amaxes, self.grad_amaxes)]
        self._row, self._grad_row = (-(-row // ALIGNMENT) * ALIGNMENT for row in rows)
        self._arena_bytes = self.scratch.nbytes + self._row
        self._replayed = not self.saved.streamed
        self._forward_replays = None
        if self._replayed and not self.scratch.streamed:
            self._forward_replays = self._replays(
                self._arena_bytes, self._forward_parts[0], self._filled_parts
            )
        temporaries = streamed(plan.backward_scratch) if self._streaming else {}
        self._replayed &= not (self.streamed_grads or temporaries) and bool(s.grads)
        large = any(map(is_large, plan.backward_scratch.values()))
        self.lends = large and self._replayed and self._lives[True] is not None

    def _spans(self, backward: bool) -> Callable[[], Mapping[str, tuple[Span, ...]]] | None:
        lives = self._lives[backward]
        return None if lives is None else lambda: lives().spans

    @cached_property
    def _make_block(self) -> Callable[[], Any]:
        """Allocates what forward saves."""
        made: Callable[[], Any] = self.memory.maker(Meta((self.saved.nbytes,), uint8))
        return made

    @cached_property
    def backward_scratch(self) -> Layout:
        """The layout of backward's temporaries in memory of their own."""
        spans = self._spans(True) if self.signature.grads else None
        return Layout(self.plan.backward_scratch, self._streaming, spans)

    @cached_property
    def _lent_scratch(self) -> Layout:
        """The layout of backward's temporaries when they may lie in two more places: in what forward saved,
        after that was read, and in gradients before they are filled. The regions are the block, then
        ``_lenders``."""
        lives = self._lives[True]
        assert lives is not None
        spans, filled, _, done, _ = lives()

        def regions() -> list[Region]:
            taken = [
                (offset, nbytes_of(Meta(shape, dtype)), (-math.inf, done.get(name, math.inf)))
                for name, _, offset, shape, dtype in self.saved.parts
            ]
            own = [Region(self.saved.nbytes, taken)]
            for name in self._lenders:
                size = nbytes_of(self.grads[name])
                own.append(Region(size, [(0, size, (filled.get(name, -math.inf), math.inf))]))
            return own

        return Layout(self.plan.backward_scratch, spans=lambda: spans, regions=regions)

    @cached_property
    def _lenders(self) -> list[str]:
        """Gradients whose memory is lent before they are filled."""
        return [name for name, meta in self.grads.items() if is_large(meta) and not meta.zero]

    @cached_property
    def _backward_replays(self) -> Replays | None:
        return self._replays_of_backward(self.backward_scratch)

    @cached_property
    def _lent_replays(self) -> Replays | None:
        return self._replays_of_backward(self._lent_scratch)

    def _replays_of_backward(self, scratch: Layout) -> Replays | None:
        if not self._replayed:
            return None
        others = [self._result_parts, self._grad_parts, self._grad_amax_parts]
        return self._replays(scratch.nbytes + self._grad_row, self._read_parts, *others)

    def _replays(self, arena: int, read: Sequence[Part], *others: Sequence[Part]) -> Replays | None:
        """The recordings of calls whose key holds the addresses of an arena of so many bytes, of the block,
        and of these arrays."""
        sizes = [nbytes_of(Meta(*part[1:])) for parts in (read, *others) for part in parts]
        # segments of a parameter have one name but for a number
        own = [name.rstrip("0123456789") for name, _, _ in read]
        joined = [
            i for i, name in enumerate(own, 2) if own.count(name) > 1 and self.operation.is_parameter(name)
        ]
        return replays(self.kernels, [arena, self.saved.nbytes, *sizes], joined)

    # --- forward --------------------------------------------------------------------------------------------

    def forward(
        self, inputs: Addresses, outputs: Addresses, amaxes: Sequence[int | None], block: Any = None
    ) -> list[Any]:
        """Fill the outputs and update the amaxes (each becomes the maximum of its old and its new value; with
        None for each they do not last). Returns what was saved for backward, as arrays of the frontend: the
        block, if there is one, then each streamed buffer. ``block``: that array, where the caller has
        allocated it."""
        memory, nbytes = self.memory, self.saved.nbytes
        if self._shown is not None:
            shown, places = self._shown.make(memory)
            amaxes = [*amaxes, *places]
        stream = memory.stream()
        saved = [self._make_block() if block is None else block] if nbytes else []
        place = memory.address(saved[0]) if nbytes else 0
        arena, replays = memory.arena(self._arena_bytes, stream), self._forward_replays
        try:
            if replays is None:
                ws = self._working_set(inputs, outputs, amaxes, place, arena, stream)
                self.operation.forward(self.plan, ws)
                if self.saved.streamed:
                    kept: Any = ws.saved
                    kept.allocate_all()
                    saved += [kept[name].owner for name in self.saved.streamed]
            else:  # nothing is streamed then
                key = (stream, arena.address, place, *inputs, *outputs, *amaxes)
                known = replays.found.get(key)
                if known is None:
                    replays.run(key, self._forward, inputs, outputs, amaxes, place, arena, stream)
                else:
                    known()
        except BaseException:
            abandon(stream)  # before the memory goes
            raise
        if arena.kept:
            memory.release(arena, stream)
        if self._shown is not None:
            self._shown.take(shown)
        return saved

    def _zeros(
        self, amaxes: Sequence[int | None], arena: Arena, layout: Layout, stream: int
    ) -> Sequence[int | None]:
        """The amaxes' addresses, of which the first ones are None: these are zeros behind the buffers of
        ``layout``."""
        count = amaxes.count(None)
        start = arena.address + layout.nbytes
        provider(self.device).fill_zero(ArrayView(start, (count,), float32, self.device), stream)
        return [*range(start, start + _AMAX * count, _AMAX), *amaxes[count:]]

    def _working_set(
        self,
        inputs: Addresses,
        outputs: Addresses,
        amaxes: Sequence[int | None],
        block: int,
        arena: Arena,
        stream: int,
    ) -> WorkingSet:
        """What a forward call works on."""
        if None in amaxes:
            amaxes = self._zeros(amaxes, arena, self.scratch, stream)
        read = views_at(self._forward_parts[0], inputs, self.device)
        filled = views_at(self._filled_parts, [*outputs, *amaxes], self.device)
        saved, scratch = self.saved.views(block, self.memory), arena.views(self.scratch, self.memory)
        return WorkingSet(self.kernels, read, filled, saved, scratch, stream)

    def _forward(
        self,
        inputs: Addresses,
        outputs: Addresses,
        amaxes: Sequence[int | None],
        block: int,
        arena: Arena,
        stream: int,
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
        """The operation's forward, where the caller has allocated ``saved`` and ``scratch`` too."""
        read = views_at(self._forward_parts[0], inputs, self.device)
        filled = views_at(self._filled_parts, [*outputs, *amaxes], self.device)
        self.operation.forward(self.plan, WorkingSet(self.kernels, read, filled, saved, scratch, stream))

    def run_measure(self, inputs: Addresses, amaxes: Addresses, scratch: Views, stream: int) -> None:
        """Update the amaxes and run no product: the operation's ``measure``."""
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
        amaxes: Sequence[int | None],
        consumed: bool = False,
    ) -> dict[str, Any]:
        """Fill ``grads`` and update the maxima, as forward does. An address in ``grads`` may be None for one
        of the ``streamed_grads``: it is allocated here. Returns those that were, by name.

        ``saved``: what ``forward`` returned. Its streamed buffers are taken out of the list; each is freed
        after its last use, if nobody else holds it. ``cotangents``: of ``results``, None for zero.
        ``consumed``, for an operation that ``lends``: after this call nobody reads what was saved, and nobody
        needs the old contents of ``grads``; temporaries may overwrite both.
        """
        memory = self.memory
        if self._grad_shown is not None:
            shown, places = self._grad_shown.make(memory)
            amaxes = [*amaxes, *places]
        stream = memory.stream()
        zeros = None
        if cotangents[0] is None:  # operations need an array for the first output's cotangent
            zeros = memory.maker(next(iter(self.outputs.values()))._replace(zero=True))()
            cotangents = [memory.address(zeros), *cotangents[1:]]
        block = memory.address(saved[0]) if self.saved.nbytes else 0
        layout = self._lent_scratch if consumed else self.backward_scratch
        replays = self._lent_replays if consumed else self._backward_replays
        arena = memory.arena(layout.nbytes + self._grad_row, stream)
        made: dict[str, Any] = {}
        try:
            known = None
            if replays is not None:
                key = (stream, arena.address, block, *kept, *backward_inputs, *cotangents, *grads, *amaxes)
                known = replays.found.get(key)
            if known is not None:
                known()
            else:
                given = (kept, backward_inputs, saved, cotangents, grads, amaxes, block, arena, stream)
                if replays is None:
                    made = self._backward(*given, consumed)
                else:
                    replays.run(key, self._backward, *given, consumed)
        except BaseException:
            abandon(stream)  # before the memory goes
            raise
        if arena.kept:
            memory.release(arena, stream)
        if self._grad_shown is not None:
            self._grad_shown.take(shown)
        return made

    def _backward(
        self,
        kept: Addresses,
        backward_inputs: Addresses,
        saved: list[Any],
        cotangents: Sequence[int | None],
        grads: Sequence[int | None],
        amaxes: Sequence[int | None],
        block: int,
        arena: Arena,
        stream: int,
        consumed: bool,
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
        scratch = self._lent_scratch if consumed else self.backward_scratch
        places = [block, *(into[name].ptr for name in self._lenders)] if consumed else []
        temporaries = arena.views(scratch, memory, places)
        if None in amaxes:
            amaxes = self._zeros(amaxes, arena, scratch, stream)
        self.run_backward(kept, backward_inputs, held, cotangents, into, amaxes, temporaries, stream)
        return {name: into[name].owner for name in missing} if missing else {}

    def run_backward(
        self,
        kept: Addresses,
        backward_inputs: Addresses,
        saved: Views,
        cotangents: Sequence[int | None],
        grads: dict[str, Any],
        amaxes: Sequence[int | None],
        scratch: Views,
        stream: int,
    ) -> None:
        """The operation's backward, where the caller has allocated everything. Views of the amaxes are added
        to the dictionary ``grads``."""
        device = self.device
        read = views_at(self._read_parts, [*kept, *backward_inputs], device)
        incoming = views_at(self._result_parts, cotangents, device)
        if self._grad_amax_parts:
            grads.update(views_at(self._grad_amax_parts, amaxes, device))
        ws = WorkingSet(self.kernels, read, grads, saved, scratch, stream)
        self.operation.backward(self.plan, ws, incoming)
