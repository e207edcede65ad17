"""Kernel sources to machine code: NVRTC, one cubin a variant, kept on disk.

CuPy's own compile step flushes float32 subnormals (``-ftz=true``), never targets ``sm_90a`` and does not see
edited headers; so the engine has its own. A cubin's name is the digest of everything that went into it: the
source, every header it includes, defines, options, architecture and NVRTC's version. Its notes, a JSON file
beside it, have the digest of what came out. Processes may compile the same kernel at once (``cache``).
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8kit import cache
from fp8kit.errors import ArgumentError, BackendError, install
from fp8kit.raw_kernels import manifest

# -fmad: a product feeding a sum may be fused (one rounding less); a product that is cast directly is not
# changed by it. -no-cache: beside a driver NVRTC keeps what it compiled, and what it takes from there it
# gives without the log that says what the functions use.
OPTIONS = (
    "-std=c++17",
    "-ftz=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "-fmad=true",
    "-no-cache",
    "--ptxas-options=-v",
)
_LOWEST = 80
_SPECIFIC = 90  # from here on the architecture-specific ("a") target is taken

_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """What one function uses: ``registers`` a thread; ``stack``, ``spill_stores``, ``spill_loads`` and static
    ``shared`` in bytes."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin on disk: its ``path``, the compiler's ``log`` and the ``resources`` of each function."""

    path: Path
    log: str
    resources: dict[str, Resources]


def arch_of(capability: tuple[int, int]) -> str:
    """NVRTC's target for a compute capability: (8, 9) -> "sm_89", (9, 0) -> "sm_90a", (12, 0) -> "sm_120a".
    BackendError below 8.0."""
    number = capability[0] * 10 + capability[1]
    if number < _LOWEST:
        got = f"compute capability {capability[0]}.{capability[1]}"
        raise BackendError("compile", "device", got, "at least 8.0 (bfloat16)")
    return f"sm_{number}a" if number >= _SPECIFIC else f"sm_{number}"


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        alone = "to compile without a GPU this suffices: pip install nvidia-cuda-nvrtc cuda-bindings"
        cure = f"{install('cuda13')}; {alone}"
        raise BackendError(f"compile: NVRTC cannot be loaded ({error}); {cure}") from error
    return nvrtc


def want_architecture(operation: str, argument: str, arch: object, to_run: bool = False) -> None:
    """ArgumentError where ``arch`` is none that this NVRTC compiles fp8kit's kernels for; with ``to_run`` as
    they run: "sm_90a", and not "sm_90". BackendError where NVRTC is missing."""
    _, numbers = _nvrtc().nvrtcGetSupportedArchs()
    takes = [f"sm_{number}{'a' if number >= _SPECIFIC else ''}" for number in numbers if number >= _LOWEST]
    if not isinstance(arch, str) or arch not in takes + [name.rstrip("a") for name in takes if not to_run]:
        raise ArgumentError(
            operation, argument, repr(arch), f"one of {', '.join(takes)}, what NVRTC here compiles for"
        )


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """NVRTC's (major, minor). BackendError where it is missing."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return major, minor


def cache_key(name: str, defines: manifest.Defines, arch: str, unit: manifest.Unit | None = None) -> str:
    """Digest of everything that decides a cubin's contents; arguments as for ``compile_cubin``."""
    unit = unit or manifest.unit(name)
    digest = hashlib.sha256()
    for part in (name, unit.content, *defines, *OPTIONS, arch, *nvrtc_version()):
        digest.update(repr(part).encode() + b"\0")
    for header in unit.headers:
        digest.update(repr(header).encode() + b"\0")
    return digest.hexdigest()


def compile_cubin(
    name: str, defines: manifest.Defines, arch: str, unit: manifest.Unit | None = None
) -> CompiledKernel:
    """Returns the cubin of source ``name`` (a file of raw_kernels) with ``defines`` for ``arch``, from the
    cache or freshly compiled. ``unit``: a text from elsewhere, to be compiled under that name instead.

    BackendError where NVRTC is missing or the source does not compile (with NVRTC's whole log).
    """
    unit = unit or manifest.unit(name)
    stem = f"{Path(name).stem}-{cache_key(name, defines, arch, unit)[:32]}"
    if (kept := _kept(stem)) is not None:
        return kept
    cubin, log = _compile(name, defines, arch, unit)
    resources = parse_resources(log)
    used = {function: asdict(found) for function, found in resources.items()}
    notes = {"cubin": hashlib.sha256(cubin).hexdigest(), "log": log, "resources": used}
    # the cubin first: notes without it would say what it is to be
    path = cache.write("kernels", f"{stem}.cubin", cubin)
    cache.write("kernels", f"{stem}.json", cache.seal(notes))
    return CompiledKernel(path, log, resources)


def _kept(stem: str) -> CompiledKernel | None:
    """Returns what is in the cache, whole; None where it is not."""
    cubin, notes = (cache.read("kernels", f"{stem}.{kind}") for kind in ("cubin", "json"))
    found = None if cubin is None or notes is None else cache.unseal(notes[1])
    if found is None or cubin is None or found.get("cubin") != hashlib.sha256(cubin[1]).hexdigest():
        return None
    try:
        used = {name: Resources(**resources) for name, resources in found["resources"].items()}
        return CompiledKernel(cubin[0], found["log"], used)
    except (KeyError, TypeError, AttributeError):  # another fp8kit's
        return None


def parse_resources(log: str) -> dict[str, Resources]:
    """Returns what ptxas says about each function in a verbose log."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        spill, used, shared = _SPILL.search(part), _USED.search(part), _SHARED.search(part)
        if spill and used:
            stack, stores, loads = map(int, spill.groups())
            static = int(shared[1]) if shared else 0
            found[part.partition("'")[0]] = Resources(int(used[1]), stack, stores, loads, static)
    return found


def compile_ptx(name: str, defines: manifest.Defines, arch: str, unit: manifest.Unit | None) -> str:
    """Returns the PTX of a source, compiled afresh; arguments and errors as for ``compile_cubin``."""
    return _compile(name, defines, arch, unit, "PTX")[0].rstrip(b"\0").decode()


def _compile(
    name: str, defines: manifest.Defines, arch: str, unit: manifest.Unit | None = None, kind: str = "CUBIN"
) -> tuple[bytes, str]:
    """Returns what NVRTC makes, of ``kind`` "CUBIN" or "PTX", and its log."""
    nvrtc, unit = _nvrtc(), unit or manifest.unit(name)

    def call(function: str, *arguments: Any) -> Any:
        status, *values = getattr(nvrtc, function)(*arguments)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BackendError(f"compile: {name}: {function} failed with {status.name}")
        return values[0] if values else None

    headers, texts = ([part[i].encode() for part in unit.headers] for i in (0, 1))
    program = call("nvrtcCreateProgram", unit.content.encode(), name.encode(), len(headers), texts, headers)
    try:
        options = [*OPTIONS, f"-arch={arch}", *(f"-D{key}={value}" for key, value in defines)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _text(
            call("nvrtcGetProgramLogSize", program), lambda out: call("nvrtcGetProgramLog", program, out)
        )
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BackendError(
                f"compile: {name} with {dict(defines)} for {arch} failed ({status.name}):\n{log}"
            )
        made = b" " * call(f"nvrtcGet{kind}Size", program)
        call(f"nvrtcGet{kind}", program, made)
        return made, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(size: int, fill: Any) -> str:
    """Returns a text of ``size`` bytes, its end (a zero byte) counted, that ``fill`` writes into a bytes
    object. One of a single byte is never handed out: CPython has each only once, and writing into it would
    change it everywhere."""
    if size <= 1:
        return ""
    out = b" " * size
    fill(out)
    return out.rstrip(b"\0").decode(errors="replace")
