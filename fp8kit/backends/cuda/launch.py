"""Kernels as Python objects, and launching them.

Cubins are loaded by ``cupy.RawModule`` and launched by the ``Function`` behind its kernels, on a raw stream handle. A launch is on
every operation's path, so what is looked up once (function, parameter types, stream holder) is kept.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import compile as kernel_compiler
from fp8kit.errors import BackendError, expected
from fp8kit.formats import DType
from fp8kit.raw_kernels import manifest

_PLAIN_SHARED = 48 * 1024  # dynamic shared memory beyond this must be asked for
_LOADING = threading.Lock()

# The define that names an element type in the sources.
TYPE_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


def type_name(dtype: DType) -> str:
    """The sources' name of an element type: float32 -> "f32". BackendError for types that kernels do not compute with."""
    try:
        return TYPE_NAMES[dtype.name]
    except KeyError:
        raise BackendError(expected("kernel", "dtype", dtype, f"one of {', '.join(TYPE_NAMES)}")) from None


def row_stride(view: ArrayView) -> int:
    """Distance of a matrix's rows in elements; at least its columns, also where there is only one row."""
    strides = view._strides
    return view.shape[-1] if strides is None else max(strides[-2], view.shape[-1])


def blocks(jobs: int, jobs_per_block: int, device_index: int, waves: int = 8) -> int:
    """A one-dimensional grid for ``jobs`` in a grid-stride loop: as many blocks as they fill, at most ``waves`` a multiprocessor."""
    return min(-(-jobs // jobs_per_block), waves * sm_count(device_index))


# What CuPy passes as a parameter of that kind: an int as 8 bytes, a float as a double, an array of one structure by value.
_TYPES = {"q": int, "d": float, "s": bytes}


class Kernel:
    """One function of one variant, loaded on one device. ``parameters`` are the manifest's codes, ``resources`` what it uses."""

    __slots__ = ("device", "function", "name", "parameters", "raw", "resources", "shared_limit", "types")

    def __init__(self, name: str, device: int, raw: Any, parameters: str, resources: kernel_compiler.Resources) -> None:
        self.name = name
        self.device = device
        self.raw = raw
        self.function = raw.kernel
        self.parameters = parameters
        self.types = tuple(_TYPES[code] for code in parameters)
        self.resources = resources
        self.shared_limit = _PLAIN_SHARED

    def __repr__(self) -> str:
        return f"Kernel({self.name}, cuda:{self.device})"


class _Stream:
    """A raw stream handle as CuPy's launcher takes it."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


_STREAMS: dict[int, _Stream] = {}


@functools.cache
def runtime() -> Any:
    """``cupy.cuda.runtime``; BackendError where CuPy is missing."""
    try:
        from cupy.cuda import runtime as module
    except ImportError as error:
        raise BackendError(f"cuda: CuPy cannot be imported ({error}); install it with: pip install 'fp8kit[cuda13]'") from error
    return module


@functools.cache
def capability(device_index: int) -> tuple[int, int]:
    """Compute capability (major, minor) of a device."""
    attribute = runtime().deviceGetAttribute  # cudaDevAttrComputeCapabilityMajor, -Minor
    return int(attribute(75, device_index)), int(attribute(76, device_index))


@functools.cache
def sm_count(device_index: int) -> int:
    """Multiprocessors of a device (cudaDevAttrMultiProcessorCount)."""
    return int(runtime().deviceGetAttribute(16, device_index))


@functools.cache
def engines_kernel(source: str, function: str, device_index: int, **defines: str) -> Kernel:
    """``function`` of ``source`` compiled with ``defines`` and loaded on a device; the same object for the same arguments.

    The defines must be one of the source's variants, which is what the tests compile. BackendError otherwise, and where it cannot be
    compiled or loaded.
    """
    return load(manifest.source(source), function, device_index, manifest.defines(**defines))


# What the engine asks for its kernels: ``engines_kernel``. ``substitute`` stands in its place while, and only while, a call runs whose
# kernels are replaced, so that a look-up costs nothing more otherwise.
kernel: Callable[..., Kernel] = engines_kernel


def load(entry: manifest.Source, function: str, device_index: int, defines: manifest.Defines, unit: manifest.Unit | None = None) -> Kernel:
    """A kernel of a manifest entry, compiled and loaded afresh (see ``engines_kernel``); ``unit``: from a text of elsewhere."""
    if defines not in entry.variants or function not in entry.functions:
        wanted = "a function and a variant that its comments list"
        raise BackendError(expected("kernel", f"{entry.name}: {function}", dict(defines), wanted))
    with _LOADING, current_device(device_index):
        module, resources = _module(entry.name, defines, device_index, unit)
        return Kernel(function, device_index, module.get_function(function), entry.parameters[function], resources[function])


@functools.cache
def _module(
    source: str, defines: manifest.Defines, device_index: int, unit: manifest.Unit | None
) -> tuple[Any, dict[str, kernel_compiler.Resources]]:
    compiled = kernel_compiler.compile_cubin(source, defines, kernel_compiler.arch_of(capability(device_index)), unit)
    import cupy

    return cupy.RawModule(path=str(compiled.path)), compiled.resources


class current_device:
    """Context manager: make a device current in this thread, and restore the former one after."""

    __slots__ = ("former", "index")

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        calls = runtime()
        self.former = calls.getDevice()
        if self.former != self.index:
            calls.setDevice(self.index)

    def __exit__(self, *error: object) -> None:
        if self.former != self.index:
            runtime().setDevice(self.former)


@functools.cache
def _get_device() -> Any:
    return runtime().getDevice


def launch(
    kernel: Kernel, grid: int | tuple[int, ...], block: int | tuple[int, ...], args: Sequence[Any], stream: int, shared: int = 0
) -> None:
    """Launch ``kernel`` on a raw ``stream`` of its device.

    ``grid`` and ``block``: a number, or up to three. ``args``: an int for every pointer and integer, a float for every double, bytes for a
    trailing structure; their number is checked. ``shared``: dynamic shared memory in bytes. A grid of no blocks launches nothing.
    BackendError when the driver refuses the launch.
    """
    grid = (grid,) if isinstance(grid, int) else grid
    block = (block,) if isinstance(block, int) else block
    if 0 in grid or 0 in block:
        return
    values = args if tuple(map(type, args)) == kernel.types else _fitted(kernel, args)
    if kernel.types[-1] is bytes:
        values = (*values[:-1], np.frombuffer(values[-1], np.dtype((np.void, len(values[-1])))))
    holder = _STREAMS.get(stream)
    if holder is None:
        holder = _STREAMS[stream] = _Stream(stream)
    if shared > kernel.shared_limit:
        kernel.raw.max_dynamic_shared_size_bytes = kernel.shared_limit = shared
    if _get_device()() == kernel.device:
        _run(kernel, grid, block, values, shared, holder)
    else:
        with current_device(kernel.device):
            _run(kernel, grid, block, values, shared, holder)


def _fitted(kernel: Kernel, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments as the parameters' types: a bool becomes an int, an int a float where a double is wanted; BackendError otherwise."""
    fits = {int: (int, np.integer), float: (int, float, np.floating), bytes: (bytes,)}
    if len(args) != len(kernel.types) or not all(isinstance(a, fits[t]) for a, t in zip(args, kernel.types, strict=True)):
        got = ", ".join(type(a).__name__ for a in args)
        raise BackendError(expected(f"launch of {kernel.name}", "args", f"({got})", f"parameters {kernel.parameters!r}"))
    return tuple(t(a) for a, t in zip(args, kernel.types, strict=True))


def _run(kernel: Kernel, grid: Any, block: Any, values: Sequence[Any], shared: int, holder: _Stream) -> None:
    try:
        kernel.function(grid, block, values, shared, holder)
    except RuntimeError as error:
        what = f"grid {grid}, block {block}, {shared} bytes of shared memory, {kernel.resources}"
        raise BackendError(f"launch of {kernel.name}: {error} ({what})") from error
