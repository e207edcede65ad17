"""Tensors whose values are held otherwise, as torch's operations see them: these work on values, and what
they write is held again. ``Part``: a slice, or another view, of such values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError
from fp8kit.lru import memoized
from fp8kit_torch import torch_compat

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class HeldTensor(torch.Tensor):
    """Base of tensors that say what their values are, and take others."""

    def _values(self) -> Tensor:
        """The values as a plain tensor."""
        raise NotImplementedError

    def _take(self, values: Tensor) -> None:
        """Hold other ``values``."""
        raise NotImplementedError

    def _writes(self) -> Any:
        """What differs after each write; None where nobody counts."""
        raise NotImplementedError

    def _part(self, values: Tensor, view: Callable[[Tensor], Tensor]) -> Part:
        """A view of it, whose values these are."""
        raise NotImplementedError

    __torch_function__ = torch_compat.no_torch_function


def on_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation of torch on values. What it writes is held again, and views are ``Part``s.
    UnsupportedError for what receives into such a tensor: it would be held before it is there."""
    own = args[0] if args and isinstance(args[0], HeldTensor) else None
    decoded: dict[int, Tensor] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, HeldTensor):
            return value
        return decoded.setdefault(id(value), value._values())

    written: dict[int, Tensor] = {}
    for place, name in written_by(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        # also those of a list, as optimisers with foreach=True write them
        for one in torch_compat.tree_leaves(value):
            if isinstance(one, HeldTensor):
                written[id(plain(one))] = one
    if written and func.__name__.startswith("recv_"):
        got, wanted = f"a {type(own).__name__}", "a plain tensor, and copy_ of what came"
        raise UnsupportedError("torch.distributed.recv", "tensor", got, wanted)
    is_view = own is not None and func.is_view
    with as_made(own) if is_view else nullcontext():
        out = func(*torch_compat.tree_map(plain, args), **torch_compat.tree_map(plain, kwargs))
        if is_view:
            return _parts(own, out, func, args[1:], kwargs)
    if not written:
        return out
    if func.namespace == "c10d":
        torch_compat.wait_for(out)
    for one in written.values():
        with counting():
            one._take(decoded[id(one)])
    return torch_compat.tree_map(lambda value: written.get(id(value), value), out)


def _parts(own: Any, out: Any, func: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The views that ``func`` has made of a tensor's values."""
    if isinstance(out, Tensor):
        return own._part(out, lambda whole: func(whole, *rest, **kwargs))
    return [
        own._part(one, lambda whole, at=at: func(whole, *rest, **kwargs)[at])  # type: ignore[misc]
        for at, one in enumerate(out)
    ]


class Part(HeldTensor):
    """A view of a tensor's values, in memory of its own: written to, it writes the whole tensor anew."""

    _plain: Tensor
    _whole: HeldTensor
    _view: Callable[[Tensor], Tensor]
    _seen: Any  # the whole's writes when these values were its

    @staticmethod
    def __new__(cls, plain: Tensor, whole: HeldTensor, view: Callable[[Tensor], Tensor]) -> Part:
        made: Part = torch_compat.make_subclass(cls, plain)
        made._plain, made._whole, made._view, made._seen = plain, whole, view, whole._writes()
        return made

    def __init__(self, *arguments: Any) -> None:
        pass

    def _values(self) -> Tensor:
        now = self._whole._writes()
        if now is None or now != self._seen:
            with torch.no_grad():
                self._plain.copy_(self._view(self._whole._values()))
            self._seen = now
        return self._plain

    def _take(self, values: Tensor) -> None:
        self._seen = object()  # also where the whole refuses them
        whole = self._whole._values()
        self._view(whole).copy_(values)
        self._whole._take(whole)

    def _writes(self) -> Any:
        return self._whole._writes()

    def _part(self, values: Tensor, view: Callable[[Tensor], Tensor]) -> Part:
        return Part(values, self._whole, lambda whole: view(self._view(whole)))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation on the values."""
        if func in _SAME:  # a chain of them is no chain of views
            own = args[0]
            with as_made(own):
                return own._whole._part(own._values().detach(), own._view)
        return on_values(func, args, kwargs or {})

    def data_ptr(self) -> int:
        """Of the values as they are now."""
        self._values()
        return super().data_ptr()

    def _plainly(self, values: Tensor) -> Tensor:
        made = values.detach().requires_grad_(self.requires_grad)
        return torch.nn.Parameter(made, self.requires_grad) if isinstance(self, torch.nn.Parameter) else made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plainly(self._values()).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = made = self._plainly(self._values().clone())
        return made

    def __format__(self, spec: str) -> str:
        return format(self._values(), spec)

    def numpy(self, *, force: bool = False) -> Any:
        """As a plain tensor's; torch has neither this nor ``tolist`` for classes of one's own."""
        return self._values().numpy(force=force)

    def tolist(self) -> Any:
        """As a plain tensor's."""
        return self._values().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self._values())


@memoized("what operations on held tensors write")
def written_by(func: Any) -> list[tuple[int, str]]:
    """Place and name of each argument that an operation writes to. Schemas of collectives do not say it, but
    what these read is named "input...", but for ``send``."""
    arguments = [*enumerate(torch_compat.schema_arguments(func))]
    if func.namespace != "c10d":
        return [(at, own.name) for at, own in arguments if own.is_write]
    reads = func.__name__.startswith(("send", "barrier", "monitored_barrier", "check"))
    return [(at, own.name) for at, own in arguments if not reads and not own.name.startswith("input")]


def as_made(tensor: Tensor) -> AbstractContextManager[Any]:
    """Where views of ``tensor`` are made: of a usual one outside of inference mode, because torch gives them
    its version, which tensors of that mode have none of."""
    return torch.inference_mode(tensor.is_inference())


@contextmanager
def counting() -> Iterator[None]:
    """Within ``__torch_dispatch__``: writes and views are counted by torch, as outside of it."""
    with torch.overrides.enable_reentrant_dispatch(), torch.no_grad():
        yield
