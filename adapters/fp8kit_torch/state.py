"""Delayed scaling's state as torch tensors, and when it is updated.

Forward states are touched while a module runs and updated when the outermost autocast ends; backward states
when the backward pass ends, by a callback of the autograd engine: all states of a recipe by one kernel.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8kit import scaling
from fp8kit.arrays import ArrayView, Device
from fp8kit.collectives import Collectives
from fp8kit.quantization import AmaxHistory
from fp8kit.recipe import Recipe
from fp8kit.scaling import FIELDS, Placed, placed
from fp8kit_torch import torch_compat
from fp8kit_torch.collectives import TorchCollectives
from fp8kit_torch.torch_compat import unseen
from fp8kit_torch.views import as_view

_scale = attrgetter("scale")
_HANDLES = itertools.count(1)
_LIVE: weakref.WeakValueDictionary[int, ScalingState] = weakref.WeakValueDictionary()
_HELD: list[None] = []  # of all threads: backward has its own
# of a backward pass: by the identity of a rule, the rule and the states that recorded by it
_Recorded = dict[int, tuple[AmaxHistory, dict["ScalingState", None]]]
_RECORDED: dict[int, _Recorded] = {}  # by the pass's number
# a state that backward records into, its rule, and the number of the pass: None for the one that runs then
Token = tuple[AmaxHistory, "ScalingState", int | None]


class ScalingState:
    """Scales and amax history of ``slots`` quantised tensors of one module in one direction
    (``fp8kit.scaling``).

    ``scale``, ``scale_inv``: float32 (slots,), ones at first; ``amax_history``: float32 (history_len, slots),
    zeros at first, row 0 the amaxes since the last update, row 1 the oldest. ``number``: of the state;
    ``handle``: the same, int64 () on the CPU, by which a compiled graph names it. ``group``: the process
    group over which its amaxes are reduced, None for all processes.
    """

    def __init__(self, slots: int, history_len: int, device: torch.device | str) -> None:
        kind: dict[str, Any] = {"dtype": torch.float32, "device": device}
        # a state outlives the mode in which it is first used
        with torch.inference_mode(False), torch.no_grad(), unseen():
            self._take(
                [
                    torch.ones(slots, **kind),
                    torch.ones(slots, **kind),
                    torch.zeros(history_len, slots, **kind),
                ]
            )

    def _take(self, parts: Sequence[Tensor]) -> None:
        self.scale, self.scale_inv, self.amax_history = parts
        number = next(_HANDLES)
        self.number = number
        self.handle = torch.tensor(number, device="cpu")
        self.group: Any = None
        _LIVE[number] = self

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> ScalingState:
        """A state of (scale, scale_inv, amax_history), which it takes over."""
        state = cls.__new__(cls)
        state._take(parts)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalingState:
        return ScalingState.of([part.clone() for part in self.parts])

    def __reduce__(self) -> Any:
        return ScalingState.of, (self.parts,)

    @property
    def parts(self) -> list[Tensor]:
        """scale, scale_inv and amax_history."""
        return [self.scale, self.scale_inv, self.amax_history]

    @property
    def views(self) -> dict[str, ArrayView]:
        """The tensors as views by their names."""
        return dict(zip(FIELDS, self.placed.arrays, strict=True))

    @cached_property
    def placed(self) -> Placed:
        """Where the tensors lie, found once for the same tensors."""
        return placed(*map(as_view, self.parts))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in FIELDS:
            self.__dict__.pop("placed", None)

    @property
    def device(self) -> Device:
        """Where the state lies."""
        return self.placed.device

    @property
    def history_len(self) -> int:
        """Rows of the history."""
        return self.amax_history.shape[0]

    def resize(self, history_len: int) -> None:
        """Another history length: the first rows are kept, or zero rows added at the end (Transformer
        Engine's rule)."""
        old = self.amax_history
        with torch.inference_mode(False), torch.no_grad(), unseen():
            new = torch.zeros(history_len, old.shape[1], dtype=old.dtype, device=old.device)
            rows = min(history_len, old.shape[0])
            new[:rows] = old[:rows]
        self.amax_history = new

    def drop(self) -> None:
        """Forget the amaxes since the last update."""
        self.amax_history[0].zero_()

    @classmethod
    def commit_forward(cls, recipe: Recipe, states: Sequence[ScalingState]) -> None:
        """Update forward states (the outermost autocast has ended)."""
        update(recipe.history, states, True)
        # autograd knows no write of ours: a compiled graph whose backward would compute forward again, with
        # later scales, is to be refused
        torch_compat.increment_version([*map(_scale, states)])


def stream_of(device: Device) -> int:
    """torch's current stream of a device."""
    return torch_compat.current_stream(device.index) if device.kind == "cuda" else 0


def _reduce(history: AmaxHistory, states: Sequence[Any]) -> None:
    """Row 0 of the histories becomes its maximum over the processes, where there are several and the recipe
    says so: one collective for each group and device."""
    if not history.reduce:
        return
    if not torch_compat.GROUPS and not any(isinstance(state.group, Collectives) for state in states):
        return
    parts: dict[tuple[Any, torch.device], list[Tensor]] = {}
    for state in states:
        row = state.amax_history[0]
        parts.setdefault((state.group, row.device), []).append(row)
    for (group, _), rows in parts.items():
        ranks = group if isinstance(group, Collectives) else TorchCollectives.of(group or dist.group.WORLD)
        if ranks.size > 1:
            whole = torch.cat(rows)
            ranks.all_reduce(as_view(whole), "max", stream_of(as_view(whole).device), "the update of scales")
            torch_compat.foreach_copy_(rows, list(whole.split([row.numel() for row in rows])))


# ``fp8kit.scaling.update`` on torch's current stream, with torch's processes; callables get tensors, as in
# Transformer Engine
update: Callable[[AmaxHistory | None, Sequence[Any], bool], None] = partial(
    scaling.update_among, torch_compat.current_stream, torch_compat.GROUPS, _reduce, lend=torch.from_numpy
)


def named(handle: int) -> ScalingState | None:
    """The live state of that handle."""
    return _LIVE.get(handle)


@contextmanager
def held() -> Iterator[None]:
    """No backward state is updated within: a graph is captured, which is to leave that to whoever replays
    it."""
    _HELD.append(None)
    try:
        yield
    finally:
        _HELD.pop()


class _BackwardEnd(int):
    """The end of a backward pass, by its number, called by autograd's engine. Where the pass fails the engine
    lets go of it uncalled, on a device's thread perhaps a moment after it raised: then what the pass recorded
    is dropped, as is what an update that raises leaves."""

    __slots__ = ()

    def __call__(self) -> None:
        for history, states in [*_RECORDED[self].values()]:
            update(history, [*states], False)
            states.clear()
        del _RECORDED[self]

    def __del__(self) -> None:
        recorded = _RECORDED.get(self)
        if recorded is None:
            return
        try:
            for _, states in recorded.values():
                for state in states:
                    if state.scale.is_cuda:
                        # what failed may still be running, on any stream
                        torch.cuda.synchronize(state.scale.device)
                    state.drop()
        finally:  # once they are dropped: whoever waits for that looks here
            del _RECORDED[self]


def open_backward() -> int:
    """Number of the backward pass that runs now, at whose end the states that it recorded are updated. Called
    within one, by any of its threads: there is one for each device."""
    number = torch_compat.current_backward()
    own: _Recorded = {}
    if _RECORDED.setdefault(number, own) is own:  # one thread's
        torch_compat.at_backwards_end(_BackwardEnd(number))
    return number


def finish_backward(tokens: Sequence[Token]) -> None:
    """Update the states of ``tokens``, all of one pass, when a backward pass has ended: the one that runs
    now, or the one of their number around it, as ``open_backward`` gave it."""
    if _HELD or not tokens:
        return
    number = tokens[0][2]
    recorded = _RECORDED[number if number in _RECORDED else open_backward()]
    for history, state, _ in tokens:
        recorded.setdefault(id(history), (history, {}))[1][state] = None


class StateBinding(NamedTuple):
    """Where an operation finds a layer's FP8 state in an eager call: addresses by the operation's names.

    ``scales``: inputs of forward; ``amaxes``: where forward accumulates, none for memory that does not last.
    ``backward_scales``, ``backward_amaxes``: those of backward, with the values of that moment. ``tokens``:
    what ``finish_backward`` is called with, once each. ``held``: the tensors that the addresses are of.
    """

    scales: Mapping[str, int]
    amaxes: Mapping[str, int] = MappingProxyType({})
    backward_scales: Mapping[str, int] = MappingProxyType({})
    backward_amaxes: Mapping[str, int] = MappingProxyType({})
    tokens: tuple[Token, ...] = ()
    held: tuple[Tensor, ...] = ()

    def of_gemm(self, prefix: str, rename: bool = False) -> StateBinding:
        """The part of one GEMM, by the prefix of its names; with ``rename`` without that prefix."""
        if not self.scales:
            return self
        start = len(prefix) if rename else 0
        parts = ({n[start:]: at for n, at in part.items() if n.startswith(prefix)} for part in self[:4])
        return StateBinding(*parts, *self[4:])


NO_STATE = StateBinding({})


def slot_addresses(slots: Mapping[str, int], row: Tensor, what: str) -> dict[str, int]:
    """Addresses of operands' slots in a row, float32, by the names ``{operand}_{what}``."""
    start = row.data_ptr()
    return {f"{operand}_{what}": start + 4 * slot for operand, slot in slots.items()}


def moved(states: Mapping[str, ScalingState], fn: Callable[[Tensor], Tensor]) -> dict[str, ScalingState]:
    """The states where ``fn`` (``Module._apply``'s) puts them: their device changes, their dtype and values
    do not."""
    found = {}
    for name, state in states.items():
        device = fn(state.scale).device
        found[name] = (
            state
            if device == state.scale.device
            else ScalingState.of([part.to(device) for part in state.parts])
        )
    return found
