"""Parameters in host memory between a layer's forward and its backward pass (``cpu_offload``).

A weight's values are copied to the host beside the computation. Then the parameter, which stays the object
that it is, gets memory that holds one NaN, so that whoever reads it meanwhile sees that; before it is needed
it gets memory of its own and its values again. It is needed by the layer's backward pass, by any call of a
module that has it, by ``state_dict``, and once no graph is left that would read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_pre_hook

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

    def __init__(self, parameter: Parameter, owner: OffloadSynchronizer) -> None:
        self._parameter, self._owner = weakref.ref(parameter), owner
        self.host: Tensor | None = None
        self._stride = parameter.stride()
        self._copied: torch.cuda.Event | None = None

    @property
    def away(self) -> bool:
        """Whether the device has no copy."""
        return self in _AWAY

    def leave(self) -> None:
        """Begin to copy the values to the host."""
        parameter = self._parameter()
        if parameter is None or self.away:
            return
        values = parameter.detach()
        if self.host is None:
            self.host = self._owner.host_buffer(values)
        with self._owner.beside(values):
            self.host.copy_(values, non_blocking=True)
        self._copied = self._owner.event(values.device)

    def release(self) -> None:
        """Let go of the device's memory; of what has another owner too, nothing is let go."""
        parameter = self._parameter()
        if parameter is None or self.away or self.host is None or owners(parameter) > 1:
            return
        self._wait(parameter.device)
        nothing = torch.full((1,), float("nan"), dtype=parameter.dtype, device=parameter.device)
        with torch.no_grad():
            parameter.data = nothing.expand(parameter.shape)
        _AWAY.add(self)

    def reload(self) -> None:
        """Begin to copy the values back."""
        parameter = self._parameter()
        if parameter is None or not self.away:
            _AWAY.discard(self)
            return
        host = self.host
        assert host is not None
        where = parameter.device
        values = torch.empty_strided(host.shape, self._stride, dtype=host.dtype, device=where)
        with self._owner.beside(values), torch.no_grad():
            values.copy_(host, non_blocking=True)
        self._owner.keep_until_copied(values)
        self._copied = self._owner.event(where)
        with torch.no_grad():
            parameter.data = values
        _AWAY.discard(self)

    def restore(self) -> None:
        """Let work that is launched from here on find the values."""
        self.reload()
        parameter = self._parameter()
        if parameter is not None:
            self._wait(parameter.device)

    def _wait(self, device: torch.device) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(device).wait_event(self._copied)
            self._copied = None


def offloaded(parameter: Any, owner: OffloadSynchronizer, least: int) -> OffloadedWeight | None:
    """What offloads that parameter, the same for each layer that has it; None for a small one, and for one
    that does not have its memory to itself, such as a part of FSDP's flat parameter or an FP8 weight."""
    found: OffloadedWeight | None = getattr(parameter, _KNOWN, None)
    if found is not None:
        return found
    if (
        type(parameter) is not Parameter
        or type(parameter.data) is not Tensor
        or parameter.numel() < least
        or parameter.layout is not torch.strided
        or parameter.untyped_storage().nbytes() != parameter.nbytes
    ):
        return None
    found = OffloadedWeight(parameter, owner)
    setattr(parameter, _KNOWN, found)
    return found


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
    """Let ``module.state_dict()`` bring its weights back first, as that of what it is in does."""
    for each in module.modules():
        if each not in _ASKED:
            _ASKED.add(each)
            each.register_state_dict_pre_hook(_before_state)


def _before_state(module: Module, prefix: str, keep_vars: bool) -> None:
    restore(module.parameters(recurse=False))
