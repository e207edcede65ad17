"""Parameters that lie side by side in memory, so that all of them are one array without a copy.

Each has a storage of its own over its part, and keeps all parts alive: saved, pickled, offloaded and counted
it is as any other parameter. What no longer lies so, because something gave a parameter other memory or put
another in its place, is found out at each call, by addresses and layouts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from fp8kit.errors import AutogradError
from fp8kit_torch.once import once
from fp8kit_torch.torch_compat import alike, applier, calls_backward, owners, storage_of, version

# bytes of a part are a multiple: where it begins, kernels find the alignment that memory of its own has
_ALIGNED = 256


_address, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
_kind = attrgetter("shape", "dtype", "device")


class Stack:
    """Memory that was made here, weakly, where in it ``members`` begin, and the shape, dtype and device of
    all of them."""

    RENEWALS = 8  # of ``_quick``, which a step in another mode of torch, or a frozen parameter, makes say no

    def __init__(self, whole: Tensor, members: Sequence[Tensor]) -> None:
        self.kind, self._members = _kind(members[0]), [*map(weakref.ref, members)]
        self.place(whole)

    def parameters(self) -> list[Any]:
        """What is left of them."""
        return [parameter for ref in self._members if (parameter := ref()) is not None]

    def place(self, whole: Tensor) -> None:
        """Let the parameters have their parts of ``whole`` (N, ...) for their memory, as it is there."""
        for part, ref in zip(whole.unbind(0), self._members, strict=True):
            parameter = ref()
            if parameter is not None:
                parameter.data = torch.from_dlpack(part)
        self.memory, self._pointers = (
            StorageWeakRef(whole.untyped_storage()),
            [*map(_address, self.parameters())],
        )
        self._quick: Any = lambda *others: False
        self._left = self.RENEWALS

    def whole(self, members: Sequence[Any]) -> Tensor | None:
        """``members`` as one tensor (N, ...) over their own memory; None where they do not lie there."""
        memory = storage_of(self.memory) if self.holds(members) else None
        if memory is None:
            return None
        shape, dtype, device = self.kind
        whole = torch.empty(0, dtype=dtype, device=device)
        return whole.set_(memory, 0, (len(members), *shape))  # type: ignore[call-overload, no-any-return]

    def holds(self, members: Sequence[Any]) -> bool:
        """Whether these are parameters that lie there as they were put."""
        if not self._quick(*members):
            if {*map(type, members)} != {Parameter} or [*map(_kind, members)] != [self.kind] * len(members):
                return False
            if not all(map(_is_contiguous, members)):
                return False
            if self._left:
                self._left -= 1
                self._quick = alike(members)
        return [*map(_address, members)] == self._pointers


class Stacks:
    """The parameters of a module that were put side by side, by the name that they share. ``anew``: "now" of
    a deep copy, whose parameters have to be put so again; "later", at its first call, of what is read from a
    file: what else has their memory may not be read yet; "" else, and of what goes to another process."""

    def __init__(self, anew: str = "") -> None:
        self.anew = anew
        self._known: dict[str, Stack] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Stacks:
        return Stacks("now")

    def __reduce__(self) -> Any:
        return Stacks, ("later",)

    def put(self, name: str, members: Sequence[Any]) -> None:
        """Bring parameters into one memory, where they are plain ones, alike, each another one with memory of
        its own alone, on the CPU or a GPU and of whole multiples of 256 bytes; others stay where they are, as
        in memory that processes or other tensors share."""
        first = members[0]
        kind = _kind(first) if type(first) is Parameter else None
        if kind is None or first.nbytes % _ALIGNED or not first.nbytes or len(members) < 2:
            return
        if first.device.type not in ("cpu", "cuda") or torch.is_inference_mode_enabled():
            return
        if any(
            type(p) is not Parameter
            or type(p.data) is not Tensor
            or _kind(p) != kind
            or not p.is_contiguous()
            or p.is_inference()
            or p.untyped_storage().nbytes() != p.nbytes  # a part of somebody's memory stays there
            or owners(p) > 1
            or (not p.is_cuda and p.is_shared())  # of a GPU's it is always said
            for p in members
        ) or len({*map(id, members)}) < len(members):
            return
        with torch.no_grad():
            whole = torch.empty((len(members), *first.shape), dtype=first.dtype, device=first.device)
            if type(whole) is not Tensor:
                return
            for part, parameter in zip(whole.unbind(0), members, strict=True):
                part.copy_(parameter)
        self._known[name] = Stack(whole, members)

    def find(self, name: str, members: Sequence[Any]) -> Tensor | None:
        """Parameters as one tensor (N, ...) over their own memory, without a gradient; None where they are
        not, or no longer, side by side."""
        known = self._known.get(name)
        return None if known is None else known.whole(members)

    def known(self) -> list[Stack]:
        """The stacks that were made here."""
        return [*self._known.values()]

    def again(self, name: str, members: Sequence[Any]) -> Tensor:
        """``find``, or a copy where they are no longer side by side."""
        found = self.find(name, members)
        return torch.stack([member.detach() for member in members]) if found is None else found


# of a process that is given the module: its parameters are the other one's
ForkingPickler.register(Stacks, lambda stacks: (Stacks, ()))


class _AsOne(torch.autograd.Function):
    """``whole``, whose gradient is that of the parameters it consists of: theirs are parts of it."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *members: Tensor) -> Tensor:
        return whole.detach()

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted, parts = ctx.needs_input_grad[1:], grad.unbind(0)
        if not all(wanted):
            parts = tuple(g if w else None for g, w in zip(parts, wanted, strict=True))
        return None, *parts


# (what ``Stacks.find`` gave, parameters) -> the former, as a function of the latter
as_one = applier(_AsOne)
calls_backward(_AsOne)


def want_unchanged(y: Tensor, members: Sequence[Tensor]) -> None:
    """AutogradError in the backward pass from ``y``, whose operation reads the parameters again there, where
    one was changed in place meanwhile: what torch says of a tensor that it has saved."""
    if not y.requires_grad:
        return
    versions = [*map(version, members)]

    def look(grad: Tensor) -> None:
        now = [*map(version, members)]
        if now != versions:
            i = next(i for i, (old, new) in enumerate(zip(versions, now, strict=True)) if old != new)
            wanted = "the one that forward had, until backward has read it"
            raise AutogradError("GroupedLinear", f"weight{i}", "a weight changed in place", wanted)

    y.register_hook(look)
