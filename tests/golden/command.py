"""The command: run cases, write their hashes or compare with written ones."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import fp8kit as fk
from tests.golden.cases import CASES, Case
from tests.golden.values import digest
from tests.golden.wide import WIDE

FRONTENDS = ("native", "torch", "jax")
Hashes = dict[str, dict[str, str]]
_PACKAGES = ("numpy", "numba", "torch", "jax", "jaxlib", "flax", "ml_dtypes", "cupy-cuda13x")
# of XLA's programs for the CPU: as ``make test`` has them, so that compiling takes less of the time
_XLA = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)


def selected(
    device: str, frontends: Iterable[str] = FRONTENDS, pattern: str = "*", cases: Iterable[Case] = CASES
) -> list[Case]:
    """The cases of these frontends that run on a device and whose names match."""
    return [
        case
        for case in cases
        if case.frontend in frontends and case.device in ("", device) and fnmatchcase(case.name, pattern)
    ]


def run(cases: Iterable[Case], device: str, say: bool = False) -> Hashes:
    """The hashes of every case by the names of its arrays; of a case that fails, also the error's type."""
    found: Hashes = {}
    frontends: dict[str, Any] = {}
    for case in cases:
        hashes = found[case.name] = {}
        try:
            if case.frontend not in frontends:
                module = importlib.import_module(f"tests.golden.run_{case.frontend}")
                frontends[case.frontend] = module.frontend(device)
            f = frontends[case.frontend]

            def record(name: str, value: Any, f: Any = f, hashes: dict[str, str] = hashes) -> None:
                hashes[name] = "none" if value is None else digest(f.host(value))

            started = time.process_time()
            with fk.deterministic():
                f.run(case, record)
            if say:
                print(f"{time.process_time() - started:7.3f} s {case.name}", file=sys.stderr)
        except Exception as error:
            hashes["error"] = type(error).__name__
            if say:
                traceback.print_exc()
            print(f"{case.name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    return found


def differences(want: Mapping[str, Mapping[str, str]], got: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each case of ``got`` that is new, and for each array that differs or is missing."""
    lines = []
    for name, hashes in got.items():
        if name not in want:
            lines.append(f"{name}: not in the file")
            continue
        for array in dict.fromkeys((*want[name], *hashes)):
            before, now = want[name].get(array, "missing"), hashes.get(array, "missing")
            if before != now:
                lines.append(f"{name}: {array}: {before} -> {now}")
    return lines


def about(device: str) -> dict[str, str]:
    """What the bits may depend on."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "none"
    variables = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "XLA_FLAGS")
    head = subprocess.run(
        ("git", "log", "-1", "--format=%h %cs %s"),
        cwd=Path(fk.__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "commit": head.stdout.strip() or "none",
        "device": device,
        "machine": platform.machine(),
        "python": platform.python_version(),
        **versions,
        **{name: os.environ.get(name, "") for name in variables},
    }


def write(path: Path, device: str, found: Hashes) -> None:
    """Write the hashes, an array a line; of a case that gives what an earlier one gave, the earlier one's
    name."""
    first: dict[str, str] = {}
    cases = {}
    for name, hashes in found.items():
        same = first.setdefault(json.dumps(hashes), name)
        cases[name] = hashes if same == name else same
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about(device), "cases": cases}, indent=0) + "\n")


def read(path: Path) -> tuple[dict[str, str], Hashes]:
    """What the bits may depend on, and the hashes, as ``write`` wrote them."""
    known = json.loads(path.read_text())
    cases = known["cases"]
    return known["about"], {name: cases[own] if isinstance(own, str) else own for name, own in cases.items()}


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the hashes")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print what differs from FILE's hashes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--frontend", nargs="+", choices=FRONTENDS, default=FRONTENDS)
    parser.add_argument("--case", default="*", metavar="PATTERN", help="of names, as native/steps/Linear*")
    parser.add_argument("--all", action="store_true", help="the cases of tests/golden/wide.py too")
    parser.add_argument("--exact", action="store_true", help="only the cases whose sums are exact")
    parser.add_argument("--say", action="store_true", help="print each case's time, and errors in full")
    options = parser.parse_args(argv)
    if options.write is None and options.compare is None:
        parser.error("one of --write and --compare is wanted")
    if options.device == "cpu":
        os.environ.setdefault("XLA_FLAGS", _XLA)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    gc.set_threshold(100_000, 50, 100)  # the frameworks make objects by the million, and few cycles
    cases = [
        case
        for case in selected(
            options.device, options.frontend, options.case, (*CASES, *WIDE) if options.all else CASES
        )
        if case.exact or not options.exact
    ]
    started = time.perf_counter()
    found = run(cases, options.device, options.say)
    count, failed = sum(map(len, found.values())), sum("error" in hashes for hashes in found.values())
    print(f"{len(found)} cases, {count} arrays, {failed} errors, {time.perf_counter() - started:.1f} s")
    if options.write is not None:
        write(options.write, options.device, found)
    if options.compare is None:
        return 0
    before, hashes = read(options.compare)
    for name, value in about(options.device).items():
        if before.get(name) != value:
            print(f"another {name}: {before.get(name)} -> {value}")
    lines = differences(hashes, found)
    print("\n".join(lines) if lines else f"no difference from {options.compare}")
    return int(bool(lines))
