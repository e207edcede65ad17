"""``Optimizer``: parameter groups, float32 masters, steps counted on the device, and their state; what AdamW
and SGD share.

A step is counted on the device, because whether it was skipped (``found_inf``) is known there only, and
because a captured graph must see a new count at each replay. Parameters that always took part in the same
steps share a counter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fp8kit import arrays, captured, serialization
from fp8kit.arguments import NamedWell, flag, listed, number, shown
from fp8kit.arrays import ArrayView
from fp8kit.autograd import Tensor
from fp8kit.autograd.tensors import fresh
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, CheckpointError, Fp8kitError, ShapeError
from fp8kit.formats import DType, float32, float64, int64
from fp8kit.serialization import Loadable

Group = dict[str, Any]
Hyper = tuple[Any, ...]
Kind = tuple[arrays.Shape, DType]
Wanted = dict[str, Kind]  # a saved array's name -> what it must be
# a parameter, its gradient, lr, and the other hyperparameters
Taking = tuple[Tensor, ArrayView, float | ArrayView, Hyper]


class _Counter:
    """Steps taken, int64 [1], of ``holders`` parameters."""

    __slots__ = ("holders", "view")

    def __init__(self, view: ArrayView) -> None:
        self.view = view
        self.holders = 0


class _State:
    """What the optimiser keeps of one parameter: its counter, arrays, and the master of a 16-bit parameter,
    of the dtype ``master`` (None: it has none), which is float32 and its value at first, or zeros."""

    __slots__ = ("arrays", "counter", "master")

    def __init__(self, param: ArrayView, counter: _Counter, master: DType | None) -> None:
        self.counter = counter
        counter.holders += 1
        self.arrays: dict[str, ArrayView] = {}
        self.master: ArrayView | None = None
        if master is float32:
            self.master = arrays.empty(param.shape, float32, param.device)
            dispatch.kernels(param.device).copy(param, self.master, arrays.current_stream(param.device))
        elif master is not None:
            self.master = arrays.zeros(param.shape, master, param.device)

    def slot(self, name: str, param: ArrayView, kind: Kind | None) -> ArrayView | None:
        """Returns the array ``name`` of this shape and dtype, zeros at first; None where there is none."""
        if kind is None:
            return None
        found = self.arrays.get(name)
        if found is None:
            found = self.arrays[name] = arrays.zeros(*kind, param.device)
        return found

    def move(self, counter: _Counter) -> None:
        """Count elsewhere from now on."""
        self.counter.holders -= 1
        counter.holders += 1
        self.counter = counter

    def named(self) -> dict[str, ArrayView]:
        """Name -> array, the master included."""
        return self.arrays if self.master is None else self.arrays | {"master": self.master}


class Entry(NamedTuple):
    """One parameter in one step."""

    param: ArrayView
    grad: ArrayView
    state: _State
    weight_decay: float


class Batch(NamedTuple):
    """Parameters of one device that share count and hyperparameters: what one kernel call takes. ``lr``: a
    number or float32 [1]."""

    entries: list[Entry]
    lr: float | ArrayView
    hyper: Hyper
    step: ArrayView
    inv_scale: ArrayView | None
    found_inf: ArrayView | None
    kind: Callable[[str, ArrayView], Kind | None]

    def columns(self, *slots: str) -> tuple[list[Any], ...]:
        """Lists of parameters, gradients, the arrays ``slots``, and masters, in the order of the kernels'
        arguments; None where a parameter has no such array."""
        params, grads, states, _ = map(list, zip(*self.entries, strict=True))
        return (params, grads, *(self.slot(name) for name in slots), [state.master for state in states])

    def slot(self, name: str) -> list[ArrayView | None]:
        """Returns the parameters' arrays of that name."""
        return [entry.state.slot(name, entry.param, self.kind(name, entry.param)) for entry in self.entries]

    def numbers(self) -> tuple[Any, ...]:
        """Returns what follows the lists in the kernels' arguments: hyperparameters, one weight decay for
        each parameter, and what is read on the device."""
        decays = [entry.weight_decay for entry in self.entries]
        return (self.lr, *self.hyper, decays, self.step, self.inv_scale, self.found_inf)


class Optimizer(NamedWell, Loadable):
    """Base of optimisers. A subclass has ``columns``, the names of the flat hyperparameters in
    ``state_dict``'s "hyper" (the first is ``lr``, the last ``weight_decay``), and ``flat``, ``nest``,
    ``slots`` and ``update``.

    ``params``: tensors, or dicts ``{"params": [...], "lr": ...}`` whose other entries override the defaults.
    A 16-bit parameter has a float32 master, made from its value at the first step, on which the update is
    made. A parameter without a gradient, such as one that does not require grad, is left alone. Load weights
    before the first step, or load the optimiser's state too: the masters, once made, are the truth.

    ``param_groups`` is a list of dicts that may be changed between steps. ``lr`` is a number, or a float32
    array of one element on the parameters' device, which is read there at each step and can be changed
    without a new captured graph.

    ``write_fp8_weights`` is deprecated: True has no effect but a DeprecationWarning.

    Raises Fp8kitError where no parameter requires grad, for duplicate, strided or read-only parameters and
    for hyperparameters outside their range, ShapeError for a ``grad`` that was set to an array of another
    shape, dtype or device.
    """

    columns: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        defaults: Group,
        write_fp8_weights: bool = False,
    ) -> None:
        name = type(self).__name__
        if flag(name, "write_fp8_weights", write_fp8_weights):
            said = f"{name}: write_fp8_weights is deprecated and has no effect: layers cast their weights"
            warnings.warn(said, DeprecationWarning, stacklevel=3)
        entries = listed(name, "params", params, "tensors, such as model.parameters(), or dicts of them")
        groups: list[Mapping[str, Any]] = (
            entries if entries and isinstance(entries[0], Mapping) else [{"params": entries}]
        )
        self.param_groups: list[Group] = []
        seen: set[int] = set()
        for group in groups:
            if not isinstance(group, Mapping) or "params" not in group:
                wanted = 'a dict with "params" in each place, or tensors alone'
                raise ArgumentError(name, "param_groups", shown(group), wanted)
            if unknown := set(group) - {"params", *defaults}:
                wanted = f"params, {', '.join(defaults)}"
                raise ArgumentError(name, "param_groups", f"unknown {sorted(unknown)}", wanted)
            own = listed(name, "params", group["params"], "a list of tensors")
            whole: Group = {**defaults, **group, "params": own}
            for param in own:
                if not isinstance(param, Tensor):
                    wanted = "fk.tensors, such as model.parameters() gives"
                    raise ArgumentError(name, "params", shown(param), wanted)
                if id(param) in seen:
                    raise ArgumentError(name, "params", "a tensor given twice", "different tensors")
                seen.add(id(param))
                want_writable(name, "params", param.view)
            self.flat(whole)
            self.param_groups.append(whole)
        if not any(param.requires_grad for param in self._params()):
            got = f"{len(seen)} tensors, none of which requires grad" if seen else "nothing"
            raise ArgumentError(name, "params", got, "at least one tensor that requires grad")
        self._states: dict[Tensor, _State] = {}

    # --- what a subclass gives ------------------------------------------------------------------------------

    def flat(self, group: Mapping[str, Any]) -> Hyper:
        """Returns a group's hyperparameters in the order of ``columns``; Fp8kitError for those outside their
        range."""
        raise NotImplementedError

    def nest(self, values: Sequence[float]) -> Group:
        """Returns the group's entries, without lr, from what ``flat`` gave."""
        raise NotImplementedError

    def slots(self, values: Sequence[float]) -> tuple[str, ...]:
        """Names of the arrays kept for a parameter under these hyperparameters."""
        raise NotImplementedError

    def kind(self, name: str, param: ArrayView) -> Kind | None:
        """Shape and dtype of the array ``name`` of a parameter, None where it has none: float32, like it."""
        return param.shape, float32

    def master_dtype(self, param: ArrayView) -> DType | None:
        """Returns the dtype of the parameter's master: float32 for a parameter of 16 bits, else None."""
        return None if param.dtype is float32 else float32

    def notes(self) -> dict[str, ArrayView]:
        """Returns what ``state_dict`` has beside the states, and must find again."""
        return {}

    def update(self, kernels: Any, batch: Batch, stream: int) -> None:
        """One step of a batch: states and masters as ``kind`` and ``master_dtype`` say, parameters and
        gradients of their own dtypes. Raises no errors of its own."""
        raise NotImplementedError

    # --- steps ----------------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """Learning rate of the first group; setting it sets every group's. Reading one that is an array waits
        for the device."""
        return _host(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = value

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for param in self._params():
            param.grad = None

    def step(self, inv_scale: Any = None, found_inf: Any = None) -> None:
        """One update of every parameter that has a gradient, in stream order, without waiting for the device.

        ``inv_scale``: float32 array of one element that gradients are multiplied by on the way.
        ``found_inf``: the same; where it is not 0, nothing changes and the step does not count.
        ``GradScaler.step`` gives both.
        """
        self.make_step(self.taking(), inv_scale, found_inf)

    def taking(self) -> list[Taking]:
        """Returns what a step would take now, a row for each parameter that has a gradient. Fp8kitError for
        gradients and hyperparameters that a step refuses."""
        found: list[Taking] = []
        for group in self.param_groups:
            hyper = self.flat(group)
            lr = hyper[0] if isinstance(hyper[0], float) else self._one("lr", hyper[0])
            having = (param for param in group["params"] if param.grad is not None)
            found += [(param, self.gradient(param), lr, hyper[1:]) for param in having]
        return found

    def make_step(self, taking: Sequence[Taking], inv_scale: Any, found_inf: Any) -> None:
        """``step`` with what ``taking`` said; arrays and errors as there."""
        captured.hold(self, self._held)
        by = None if inv_scale is None else self._one("inv_scale", inv_scale)
        bad = None if found_inf is None else self._one("found_inf", found_inf)
        counters = self._counters([param for param, *_ in taking])
        batches: dict[tuple[Any, ...], Batch] = {}
        for param, grad, lr, hyper in taking:
            state = self._states[param]
            key = (id(state.counter), lr if isinstance(lr, float) else lr.ptr, *hyper[:-1])
            if key not in batches:
                batches[key] = Batch([], lr, hyper[:-1], state.counter.view, by, bad, self.kind)
            batches[key].entries.append(Entry(param.view, grad, state, hyper[-1]))
        for batch in batches.values():
            # what may fail for want of memory, before the step counts
            batch.columns(*self.slots((0.0, *batch.hyper, 0.0)))
        counted: list[_Counter] = []
        updated: set[int] = set()
        try:
            for counter in counters:
                device = counter.view.device
                dispatch.kernels(device).count_(counter.view, bad, arrays.current_stream(device))
                counted.append(counter)
            for batch in batches.values():
                device = batch.step.device
                self.update(dispatch.kernels(device), batch, arrays.current_stream(device))
                updated.add(id(batch.step))
        except BaseException:
            self._take_back([counter.view for counter in counted if id(counter.view) not in updated], bad)
            raise
        for param, *_ in taking:
            param.version().count += 1

    def _held(self) -> tuple[list[str], captured.Read, object]:
        """Returns what a captured graph would not see change, as ``captured.hold`` takes it. An ``lr`` that
        is an array is read where it lies."""

        def read() -> list[Any]:
            values = [value for group in self.param_groups for value in self.flat(group)]
            held = [arrays.as_view(v).ptr if hasattr(v, "shape") else v for v in values]
            return [*held, id(self._states)]

        names = [
            f"{type(self).__name__}.param_groups[{i}]: {name}"
            for i in range(len(self.param_groups))
            for name in self.columns
        ]
        names.append(f"{type(self).__name__}: state, which was loaded")
        return names, read, (self._states, [group["lr"] for group in self.param_groups])

    @staticmethod
    def _take_back(counts: Sequence[ArrayView], found_inf: ArrayView | None) -> None:
        """Let a step that was not made not count, unless it was skipped anyway. Waits for the device."""
        if found_inf is None or found_inf.numpy().reshape(-1)[0] == 0:
            for count in counts:
                arrays.copy(count, count.numpy() - 1)

    def _counters(self, params: Sequence[Tensor]) -> list[_Counter]:
        """Make the states that are missing; the counters of ``params``, each once and with no other holders.
        Parameters that leave behind others which they shared a counter with get a copy of it."""
        new: dict[arrays.Device, _Counter] = {}
        taking: dict[int, list[_State]] = {}
        found: list[_Counter] = []
        for param in params:
            state = self._states.get(param)
            if state is None:
                if param.device not in new:
                    new[param.device] = _Counter(arrays.zeros((1,), int64, param.device))
                state = _State(param.view, new[param.device], self.master_dtype(param.view))
                self._states[param] = state
            taking.setdefault(id(state.counter), []).append(state)
        for states in taking.values():
            counter = states[0].counter
            if len(states) < counter.holders:
                counter = _Counter(fresh(counter.view))
                for state in states:
                    state.move(counter)
            found.append(counter)
        return found

    def gradient(self, param: Tensor) -> ArrayView:
        """Returns the gradient of a parameter, of its shape and dtype, C-contiguous. ShapeError, FormatError
        where another array has been set."""
        grad = arrays.contiguous(arrays.as_view(param.grad, type(self).__name__, "grad"))
        if (grad.shape, grad.dtype, grad.device) != (param.shape, param.dtype, param.device):
            got, wanted = (f"{a.dtype.name} {a.shape} on {a.device}" for a in (grad, param))
            raise ShapeError(type(self).__name__, "grad", got, wanted)
        return grad

    def _one(self, argument: str, value: Any) -> ArrayView:
        """Returns a float32 array of one element on the parameters' device."""
        view = arrays.as_view(value, type(self).__name__, argument)
        devices = {param.device for param in self._params()}
        if view.size != 1 or view.dtype is not float32 or devices != {view.device}:
            got = f"{view.dtype.name} {view.shape} on {view.device}"
            wanted = f"one float32 element on {', '.join(map(str, devices))}"
            raise ShapeError(type(self).__name__, argument, got, wanted)
        return view.reshape(1)

    # --- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, ArrayView]:
        """Arrays by name, for ``fk.save``: ``steps`` int64 (parameters,), ``hyper`` float64 (groups,
        len(columns)), and for each parameter i that has taken a step its arrays, ``exp_avg.i`` and so
        on, and ``master.i``. Waits for the device."""
        states = [self._states.get(param) for param in self._params()]
        counters = {id(state.counter): state.counter.view for state in states if state is not None}
        counts = {key: int(view.numpy()[0]) for key, view in counters.items()}
        steps = [0 if state is None else counts[id(state.counter)] for state in states]
        out: dict[str, ArrayView] = {}
        for i, state in enumerate(states):
            if state is not None and steps[i]:
                out |= {f"{name}.{i}": view for name, view in state.named().items()}
        hyper = [[_host(value) for value in self.flat(group)] for group in self.param_groups]
        return {
            "steps": arrays.as_view(np.array(steps, np.int64)),
            "hyper": arrays.as_view(np.array(hyper, np.float64)),
            **self.notes(),
        } | out

    def check_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Callable[[], None]:
        """Check what ``state_dict`` gave, and return what takes it over. CheckpointError for missing or
        (``strict``) unexpected names, and for other shapes or dtypes."""
        groups, params = len(self.param_groups), len(self._params())
        operation = f"{type(self).__name__}.load_state_dict"
        strict = flag(operation, "strict", strict, CheckpointError)
        views = state_views(operation, state)
        wanted: Wanted = {"steps": ((params,), int64), "hyper": ((groups, len(self.columns)), float64)}
        fits = {n: n in views and (views[n].shape, views[n].dtype) == wanted[n] for n in wanted}
        steps = views["steps"].numpy() if fits["steps"] else np.zeros(params, np.int64)
        saved = views["hyper"].numpy().tolist() if fits["hyper"] else []
        rows = saved or [self.flat(group) for group in self.param_groups]
        for i, (param, row) in enumerate(self._with_hyper(rows)):
            if steps[i]:
                wanted |= {f"{name}.{i}": kind for name, kind in self._kept(param.view, row).items()}
        notes = self.notes()
        wanted |= {name: (note.shape, note.dtype) for name, note in notes.items()}
        faults = faults_of(views, wanted, strict)
        faults += [
            f"{name}: got {views[name].numpy().tolist()}, expected {note.numpy().tolist()}"
            for name, note in notes.items()
            if name in views and views[name].numpy().tolist() != note.numpy().tolist()
        ]
        if (steps < 0).any():
            faults.append(f"steps: got {steps.min()}, expected counts")
        for row in saved:
            try:
                self.flat({"lr": row[0], **self.nest(row)})
            except Fp8kitError as error:
                faults.append(f"hyper: {error}")
        want_none(operation, faults)
        return lambda: self._take(views, steps.tolist(), rows)

    def _with_hyper(self, rows: Sequence[Sequence[float]]) -> list[tuple[Tensor, Sequence[float]]]:
        """Each parameter with the row of its group."""
        groups = zip(self.param_groups, rows, strict=True)
        return [(param, row) for group, row in groups for param in group["params"]]

    def _kept(self, param: ArrayView, row: Sequence[float]) -> Wanted:
        """Returns what is kept of a parameter under the hyperparameters of its group."""
        master = self.master_dtype(param)
        found = {name: self.kind(name, param) for name in self.slots(row)}
        kept = {name: kind for name, kind in found.items() if kind is not None}
        return kept if master is None else kept | {"master": (param.shape, master)}

    def _take(
        self, views: Mapping[str, ArrayView], steps: Sequence[int], rows: Sequence[Sequence[float]]
    ) -> None:
        for group, row in zip(self.param_groups, rows, strict=True):
            if isinstance(group["lr"], int | float):
                group["lr"] = row[0]
            else:  # a captured graph reads it where it is
                arrays.copy(group["lr"], np.full(1, row[0], np.float32))
            group |= self.nest(row)
        self._states = {}
        counters: dict[tuple[arrays.Device, int], _Counter] = {}
        for i, (param, row) in enumerate(self._with_hyper(rows)):
            if steps[i]:
                key = (param.device, steps[i])
                if key not in counters:
                    count = arrays.as_view(np.full(1, steps[i], np.int64))
                    counters[key] = _Counter(arrays.to(count, param.device))
                state = _State(param.view, counters[key], self.master_dtype(param.view))
                self._states[param] = state
                for name in self.slots(row):
                    state.slot(name, param.view, self.kind(name, param.view))
                for name, target in state.named().items():
                    arrays.copy(target, arrays.contiguous(views[f"{name}.{i}"]))


def rate(operation: str, value: Any) -> Any:
    """Returns a learning rate: a float, or an array of one float32 element as it is. Fp8kitError for another
    number."""
    plain = isinstance(value, int | float | np.floating) or not hasattr(value, "shape")
    return number(operation, "lr", value) if plain else value


def _host(value: Any) -> float:
    return float(value if isinstance(value, int | float) else arrays.as_view(value).numpy().item())


def want_writable(
    operation: str, argument: str, view: ArrayView, kind: type[Fp8kitError] = ArgumentError
) -> None:
    """``kind`` for an array that is no C-contiguous memory that may be written."""
    if not view.contiguous or not view.writable:
        got = "read-only memory" if view.contiguous else f"strides {view.strides}"
        raise kind(operation, argument, got, "C-contiguous memory that may be written")


# --- checks of saved states ---------------------------------------------------------------------------------


def state_views(operation: str, state: Any) -> dict[str, ArrayView]:
    """Returns a saved state's arrays by name. CheckpointError for a value that is not an array."""
    entries = serialization.mapping(operation, state).items()
    return {name: serialization.array(operation, name, value) for name, value in entries}


def faults_of(views: Mapping[str, ArrayView], wanted: Wanted, strict: bool) -> list[str]:
    """Returns how arrays are not the ``wanted`` ones, in words; the causes first: with other steps other
    arrays are expected."""
    faults = [
        f"{name}: got {views[name].dtype.name} {views[name].shape}, expected {kind.name} {shape}"
        for name, (shape, kind) in wanted.items()
        if name in views and (views[name].shape, views[name].dtype) != (shape, kind)
    ]
    faults += [f"missing: {name}" for name in wanted if name not in views]
    return faults + [f"unexpected: {name}" for name in views if name not in wanted and strict]


def want_none(operation: str, faults: Sequence[str]) -> None:
    """CheckpointError that lists up to 8 faults where there are any."""
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise CheckpointError(f"{operation}: {'; '.join(faults[:8])}{more}")
