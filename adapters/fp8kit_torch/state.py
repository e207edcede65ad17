"""Delayed scaling's state as torch tensors, and when it is updated.

Forward states are touched while a module runs and updated when the outermost autocast ends; backward states when the backward pass ends,
by a callback of the autograd engine: all states of a recipe by one kernel.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit import scaling
from fp8kit.arrays import ArrayView, Device
from fp8kit.recipe import Recipe
from fp8kit.scaling import FIELDS
from fp8kit_torch.views import as_view

_HANDLES = itertools.count(1)
_LIVE: weakref.WeakValueDictionary[int, ScalingState] = weakref.WeakValueDictionary()
_WALKS: dict[int, dict[int, tuple[Recipe, dict[int, ScalingState]]]] = {}  # backward pass -> recipes and states that recorded in it


class ScalingState:
    """Scales and amax history of ``slots`` quantised tensors of one module in one direction (``fp8kit.scaling``).

    ``scale``, ``scale_inv``: float32 (slots,), ones at first; ``amax_history``: float32 (history_len, slots), zeros at first, row 0 the
    amaxes since the last update, row 1 the oldest. ``handle``: int64 () on the CPU, by which a compiled graph names the state.
    """

    def __init__(self, slots: int, history_len: int, device: torch.device | str) -> None:
        kind: dict[str, Any] = {"dtype": torch.float32, "device": device}
        with torch.inference_mode(False), torch.no_grad():  # a state outlives the mode in which it is first used
            self._take([torch.ones(slots, **kind), torch.ones(slots, **kind), torch.zeros(history_len, slots, **kind)])

    def _take(self, parts: Sequence[Tensor]) -> None:
        self.scale, self.scale_inv, self.amax_history = parts
        number = next(_HANDLES)
        self.handle = torch.tensor(number)
        self._seen: Any = (None, None, None, {})
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
        """The tensors as views by their names, made once for the same tensors."""
        scale, scale_inv, history, views = self._seen
        if scale is not self.scale or scale_inv is not self.scale_inv or history is not self.amax_history:
            views = dict(zip(FIELDS, map(as_view, self.parts), strict=True))
            self._seen = (*self.parts, views)
        return views  # type: ignore[no-any-return]

    @property
    def device(self) -> Device:
        """Where the state lies."""
        return self.views["scale"].device

    @property
    def history_len(self) -> int:
        """Rows of the history."""
        return self.amax_history.shape[0]

    def resize(self, history_len: int) -> None:
        """Another history length: the first rows are kept, or zero rows added at the end (Transformer Engine's rule)."""
        old = self.amax_history
        with torch.inference_mode(False), torch.no_grad():
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
        update(recipe, states, forward=True)

    @classmethod
    def discard_forward(cls, states: Sequence[ScalingState]) -> None:
        """The outermost autocast ended by an exception: what the unfinished step recorded is dropped."""
        for state in states:
            state.drop()


def update(recipe: Recipe, states: Sequence[Any], forward: bool) -> None:
    """Delayed scaling's update of all ``states``, one kernel call a device, on torch's current stream."""
    fp8_max = (recipe.forward_format if forward else recipe.backward_format).max
    for device in dict.fromkeys(state.device for state in states):
        own = [state for state in states if state.device == device]
        if device.kind == "cpu":
            scaling.update(recipe, own, fp8_max, 0)
        else:
            with torch.cuda.device(device.index):
                scaling.update(recipe, own, fp8_max, torch.cuda.current_stream().cuda_stream)


def named(handle: int) -> ScalingState | None:
    """The live state of that handle."""
    return _LIVE.get(handle)


def finish_backward(recipe: Recipe, state: ScalingState) -> None:
    """Update ``state`` when the backward pass that runs now has ended. Called within one."""
    walk = torch._C._current_graph_task_id()
    groups = _WALKS.get(walk)
    if groups is None:
        groups = _WALKS[walk] = {}
        torch.autograd.Variable._execution_engine.queue_callback(_ended(walk))
    found = groups.get(id(recipe))
    if found is None:
        found = groups[id(recipe)] = (recipe, {})
    found[1][id(state)] = state


def _ended(walk: int) -> Callable[[], None]:
    def end() -> None:
        for recipe, states in _WALKS.pop(walk).values():
            update(recipe, list(states.values()), forward=False)

    return end


def moved(states: Mapping[str, ScalingState], fn: Callable[[Tensor], Tensor]) -> dict[str, ScalingState]:
    """The states where ``fn`` (``Module._apply``'s) puts them: their device changes, their dtype and values do not."""
    found = {}
    for name, state in states.items():
        device = fn(state.scale).device
        found[name] = state if device == state.scale.device else ScalingState.of([part.to(device) for part in state.parts])
    return found
