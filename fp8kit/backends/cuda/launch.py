"""Kernels as Python objects, and launching them.

Cubins are loaded by ``cupy.RawModule`` and launched by the driver's ``cuLaunchKernelEx`` on a raw stream
handle. A launch is on every operation's path: one ``struct`` packing writes the launch configuration and all
arguments into memory that the thread keeps, one foreign call hands its addresses to the driver, which has
copied everything when it returns.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import compile as kernel_compiler
from fp8kit.errors import BackendError, install
from fp8kit.formats import DType
from fp8kit.raw_kernels import manifest
from fp8kit.scoped import changed

_PLAIN_SHARED = 48 * 1024  # dynamic shared memory beyond this must be asked for


class Locks(dict[int, threading.Lock]):
    """A lock for each device. What may wait for a device, as loading a kernel does, holds only that one's:
    the device may be at a collective, and so wait for another device, whose thread must get on."""

    def __missing__(self, device: int) -> threading.Lock:
        return self.setdefault(device, threading.Lock())


_LOADING = Locks()
_COMPILING = threading.Lock()  # waits for no device: what one thread compiles another finds

# The define that names an element type in the sources.
TYPE_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


def type_name(dtype: DType) -> str:
    """Returns the sources' name of an element type: float32 -> "f32". BackendError for types that kernels do
    not compute with."""
    try:
        return TYPE_NAMES[dtype.name]
    except KeyError:
        raise BackendError("kernel", "dtype", dtype, f"one of {', '.join(TYPE_NAMES)}") from None


def row_stride(view: ArrayView) -> int:
    """Distance of a matrix's rows in elements; at least its columns, also where there is only one row."""
    strides = view._strides
    return view.shape[-1] if strides is None else max(strides[-2], view.shape[-1])


def blocks(jobs: int, jobs_per_block: int, device_index: int, waves: int = 8) -> int:
    """Returns a one-dimensional grid for ``jobs`` in a grid-stride loop: as many blocks as they fill, at most
    ``waves`` a multiprocessor."""
    return min(-(-jobs // jobs_per_block), waves * sm_count(device_index))


# CUlaunchConfig (cuda.h): grid, block, shared memory; stream; attributes' address and number, none mostly. It
# takes the first CONFIG bytes of a thread's memory, the arguments follow, 8 bytes each.
_CONFIGURATION = "=7I4xQ24x"
CONFIG = struct.calcsize(_CONFIGURATION)
STREAM_AT = struct.calcsize("=7I4x")
_ATTRIBUTES_AT = struct.calcsize("=7I4xQ")
# CUlaunchAttribute: its number, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, and 64 bytes of its
# value, 1
_EARLY = (ctypes.c_uint32 * 18)(6, 0, 1)
_EARLY_AT = ctypes.addressof(_EARLY)
_EARLY_CAPABILITY, _EARLY_DRIVER = (9, 0), 12030  # captured graphs have it from CUDA 12.3 on
_ATTRIBUTES = struct.Struct("=QI")
_SLOTS = 64
_PARAMETERS = 32764  # bytes of parameters that CUDA takes, at most
ALIGNMENT = 16


class LaunchMemory:
    """The memory that a thread launches from: the configuration and the arguments, and a table of the
    arguments' addresses.

    ``tables``: the table as a kernel sees it whose first argument lies at the first slot, or at the second.
    """

    def __init__(self) -> None:
        calls = runtime()
        # a thread that is new has no context; CUDA 12 and later make the device's current here
        calls.setDevice(calls.getDevice())
        size = CONFIG + 8 + _PARAMETERS
        memory = (ctypes.c_char * (size + ALIGNMENT))()
        shift = -ctypes.addressof(memory) % ALIGNMENT
        self.buffer = (ctypes.c_char * size).from_buffer(memory, shift)
        first = ctypes.addressof(self.buffer) + CONFIG
        self.addresses = (ctypes.c_uint64 * (_SLOTS + 1))(*range(first, first + 8 * (_SLOTS + 1), 8))
        self.config = ctypes.byref(self.buffer)
        self.tables = ctypes.byref(self.addresses), ctypes.byref(self.addresses, 8)


class Here(threading.local):
    """State of a thread: the memory that it launches from, the ``recorded.Recording`` of its current call,
    and what launches in the engine's place (``launch``'s parameters); the last two are mostly None."""

    memory: LaunchMemory | None = None
    recording: Any = None
    launcher: Callable[..., None] | None = None


here = Here()


class Loaded(NamedTuple):
    """A kernel on its device: CuPy's function, what it uses (None where the compiler did not say), and
    whether it may be launched before the kernel in front of it has ended (``manifest.Source``)."""

    raw: Any
    resources: kernel_compiler.Resources | None
    early: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Kernel:
    """One function, ``name``, of one variant of a source on one device: compiled and loaded at its first
    launch. ``parameters`` are the manifest's codes; ``pointers``: for each whether it is a pointer.

    ``pack(memory, 0, grid x, y, z, block x, y, z, shared, stream, *arguments)`` writes what a launch reads; a
    structure by value, which comes last, at a multiple of 16 bytes: ``table`` is 1 where the arguments begin
    at the second slot for that.
    """

    source: str
    name: str
    device: int
    defines: manifest.Defines
    parameters: str
    pointers: tuple[bool, ...]
    _load: Callable[[], Loaded]
    raw: Any = field(default=None, init=False)
    handle: ctypes.c_void_p | None = field(default=None, init=False)  # a CUfunction, alive as long as ``raw``
    resources: kernel_compiler.Resources | None = field(default=None, init=False)
    early: bool = field(default=False, init=False)
    shared_limit: int = field(default=_PLAIN_SHARED, init=False)
    packers: dict[int, Any] = field(default_factory=dict, init=False)  # bytes of the structure -> pack
    table: int = field(init=False)
    pack: Any = field(init=False)

    def __post_init__(self) -> None:
        self.table = int(self.parameters.endswith("s") and len(self.parameters) % 2 == 0)
        self.pack = None if self.parameters.endswith("s") else self.packer(0)

    def load(self) -> None:
        """Compile and load it, once. BackendError where that cannot be."""
        with _LOADING[self.device], current_device(self.device):
            if self.handle is None:
                self.raw, self.resources, self.early = self._load()
                if self.resources is not None:  # what is allowed counts both kinds of shared memory
                    self.shared_limit -= self.resources.shared
                # last: other threads look whether it is there
                self.handle = ctypes.c_void_p(self.raw.kernel.ptr)

    def packer(self, size: int) -> Any:
        """``pack`` for a structure of ``size`` bytes."""
        found = self.packers.get(size)
        if found is None:
            layout = _CONFIGURATION + "8x" * self.table + self.parameters.replace("s", f"{size}s")
            found = self.packers[size] = struct.Struct(layout).pack_into
        return found

    def allow(self, shared: int) -> None:
        """Let launches ask for so many bytes of dynamic shared memory; what is allowed only grows, also where
        threads ask at once."""
        with _LOADING[self.device], current_device(self.device):  # CuPy's function is the current device's
            if shared > self.shared_limit:
                self.raw.max_dynamic_shared_size_bytes = self.shared_limit = shared

    def __repr__(self) -> str:
        return f"Kernel({self.name}, cuda:{self.device})"


@functools.cache
def runtime() -> Any:
    """``cupy.cuda.runtime``; BackendError where CuPy is missing."""
    try:
        from cupy.cuda import runtime as module
    except ImportError as error:
        raise BackendError(f"cuda: CuPy cannot be imported ({error}); {install('cuda13')}") from error
    return module


@functools.cache
def driver() -> Any:
    """Returns the driver's library, for ``ctypes``; BackendError where there is none."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        raise BackendError("no NVIDIA driver") from None


@functools.cache
def entry_point() -> tuple[Any, Any]:
    """``cuLaunchKernelEx``, which lets other threads run meanwhile (a full queue makes it wait, perhaps for
    work of theirs), and ``getDevice``: None where there is only one device."""
    function = driver().cuLaunchKernelEx
    return function, None if runtime().getDeviceCount() == 1 else runtime().getDevice


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
def _launches_early(device_index: int) -> bool:
    """Whether device and driver have programmatic dependent launches, in captured graphs too."""
    return (
        capability(device_index) >= _EARLY_CAPABILITY and int(runtime().driverGetVersion()) >= _EARLY_DRIVER
    )


@functools.cache
def kernel(source: str, function: str, device_index: int, **defines: str) -> Kernel:
    """``function`` of ``source`` with ``defines`` on a device; the same object for the same arguments.

    The defines must be one of the source's variants, which is what the tests compile: BackendError otherwise.
    """
    return variant(manifest.source(source), function, device_index, manifest.defines(**defines))


def variant(
    entry: manifest.Source,
    function: str,
    device_index: int,
    defines: manifest.Defines,
    unit: manifest.Unit | None = None,
) -> Kernel:
    """Returns a kernel of a manifest entry (see ``kernel``); ``unit``: from a text of elsewhere."""
    if defines not in entry.variants or function not in entry.functions:
        wanted = "a function and a variant that its comments list"
        raise BackendError("kernel", f"{entry.name}: {function}", dict(defines), wanted)

    def load() -> Loaded:
        module, resources = _module(entry.name, defines, device_index, unit)
        early = function in entry.early and _launches_early(device_index)
        return Loaded(module.get_function(function), resources.get(function), early)

    pointers = tuple(map(bool, entry.pointers[function]))
    return Kernel(entry.name, function, device_index, defines, entry.parameters[function], pointers, load)


@functools.cache
def _module(
    source: str, defines: manifest.Defines, device_index: int, unit: manifest.Unit | None
) -> tuple[Any, dict[str, kernel_compiler.Resources]]:
    with _COMPILING:
        compiled = kernel_compiler.compile_cubin(
            source, defines, kernel_compiler.arch_of(capability(device_index)), unit
        )
    import cupy

    return cupy.RawModule(path=str(compiled.path)), compiled.resources


def launching_by(launcher: Callable[..., None] | None) -> AbstractContextManager[None]:
    """Context manager: in this thread ``launcher``, with the parameters of ``launch``, launches in its place;
    None is the engine itself."""
    return changed(here, launcher=launcher)


def capturing(stream: int) -> bool:
    """Whether work on ``stream`` is captured into a graph now."""
    calls = runtime()
    try:
        return bool(calls.streamIsCapturing(stream))
    except calls.CUDARuntimeError:  # the legacy stream, while another one is captured
        return True


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


def launch(
    kernel: Kernel,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Any],
    stream: int,
    shared: int = 0,
) -> None:
    """Launch ``kernel`` on a raw ``stream`` of its device.

    ``grid`` and ``block``: a number, or up to three. ``args``: an int for every pointer and integer, a number
    for every double, bytes for a trailing structure; their number is checked. ``shared``: dynamic shared
    memory in bytes. A grid of no blocks launches nothing. BackendError when the kernel does not compile, and
    when the driver refuses the launch. Within a block of ``launching_by`` that function does it all.
    """
    if here.launcher is not None:
        here.launcher(kernel, grid, block, args, stream, shared)
        return
    x, y, z = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    i, j, k = (block, 1, 1) if isinstance(block, int) else (*block, 1, 1)[:3]
    if not (x and y and z and i and j and k):
        return
    if kernel.handle is None:
        kernel.load()
    if shared > kernel.shared_limit:
        kernel.allow(shared)
    memory = here.memory
    if memory is None:
        memory = here.memory = LaunchMemory()
    try:
        pack = kernel.pack or kernel.packer(len(args[-1]))
        pack(memory.buffer, 0, x, y, z, i, j, k, shared, stream, *args)
    except (struct.error, TypeError, IndexError):
        raise _unfit(kernel, (x, y, z), (i, j, k), args) from None
    if kernel.early:
        _ATTRIBUTES.pack_into(memory.buffer, _ATTRIBUTES_AT, _EARLY_AT, 1)
    function, device = entry_point()
    if device is None or device() == kernel.device:
        status = function(memory.config, kernel.handle, memory.tables[kernel.table], None)
    else:
        with current_device(kernel.device):
            status = function(memory.config, kernel.handle, memory.tables[kernel.table], None)
    if status:
        what = f"grid {(x, y, z)}, block {(i, j, k)}, {shared} bytes of shared memory, {kernel.resources}"
        raise BackendError(f"launch of {kernel.name}: {error_text(status)} ({what})")
    if here.recording is not None:
        structure = args[-1] if kernel.parameters.endswith("s") else b""
        here.recording.launched(kernel, memory, pack.__self__.size, stream, structure)


def _unfit(
    kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]
) -> BackendError:
    """Returns what is said of arguments that cannot be packed: of another number or kind, or a grid beyond 32
    bits."""
    operation, got = f"launch of {kernel.name}", ", ".join(type(a).__name__ for a in args)
    if not all(isinstance(n, int) and 0 <= n < 2**32 for n in (*grid, *block)):
        return BackendError(operation, "grid, block", f"{grid}, {block}", "numbers of 32 bits")
    return BackendError(operation, "args", f"({got})", f"parameters {kernel.parameters!r}")


def error_text(status: int) -> str:
    """Returns the driver's name and words for a status: "CUDA_ERROR_INVALID_VALUE: invalid argument"."""
    words = []
    for ask in (driver().cuGetErrorName, driver().cuGetErrorString):
        text = ctypes.c_char_p()
        words.append(
            text.value.decode() if ask(status, ctypes.byref(text)) == 0 and text.value else str(status)
        )
    return ": ".join(words)
