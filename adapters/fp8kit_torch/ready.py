"""``Ready``: a call whose shapes are known, and its run forward and backward: memory from torch's allocator,
work on torch's stream.

On a GPU a run whose addresses are known is done again from its recording (``fp8kit.replays``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from fp8kit.replays import replays
from fp8kit.scratch import Buffers, large
from torch import Tensor

from fp8kit.arrays import ArrayView, Shape
from fp8kit.errors import BackendError, FormatError
from fp8kit.formats import DType
from fp8kit.ops.product import ProductSpec
from fp8kit.ops.products import product_class
from fp8kit_torch.memory import EMPTY, Block, Out, Placed, amax_views, maker, outs_of, place_of
from fp8kit_torch.views import kind_of
from fp8kit_torch.words import argument_of

if TYPE_CHECKING:
    from fp8kit_torch.plans import Call

_NOWHERE: Mapping[str, Tensor] = {}


def want_fp8(operation: str, products: Iterable[ProductSpec], device: torch.device) -> None:
    """BackendError where the tensor cores of a CUDA device do not compute these products."""
    if device.type == "cuda":
        have = torch.cuda.get_device_capability(device)
        for kind in (product_class(product.fp8) for product in products if product.fp8 is not None):
            if have >= kind.capability:
                continue
            least = "{}.{}".format(*kind.capability)
            wanted = f"{least} or higher for {kind.described}, or autocast(enabled=False)"
            raise BackendError(
                operation, "device", f"{device} of compute capability {have[0]}.{have[1]}", wanted
            )


class Ready:
    """A call for certain shapes, dtypes, wanted gradients (``needs``), device and policy."""

    def __init__(
        self,
        call: Call,
        kinds: list[tuple[Shape, DType]],
        needs: tuple[str, ...],
        device: torch.device,
        kernels: Any,
    ) -> None:
        self.operation, self.needs, self.device, self.place = call.operation, needs, device, place_of(device)
        # an only device is always the current one
        self.guarded = device.type == "cuda" and torch.cuda.device_count() > 1
        # compiled functions may be captured, and then account for all memory that they find allocated
        self.eager = not call.policy
        if call.gemms:
            products = [value for value in vars(call.spec).values() if isinstance(value, ProductSpec)]
            want_fp8(self.operation.name, products, device)
        self.plan = plan = call.operation.plan(call.spec, call.metas(kinds), frozenset(needs), kernels)
        self.signature = signature = plan.signature
        self.inputs = [(name, *kind) for name, kind in zip(call.names, kinds, strict=True)]
        self.outputs, self.grads = (
            outs_of(signature.outputs, call.front, device),
            outs_of(signature.grads, call.back, device),
        )
        self.names = (*(out.name for out in self.outputs), *signature.passes)
        early = self.operation.early
        self.make, self.empty = maker(device, self.place), EMPTY[device.type]
        # handle of torch's current stream
        self.stream: Callable[[], int] = (
            partial(torch._C._cuda_getCurrentRawStream, self.place.index) if device.type == "cuda" else int
        )
        make = self.make if early else None
        # the former for torch.compile's ops
        self.saved, self.saved_apart = Block(signature.saved), Block(signature.saved, make)
        self.scratch, self.back_scratch = Block(plan.scratch, make), Block(plan.backward_scratch, make)
        self.grads_apart = large(signature.grads) if early else {}
        self.front = {name: slot for name, slot in call.front.items() if f"{name}_amax" in signature.outputs}
        self.back = {name: slot for name, slot in call.back.items() if f"{name}_amax" in signature.grads}
        self.front_slots, self.back_slots = call.front_slots, call.back_slots
        # what was done already; None where that is not recorded, as where buffers lie apart
        self.again = replays(kernels) if self.eager and not self.scratch.apart else None
        self.back_again = (
            replays(kernels) if self.eager and not (self.grads_apart or self.back_scratch.apart) else None
        )
        at = {name: i for i, name in enumerate(call.names)}
        self.wanted = [at[name] for name in needs]
        self.through = [at[name] for name in signature.passes.values()]
        made = {out.name: i for i, out in enumerate(self.outputs)}
        # (name, index, whether it is an output, shape, dtype) of what backward reads
        shapes = {name: (shape, kind) for name, shape, kind in self.inputs} | {
            out.name: (out.shape, out.kind) for out in self.outputs
        }
        self.kept = [
            (n, at[n] if n in at else made[n], n not in at, *shapes[n])
            for n in signature.kept
            if n in at or n in made
        ]
        # of each wanted gradient: its place among those that are made, or of the output whose cotangent it is
        own = {out.name: i for i, out in enumerate(self.grads)}
        passed = {name: i for i, name in enumerate(self.names)}
        self.answers = [(own.get(name), passed.get(signature.grad_passes.get(name, ""))) for name in needs]
        # what is made is what is wanted, in that order
        self.direct = [at for at, _ in self.answers] == list(range(len(self.grads)))
        missing = [
            name for name in needs if name not in signature.grads and name not in signature.grad_passes
        ]
        if missing:
            raise FormatError(
                call.operation.name, missing[0], "a tensor that requires a gradient", "one that does not"
            )

    def forward(
        self, tensors: Sequence[Tensor], scales: Placed, amaxes: Placed, apart: bool = False
    ) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        """(outputs, amaxes, what is saved). ``amaxes``: where they are max-accumulated; ``NOTHING`` makes a
        tensor of slots for them. ``apart``: large buffers among what is saved are tensors of their own;
        otherwise all is one tensor."""
        if self.guarded and torch._C._cuda_getDevice() != self.place.index:
            with torch.cuda.device(self.device):
                return self.forward(tensors, scales, amaxes, apart)
        row = None
        if not amaxes and self.front:
            row = torch.zeros(self.front_slots, dtype=torch.float32, device=self.device)
            amaxes = amax_views(self.front, row, self.place)
        outputs = [out.made() for out in self.outputs]
        block = self.saved_apart if apart else self.saved
        held = []
        if block.parts and apart:
            held = [self.empty((block.size,), (1,), torch.uint8)]
        # torch sees all bytes that an op of torch.compile gives, and may want those between the buffers
        # filled
        elif block.parts:
            held = [torch.empty(block.size, dtype=torch.uint8, device=self.device)]
        stream = self.stream()
        again = None if block.apart else self.again
        at = -1 if again is None else self.scratch.kept_at(self.place, stream)
        if at < 0:
            held += self._run_forward(tensors, scales, amaxes, outputs, block, held, stream)
            return outputs, row, held
        key = (stream, at, scales.at, amaxes.at, *[t.data_ptr() for t in (*tensors, *outputs, *held)])
        again.run(  # type: ignore[union-attr]
            key, self._run_forward, tensors, scales, amaxes, outputs, block, held, stream
        )
        return outputs, row, held

    def _run_forward(
        self,
        tensors: Sequence[Tensor],
        scales: Placed,
        amaxes: Placed,
        outputs: list[Tensor],
        block: Block,
        held: list[Tensor],
        stream: int,
    ) -> list[Tensor]:
        """The operation's forward; gives what was saved apart."""
        place = self.place
        views: Any = dict(scales)
        for (name, shape, kind), tensor in zip(self.inputs, tensors, strict=True):
            views[name] = ArrayView(
                tensor.data_ptr() or self._nowhere(name, tensor), shape, kind, place, tensor
            )
        saved = block.carve(held[0], place) if held else {}
        if block.apart:
            saved = Buffers(saved, block.apart, self.make)
        scratch = self.scratch.room(place, self.device, stream, self.eager)
        self.operation.forward(
            self.plan, views, self._views(self.outputs, outputs, amaxes), saved, scratch, stream
        )
        return [saved[name].owner for name in block.apart]  # type: ignore[misc]

    def _nowhere(self, name: str, tensor: Tensor) -> int:
        """The address of a tensor that is not read: without elements, or one in FP8 whose codes come beside
        it. FormatError for one that stands for values that are elsewhere."""
        names = [own for own, _, _ in self.inputs]
        if tensor.numel() and not (
            hasattr(tensor, "held_in_fp8") and any(own.endswith("_q") for own in names)
        ):
            argument = argument_of(self.operation.name, name, names)
            wanted = "a tensor with memory of its own: a DTensor's to_local(), a real one for a FakeTensor"
            raise FormatError(
                self.operation.name, argument, f"a {type(tensor).__name__} without memory", wanted
            )
        return 0

    def backward(
        self,
        kept: Sequence[Tensor],
        held: list[Tensor],
        cotangents: Sequence[Tensor | None],
        scales: Placed,
        amaxes: Placed,
        into: Mapping[str, Tensor] = _NOWHERE,
        apart: bool = False,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """(gradients of ``needs``, amaxes). ``held``: what forward saved, ``apart`` or not; the list is
        emptied. ``kept``, ``cotangents``: in the order of ``self.kept`` and ``self.names``; ``into``: where
        gradients by name go that have a place already."""
        if self.guarded and torch._C._cuda_getDevice() != self.place.index:
            with torch.cuda.device(self.device):
                return self.backward(kept, held, cotangents, scales, amaxes, into, apart)
        row = None
        if not amaxes and self.back:
            row = torch.zeros(self.back_slots, dtype=torch.float32, device=self.device)
            amaxes = amax_views(self.back, row, self.place)
        arrived = [g if g is None or g.is_contiguous() else g.contiguous() for g in cotangents]
        if arrived[0] is None:
            main = self.outputs[0]
            arrived[0] = torch.zeros(main.shape, dtype=main.dtype, device=self.device)
        made = self._made(into) if into or self.grads_apart else [out.made() for out in self.grads]
        stream = self.stream()
        again = None if self.saved_apart.apart else self.back_again
        at = -1 if again is None else self.back_scratch.kept_at(self.place, stream)
        if at < 0:
            made = self._run_backward(kept, held, arrived, scales, amaxes, made, into, apart, stream)
        else:
            key = (
                stream,
                at,
                scales.at,
                amaxes.at,
                *[t.data_ptr() for t in (*kept, *held, *made)],
                *[None if g is None else (g.data_ptr(), g.dtype) for g in arrived],
            )
            again.run(  # type: ignore[union-attr]
                key, self._run_backward, kept, held, arrived, scales, amaxes, made, into, apart, stream
            )
        if self.direct:
            return made, row  # type: ignore[return-value]
        return [
            (None if passed is None else arrived[passed]) if at is None else made[at]
            for at, passed in self.answers
        ], row

    def _run_backward(
        self,
        kept: Sequence[Tensor],
        held: list[Tensor],
        arrived: Sequence[Tensor | None],
        scales: Placed,
        amaxes: Placed,
        made: list[Tensor],
        into: Mapping[str, Tensor],
        apart: bool,
        stream: int,
    ) -> list[Tensor]:
        """The operation's backward; gives the gradients."""
        place = self.place
        views: Any = dict(scales)
        for (name, _, _, shape, kind), tensor in zip(self.kept, kept, strict=True):
            views[name] = ArrayView(tensor.data_ptr(), shape, kind, place, tensor)
        incoming = {
            name: None if g is None else ArrayView(g.data_ptr(), tuple(g.shape), kind_of(g.dtype), place, g)
            for name, g in zip(self.names, arrived, strict=True)
        }
        filled = self._views(
            [out for out in self.grads if out.name in into or out.name not in self.grads_apart], made, amaxes
        )
        if self.grads_apart:
            filled = Buffers(filled, self.grads_apart, self.make)
        saved = (self.saved_apart if apart else self.saved).opened(held, place) if held else {}
        scratch = self.back_scratch.room(place, self.device, stream, self.eager)
        self.operation.backward(self.plan, views, saved, incoming, filled, scratch, stream)
        return [filled[out.name].owner for out in self.grads] if self.grads_apart else made

    def _made(self, into: Mapping[str, Tensor]) -> list[Tensor]:
        """Tensors for the gradients, fresh but for those in ``into``; but for those that are made later."""
        later = self.grads_apart.keys() - into.keys()
        return [
            into[out.name] if out.name in into else out.made() for out in self.grads if out.name not in later
        ]

    def _views(self, outs: list[Out], made: list[Tensor], amaxes: Placed) -> Any:
        """What was made, and the amaxes, by name."""
        views = dict(amaxes)
        for out, tensor in zip(outs, made, strict=True):
            views[out.name] = ArrayView(tensor.data_ptr(), out.shape, out.kind, self.place, tensor)
        return views
