"""An implementation beside the reference: every call is made twice, and the first difference is an error.

The reference is the CPU engine, on copies of the arguments that were taken before. Outputs start poisoned, so
that what is left out shows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from fp8kit import arrays, codec
from fp8kit.arrays import CPU, ArrayView
from fp8kit.backends import dispatch
from fp8kit.backends.policy import SelectionPolicy
from fp8kit.backends.protocol import signature
from fp8kit.errors import BackendError
from fp8kit.formats import FORMATS
from fp8kit.lab.outputs import Output, outputs, views, walk
from fp8kit.testing.compare import assert_close, assert_same_bits, epsilon

Array = np.ndarray[Any, Any]


def reference(operation: str) -> Callable[..., Any]:
    """The CPU engine's implementation of an operation of the contract."""
    usable, _ = dispatch.candidates(operation, CPU, SelectionPolicy(backend="reference"))
    return usable[0].fn


def verified(operation: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """``implementation`` with a look at everything it writes.

    The result raises BackendError that names the operation, the output, the first wrong coordinate and both
    values. Operations that answer with a number (``..._workspace``) are not looked at: engines differ there.
    """
    contract = signature(operation)

    def call(*args: Any, **named: Any) -> Any:
        arguments = dict(contract.bind(*args, **named).arguments)
        found = views(arguments)
        if not found:
            return implementation(*args, **named)
        with on(found[0].device, arguments["stream"]):
            return _both(operation, implementation, arguments, found)

    return call


def on(device: arrays.Device, stream: int) -> AbstractContextManager[Any]:
    """Context manager: ``stream`` is the device's current one, for whoever asks (CuPy, ``arrays.copy``);
    nothing to do on a CPU."""
    if device.kind != "cuda" or arrays.current_stream(device) == stream:
        return nullcontext()
    from fp8kit.backends.cuda.substitute import on_stream

    return on_stream(device.index, stream)


def _both(
    operation: str, implementation: Callable[..., Any], arguments: dict[str, Any], found: list[ArrayView]
) -> Any:
    from fp8kit.lab.tolerance import slack  # its oracles are only loaded by who wants them

    device = found[0].device
    theirs = _copied(arguments)
    before = {name: walk(value, _as_numpy_copy) for name, value in theirs.items()}
    for output in outputs(operation, arguments):
        if not output.kept and not _meets_an_input(output, arguments):
            _poison(output.view)
    answer = implementation(**arguments)
    reference(operation)(**theirs)
    bounds = slack(operation, before, device)
    for ours, right in zip(outputs(operation, arguments), outputs(operation, theirs), strict=True):
        try:
            _compare(ours, host(ours.view), right.view.numpy(), bounds, arguments)
        except AssertionError as error:
            raise BackendError(f"override: {operation}: output {error}") from None
    _want_inputs_untouched(operation, arguments, theirs)
    return answer


def _want_inputs_untouched(operation: str, arguments: dict[str, Any], theirs: dict[str, Any]) -> None:
    """BackendError where an array that is only read is no longer what the reference left of its copy: what it
    was."""
    written = [_span(output.view) for output in outputs(operation, arguments)]
    for name in arguments.keys() - {"workspace", "stream"}:
        pairs = zip(views({name: arguments[name]}), views({name: theirs[name]}), strict=True)
        for ours, copy in pairs:
            first, last = _span(ours)
            if all(last <= start or stop <= first for start, stop in written):
                try:
                    _same(name, host(ours), copy.numpy())
                except AssertionError as error:
                    raise BackendError(
                        f"override: {operation}: input, which it must not change: {error}"
                    ) from None


def host(view: ArrayView) -> Array:
    """The values of an array, perhaps strided, in memory of the host; the same memory where they lie there
    already."""
    return arrays.to(arrays.contiguous(view), CPU).numpy()


def _as_numpy_copy(view: ArrayView) -> Any:
    return host(view).copy()


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with every array copied to the host; what was one array stays one."""
    made: dict[tuple[object, ...], ArrayView] = {}

    def copy(view: ArrayView) -> ArrayView:
        key = (view.ptr, view.shape, view.strides, view.dtype.name)
        if key not in made:
            made[key] = arrays.as_view(host(view).copy())
        return made[key]

    copies = {name: walk(value, copy) for name, value in arguments.items()}
    copies["stream"] = 0
    if copies.get("workspace") is not None:
        copies["workspace"] = arrays.zeros(arguments["workspace"].shape, arguments["workspace"].dtype, CPU)
    return copies


def _span(view: ArrayView) -> tuple[int, int]:
    extent = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) if view.size else 0
    return view.ptr, view.ptr + extent * view.dtype.itemsize


def _meets_an_input(output: Output, arguments: dict[str, Any]) -> bool:
    """Whether the output's memory overlaps that of anything else: then it cannot be poisoned."""
    first, last = _span(output.view)
    everything = views(arguments)
    spans = [_span(view) for view in everything if view is not output.view]
    twice = sum(view is output.view for view in everything) > 1
    return twice or any(start < last and first < stop for start, stop in spans)


def _poison(view: ArrayView) -> None:
    """Every byte 0xFF: NaN in float types, the NaN code of FP8, -1."""
    filled = (
        np.full((*view.shape, view.dtype.itemsize), 0xFF, np.uint8).view(view.dtype.numpy).reshape(view.shape)
    )
    arrays.assign(view, arrays.to(arrays.as_view(filled), view.device))


def _compare(
    output: Output, got: Array, want: Array, bounds: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """AssertionError with the first coordinate where ``got`` is not what it may be."""
    bound = bounds.get(output.name, bounds.get(output.argument))
    if output.cast is not None:
        bound = bounds.get("cast")
        if bound is not None and output.name != "cast.scale_inv":
            _compare_cast(output, got, want, _finite(bound), arguments)
            return
        bound = None
    if bound is None or not output.view.dtype.floating:
        _same(output.name, got, want)
        return
    bound = _finite(bound)
    if output.argument == "amax":
        bound = np.max(bound, initial=0)
    kind = output.view.dtype
    exact = np.abs(np.nan_to_num(want.astype(np.float64), nan=0, posinf=0, neginf=0))
    assert_close(output.name, got, want.astype(np.float64), kind, 2 * bound + epsilon(kind) * exact)


def _compare_cast(output: Output, got: Array, want: Array, bound: Any, arguments: dict[str, Any]) -> None:
    """A fused cast: codes within one step of the format, and what the values before the cast may differ by;
    their amax likewise."""
    assert output.cast is not None
    rounding = epsilon(arguments["x"].dtype)
    if output.name == "cast.amax":
        assert_close(
            output.name,
            got,
            want.astype(np.float64),
            "float32",
            2 * np.max(bound, initial=0) + 2 * rounding * np.abs(want),
        )
        return
    fmt = output.cast.format
    table = codec.table(FORMATS.get(fmt.name, fmt))
    values, right = table[got], table[want]
    spread = np.zeros(want.shape)
    turned = output.name == "cast.q_t"
    spread[tuple(map(slice, bound.shape[::-1] if turned else bound.shape))] = bound.T if turned else bound
    given = output.cast.scale
    factor = abs(1 / float(host(output.cast.scale_inv)[0]) if given is None else float(host(given)[0]))
    with np.errstate(invalid="ignore"):
        size = np.nan_to_num(np.abs(right), nan=0)
        limit = (fmt.epsilon + rounding) * size + fmt.smallest_subnormal + 2 * factor * spread
        wrong = (got != want) & ~(np.abs(values - right) <= limit)
    if wrong.any():
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
        raise AssertionError(
            f"{output.name}: {int(wrong.sum())} of {wrong.size} differ by more than a step of {fmt}, "
            f"first at {at}: got {got[at]:#x} ({values[at]:g}), expected {want[at]:#x} ({right[at]:g})"
        )


def _finite(bound: Any) -> Any:
    return np.nan_to_num(np.asarray(bound, np.float64), nan=0.0, posinf=np.finfo(np.float64).max / 4)


def _same(name: str, got: Array, want: Array) -> None:
    """Bit for bit; any NaN stands for any other."""
    if got.dtype.kind in "fV" or got.dtype.name == "bfloat16":
        with np.errstate(over="ignore"):  # float64 beyond float32 is no NaN
            nan, unlike = np.isnan(want.astype(np.float32)), np.isnan(got.astype(np.float32))
        blank, unlike = np.zeros((), want.dtype), unlike != nan
        if not unlike.any():
            got, want = np.where(nan, blank, got), np.where(nan, blank, want)
    assert_same_bits(name, got, want)
