"""The state of operands whose scales follow from earlier steps: scales and amax histories of a module, their
names, their check, and their update. Every frontend's.

A ``ScalingState`` holds the n quantised tensors of one module in one direction, in contiguous arrays. Forward
slots per GEMM are input, weight, output; backward slots are grad_output, grad_input (Transformer Engine's
order; output and grad_input are reserved). Operations read ``scale`` and accumulate amaxes into row 0 of the
history; the update of all states by one ``AmaxHistory`` is one kernel call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from fp8kit import arrays
from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.backends import dispatch
from fp8kit.collectives import EVERYONE, Collectives
from fp8kit.errors import CheckpointError, RecipeError
from fp8kit.execution import replay
from fp8kit.formats import float32
from fp8kit.quantization import AmaxHistory, DelayedRule
from fp8kit.recipe import DELAYED_SCALES, Recipe

HostArray = np.ndarray[Any, Any]
FORWARD_SLOTS = 3  # input, weight, output
BACKWARD_SLOTS = 2  # grad_output, grad_input
FIELDS = ("scale", "scale_inv", "amax_history")
_FEW = 64  # states: more cost their look-up more than they save
_UPDATE = "update_delayed_"  # of a key
_LEAST, _MOST = map(np.float32, DELAYED_SCALES)
_placed, _place, _device, _group = map(attrgetter, ("placed", "placed.place", "device", "group"))


def forward_slots(gemms: Sequence[str]) -> dict[str, int]:
    """Operand -> slot of the forward state, for GEMMs by the prefixes of their names: x and w. An operation
    reads ``{operand}_scale`` and records ``{operand}_amax``."""
    return {
        f"{prefix}{operand}": FORWARD_SLOTS * i + at
        for i, prefix in enumerate(gemms)
        for at, operand in enumerate("xw")
    }


def backward_slots(gemms: Sequence[str]) -> dict[str, int]:
    """Operand -> slot of the backward state: g."""
    return {f"{prefix}g": BACKWARD_SLOTS * i for i, prefix in enumerate(gemms)}


def check_saved(state: Mapping[str, ArrayView], gemms: int) -> dict[str, list[ArrayView]]:
    """The arrays of a saved state of ``gemms`` GEMMs, "scaling_fwd.scale" and so on, as "scaling_fwd",
    "scaling_bwd" -> FIELDS; an empty one stays empty. CheckpointError that names the array where one is
    missing, unknown or does not fit, and where a number in it is none that the state can have: scales and
    their inverses are finite and positive, amaxes not negative (Inf is what a step that overflowed leaves
    behind)."""
    if not state:
        return {}
    sizes = {"scaling_fwd": FORWARD_SLOTS * gemms, "scaling_bwd": BACKWARD_SLOTS * gemms}
    names = {f"{name}.{field}" for name in sizes for field in FIELDS}
    wrong = [f"missing: {n}" for n in sorted(names - set(state))]
    wrong += [f"unexpected: {n}" for n in sorted(set(state) - names)]
    if wrong:
        raise CheckpointError("; ".join(wrong))
    for name, slots in sizes.items():
        for field in FIELDS:
            part, history = state[f"{name}.{field}"], field == "amax_history"
            fits = part.ndim == 1 + history and part.shape[-1] == slots and not (history and not part.size)
            if not fits or part.dtype is not float32:
                wanted = f"(steps, {slots})" if history else f"({slots},)"
                got = f"{part.dtype.name} {part.shape}"
                raise CheckpointError(f"{name}.{field}: got {got}, expected float32 {wanted}")
            _check_numbers(f"{name}.{field}", field, part.numpy())
    return {name: [state[f"{name}.{field}"] for field in FIELDS] for name in sizes}


def _check_numbers(name: str, field: str, values: HostArray) -> None:
    """CheckpointError for what is no scale, no inverse of one, or no amax."""
    if field == "amax_history":
        fits, wanted = values >= 0, "amaxes, 0 or more"
    else:
        fits, wanted = (values > 0) & np.isfinite(values), "finite numbers above 0"
        if field == "scale":
            wanted += ", and their inverses too"
            with np.errstate(divide="ignore", over="ignore"):
                fits &= np.isfinite(np.float32(1) / values)
    if not fits.all():
        at = tuple(map(int, np.argwhere(~fits)[0]))
        where = at if len(at) > 1 else at[0]
        raise CheckpointError(f"{name}: got {values[at]} at {where}, expected {wanted}")


class Placed(NamedTuple):
    """Where a state lies, for its update: its arrays in the order of ``FIELDS``, and what says in a key which
    arrays these are."""

    device: Device
    arrays: tuple[ArrayView, ArrayView, ArrayView]
    place: tuple[int, int, int, Shape]


def placed(scale: ArrayView, scale_inv: ArrayView, history: ArrayView) -> Placed:
    """``Placed`` of a state's arrays."""
    place = scale.ptr, scale_inv.ptr, history.ptr, history.shape
    return Placed(scale.device, (scale, scale_inv, history), place)


class ScalingState:
    """Scales and amax history of ``slots`` tensors on ``device``.

    ``scale``, ``scale_inv``: float32 (slots,), ones at first; ``amax_history``: float32 (history_len, slots),
    zeros at first, row 0 the amaxes since the last update, row 1 the oldest. They read as arrays of the
    device's library that share the state's memory. ``group``: the ranks over which its amaxes are reduced,
    None for all processes.
    """

    __slots__ = ("amaxes", "device", "group", "placed", "scales", "slots", "views")

    def __init__(self, slots: int, history_len: int, device: Device) -> None:
        self.group: Collectives | None = None
        self.slots = slots
        self.device = device
        scale, scale_inv = (_put(np.ones(slots, np.float32), device) for _ in range(2))
        self._take(scale, scale_inv, arrays.zeros((history_len, slots), float32, device))

    def _take(self, scale: ArrayView, scale_inv: ArrayView, history: ArrayView) -> None:
        self.views: dict[str, ArrayView] = dict(zip(FIELDS, (scale, scale_inv, history), strict=True))
        self.placed = placed(scale, scale_inv, history)
        flat = history.reshape(history.size)
        self.scales = tuple(scale.slice(0, i, 1) for i in range(self.slots))
        self.amaxes = tuple(flat.slice(0, i, 1) for i in range(self.slots))

    @classmethod
    def of(cls, parts: Sequence[ArrayView], device: Device) -> ScalingState:
        """A state with the values of (scale, scale_inv, amax_history), copied to ``device``."""
        state = cls.__new__(cls)
        state.slots, state.device, state.group = parts[0].size, device, None
        state._take(*(_put(part.numpy(), device) for part in parts))
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalingState:
        """The same values in memory of their own."""
        return ScalingState.of([self.views[field] for field in FIELDS], self.device)

    @property
    def history_len(self) -> int:
        """Rows of the history."""
        return self.views["amax_history"].shape[0]

    @property
    def scale(self) -> Any:
        """float32 (slots,): multiplies before the cast."""
        return self._native("scale")

    @property
    def scale_inv(self) -> Any:
        """float32 (slots,): 1 / scale."""
        return self._native("scale_inv")

    @property
    def amax_history(self) -> Any:
        """float32 (history_len, slots)."""
        return self._native("amax_history")

    def _native(self, field: str) -> Any:
        return arrays.native(self.views[field])

    def resize(self, history_len: int) -> None:
        """Another history length: the first rows are kept, or zero rows added at the end (Transformer
        Engine's rule)."""
        old = self.views["amax_history"]
        rows = min(history_len, self.history_len)
        new = arrays.zeros((history_len, self.slots), float32, self.device)
        arrays.copy(new.slice(0, 0, rows), old.slice(0, 0, rows))
        self._take(self.views["scale"], self.views["scale_inv"], new)

    def load(self, other: ScalingState) -> None:
        """Take over the values of a state of the same sizes, in place."""
        for field in FIELDS:
            arrays.copy(self.views[field], other.views[field])

    def drop(self) -> None:
        """Forget the amaxes since the last update."""
        arrays.zero_(self.views["amax_history"].slice(0, 0, 1))

    @classmethod
    def commit_forward(cls, recipe: Recipe, states: Sequence[ScalingState]) -> None:
        """Update forward states (the outermost autocast has ended)."""
        update(recipe.history, states, True)


def _put(array: HostArray, device: Device) -> ArrayView:
    return arrays.to(np.array(array, np.float32, copy=True, order="C"), device)


def share_amaxes(history: AmaxHistory, states: Sequence[ScalingState]) -> None:
    """Row 0 of the histories becomes its maximum over the ranks, where there are several and the recipe says
    so: one collective for each group and device."""
    if not history.reduce:
        return
    parts: dict[tuple[str, Device], tuple[Collectives, list[ArrayView]]] = {}
    for state in states:
        ranks = state.group or (EVERYONE[0] if EVERYONE else None)
        if ranks is not None and ranks.size > 1:
            row = state.views["amax_history"].at(0)
            parts.setdefault((ranks.name, state.device), (ranks, []))[1].append(row)
    for (_, device), (ranks, rows) in parts.items():
        kernels, stream = dispatch.kernels(device), arrays.current_stream(device)
        whole, at = arrays.empty((sum(row.size for row in rows),), float32, device), 0
        places = []
        for row in rows:
            places.append((row, whole.slice(0, at, row.size)))
            at += row.size
        for row, place in places:
            kernels.copy(row, place, stream)
        ranks.all_reduce(whole, "max", stream, "the update of scales")
        for row, place in places:
            kernels.copy(place, row, stream)


def update(
    history: AmaxHistory | None,
    states: Sequence[Any],
    forward: bool,
    stream: Callable[[int], int] | None = None,
) -> None:
    """Update all ``states``, of forward or of backward operands, by the rule of ``AmaxHistory``: one
    kernel call a device; callables run on the host. Nothing where a recipe has no history.

    ``stream``: gives the stream to work on of a GPU, by its index; None takes the current one.
    """
    update_among(stream, EVERYONE, share_amaxes, history, states, forward)


def update_among(
    stream: Callable[[int], int] | None,
    ranks: Any,
    share: Callable[[AmaxHistory, Sequence[Any]], None],
    history: AmaxHistory | None,
    states: Sequence[Any],
    forward: bool,
    lend: Callable[[HostArray], Any] = np.asarray,
) -> None:
    """``update`` by a frontend of other ranks: ``share`` is called before with history and states where
    ``ranks`` are not empty or a state has a group of its own. ``lend``: makes what callables get of an
    array."""
    if history is None or not states:
        return
    if ranks or any(map(_group, states)):
        share(history, states)
    if history.on_host:
        _update_on_host(history, states, history.max_forward if forward else history.max_backward, lend)
        return
    device = states[0].placed.device
    on = arrays.current_stream(device) if stream is None or device.kind == "cpu" else stream(device.index)
    kernels, rule = dispatch.kernels(device), history.rules[forward]
    replays = kernels.replays
    if replays is not None and len(states) <= _FEW:
        known = replays.found.get((_UPDATE, on, rule, *map(_place, states)))
        if known is not None:
            known()
            return
    there: list[Placed] = [*map(_placed, states)]
    devices = dict.fromkeys(map(_device, there))
    if len(devices) > 1:
        for device in devices:
            own = [state for state in states if state.placed.device == device]
            update_among(stream, (), _shared, history, own, forward)
    elif len(there) <= _FEW and (replays := replay.direct(kernels)) is not None:
        replays.run((_UPDATE, on, rule, *map(_place, states)), _update_delayed, kernels, there, rule, on)
    else:
        _update_delayed(kernels, there, rule, on)


def _shared(history: AmaxHistory, states: Sequence[Any]) -> None:
    """Amaxes that are shared already."""


def _update_delayed(kernels: Any, there: Sequence[Placed], rule: DelayedRule, stream: int) -> None:
    """The kernel call for all states of a device."""
    fp8_max, *rest = rule
    scales, inverses, histories = zip(*[own.arrays for own in there], strict=True)
    kernels.update_delayed_(scales, inverses, histories, [fp8_max] * len(there), *rest, stream)


def _update_on_host(history: AmaxHistory, states: Sequence[Any], fp8_max: float, lend: Any) -> None:
    """The update by user callables. All answers come first: one that raises leaves every state as it was."""
    for state, updated in [(state, _updated_on_host(history, state, fp8_max, lend)) for state in states]:
        for view, array in zip(state.placed.arrays, updated, strict=True):
            arrays.copy(view, array)


def _updated_on_host(rule: AmaxHistory, state: ScalingState, fp8_max: float, lend: Any) -> list[HostArray]:
    """A state's arrays after the update with user callables. Same rule as the kernel for tensors that were
    not used."""
    scale, scale_inv, history = (view.numpy().copy() for view in state.placed.arrays)
    algo, used = rule.amax_algo, history[0] != 0
    if callable(algo):
        amax = _answer(rule, "amax_compute_algo", algo, (lend(history.copy()),), scale.shape)
    else:
        amax = history[0].copy() if rule.most_recent else np.fmax.reduce(history, 0)
    if rule.scale_algo is not None:
        given = lend(amax.copy()), lend(scale.copy()), fp8_max, rule.recipe
        made = _answer(rule, "scaling_factor_compute_algo", rule.scale_algo, given, scale.shape)
        new = _scales(rule, made, amax, scale, used)
    else:
        new = default_scale(amax, scale, fp8_max, rule.margin)
        if rule.power_2:
            new = np.ldexp(np.float32(0.5), np.frexp(new)[1])
    scale[used] = new[used]
    scale_inv[used] = np.float32(1) / scale[used]
    rolled = np.roll(history, -1, 0)  # row 0 becomes the last
    rolled[0] = 0
    history[:, used] = rolled[:, used]
    return [scale, scale_inv, history]


def default_scale(amax: HostArray, scale: HostArray, fp8_max: float, margin: int) -> HostArray:
    """``fp8_max * 2 ** -margin / amax``, brought into ``DELAYED_SCALES``; the old scale where amax is 0, Inf
    or NaN. float32 (n,)."""
    usable = np.isfinite(amax) & (amax > 0)
    with np.errstate(over="ignore"):
        new = np.float32(fp8_max * 2.0**-margin) / np.where(usable, amax, np.float32(1))
    return np.where(usable, np.clip(new, _LEAST, _MOST), scale).astype(np.float32)


def _scales(
    rule: AmaxHistory, answer: HostArray, amax: HostArray, scale: HostArray, used: HostArray
) -> HostArray:
    """What a callable answered, made scales as ``DelayedScaling`` says. RecipeError for one that no scale can
    be."""
    fits = answer > 0  # False for NaN
    wrong = np.flatnonzero(used & np.isfinite(amax) & (amax > 0) & ~fits)
    if wrong.size:
        got, wanted = f"{answer[wrong[0]]} for the amax {amax[wrong[0]]}", "a positive scale"
        raise RecipeError(type(rule.recipe or rule).__name__, "scaling_factor_compute_algo", got, wanted)
    return np.where(fits, np.clip(answer, _LEAST, _MOST), scale)


def _answer(rule: AmaxHistory, name: str, function: Any, given: Sequence[Any], shape: Shape) -> HostArray:
    try:
        array = np.asarray(function(*given), np.float32)
    except (AttributeError, TypeError) as error:
        if isinstance(given[0], np.ndarray):
            raise
        got, wanted = f"{type(error).__name__}: {error}", "a function of tensors on the CPU"
        raise RecipeError(type(rule.recipe or rule).__name__, name, got, wanted) from error
    if array.shape != shape:
        got = f"a result of shape {array.shape}"
        raise RecipeError(type(rule.recipe or rule).__name__, name, got, f"shape {shape}")
    return array
