"""Names that a person gives on the command line, resolved: a kernel of the contract, a raw kernel, a
source of fp8kit's, or a file of one's own.

And what the compiler says of a source: registers, shared memory, spills, PTX, and machine code where a
disassembler is installed.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fp8kit.backends.cuda import compile as compiler
from fp8kit.backends.protocol import KERNELS
from fp8kit.errors import ArgumentError, BackendError, meant
from fp8kit.lab.overrides import read
from fp8kit.raw_kernels import manifest

DEFAULT_ARCH = "sm_90a"
_DISASSEMBLERS = {"nvdisasm": (), "cuobjdump": ("-sass",)}  # program -> its options
_PREFERRED = ("bf16", "e4m3", "gelu", "bare")  # of the variants, the one that is shown when one is shown


@dataclass(frozen=True)
class Part:
    """A source, or a file of one's own in the place of one: ``entry`` as it is compiled, ``like`` as fp8kit
    has it, the ``functions`` that are meant, and the file's ``unit`` (None: fp8kit's own)."""

    entry: manifest.Source
    like: manifest.Source
    functions: tuple[str, ...]
    unit: manifest.Unit | None = None

    @property
    def text(self) -> str:
        """The source's text."""
        return self.unit.content if self.unit is not None else manifest.text(self.entry.name)

    def variants(self, wanted: str = "") -> tuple[manifest.Defines, ...]:
        """The sets of defines that ``wanted`` asks for (``manifest.asked``). ArgumentError for another
        text."""
        try:
            return manifest.asked(wanted, self.like, self.unit).all_of(self.entry.variants)
        except ValueError as error:
            raise ArgumentError("kernels", "variant", repr(wanted), str(error)) from None

    def variant(self, wanted: str = "") -> manifest.Defines:
        """The one of ``variants`` to show: bfloat16, E4M3 or GELU where there is a choice."""
        return max(self.variants(wanted), key=lambda v: sum(value in _PREFERRED for _, value in v))

    def compiled(self, defines: manifest.Defines, arch: str) -> compiler.CompiledKernel:
        """The source compiled, from the cache or afresh. BackendError as ``compile_cubin``."""
        return compiler.compile_cubin(self.entry.name, defines, arch, self.unit)


@dataclass(frozen=True)
class Found:
    """What a name means: the ``parts`` that hold its source, and the ``operations`` that launch one of their
    functions. ``file``: its path, where it is one."""

    name: str
    parts: tuple[Part, ...]
    operations: tuple[str, ...]
    file: Path | None = None


def find(name: str) -> Found:
    """What ``name`` means: a file, a source's name (``quantize.cu``), one of its functions
    (``quantize.cu:quantize_fp8``), an operation, a function wherever it is, or a source's stem, in this
    order. ArgumentError, with names like it, where it means nothing, and for a file that cannot be read or
    stands for no source."""
    path = Path(name)
    if path.suffix == ".cu" and path.is_file():
        try:
            unit = read(path)
            like = manifest.replaced_by(unit)
            entry = manifest.stands_for(unit, like)
        except (BackendError, ValueError) as error:
            raise ArgumentError(f"kernels: {str(error).removeprefix('override: ')}") from None
        whole = [
            op
            for op, uses in launching().items()
            if like.name in uses and set(uses[like.name]) <= set(entry.functions)
        ]
        return Found(name, (Part(entry, like, entry.functions, unit),), tuple(whole), path)
    functions = {entry.name: entry.functions for entry in manifest.sources()}
    source, _, function = name.partition(":")
    if name in functions:
        return _own(name, {name: functions[name]})
    if function in functions.get(source, ()):
        return _own(name, {source: (function,)})
    if name in launching():
        return Found(name, _own(name, launching()[name]).parts, (name,))
    places = {source: own for source, own in functions.items() if source == f"{name}.cu"}
    places = {source: (name,) for source, own in functions.items() if name in own} or places
    if places:
        return _own(name, places)
    wanted = "a kernel of the contract that launches raw kernels; this one launches none"
    if name.endswith(".cu"):
        wanted = f"a .cu file, or a source: no such file is there{meant(name, functions)}"
    elif name not in KERNELS:
        known = [*functions, *launching(), *(f for own in functions.values() for f in own)]
        hint = meant(name, known, 4) or "; `fp8kit kernels list` has them all"
        wanted = f"a kernel of the contract, a raw kernel, a source or a .cu file{hint}"
    raise ArgumentError("kernels", "name", repr(name), wanted)


def _own(name: str, places: dict[str, tuple[str, ...]]) -> Found:
    parts = tuple(
        Part(manifest.source(source), manifest.source(source), functions)
        for source, functions in places.items()
    )
    found = {op for source, functions in places.items() for f in functions for op in users(source, f)}
    return Found(name, parts, tuple(op for op in launching() if op in found))


@functools.cache
def launching() -> dict[str, dict[str, tuple[str, ...]]]:
    """The operations that launch raw kernels: source -> its functions (``manifest.uses``)."""
    return {op: manifest.uses(op) for op in KERNELS if manifest.uses(op)}


def users(source: str, function: str) -> list[str]:
    """The operations that launch a function of a source."""
    return [op for op, uses in launching().items() if function in uses.get(source, ())]


def sass(cubin: Path) -> str:
    """Machine code as text, by nvdisasm or cuobjdump, whichever is installed; BackendError that says how to
    get one, where neither is."""
    spec = importlib.util.find_spec("nvidia")
    folders = [
        found
        for place in (spec.submodule_search_locations or () if spec else ())
        for found in Path(place).glob("*/bin")
    ]
    for program, options in _DISASSEMBLERS.items():
        path = shutil.which(program) or next(
            (str(at / program) for at in folders if (at / program).is_file()), None
        )
        if path is not None:
            done = subprocess.run([path, *options, str(cubin)], capture_output=True, text=True)
            if done.returncode:
                raise BackendError(f"kernels: {program} failed: {done.stderr.strip()}")
            return done.stdout
    raise BackendError(
        "kernels: machine code needs nvdisasm or cuobjdump, neither is installed: "
        "pip install nvidia-cuda-nvdisasm"
    )
