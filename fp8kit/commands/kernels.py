"""``fp8kit kernels``: raw kernels listed, shown, compiled, checked, timed, compared with another version,
watched while one is edited."""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8kit import arrays
from fp8kit.arrays import CPU, Device
from fp8kit.backends.cuda.compile import CompiledKernel
from fp8kit.backends.protocol import KERNELS
from fp8kit.commands import add_device, command, device_of, said, table
from fp8kit.errors import ArgumentError, BackendError, Fp8kitError
from fp8kit.formats import DType
from fp8kit.lab import checks, sources, timing
from fp8kit.lab.overrides import override
from fp8kit.lab.sources import Found, Part
from fp8kit.raw_kernels import manifest

WRONG = 1  # exit status: a kernel is wrong, or does not compile
# exit status: what serves the CPU is right, or was timed; the CUDA kernel that was asked about could not be
# run
UNCHECKED = 3
POLL = 0.25  # seconds between two looks at a watched file
_BESIDE = {"gemm": ("fp8_gemm", "block_gemm")}  # what `bench` of a name shows, too
_SHOWN = re.compile(r"^// \S+\.cu: .*; for .*\n")  # what `show` puts before a source
_NO_GPU = "the CUDA kernel itself was not run: it needs a GPU"


def add(commands: Any) -> None:
    """Add the command to ``commands``, argparse's subparsers of ``fp8kit``."""
    what = "list, show, compile, check, time, compare and watch the raw CUDA kernels"
    parser = command(commands, "kernels", what)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    name = "a kernel of the contract, a raw kernel, a source, or a .cu file of your own that stands for one"
    arch_help = f"what to compile for (the GPU here, else {sources.DEFAULT_ARCH})"

    def action(
        word: str, about: str, run: Callable[[argparse.Namespace], int], *names: str, arch: bool = False
    ) -> argparse.ArgumentParser:
        found = command(actions, word, about, run)
        for each in names:
            found.add_argument(each, metavar=each.upper(), help=name)
        if arch:
            found.add_argument("--arch", metavar="ARCH", help=arch_help)
        return found

    action(
        "list",
        "every raw kernel: the kernels that launch it, variants, registers, shared memory, spills",
        _list,
        arch=True,
    )
    show = action("show", "a source, or its PTX or machine code", _show, "name", arch=True)
    kinds = show.add_mutually_exclusive_group()
    kinds.add_argument("--ptx", action="store_true", help="the PTX that NVRTC makes of it")
    kinds.add_argument("--sass", action="store_true", help="machine code (needs nvdisasm or cuobjdump)")
    compiled = action("compile", "every variant compiled, no GPU needed", _compile, "name", arch=True)
    about = f"the contract's cases; exit status {WRONG}: wrong, {UNCHECKED}: {_NO_GPU}"
    check = action("check", about, _on_device(_check), "name")
    check.add_argument("--only", default="", metavar="WORD", help="cases with this word in their name")
    bench = action(
        "bench",
        f"time, and the share of a copy's speed; of products and attention GFLOP/s; exit status {UNCHECKED}: "
        f"{_NO_GPU}",
        _on_device(_bench),
        "name",
    )
    for each in (check, bench):
        add_device(each)
    for each, of_it in (
        (show, "for --ptx, --sass: the variant (bfloat16, E4M3)"),
        (compiled, "variants with these defines (all)"),
        (check, "with other defines where the engine launches these"),
        (bench, "with other defines where the engine launches these"),
    ):
        more = ", NAME=OLD:NEW compiles NEW in OLD's place"
        each.add_argument("--variant", default="", metavar="NAME=VALUE,...", help=of_it + more)
    bench.add_argument(
        "--shape",
        type=int,
        nargs="+",
        action="append",
        metavar="N",
        help="of the arrays: rows and columns, these a multiple of 128; of a product rows, columns and "
        "perhaps terms, the last of them a multiple of 16; may be given several times",
    )
    bench.add_argument(
        "--split", action="store_true", help="products with promoted sums, not by fast accumulation"
    )
    bench.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("float32", "bfloat16", "float16"),
        help="of the arrays (%(default)s)",
    )
    action(
        "diff",
        "two versions side by side: source, resources, and on a GPU time and errors",
        _diff,
        "a",
        "b",
        arch=True,
    )
    watch = action(
        "watch", "compile a file at every change; on a GPU also check and time it", _watch, "file", arch=True
    )
    watch.add_argument("--rounds", type=int, metavar="N", help="stop after N versions (Ctrl-C)")


def _arch(options: argparse.Namespace) -> str:
    from fp8kit.backends.cuda import compile as compiler

    if options.arch is not None:
        with suppress(BackendError):  # no NVRTC: what would compile says so
            compiler.want_architecture("kernels", "--arch", options.arch)
        return str(options.arch)
    if not arrays.available("cuda"):
        return sources.DEFAULT_ARCH
    from fp8kit.backends.cuda import launch

    return compiler.arch_of(launch.capability(0))


def _say(text: str) -> None:
    print(f"fp8kit kernels: {text}", file=sys.stderr)


# --- list, show, compile ------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> int:
    """Resources are those of one variant of each source: all of them are what ``compile`` shows."""
    from fp8kit.backends.cuda import compile as compiler

    arch, parts = _arch(options), [Part(entry, entry, entry.functions) for entry in manifest.sources()]
    found: list[dict[str, Any]] = [{} for _ in parts]
    try:
        compiler.nvrtc_version()
    except BackendError as error:
        _say(f"no resources: {error}")
    else:
        jobs = [(part, part.variant()) for part in parts]
        found = [kernel.resources for kernel in _compiled(jobs, arch, "sources")]
    rows = [
        (
            f"{part.entry.name}:{function}",
            " ".join(sources.users(part.entry.name, function)),
            _axes(part.entry),
            manifest.said(part.variant()),
            *_resources(used.get(function)),
        )
        for part, used in zip(parts, found, strict=True)
        for function in part.functions
    ]
    head = ("raw kernel", "kernels", "variants", f"shown for {arch}", "registers", "shared", "spills")
    table(head, rows, fit=True)
    return 0


def _axes(entry: manifest.Source) -> str:
    """The variants as one writes them in a source's head; for a union of products, all values of each key."""
    axes: dict[str, dict[str, None]] = {}
    for variant in entry.variants:
        for key, value in variant:
            axes.setdefault(key, {})[value] = None
    return "; ".join(f"{key}={','.join(values)}" for key, values in axes.items()) or "-"


def _resources(used: Any) -> tuple[str, str, str]:
    if used is None:
        return "", "", ""
    return str(used.registers), str(used.shared), str(used.spill_stores + used.spill_loads + used.stack)


def _show(options: argparse.Namespace) -> int:
    found = sources.find(options.name)
    if options.variant and not (options.ptx or options.sass):
        wanted = "--ptx or --sass beside it: all variants have one source"
        raise ArgumentError("kernels", "--variant", repr(options.variant), wanted)
    for part in found.parts:
        if not (options.ptx or options.sass):
            print(f"// {part.entry.name}: {', '.join(part.functions)}; for {', '.join(found.operations)}")
            print(part.text.rstrip())
            continue
        from fp8kit.backends.cuda import compile as compiler

        defines, arch = part.variant(options.variant), _arch(options)
        if options.ptx:
            text = compiler.compile_ptx(part.entry.name, defines, arch, part.unit)
        else:
            text = sources.sass(part.compiled(defines, arch).path)
        print(f"// {part.entry.name}, {manifest.said(defines)}, {arch}")
        print(text.rstrip())
    return 0


def _compile(options: argparse.Namespace) -> int:
    _print_resources(sources.find(options.name), _arch(options), options.variant)
    return 0


def _compiled(jobs: list[tuple[Part, manifest.Defines]], arch: str, what: str) -> list[CompiledKernel]:
    """The jobs' kernels, compiled by several threads: NVRTC lets go of the interpreter. On a terminal a bar
    shows how far that is."""
    from fp8kit.models.progress import tracked

    _say(f"{len(jobs)} {what} for {arch}, compiled where they are not in the cache yet")
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        return list(tracked(pool.map(lambda job: job[0].compiled(job[1], arch), jobs), what, len(jobs)))
    finally:  # where one does not compile, or at Ctrl-C, the others are not waited for
        pool.shutdown(cancel_futures=True)


def _print_resources(found: Found, arch: str, wanted: str = "") -> None:
    jobs = [(part, defines) for part in found.parts for defines in part.variants(wanted)]
    rows = []
    for (part, defines), kernel in zip(jobs, _compiled(jobs, arch, "variants"), strict=True):
        for function in part.functions:
            used = _resources(kernel.resources.get(function))
            rows.append((f"{part.entry.name}:{function}", manifest.said(defines), *used))
        for line in kernel.log.splitlines():
            if "warning" in line.lower():
                print(line, file=sys.stderr)
    table((f"raw kernel for {arch}", "variant", "registers", "shared", "spills"), rows)


# --- check, bench -------------------------------------------------------------------------------------------


def _on_device(run: Callable[[argparse.Namespace, Found, Device], int]) -> Callable[..., int]:
    """``run`` with what is named, on the device that is asked for, else CUDA where it is usable, whatever
    FP8KIT_DEVICE says. Its status is ``UNCHECKED`` where the one that is asked for is not here."""

    def at(options: argparse.Namespace) -> int:
        found = sources.find(options.name)
        try:
            asked = device_of(options) if options.device else None
        except BackendError as error:
            _say(f"{error}; {_NO_GPU}")
            return UNCHECKED
        return run(options, found, asked or (Device("cuda") if arrays.available("cuda") else CPU))

    return at


def _with(found: Found, operation: str, variant: str, own: bool = False) -> AbstractContextManager[Any]:
    """The file's kernels in the place of fp8kit's, where the name is a file; the source's itself, with other
    defines, or ``own``, where what is named is not what is in force."""
    if found.file is None and not variant and not own:
        return nullcontext()
    text = manifest.text(found.parts[0].entry.name) if found.file is None else found.file
    return override(operation, text, defines=variant)


def _lacks_gpu(found: Found, device: Device, variant: str) -> bool:
    """Whether the name is a file, or a variant is asked for, which no other device can run; then that is
    said. ArgumentError for a variant of a name that has several sources."""
    for part in found.parts:
        part.variants(variant)  # refuses
    if variant and len(found.parts) > 1:
        of_them = " or ".join(part.entry.name for part in found.parts)
        raise ArgumentError(
            "kernels", "--variant", repr(variant), f"a name of one source beside it, {of_them}"
        )
    lacks = (found.file is not None or bool(variant)) and device.kind != "cuda"
    if lacks:
        _say(f"{found.name}: {_NO_GPU}; `fp8kit kernels compile` needs none")
    return lacks


def _is_wrong(
    found: Found, device: Device, only: str = "", lead: str = "", most: int = 5, variant: str = ""
) -> bool:
    """Check the operations, and print what came out, each line after ``lead``, with ``most`` failures."""
    from fp8kit.backends.cuda import OWN

    own = device.kind == "cuda" and found.name not in KERNELS and found.parts[0].like.name in OWN
    wrong = False
    for operation in [op for op in found.operations if checks.chosen(op, only)] or found.operations[:1]:
        with _with(found, operation, variant, own):
            report = checks.check(operation, device, only)
        print(f"{lead}{report}")
        for name, what in report.failures[:most]:
            print(f"{lead}  {name}: {what}")
        wrong = wrong or bool(report.failures)
    return wrong


def _check(options: argparse.Namespace, found: Found, device: Device) -> int:
    if _lacks_gpu(found, device, options.variant):
        return UNCHECKED
    wrong = _is_wrong(found, device, options.only, variant=options.variant)
    if device.kind == "cpu" and not options.device:
        _say(_NO_GPU)
        return WRONG if wrong else UNCHECKED
    return WRONG if wrong else 0


def _time(
    found: Found,
    device: Device,
    lead: str = "",
    shapes: Sequence[Sequence[int]] | None = None,
    dtype: DType | str = "bfloat16",
    variant: str = "",
    **more: Any,
) -> None:
    """Time the operations, and print what came out; ``more``: options of those that have them."""
    every: Sequence[Sequence[int] | None] = shapes or [None]
    for operation, shape in itertools.product(found.operations, every):
        with _with(found, operation, variant):
            size = None if shape is None else tuple(shape)
            options = {name: value for name, value in more.items() if timing.has_option(operation, name)}
            for each in timing.measure_all(operation, device, size, dtype, **options):
                print(f"{lead}{each}")


def _bench(options: argparse.Namespace, found: Found, device: Device) -> int:
    if _lacks_gpu(found, device, options.variant):
        return UNCHECKED
    found = replace(found, operations=(*found.operations, *_BESIDE.get(found.name, ())))
    more = {"fast": False} if options.split else {}
    _time(found, device, "", options.shape, options.dtype, options.variant, **more)
    if device.kind == "cpu" and not options.device:
        _say(_NO_GPU)
        return UNCHECKED
    return 0


# --- diff, watch --------------------------------------------------------------------------------------------


def _same_source(a: Found, b: Found) -> tuple[Part, Part]:
    """One part of each, of the same source. ArgumentError where they share none."""
    pairs = [(x, y) for x in a.parts for y in b.parts if x.like.name == y.like.name]
    if not pairs:
        wanted = f"a version of {' or '.join(part.like.name for part in a.parts)}, as {a.name} is"
        raise ArgumentError("kernels", "b", repr(b.name), wanted)
    return pairs[0]


def _diff(options: argparse.Namespace) -> int:
    found = [sources.find(options.a), sources.find(options.b)]
    parts, arch = _same_source(found[0], found[1]), _arch(options)
    texts = [_SHOWN.sub("", part.text).splitlines() for part in parts]
    difference = difflib.unified_diff(texts[0], texts[1], options.a, options.b, lineterm="")
    print("\n".join(difference) or "the sources are the same")
    used = [part.compiled(part.variant(), arch).resources for part in parts]
    functions = list(dict.fromkeys(f for part in parts for f in part.functions))
    rows = []
    for function in functions:
        pairs = zip(*(_resources(each.get(function)) for each in used), strict=True)
        rows.append((function, *itertools.chain(*pairs)))
    heads = [f"{what} {side}" for what in ("registers", "shared", "spills") for side in "AB"]
    table((f"{manifest.said(parts[0].variant())}, {arch}", *heads), rows)
    if not arrays.available("cuda"):
        print("time and errors of both: they need a GPU")
        return 0
    both = tuple(op for op in found[0].operations if op in found[1].operations)
    wrong = [
        _look(replace(one, operations=both), Device("cuda"), f"{side}: ")
        for side, one in zip("AB", found, strict=True)
    ]
    return WRONG if any(wrong) else 0


def _look(found: Found, device: Device, lead: str = "") -> bool:
    """Check and time, printed; whether anything is wrong."""
    wrong = _is_wrong(found, device, lead=lead, most=1)
    _time(found, device, lead)
    return wrong


def _watch(options: argparse.Namespace) -> int:
    path = Path(options.file)
    if path.suffix != ".cu" or not path.is_file():
        raise ArgumentError("kernels", "file", repr(options.file), "a .cu file that is there")
    return watch(path, _arch(options), options.rounds)


def watch(
    path: Path, arch: str, rounds: int | None = None, sleep: Callable[[float], object] = time.sleep
) -> int:
    """Compile ``path`` for ``arch`` now and whenever it, or a header beside it, changes, and print what came
    out; with a GPU also whether it is right and how fast. ``rounds``: versions to look at, None until Ctrl-C;
    ``sleep`` waits between two looks. The last status."""
    status, seen, done = 0, None, 0
    while rounds is None or done < rounds:
        now = _stamps(path)
        if now == seen:
            sleep(POLL)
            continue
        seen, done = now, done + 1
        print(f"--- {path.name}, {time.strftime('%H:%M:%S')}")
        try:
            found = sources.find(str(path))
            _print_resources(found, arch)
            status = 0
            if arrays.available("cuda"):
                status = WRONG if _look(found, Device("cuda")) else 0
            else:
                print(_NO_GPU)
        # a version that is half written, or wrong: the next one may be better
        except (Fp8kitError, OSError) as error:
            print(said("kernels", error), file=sys.stderr)
            status = WRONG
        sys.stdout.flush()
    return status


def _stamps(path: Path) -> dict[str, int]:
    """When the file and the headers beside it were written; a file that an editor is just replacing is
    missing."""
    found = {}
    for each in (path, *sorted(path.parent.glob("*.cuh"))):
        with suppress(OSError):
            found[each.name] = each.stat().st_mtime_ns
    return found
