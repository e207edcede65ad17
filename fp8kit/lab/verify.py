"""An implementation beside the reference: every call is made twice, and the first difference is an error.

The reference is the CPU engine, on copies of the arguments that were taken before; how far both may be from
exact arithmetic says the contract's oracle. Outputs start poisoned, so that what is left out shows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.arrays import CPU, ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.policy import SelectionPolicy
from fp8kit.backends.protocol import SPECS, KernelSpec, Output, views
from fp8kit.errors import BackendError
from fp8kit.testing.compare import assert_same_values


def reference(operation: str) -> Callable[..., Any]:
    """Returns the CPU engine's implementation of an operation of the contract."""
    usable, _ = dispatch.candidates(operation, CPU, SelectionPolicy(backend="reference"))
    return usable[0].fn


def verified(operation: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """``implementation`` with a look at everything it writes.

    The result raises BackendError that names the operation, the output, the first wrong coordinate and both
    values. Operations that answer with a number (``..._workspace``) are not looked at: engines differ there.
    """
    spec = SPECS[operation]

    def call(*args: Any, **named: Any) -> Any:
        arguments = spec.bind(*args, **named)
        first = next(views(arguments.values()), None)
        if first is None:
            return implementation(*args, **named)
        with on(first.device, arguments["stream"]):
            return _both(spec, implementation, arguments, first.device)

    return call


def on(device: Device, stream: int) -> AbstractContextManager[Any]:
    """Context manager: ``stream`` is the device's current one, for CuPy and ``arrays.copy``;
    nothing to do on a CPU."""
    if device.kind != "cuda" or arrays.current_stream(device) == stream:
        return nullcontext()
    from fp8kit.backends.cuda.substitute import on_stream

    return on_stream(device.index, stream)


def _both(
    spec: KernelSpec, implementation: Callable[..., Any], arguments: dict[str, Any], device: Device
) -> Any:
    from fp8kit.testing.contract import copied, host, kernel_test, snapshot  # loaded by who verifies alone
    from fp8kit.testing.contract.agreement import assert_agree

    theirs, before = copied(arguments), snapshot(arguments, device)
    for output in spec.outputs(arguments):
        if not output.kept and not _meets_an_input(output, arguments):
            _poison(output.view)
    answer = implementation(**arguments)
    spec.call(SimpleNamespace(**{spec.name: reference(spec.name)}), theirs)
    slacks = kernel_test(spec.name).slacks(before)
    for ours, right in zip(spec.outputs(arguments), spec.outputs(theirs), strict=True):
        try:
            assert_agree(ours, host(ours.view), right.view.numpy(), slacks)
        except AssertionError as error:
            raise BackendError(f"override: {spec.name}: output {error}") from None
    written = [_span(output.view) for output in spec.outputs(arguments)]
    for name in theirs.keys() - {"workspace", "stream"}:
        for view, copy in zip(views([arguments[name]]), views([theirs[name]]), strict=True):
            first, last = _span(view)
            if all(last <= start or stop <= first for start, stop in written):
                try:
                    assert_same_values(name, host(view), copy.numpy())
                except AssertionError as error:
                    what = f"override: {spec.name}: input, which it must not change: {error}"
                    raise BackendError(what) from None
    return answer


def _span(view: ArrayView) -> tuple[int, int]:
    extent = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) if view.size else 0
    return view.ptr, view.ptr + extent * view.dtype.itemsize


def _meets_an_input(output: Output, arguments: dict[str, Any]) -> bool:
    """Whether the output's memory overlaps that of anything else: then it cannot be poisoned."""
    first, last = _span(output.view)
    everything = list(views(arguments.values()))
    spans = [_span(view) for view in everything if view is not output.view]
    twice = sum(view is output.view for view in everything) > 1
    return twice or any(start < last and first < stop for start, stop in spans)


def _poison(view: ArrayView) -> None:
    """Every byte 0xFF: NaN in float types, the NaN code of FP8, -1."""
    filled = np.full((*view.shape, view.dtype.itemsize), 0xFF, np.uint8).view(view.dtype.numpy)
    arrays.assign(view, arrays.to(filled.reshape(view.shape), view.device))
