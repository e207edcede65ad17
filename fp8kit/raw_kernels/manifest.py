"""What the kernel sources hold: functions, their parameters, and every set of defines that the engine compiles them with.

A source says so itself, in comments at its head::

    // functions: amax_tensor, amax_tiles
    // variants: T=f32,bf16,f16; FORMAT=e4m3,e5m2

Each ``variants`` line is the product of its lists; several lines are a union. A source without one has the single empty set of defines.
Kernels are ``extern "C" __global__`` functions (their names stay as written) with parameters of four kinds only, so that the host can
pack arguments without knowing more: pointers, ``i64`` (or ``u64``), ``f64``, and at most one structure by value, the last parameter.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
Defines = tuple[tuple[str, str], ...]

_KERNEL = re.compile(r'extern "C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\s*\(([^)]*)\)', re.S)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
_SCALARS = {"i64": "q", "u64": "q", "f64": "d"}


@dataclass(frozen=True)
class Source:
    """One .cu file: its ``name``, its ``functions``, every set of defines in ``variants``, and per function a string of parameter
    codes in ``parameters``: "q" a pointer or 64-bit integer, "d" a double, "s" a structure by value."""

    name: str
    functions: tuple[str, ...]
    variants: tuple[Defines, ...]
    parameters: dict[str, str]


def text(name: str) -> str:
    """The text of a .cu or .cuh file of this folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


@functools.cache
def headers(name: str) -> tuple[str, ...]:
    """Names of all headers that a file includes, directly or not, in a fixed order."""
    found: list[str] = []
    queue = [name]
    while queue:
        for header in _INCLUDE.findall(text(queue.pop(0))):
            if header not in found:
                found.append(header)
                queue.append(header)
    return tuple(found)


@functools.cache
def source(name: str) -> Source:
    """The manifest entry of one .cu file; ValueError when its comments and its code do not fit together."""
    content = text(name)
    functions = tuple(part for line in _comments(content, "functions") for part in _split(line, ","))
    variants = tuple(v for line in _comments(content, "variants") for v in _product(name, line)) or ((),)
    kernels = {match[1]: _parameters(name, match[1], match[2]) for match in _KERNEL.finditer(content)}
    if set(functions) != set(kernels) or len(set(variants)) != len(variants):
        raise ValueError(f"{name}: its comment lists {sorted(functions)}, it defines {sorted(kernels)}; variants must not repeat")
    return Source(name, functions, variants, kernels)


def sources() -> tuple[Source, ...]:
    """Every .cu file of the folder, by name."""
    return tuple(source(path.name) for path in sorted(FOLDER.glob("*.cu")))


def defines(**values: str) -> Defines:
    """A set of defines in its canonical order, by name."""
    return tuple(sorted(values.items()))


def _comments(content: str, key: str) -> list[str]:
    return re.findall(rf"^//\s*{key}:\s*(.*)$", content, re.M)


def _split(line: str, separator: str) -> list[str]:
    return [part.strip() for part in line.split(separator) if part.strip()]


def _product(name: str, line: str) -> list[Defines]:
    axes = []
    for axis in _split(line, ";"):
        key, equals, values = axis.partition("=")
        if not equals:
            raise ValueError(f"{name}: variants: {axis!r} is not KEY=value,value")
        axes.append([(key.strip(), value) for value in _split(values, ",")])
    return [tuple(sorted(choice)) for choice in itertools.product(*axes)]


def _parameters(name: str, function: str, declared: str) -> str:
    codes = ""
    parts = _split(re.sub(r"//[^\n]*", "", declared), ",")
    for position, parameter in enumerate(parts):
        words = [w for w in parameter.replace("*", " * ").split() if w not in ("const", "__restrict__", "__grid_constant__")]
        if "*" in words:
            codes += "q"
        elif words[0] in _SCALARS:
            codes += _SCALARS[words[0]]
        elif position == len(parts) - 1:
            codes += "s"
        else:
            raise ValueError(f"{name}: {function}: {parameter!r} is neither a pointer, i64, u64 nor f64 (a structure must come last)")
    return codes
