"""Kernels as Python objects, and launching them.

A launch is on every operation's path, so it is one ctypes call of the driver's ``cuLaunchKernel`` from a buffer of arguments that each
thread keeps: every parameter is eight bytes wide (see ``raw_kernels.manifest``), one ``struct.pack_into`` fills them all. Modules live in
the device's primary context, the one that CuPy, PyTorch and JAX use.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import compile as kernel_compiler
from fp8kit.errors import BackendError, expected
from fp8kit.formats import DType
from fp8kit.raw_kernels import manifest

_PARAMETERS = 64
_BYTES = 8 * _PARAMETERS + 4096
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


class Kernel:
    """One function of one variant, loaded on one device. ``parameters`` are the manifest's codes, ``resources`` what it uses."""

    __slots__ = ("device", "handle", "layout", "module", "name", "parameters", "resources", "shared_limit")

    def __init__(self, name: str, device: int, module: Any, handle: int, parameters: str, resources: kernel_compiler.Resources) -> None:
        self.name = name
        self.device = device
        self.module = module
        self.handle = handle
        self.parameters = parameters
        self.layout = None if parameters.endswith("s") else struct.Struct("=" + parameters)
        self.resources = resources
        self.shared_limit = _PLAIN_SHARED

    def __repr__(self) -> str:
        return f"Kernel({self.name}, cuda:{self.device})"


class _Arguments(threading.local):
    """A thread's argument buffer and the array of pointers into it that cuLaunchKernel reads."""

    def __init__(self) -> None:
        self.buffer = (ctypes.c_char * _BYTES)()
        start = ctypes.addressof(self.buffer)
        self._pointers = (ctypes.c_void_p * _PARAMETERS)(*(start + 8 * i for i in range(_PARAMETERS)))
        self.pointers = ctypes.addressof(self._pointers)
        self.bound: set[int] = set()  # devices whose primary context this thread has made current before


_ARGUMENTS = _Arguments()


@functools.cache
def runtime() -> Any:
    """``cupy.cuda.runtime``; BackendError where CuPy is missing."""
    try:
        from cupy.cuda import runtime as module
    except ImportError as error:
        raise BackendError(f"cuda: CuPy cannot be imported ({error}); install it with: pip install 'fp8kit[cuda13]'") from error
    return module


@functools.cache
def driver() -> Any:
    """``cuda.bindings.driver``; BackendError where it is missing."""
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise BackendError(f"cuda: cuda-bindings cannot be imported ({error}); install it with: pip install 'fp8kit[cuda13]'") from error
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
def kernel(source: str, function: str, device_index: int, **defines: str) -> Kernel:
    """``function`` of ``source`` compiled with ``defines`` and loaded on a device; the same object for the same arguments.

    The defines must be one of the source's variants, which is what the tests compile. BackendError otherwise, and where it cannot be
    compiled or loaded.
    """
    entry = manifest.source(source)
    chosen = manifest.defines(**defines)
    if chosen not in entry.variants or function not in entry.functions:
        raise BackendError(expected("kernel", f"{source}: {function}", dict(chosen), "a function and a variant that its comments list"))
    with _LOADING:
        module, resources = _module(source, chosen, device_index)
        handle = _checked("cuModuleGetFunction", driver().cuModuleGetFunction(module, function.encode()))
    return Kernel(function, device_index, module, int(handle), entry.parameters[function], resources[function])


@functools.cache
def _module(source: str, defines: manifest.Defines, device_index: int) -> tuple[Any, dict[str, kernel_compiler.Resources]]:
    compiled = kernel_compiler.compile_cubin(source, defines, kernel_compiler.arch_of(capability(device_index)))
    with current_device(device_index):
        return _checked("cuModuleLoadData", driver().cuModuleLoadData(compiled.path.read_bytes())), compiled.resources


def _checked(call: str, result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise BackendError(f"{call}: {result[0].name}")
    return result[1] if len(result) > 1 else None


class current_device:
    """Context manager: make a device, and its primary context, current in this thread, and restore the former one after."""

    __slots__ = ("former", "index")

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        calls = runtime()
        self.former = calls.getDevice()
        if self.former != self.index or self.index not in _ARGUMENTS.bound:
            calls.setDevice(self.index)
            _ARGUMENTS.bound.add(self.index)

    def __exit__(self, *error: object) -> None:
        if self.former != self.index:
            runtime().setDevice(self.former)


@functools.cache
def _entry() -> tuple[Any, Any]:
    try:
        call = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    except OSError as error:
        raise BackendError(f"cuda: the NVIDIA driver is missing ({error})") from error
    size, pointer = ctypes.c_uint, ctypes.c_void_p
    call.argtypes = (pointer, size, size, size, size, size, size, size, pointer, pointer, pointer)
    call.restype = ctypes.c_int
    return call, runtime().getDevice


def launch(kernel: Kernel, grid: int | tuple[int, ...], block: int | tuple[int, ...], args: Sequence[Any], stream: int, shared: int = 0) -> None:
    """Launch ``kernel`` on a raw ``stream`` of its device.

    ``grid`` and ``block``: a number, or up to three. ``args``: an int for every pointer and integer, a float for every double, bytes for a
    trailing structure; their number is checked. ``shared``: dynamic shared memory in bytes. A grid of no blocks launches nothing.
    BackendError when the driver refuses the launch.
    """
    gx, gy, gz = (grid, 1, 1) if type(grid) is int else (*grid, 1, 1)[:3]  # type: ignore[misc]
    bx, by, bz = (block, 1, 1) if type(block) is int else (*block, 1, 1)[:3]  # type: ignore[misc]
    if not (gx and gy and gz):
        return
    state = _ARGUMENTS
    try:
        if kernel.layout is not None:
            kernel.layout.pack_into(state.buffer, 0, *args)
        else:
            struct.pack_into(f"={kernel.parameters[:-1]}{len(args[-1])}s", state.buffer, 0, *args)
    except (struct.error, TypeError) as error:
        raise BackendError(expected(f"launch of {kernel.name}", "args", f"{len(args)} ({error})", f"parameters {kernel.parameters!r}")) from error
    call, get_device = _entry()
    index = kernel.device
    if shared > kernel.shared_limit:
        _raise_shared_limit(kernel, shared)
    if get_device() == index and index in state.bound:
        status = call(kernel.handle, gx, gy, gz, bx, by, bz, shared, stream, state.pointers, None)
    else:
        with current_device(index):
            status = call(kernel.handle, gx, gy, gz, bx, by, bz, shared, stream, state.pointers, None)
    if status:
        name = driver().CUresult(status).name
        raise BackendError(f"launch of {kernel.name}: {name} (grid {grid}, block {block}, {shared} bytes of shared memory, {kernel.resources})")


def _raise_shared_limit(kernel: Kernel, shared: int) -> None:
    """Let ``kernel`` use ``shared`` bytes of dynamic shared memory, beyond the 48 KiB that any kernel may have."""
    calls = driver()
    attribute = calls.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    with current_device(kernel.device):
        _checked("cuFuncSetAttribute", calls.cuFuncSetAttribute(calls.CUfunction(kernel.handle), attribute, shared))
    kernel.shared_limit = shared
