"""Parameters in host memory between a layer's forward and its backward pass (``cpu_offload``).

A weight's values are copied to the host beside the computation. Then the parameter, which stays the object
that it is, gets memory that holds one NaN, so that whoever reads it meanwhile sees that; before it is needed
it gets memory of its own and its values again. It is needed by the layer's backward pass, by any call of a
module that has it, by ``state_dict`` and ``load_state_dict``, and once no graph is left that would read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_pre_hook

from fp8kit_torch.side_by_side import Stack, Stacks
from fp8kit_torch.te_compat.grouped_tensor import GroupedTensor
from fp8kit_torch.torch_compat import owners

if TYPE_CHECKING:
    from fp8kit_torch.offloading import OffloadSynchronizer

_KNOWN = "_fp8kit_offloaded"  # attribute of a parameter
_AWAY: set[OffloadedWeight] = set()
# modules that bring their weights back before their state is read
_ASKED: weakref.WeakSet[Module] = weakref.WeakSet()


class OffloadedWeight:
    """A parameter whose values may be in ``host`` memory alone. ``copied``: the event that the last copy
    ends with."""

    def __init__(self, parameters: Sequence[Parameter], owner: OffloadSynchronizer) -> None:
        self._members, self._owner = [*map(weakref.ref, parameters)], owner
        self.host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        for parameter in parameters:
            setattr(parameter, _KNOWN, self)

    def __reduce__(self) -> Any:
        return type(None), ()  # a parameter that is read from a file is not offloaded

    def _there(self) -> list[Any]:
        """What is left of the parameters."""
        return [parameter for ref in self._members if (parameter := ref()) is not None]

    def _values(self) -> Tensor | None:
        """The values where they are on the device; None where they are no more."""
        found = self._there()
        return found[0].detach() if found else None

    def _place(self, values: Tensor) -> None:
        """Give the parameters their values."""
        self._there()[0].data = values

    @property
    def away(self) -> bool:
        """Whether the device has no copy."""
        return self in _AWAY

    def leave(self) -> None:
        """Begin to copy the values to the host."""
        values = None if self.away else self._values()
        if values is None:
            return
        self._stride = values.stride()
        if self.host is None or (self.host.shape, self.host.dtype) != (values.shape, values.dtype):
            self.host = self._owner.host_buffer(values)
        with self._owner.beside(values):
            self.host.copy_(values, non_blocking=True)
        self._copied = self._owner.event(values.device)

    def release(self) -> None:
        """Let go of the device's memory; of what has another owner too, or lies elsewhere by now, nothing is
        let go."""
        found = self._there()
        if self.host is None or self.away or self._values() is None:
            return
        if any(owners(parameter) > 1 or getattr(parameter, _KNOWN) is not self for parameter in found):
            return
        where = found[0].device
        self._wait(where)
        nothing = torch.full((1,), float("nan"), dtype=self.host.dtype, device=where)
        with torch.no_grad():
            for parameter in found:
                parameter.data = nothing.expand(parameter.shape)
        _AWAY.add(self)

    def reload(self) -> None:
        """Begin to copy the values back."""
        found, host = self._there(), self.host
        if not found or not self.away:
            _AWAY.discard(self)
            return
        assert host is not None
        where = found[0].device
        values = torch.empty_strided(host.shape, self._stride, dtype=found[0].dtype, device=where)
        with self._owner.beside(values), torch.no_grad():
            values.copy_(host, non_blocking=True)
        self._owner.keep_until_copied(values)
        self._copied = self._owner.event(where)
        with torch.no_grad():
            self._place(values)
        _AWAY.discard(self)

    def restore(self) -> None:
        """Let work that is launched from here on find the values."""
        self.reload()
        found = self._there()
        if found:
            self._wait(found[0].device)

    def _wait(self, device: torch.device) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(device).wait_event(self._copied)
            self._copied = None


class OffloadedStack(OffloadedWeight):
    """Parameters that lie side by side: they go together, and are side by side again."""

    def __init__(self, stack: Stack, parameters: Sequence[Parameter], owner: OffloadSynchronizer) -> None:
        self.stack = stack
        super().__init__(parameters, owner)

    def _values(self) -> Tensor | None:
        found = self._there()
        return self.stack.whole(found) if len(found) == len(self._members) else None

    def _place(self, values: Tensor) -> None:
        self.stack.place(values)


def offloaded_of(module: Module, owner: OffloadSynchronizer, least: int) -> list[OffloadedWeight]:
    """What offloads the parameters of a module: each by itself, or those that lie side by side as one; the
    same for each layer that has them. Not small ones, and none that does not have its memory to itself, such
    as a part of FSDP's flat parameter or an FP8 weight."""
    found: dict[OffloadedWeight, None] = {}
    for each in module.modules():
        stacks = vars(each).get("_stacks")
        for stack in stacks.known() if isinstance(stacks, Stacks) else ():
            members = stack.parameters()
            whole = stack.whole(members)
            if whole is not None and whole.numel() >= least:
                known = getattr(members[0], _KNOWN, None)
                if type(known) is not OffloadedStack or known.stack is not stack:
                    known = OffloadedStack(stack, members, owner)
                found[known] = None
    for parameter in module.parameters():
        known = getattr(parameter, _KNOWN, None)
        if type(known) is OffloadedStack and known not in found and not known.away:
            known = None  # it lies by itself by now
        if known is None and _has_its_own_memory(parameter, least):
            known = OffloadedWeight([parameter], owner)
        if known is not None:
            found[known] = None
    return list(found)


def _has_its_own_memory(parameter: Any, least: int) -> bool:
    return (
        type(parameter) in (Parameter, GroupedTensor)
        and type(parameter.data) is Tensor
        and parameter.numel() >= least
        and parameter.layout is torch.strided
        and parameter.untyped_storage().nbytes() == parameter.nbytes
    )


class ModuleCalls:
    """While it is open: modules that are called are noted, by the outermost of them; whatever they have in
    host memory comes back first. It stays open, and notes nothing, until nothing is away any more."""

    def __init__(self) -> None:
        self.noted: list[Module] | None = None
        self._handle: Any = None

    def open(self) -> None:
        """Note calls from here on."""
        self.noted = []
        if self._handle is None:
            self._handle = register_module_forward_pre_hook(self._called)

    def close(self) -> list[Module]:
        """The modules that were called."""
        found, self.noted = self.noted or [], None
        return found

    def _called(self, module: Module, args: Any) -> None:
        if self.noted is None and not _AWAY:
            self._handle.remove()
            self._handle = None
        if _AWAY:
            restore(module.parameters())
        if self.noted is not None and not any(module in set(each.modules()) for each in self.noted):
            self.noted.append(module)


def restore(parameters: Iterable[Any]) -> None:
    """Bring back what is away of these."""
    for parameter in parameters:
        found = getattr(parameter, _KNOWN, None)
        if found is not None and found.away:
            found.restore()


def restore_before_state(module: Module) -> None:
    """Let ``module.state_dict()`` and ``load_state_dict`` bring its weights back first, as those of what it
    is in do."""
    for each in module.modules():
        if each not in _ASKED:
            _ASKED.add(each)
            each.register_state_dict_pre_hook(_before_state)
            each.register_load_state_dict_pre_hook(_before_state)


def _before_state(module: Module, *given: Any) -> None:
    restore(module.parameters(recurse=False))
