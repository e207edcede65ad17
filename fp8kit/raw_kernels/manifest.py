"""What the kernel sources hold: functions, their parameters, and every set of defines that the engine
compiles them with.

A source says so itself, in comments at its head::

    // functions: amax_tensor (amax, quantize), amax_tiles (amax, quantize)
    // variants: T=f32,bf16,f16; FORMAT=e4m3,e5m2

Behind a function stand the operations of the kernel contract that launch it; without any it is the operation
of its name; a list goes on in a comment line that begins with three blanks. Each ``variants`` line is the
product of its lists, of which one may set several defines at once (``A B=1 2,3 4``); several lines are a
union. A source without one has the single empty set of defines.
``spills: N`` allows a thread so many bytes of spilled registers, where accumulators fill them, ``spills: N
bytes on sm_90a, sm_100a`` there alone; without it none. Kernels are ``extern "C" __global__`` functions
(their names stay as written) with parameters of four kinds only, so that the host can pack arguments without
knowing more: pointers, ``i64`` (or ``u64``), ``f64``, and at most one structure by value, the last parameter.

A text asks for some of the variants, or for others than those (``asked``)::

    T=f16,FORMAT=e5m2             the variants with these values
    PROMOTE=128:64                those with PROMOTE=128, compiled with 64 instead
    PROMOTE=64,BM=256             of a text from elsewhere: those with BM=256, compiled with a number that the
                                  source does not list, or with another define that the text names; with a
                                  word where the text's own head lists it

``uses`` answers the other way round: which functions an operation launches. A text from elsewhere that takes
the place of one of these sources (``foreign``) is read by the same rules; ``stands_for`` finds out which.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).parent
Defines = tuple[tuple[str, str], ...]

_KERNEL = re.compile(r'extern "C"\s+__global__\s+void\s+(?:__\w+__\([^)]*\)\s+)*(\w+)\s*\(([^)]*)\)', re.S)
# set up without preprocessing or return, then the wait where every thread comes to it: a line of the body's
_LATER = r"let_next_start\(\);(?=\n)(?:(?!\n\}|\n\s*#|\breturn\b).)*?\n  wait_for_former\(\);"
_EARLY = re.compile(rf"\s*\{{\s*(start_early\(\);|{_LATER})", re.S)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
_FUNCTION = re.compile(r"(\w+)\s*(?:\(([^)]*)\))?")
_DEFINE = re.compile(r"[A-Za-z_]\w*=[^=:,]+(:[^=:,]+)?")
_NUMBER = re.compile(r"[-+]?\d[\w.]*")  # what a define may be beyond those that a source lists
_COMMENT = re.compile(r"//[^\n]*")
_KINDS = {"q": "a pointer or a 64-bit integer", "d": "a double", "s": "a structure"}
_SCALARS = {"i64": "q", "u64": "q", "f64": "d"}


@dataclass(frozen=True)
class Source:
    """One .cu file.

    * ``functions`` and ``variants``, every set of defines; ``operations``: per function the operations that
      launch it, none for that of its name, which may end in an underscore.
    * ``parameters``: per function a code for each, "q" a pointer or 64-bit integer, "d" a double, "s" a
      structure by value. ``pointers``: per function and parameter the type that it points to ("T", "u8",
      "float"), "" where it is no pointer.
    * ``early``: the functions that may be launched before the kernel in front of them has ended, since they
      wait for it (common.cuh): ``start_early();`` is their first statement, or ``let_next_start();``, with
      ``wait_for_former();`` as a line of its own further on, indented by two; and none of their pointers is
      ``__restrict__``. That nothing between the two reads memory is the author's to see to.
    * ``spills``: bytes of registers that a thread may spill, each with the architectures where it may, none
      for all of them.
    """

    name: str
    functions: tuple[str, ...]
    variants: tuple[Defines, ...]
    parameters: dict[str, str]
    pointers: dict[str, tuple[str, ...]]
    early: frozenset[str]
    operations: dict[str, tuple[str, ...]]
    spills: tuple[tuple[int, tuple[str, ...]], ...] = ()

    def launched_by(self, function: str, operation: str) -> bool:
        """Whether an operation of the contract launches the function."""
        return operation in (self.operations[function] or (function, f"{function}_"))

    def may_spill(self, arch: str) -> int:
        """Bytes of registers that a thread may spill on ``arch``."""
        return max((size for size, where in self.spills if not where or arch in where), default=0)


@dataclass(frozen=True)
class Asked:
    """What a text asks of a source's variants: those that have all defines ``where``, and in them ``instead``
    in the place of their own values."""

    where: Defines = ()
    instead: Defines = ()

    def of(self, variant: Defines) -> Defines | None:
        """The variant as it is to be compiled; None for one that is not asked for."""
        if not set(self.where) <= set(variant):
            return None
        return tuple(sorted((dict(variant) | dict(self.instead)).items()))

    def all_of(self, variants: Iterable[Defines]) -> tuple[Defines, ...]:
        """What is asked for of several, each once."""
        return tuple(dict.fromkeys(found for each in variants if (found := self.of(each)) is not None))


@dataclass(frozen=True)
class Unit:
    """What is compiled at once: the ``name`` that messages give it, its ``content``, and ``headers``: (name,
    text) of every header that it includes, directly or not, in a fixed order."""

    name: str
    content: str
    headers: tuple[tuple[str, str], ...]


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


def unit(name: str) -> Unit:
    """A .cu file of this folder with its headers, as they are now."""
    return Unit(name, text(name), tuple((header, text(header)) for header in headers(name)))


def foreign(content: str, name: str = "text.cu", folder: Path | None = None) -> Unit:
    """A text from elsewhere: its headers are looked for in ``folder`` and then here. ValueError for one that
    is in neither."""
    found: dict[str, str] = {}
    queue = [content]
    while queue:
        for header in _INCLUDE.findall(queue.pop(0)):
            if header not in found:
                path = next(
                    (at / header for at in (folder, FOLDER) if at is not None and (at / header).is_file()),
                    None,
                )
                if path is None:
                    raise ValueError(
                        f"{name}: header {header!r} is neither in {folder or 'a folder of its own'} nor "
                        "among fp8kit's"
                    )
                found[header] = path.read_text(encoding="utf-8")
                queue.append(found[header])
    return Unit(name, content, tuple(found.items()))


def functions_of(unit: Unit) -> set[str]:
    """Names of the kernels that a text defines."""
    return {match[1] for match in _KERNEL.finditer(unit.content)}


def stands_for(unit: Unit, like: Source) -> Source:
    """A foreign text read as another version of ``like``: its functions, with ``like``'s variants.

    ValueError where it has no kernel at all, a function that ``like`` does not have, or one with other
    parameters.
    """
    read = _kernels(unit.name, unit.content)
    if not read:
        raise ValueError(f'{unit.name}: has no function that is extern "C" __global__ void')
    for function, (codes, *_) in read.items():
        if function not in like.parameters:
            raise ValueError(
                f"{unit.name}: function {function!r} is not in {like.name}, "
                f"which has {', '.join(like.functions)}"
            )
        if codes != like.parameters[function]:
            wanted = _declared(text(like.name), function)
            unlike = _misfits(_declared(unit.content, function), codes, wanted, like.parameters[function])
            raise ValueError(
                f"{unit.name}: {function}: the parameters are not those that it has in {like.name}: "
                f"{'; '.join(unlike)}"
            )
    return _source(unit.name, like.variants, {name: like.operations[name] for name in read}, read)


def _declared(content: str, function: str) -> list[str]:
    """The parameters of a kernel that a text defines, as they are written."""
    *_, kernel = (match for match in _KERNEL.finditer(content) if match[1] == function)
    return [" ".join(each.split()) for each in _split(_COMMENT.sub("", kernel[2]), ",")]


def _misfits(declared: list[str], codes: str, wanted: list[str], wanted_codes: str) -> Iterator[str]:
    """Which parameters are missing, too many or of another kind. Those with the same name and code are the
    same; between them they go by their position, since a name is free."""
    ours = [f"{code} {_name(each)}" for code, each in zip(codes, declared, strict=True)]
    theirs = [f"{code} {_name(each)}" for code, each in zip(wanted_codes, wanted, strict=True)]
    for _, i, after_i, j, after_j in difflib.SequenceMatcher(None, ours, theirs, False).get_opcodes():
        for at, there in itertools.zip_longest(range(i, after_i), range(j, after_j)):
            if at is None:
                yield f"{wanted[there]!r}, parameter {there + 1} there, is missing"
            elif there is None:
                yield f"parameter {at + 1}, {declared[at]!r}, is one too many"
            elif codes[at] != wanted_codes[there]:
                kind = f"{_KINDS[codes[at]]}, expected {_KINDS[wanted_codes[there]]}"
                yield f"parameter {at + 1}, {declared[at]!r}, is {kind} ({wanted[there]!r} there)"


def _name(parameter: str) -> str:
    return str(re.findall(r"\w+", parameter)[-1])


def replaced_by(unit: Unit) -> Source:
    """The source that a foreign text is another version of, by its functions' names; of several, the one of
    its own name. ValueError where there is none, or where that leaves several."""
    named = functions_of(unit)
    like = [entry for entry in sources() if named and named <= set(entry.functions)]
    like = [entry for entry in like if entry.name == unit.name] or like
    if len(like) != 1:
        what = (
            f"could stand for {' or '.join(entry.name for entry in like)}"
            if like
            else 'are not the functions of any source; a kernel begins with extern "C" __global__'
        )
        raise ValueError(f"{unit.name}: its functions ({', '.join(sorted(named)) or 'none'}) {what}")
    return like[0]


def asked(text: str, entry: Source, unit: Unit | None = None) -> Asked:
    """What ``text`` (see this module's) asks of the variants of ``entry``, or of ``unit``, a text from
    elsewhere in its place. ValueError, which says what was expected, for anything else."""
    listed: dict[str, dict[str, None]] = {}
    own = [] if unit is None else [_product(unit.name, line) for line in _comments(unit.content, "variants")]
    for name, value in itertools.chain(*entry.variants, *itertools.chain(*own)):
        listed.setdefault(name, {})[value] = None
    where: list[tuple[str, str]] = []
    instead: list[tuple[str, str]] = []
    expected = f"defines of {entry.name}, such as {said(entry.variants[0])}"
    for part in _split(text, ","):
        name, _, value = part.partition("=")
        old, colon, new = value.partition(":")
        if not _DEFINE.fullmatch(part):
            raise ValueError(expected)
        words = [known for known in listed.get(name, ()) if not _NUMBER.fullmatch(known)]
        if words and not {old, new or old} <= listed[name].keys():
            raise ValueError(f"{name} to be one of {', '.join(words)}, which the source lists")
        if any((name, old) in variant for variant in entry.variants):
            where.append((name, old))
        elif colon or unit is None:
            raise ValueError(expected)
        elif name not in listed and not any(
            re.search(rf"\b{name}\b", content) for content in (unit.content, *(h for _, h in unit.headers))
        ):
            raise ValueError(f"{expected}, or what {unit.name} names")
        if colon or (name, old) not in where:
            instead.append((name, new or old))
    found = Asked(tuple(where), tuple(instead))
    if not found.all_of(entry.variants):
        raise ValueError(f"{expected}: no variant has {said(found.where)}")
    return found


def said(defines: Defines) -> str:
    """Defines as one writes them on the command line: T=bf16,FORMAT=e4m3."""
    return ",".join(f"{key}={value}" for key, value in defines) or "-"


@functools.cache
def source(name: str) -> Source:
    """The manifest entry of one .cu file; ValueError when its comments and its code do not fit together."""
    content = text(name)
    functions = {
        match[1]: tuple(_split(match[2] or "", ","))
        for line in _comments(content, "functions")
        for match in _FUNCTION.finditer(line)
    }
    variants = tuple(v for line in _comments(content, "variants") for v in _product(name, line)) or ((),)
    kernels = _kernels(name, content)
    if set(functions) != set(kernels):
        raise ValueError(
            f"{name}: its comment '// functions:' lists {sorted(functions)}, it defines {sorted(kernels)}"
        )
    if len(set(variants)) != len(variants):
        raise ValueError(f"{name}: its comment '// variants:' lists a variant twice")
    spills = tuple(
        (int(line.split()[0]), tuple(re.findall(r"\bsm_\w+", line))) for line in _comments(content, "spills")
    )
    return replace(_source(name, variants, functions, kernels), spills=spills)


def sources() -> tuple[Source, ...]:
    """Every .cu file of the folder, by name."""
    return tuple(source(path.name) for path in sorted(FOLDER.glob("*.cu")))


@functools.cache
def uses(operation: str) -> dict[str, tuple[str, ...]]:
    """Source -> functions of it that the engine may launch for an operation of the kernel contract, the
    source first whose name is most like the operation's; nothing for one that launches none."""
    found = {
        entry.name: tuple(f for f in entry.functions if entry.launched_by(f, operation))
        for entry in sorted(
            sources(), key=lambda e: -difflib.SequenceMatcher(None, e.name, operation).ratio()
        )
    }
    return {name: functions for name, functions in found.items() if functions}


def defines(**values: str) -> Defines:
    """A set of defines in its canonical order, by name."""
    return tuple(sorted(values.items()))


def _comments(content: str, key: str) -> list[str]:
    found = re.findall(rf"^// {key}:\s*(.*(?:\n//   .*)*)$", content, re.M)
    return [re.sub(r"\n//\s*", " ", line) for line in found]


def _split(line: str, separator: str) -> list[str]:
    return [part.strip() for part in line.split(separator) if part.strip()]


def _product(name: str, line: str) -> list[Defines]:
    axes = []
    for axis in _split(line, ";"):
        keys, equals, values = axis.partition("=")
        names, choices = keys.split(), [value.split() for value in _split(values, ",")]
        if not equals or any(len(choice) != len(names) for choice in choices):
            raise ValueError(f"{name}: variants: {axis!r} is not KEY=value,value or KEY KEY=value value")
        axes.append([list(zip(names, choice, strict=True)) for choice in choices])
    return [tuple(sorted(itertools.chain(*choice))) for choice in itertools.product(*axes)]


def _kernels(name: str, content: str) -> dict[str, tuple[str, tuple[str, ...], bool]]:
    """function -> (parameter codes, types pointed to, whether it waits for the kernel in front) of every
    kernel that a text defines."""
    return {
        match[1]: (*_parameters(name, match[1], match[2]), _starts_early(content, match))
        for match in _KERNEL.finditer(content)
    }


def _starts_early(content: str, match: re.Match[str]) -> bool:
    """Whether a kernel waits before all else, and has no pointer whose loads the compiler may do before."""
    return _EARLY.match(content, match.end()) is not None and "__restrict__" not in match[2]


def _source(
    name: str,
    variants: tuple[Defines, ...],
    operations: dict[str, tuple[str, ...]],
    kernels: dict[str, tuple[str, tuple[str, ...], bool]],
) -> Source:
    return Source(
        name,
        tuple(operations),
        variants,
        {function: codes for function, (codes, _, _) in kernels.items()},
        {function: pointers for function, (_, pointers, _) in kernels.items()},
        frozenset(function for function, (_, _, early) in kernels.items() if early),
        operations,
    )


def _parameters(name: str, function: str, declared: str) -> tuple[str, tuple[str, ...]]:
    codes, pointed = "", []
    parts = _split(_COMMENT.sub("", declared), ",")
    for position, parameter in enumerate(parts):
        words = [
            w
            for w in parameter.replace("*", " * ").split()
            if w not in ("const", "__restrict__", "__grid_constant__")
        ]
        pointed.append(words[0] if "*" in words else "")
        if "*" in words:
            codes += "q"
        elif words[0] in _SCALARS:
            codes += _SCALARS[words[0]]
        elif position == len(parts) - 1:
            codes += "s"
        else:
            raise ValueError(
                f"{name}: {function}: {parameter!r} is neither a pointer, i64, u64 nor f64 "
                "(a structure must come last)"
            )
    return codes, tuple(pointed)
