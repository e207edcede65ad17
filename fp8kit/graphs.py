"""``graph``: a whole training step as one CUDA graph, which the host starts with a single call.

The first calls run as they are written, and are ordinary steps: they compile kernels, make plans, and make
the states that a step goes on with. The next one is captured, its work recorded instead of done, and from
then on every call copies its arrays into those that the recording reads and replays it. So each call is one
step, the same kernels in the same order as without a graph: the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fp8kit import arguments, arrays, captured, inspection
from fp8kit.arrays import ArrayView, Device, Shape
from fp8kit.autocast import current
from fp8kit.autograd import Tensor
from fp8kit.autograd.call import scratch
from fp8kit.backends import dispatch
from fp8kit.backends.policy import SelectionPolicy, get_policy
from fp8kit.errors import ArgumentError, BackendError, Fp8kitError
from fp8kit.formats import DType
from fp8kit.nests import mapped


class _Array(NamedTuple):
    """What must be the same at every call of an argument that is an array. ``kind``: "tensor", "view", or
    "native" of its library."""

    kind: str
    shape: Shape
    dtype: DType
    device: Device
    requires_grad: bool


class _Captured(NamedTuple):
    """A recording, the memory that it reads its arguments from, what the function returned, and what it holds
    of the host."""

    recording: Any
    inputs: list[ArrayView]
    outputs: Any
    policy: SelectionPolicy
    held: list[captured.Held]
    arenas: object


def _view(value: Any) -> ArrayView | None:
    """Returns an array's view, None for anything else."""
    if isinstance(value, Tensor):
        return value.view
    known = (
        isinstance(value, ArrayView | np.ndarray)
        or hasattr(type(value), "__cuda_array_interface__")
        or hasattr(type(value), "__dlpack__")
    )
    return arrays.as_view(value) if known and not isinstance(value, np.generic) else None


def _like(value: Any, view: ArrayView) -> Any:
    """``view`` as the kind of array that ``value`` is; a Tensor is a leaf of its own."""
    if isinstance(value, Tensor):
        return Tensor(view, value.requires_grad)
    return view if isinstance(value, ArrayView) else arrays.native(view)


class Graph:
    """A function as ``graph`` makes it: called like the function."""

    def __init__(self, function: Callable[..., Any], warmup: int) -> None:
        self._function = function
        self._left = warmup
        self._known: Any = None  # what the arguments of all calls look like
        self._captured: _Captured | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **options: Any) -> Any:
        """One step. See ``graph`` for arguments, results and errors."""
        scope = current()
        if scope is not None and (scope.enabled or scope.calibrating):
            wanted = "autocast within the function: its end is a part of the step"
            raise Fp8kitError("graph", "call", "a call within autocast", wanted)
        given = (args, options)
        with self._lock:
            views = self._looked_at(given)
            if inspection.hooks.inspector is not None:  # which looks at what Python does
                return mapped(self._call(given, views), _detached)
            if self._left:
                out = self._call(given, views)
                self._left -= 1
                return mapped(out, _detached)
            if self._captured is None:
                self._captured = self._capture(given, views)
            self._want_unchanged(self._captured)
            for own, view in zip(self._captured.inputs, views, strict=True):
                arrays.copy(own, arrays.contiguous(view))
            self._captured.recording.launch()
            return mapped(self._captured.outputs, _copied)

    @staticmethod
    def _want_unchanged(made: _Captured) -> None:
        """ArgumentError where the host has changed what the recording holds."""
        policy = get_policy()
        if policy is not made.policy and policy != made.policy:
            raise ArgumentError("graph", "policy", policy, f"{made.policy}, as at the capture")
        for held in made.held:
            held.check()

    def _looked_at(self, given: Any) -> list[ArrayView]:
        """Returns the arrays among the arguments. BackendError unless they lie on one CUDA device,
        Fp8kitError if shapes, dtypes or values differ from the first call's."""
        views: list[ArrayView] = []

        def look(value: Any) -> Any:
            view = _view(value)
            if view is None:
                return value
            views.append(view)
            kind = "view" if isinstance(value, ArrayView) else "native"
            if isinstance(value, Tensor):
                kind = "tensor"
            return _Array(kind, view.shape, view.dtype, view.device, kind == "tensor" and value.requires_grad)

        found = mapped(given, look)
        if self._known is None:
            devices = {view.device for view in views} or {dispatch.default_device()}
            if len(devices) > 1 or not hasattr(arrays.provider(next(iter(devices))), "capture"):
                got = f"device {', '.join(sorted(map(str, devices)))}"
                raise BackendError("graph", "arguments", got, "arrays on one CUDA device: a graph is CUDA's")
            self._known = found
        elif found != self._known:
            wanted = (
                f"{arguments.shown(self._known)}, as at the first call: make a graph for each shape, "
                "dtype and value"
            )
            raise Fp8kitError("graph", "arguments", arguments.shown(found), wanted)
        return views

    def _call(self, given: Any, views: list[ArrayView]) -> Any:
        """Returns the function on ``views`` in place of the arrays among the arguments."""
        left = iter(views)

        def replaced(value: Any) -> Any:
            return value if _view(value) is None else _like(value, next(left))

        args, options = mapped(given, replaced)
        return self._function(*args, **options)

    def _capture(self, given: Any, views: list[ArrayView]) -> _Captured:
        device = views[0].device if views else dispatch.default_device()
        inputs = [arrays.empty(view.shape, view.dtype, view.device) for view in views]
        with captured.capture() as held, scratch.separate() as arenas:
            capture = arrays.provider(device).capture  # type: ignore[attr-defined]
            outputs, recording = capture(device, lambda: self._call(given, inputs))
        return _Captured(recording, inputs, mapped(outputs, _detached), get_policy(), held, dict(arenas))


def _detached(value: Any) -> Any:
    return Tensor(value.view) if isinstance(value, Tensor) else value


def _copied(value: Any) -> Any:
    """Returns a copy of a result of the recording, for the caller to keep: the next call overwrites the
    recording's own."""
    view = _view(value)
    return value if view is None else _like(value, arrays.duplicate(view))


def graph(function: Callable[..., Any], warmup: int = 2) -> Graph:
    """``function``, a whole training step, replayed as a CUDA graph: forward, backward, optimiser, and the
    update of FP8 scales.

    Call it like ``function``; each call is one step, with the bits that ``function`` itself would give (under
    ``fk.deterministic`` wherever that is needed for one run to equal another). The first ``warmup`` calls run
    ``function``, the next one captures it, all others replay.

    * Arguments: arrays on one CUDA device, of any shape and dtype (Tensors, ``ArrayView``, CuPy, ...), also
      within tuples, lists and dicts, whose shapes, dtypes and kinds stay; what a call gives is copied, so
      ``function`` sees Tensors that are leaves of their own. Everything else is a constant and must be equal
      at each call: ``is_first_microbatch=True`` and ``False`` are two graphs.
    * Results: arrays in tuples, lists and dicts, copied out at each call, Tensors without their history. All
      else is as it was at the capture.
    * What ``function`` reaches otherwise (parameters, gradients, optimiser and FP8 states, dropout's state)
      is read and written where it lies: load a module's ``state_dict`` or reseed as you like, the next call
      goes on from there.
    * What Python does happens at the capture only. A call is refused when what the capture read has changed
      since: optimisers' hyperparameters (let an ``lr`` that changes be a float32 array of one element) and
      state, ``GradScaler``'s settings, modules' settings (``training``, dropout rates), the memory of their
      arrays (a loaded history of another length), the policy (``fk.deterministic``). Other numbers, such as
      the ``max_norm`` of ``clip_grad_norm_``, are constants, whose changes are not noticed.
    * ``autocast`` is entered within ``function``. Nothing within may wait for the device.

    The graph keeps all memory that it works in for as long as it lives. Raises BackendError for arrays that
    are not on one CUDA device and for a function that cannot be captured (device values on the host,
    ``check_finite``, arrays made on the host): the step is then not made, and gradients are undefined.
    ArgumentError if something that it holds has changed since the capture; nothing is done then. Fp8kitError
    for a call within an active autocast, for arguments that do not fit the first call's, and for a ``warmup``
    below 1, which makes the states that a capture needs.
    """
    return Graph(
        arguments.function("graph", "function", function), arguments.integer("graph", "warmup", warmup, 1)
    )
