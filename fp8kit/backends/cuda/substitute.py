"""The engine's host code with other kernels: for one call, chosen functions come from another text, from CuPy
or from numba.cuda.

Grid, block, arguments and shared memory stay the engine's own. The call is made with a launcher in the
engine's place (``launch.launching_by``), which hands on what is not replaced. Every other thread, and every
other call, launches the engine's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from fp8kit.backends import cuda
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda.compile import Resources
from fp8kit.backends.cuda.device import cupy
from fp8kit.errors import BackendError
from fp8kit.raw_kernels import manifest

ALL = manifest.Asked()  # every variant, as it is
Place = tuple[str, str]  # source, function
Maker = Callable[[int, manifest.Defines], Any]  # device index, defines -> what is launched there
Extent = int | tuple[int, ...]  # of a grid or a block

# Elements of the arrays that a numba.cuda kernel sees: no kernel is told their length, and none asks.
_UNBOUNDED = 1 << 40
# A pointed type of the sources -> typestr of the array that stands for it; T is the define's.
_TYPES = {
    "u8": "|u1",
    "u16": "<u2",
    "u32": "<u4",
    "u64": "<u8",
    "i32": "<i4",
    "i64": "<i8",
    "float": "<f4",
    "double": "<f8",
    "f32": "<f4",
    "f16": "<f2",
    "bf16": "<u2",
    "f64": "<f8",
    "void": "|u1",
}


def engine_with(
    operation: str, replacements: Mapping[Place, Maker], note: Callable[[manifest.Defines], object]
) -> Callable[..., Any]:
    """The engine's implementation of an operation of the contract, the one that launches what is replaced
    (functions of one source); ``note`` is called at every use of one, with the engine's defines."""
    function = cuda.implementation(operation, next(iter(replacements))[0])

    def launcher(
        kernel: launch.Kernel, grid: Extent, block: Extent, args: Sequence[Any], stream: int, shared: int
    ) -> None:
        found: Any = kernel
        maker = replacements.get((kernel.source, kernel.name))
        if maker is not None:
            note(kernel.defines)
            found = maker(kernel.device, kernel.defines)
        if isinstance(found, _Numba):
            found.launch(grid, block, args, stream, shared)
        else:
            with launch.launching_by(None):
                launch.launch(found, grid, block, args, stream, shared)

    @functools.wraps(function, updated=())  # what the function says of its sums may hold no more
    def call(*args: Any, **named: Any) -> Any:
        with launch.launching_by(launcher):
            return function(*args, **named)

    return call


def of_text(unit: manifest.Unit, source: str, asked: manifest.Asked = ALL) -> dict[Place, Maker]:
    """Replacements of every function of ``source`` that a text defines, compiled with what is ``asked`` for,
    or with the engine's defines where that asks for nothing. BackendError, naming the function, where it does
    not fit."""

    def compiled(defines: manifest.Defines) -> manifest.Defines:
        return asked.of(defines) or defines

    try:
        entry = manifest.stands_for(unit, manifest.source(source))
    except ValueError as error:
        raise BackendError(f"override: {error}") from None
    entry = replace(entry, variants=tuple(dict.fromkeys(map(compiled, entry.variants))))

    def maker(function: str) -> Maker:
        return functools.cache(
            lambda device, defines: launch.variant(entry, function, device, compiled(defines), unit)
        )

    return {(source, function): maker(function) for function in entry.functions}


def of_cupy(kernel: Any, place: Place) -> dict[Place, Maker]:
    """Returns a ``cupy.RawKernel`` in the place of one function; it is compiled by CuPy, for one set of
    defines: its author's."""
    source, function = place
    entry = manifest.source(source)
    codes, pointers = entry.parameters[function], tuple(map(bool, entry.pointers[function]))

    @functools.cache
    def make(device: int, defines: manifest.Defines) -> launch.Kernel:
        def load() -> launch.Loaded:
            used = Resources(kernel.num_regs, kernel.local_size_bytes, 0, 0, kernel.shared_size_bytes)
            return launch.Loaded(kernel, used)

        return launch.Kernel(source, f"{function} (cupy.RawKernel)", device, defines, codes, pointers, load)

    return {place: make}


def of_numba(kernel: Any, place: Place) -> dict[Place, Maker]:
    """Returns a numba.cuda kernel in the place of one function. Its pointers come as one-dimensional arrays
    without a known length, bfloat16 as uint16; a null pointer as an array of no elements. BackendError for a
    function that takes a structure by value."""
    source, function = place
    entry = manifest.source(source)
    codes = entry.parameters[function]
    if "s" in codes:
        raise BackendError(
            "override", "function", f"{function}, which takes a structure by value", "one that numba can call"
        )

    @functools.cache
    def make(device: int, defines: manifest.Defines) -> _Numba:
        types = [_typestr(function, name, dict(defines)) for name in entry.pointers[function]]
        return _Numba(function, device, kernel, codes, types)

    return {place: make}


def _typestr(function: str, pointed: str, defines: dict[str, str]) -> str:
    if not pointed:
        return ""
    found = _TYPES.get(defines.get(pointed, pointed))
    if found is None:
        raise BackendError(
            "override", function, f"a pointer to {pointed}", f"a pointer to one of {', '.join(_TYPES)}"
        )
    return found


class _Flat:
    """An address as an array that numba.cuda takes."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, ptr: int, typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": (_UNBOUNDED if ptr else 0,),
            "typestr": typestr,
            "data": (ptr, False),
            "version": 2,
        }


class _Numba(NamedTuple):
    """A numba.cuda kernel of the parameters ``codes``; ``types``: typestr of what each points to, "" for
    numbers."""

    name: str
    device: int
    kernel: Any
    codes: str
    types: list[str]

    def launch(self, grid: Extent, block: Extent, args: Sequence[Any], stream: int, shared: int) -> None:
        """As ``launch.launch``."""
        grid, block = ((n,) if isinstance(n, int) else n for n in (grid, block))
        if 0 in grid or 0 in block:
            return
        if len(args) != len(self.codes):
            raise BackendError(
                f"launch of {self.name}", "args", f"{len(args)} arguments", f"parameters {self.codes!r}"
            )
        values = [
            _Flat(int(v), kind) if kind else float(v) if code == "d" else int(v)
            for v, kind, code in zip(args, self.types, self.codes, strict=True)
        ]
        with launch.current_device(self.device):
            handle = sys.modules["numba.cuda"].external_stream(stream) if stream else 0
            self.kernel[grid, block, handle, shared](*values)


class _Handle:
    """A raw stream as CuPy takes one from elsewhere."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


@contextmanager
def on_stream(device_index: int, stream: int) -> Iterator[None]:
    """Context manager: make a device and a raw stream of it CuPy's current ones in this thread."""
    with launch.current_device(device_index), as_stream(stream):
        yield


def as_stream(stream: int) -> Any:
    """Returns a raw stream as CuPy's."""
    streams = cupy().cuda.Stream
    return streams.from_external(_Handle(stream)) if stream else streams.null
