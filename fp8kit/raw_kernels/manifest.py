"""What the kernel sources hold: functions, their parameters, and every set of defines that the engine
compiles them with.

A source says so itself, in comments at its head::

    // functions: amax_tensor, amax_tiles
    // variants: T=f32,bf16,f16; FORMAT=e4m3,e5m2

Each ``variants`` line is the product of its lists; several lines are a union. A source without one has the
single empty set of defines. Kernels are ``extern "C" __global__`` functions (their names stay as written)
with parameters of four kinds only, so that the host can pack arguments without knowing more: pointers,
``i64`` (or ``u64``), ``f64``, and at most one structure by value, the last parameter.

``USES`` says which functions each operation of the kernel contract launches. A text from elsewhere that takes
the place of one of these sources (``foreign``) is read by the same rules; ``stands_for`` finds out which.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
Defines = tuple[tuple[str, str], ...]

_KERNEL = re.compile(
    r'extern "C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\s*\(([^)]*)\)', re.S
)
_EARLY = re.compile(r"\s*\{\s*start_early\(\);")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
_SCALARS = {"i64": "q", "u64": "q", "f64": "d"}


@dataclass(frozen=True)
class Source:
    """One .cu file: its ``name``, its ``functions``, every set of defines in ``variants``, and per function a
    string of parameter codes in ``parameters``: "q" a pointer or 64-bit integer, "d" a double, "s" a
    structure by value. ``pointers``: per function and parameter the type that it points to ("T", "u8",
    "float"), "" where it is no pointer. ``early``: the functions that may be launched before the kernel in
    front of them has ended, since ``start_early();`` (common.cuh), their first statement, waits for it, and
    none of their pointers is ``__restrict__``."""

    name: str
    functions: tuple[str, ...]
    variants: tuple[Defines, ...]
    parameters: dict[str, str]
    pointers: dict[str, tuple[str, ...]]
    early: frozenset[str]


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
            raise ValueError(
                f"{unit.name}: {function}: parameters {codes!r}, in {like.name} they are "
                f"{like.parameters[function]!r} (q: a pointer or 64-bit integer, d: a double, s: a structure)"
            )
    return _source(unit.name, tuple(read), like.variants, read)


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
            else "are not the functions of any source"
        )
        raise ValueError(f"{unit.name}: its functions ({', '.join(sorted(named)) or 'none'}) {what}")
    return like[0]


@functools.cache
def source(name: str) -> Source:
    """The manifest entry of one .cu file; ValueError when its comments and its code do not fit together."""
    content = text(name)
    functions = tuple(part for line in _comments(content, "functions") for part in _split(line, ","))
    variants = tuple(v for line in _comments(content, "variants") for v in _product(name, line)) or ((),)
    kernels = _kernels(name, content)
    if set(functions) != set(kernels) or len(set(variants)) != len(variants):
        raise ValueError(
            f"{name}: its comment lists {sorted(functions)}, it defines {sorted(kernels)}; "
            "variants must not repeat"
        )
    return _source(name, functions, variants, kernels)


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
    functions: tuple[str, ...],
    variants: tuple[Defines, ...],
    kernels: dict[str, tuple[str, tuple[str, ...], bool]],
) -> Source:
    codes, pointers = {f: part[0] for f, part in kernels.items()}, {f: part[1] for f, part in kernels.items()}
    return Source(
        name, functions, variants, codes, pointers, frozenset(f for f, part in kernels.items() if part[2])
    )


def _parameters(name: str, function: str, declared: str) -> tuple[str, tuple[str, ...]]:
    codes, pointed = "", []
    parts = _split(re.sub(r"//[^\n]*", "", declared), ",")
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


def _use(line: str) -> dict[str, tuple[str, ...]]:
    """``a.cu: f, g; b.cu: h`` as a table."""
    parts = (part.partition(":") for part in _split(line, ";"))
    return {name.strip(): tuple(_split(functions, ",")) for name, _, functions in parts}


# operation of the kernel contract -> source -> functions of it that the engine may launch for a call;
# operations without a line launch none
USES: dict[str, dict[str, tuple[str, ...]]] = {
    operation: _use(line)
    for operation, line in {
        "amax": "amax.cu: amax_tensor, amax_tiles",
        "amax_many": "amax.cu: amax_many",
        "scale_from_amax": "scales.cu: scale_from_amax",
        "update_delayed_": "scales.cu: update_delayed",
        "quantize": (
            "quantize.cu: quantize_fp8; quantize_any.cu: quantize_any; amax.cu: amax_tensor, amax_tiles"
        ),
        "dequantize": "quantize.cu: dequantize_fp8; quantize_any.cu: dequantize_any",
        "quantize_transpose": "quantize.cu: quantize_transpose; dropout.cu: sum_partials",
        "quantize_transpose_many": "quantize.cu: quantize_transpose_many",
        "block_quantize": "block.cu: block_quantize",
        "block_quantize_many": "block.cu: block_quantize_many",
        "gemm": "gemm.cu: finish",
        "fp8_gemm": "gemm.cu: finish",
        "block_gemm": "gemm.cu: finish",
        "norm_fwd": "norm_fwd.cu: norm_fwd; norm_any.cu: norm_fwd_any",
        "norm_bwd": "norm_bwd.cu: norm_bwd; norm_any.cu: norm_bwd_any; dropout.cu: sum_partials",
        "act_fwd": "activation.cu: act_fwd",
        "act_bwd": "activation.cu: act_bwd; dropout.cu: sum_partials",
        "dropout_add": "dropout.cu: dropout_add",
        "dropout_bwd": "dropout.cu: column_sums, sum_partials",
        "drop_path": "drop_path.cu: drop_path",
        "attention_fwd": (
            "attention.cu: attention_softmax; attention_padding.cu: attention_clean, attention_zero_padding, "
            "attention_lse_padding, attention_lengths"
        ),
        "attention_bwd": (
            "attention.cu: attention_softmax_bwd, attention_dbias, attention_doffset_partial, "
            "attention_doffset, attention_store; attention_padding.cu: attention_clean, "
            "attention_zero_padding, attention_lse_padding, attention_lengths"
        ),
        "unpack_sequences": "sequences.cu: unpack_sequences",
        "pack_sequences": "sequences.cu: pack_sequences",
        "cache_append_": "kv_cache.cu: cache_append",
        "cache_gather": "kv_cache.cu: cache_gather",
        "rope_fwd": "rope.cu: rope",
        "rope_bwd": "rope.cu: rope",
        "embedding_fwd": "embedding.cu: embedding_fwd",
        "embedding_bwd": "embedding.cu: embedding_bwd",
        "cross_entropy_fwd": "cross_entropy.cu: cross_entropy_fwd, cross_entropy_total",
        "cross_entropy_bwd": "cross_entropy.cu: cross_entropy_bwd",
        "adamw_": "optim.cu: adamw",
        "sgd_": "optim.cu: sgd",
        "scale_": "optim.cu: scale",
        "loss_scale_": "optim.cu: loss_scale",
        "count_": "optim.cu: count",
        "l2norm": "optim.cu: l2norm_parts, l2norm_total",
        "clip_": "optim.cu: clip",
        "copy": "convert.cu: convert; elementwise.cu: move1, move2, move4",
        "add": "elementwise.cu: add",
        "sum_rows": "dropout.cu: column_sums, sum_partials",
        "rng_next_": "elementwise.cu: rng_next",
    }.items()
}
