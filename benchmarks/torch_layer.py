"""The PyTorch door beside plain torch, fp8kit's native library and, where they are installed, Transformer Engine and torchao.

    python -m benchmarks.torch_layer --out benchmarks/results/h200/torch_layer.json

Times forward and backward of a TransformerLayer, a LayerNormMLP and a Linear at a large size, and the host's time at small ones, then the
FP8 products alone. All cases of a workload have the same random weights and data, run in turn in one process, and are checked against a
float32 reference: ``error_y`` and ``error_dx`` are ||got - exact|| / ||exact||, for the layer without the residual stream (y - x, dx - dy).
``gpu_ms``: median time of a call, calls queued back to back, by CUDA events, so the host's where the host is slower; ``host_us``: median
time until a call returns, the device idle before; ``peak_gib``: the case's parameters, gradients and all that a step allocates, without
its input; ``first_step_s``: making the module and its first step, compilation included. The CPU has ``host_us`` alone. What is not
installed or fails has a ``status`` that says so. Returns 1 where a case of fp8kit fails or its error is too large.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fp8kit_torch as ft
import torch
from torch import Tensor

from benchmarks import torch_gemms, torch_timing
from benchmarks.torch_cases import EAGER, PEERS, Problem, Step, Unavailable, bounds, cases, make_problem, version_of
from benchmarks.torch_plain import plain
from fp8kit.bench import versions

WARMUPS = 3  # steps before a result is compared: delayed scaling has seen the values then


@dataclass(frozen=True)
class Workload:
    """What is timed under ``name``: a module of ``kind`` and ``sizes`` on (batch, sequence) tokens; ``compile``: torch.compile too."""

    name: str
    kind: str
    sizes: tuple[int, ...]
    batch: int
    sequence: int
    compile: bool = False


def workloads(o: argparse.Namespace) -> list[Workload]:
    """Those that the arguments ask for."""
    hidden, ffn, heads, sequence, batch = o.layer
    small = o.small
    tokens, columns, rows = o.linear
    every = [
        Workload("layer", "TransformerLayer", (hidden, ffn, heads), batch, sequence, o.compile != "none"),
        Workload("mlp", "LayerNormMLP", (hidden, ffn), batch, sequence),
        Workload("linear", "Linear", (hidden, ffn), batch, sequence),
        Workload("small-layer", "TransformerLayer", tuple(small[:3]), small[4], small[3]),
        Workload("small-linear", "Linear", (columns, rows), 1, tokens),
    ]
    return [w for w in every if w.name in o.only]


def relative(got: Tensor, exact: Tensor) -> float:
    """``||got - exact|| / ||exact||``, the sums in float64."""
    return float((got.double() - exact).norm() / exact.double().norm())


def branches(kind: str, y: Tensor, dx: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """y and dx in float32, of a TransformerLayer without what its residual stream carries: that would hide the error."""
    y, dx = y.float(), dx.float()
    return (y - x, dx - dy) if kind == "TransformerLayer" else (y, dx)


def reference(problem: Problem) -> tuple[Tensor, Tensor]:
    """(y, dx) of the plain module in float32."""
    module = plain(problem.kind, problem.sizes, problem.weights, torch.float32)
    leaf = problem.x.float().requires_grad_()
    y = module(leaf)
    y.backward(problem.dy.float())
    assert leaf.grad is not None
    return branches(problem.kind, y.detach(), leaf.grad, problem.x, problem.dy)


def reason(error: Exception) -> str:
    """Why a case did not run, in one line."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, Unavailable) else f"failed: {type(error).__name__}: {text}"


def measure(work: Workload, o: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All figures of one workload."""
    problem = make_problem(work.kind, work.sizes, work.batch, work.sequence, o.layout, o.compile, device, o.seed)
    exact = reference(problem)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name, case in cases(problem, work.compile).items():
        rows[name] = row = {"case": name, "status": "ok"}
        memory = torch_timing.Memory() if device.type == "cuda" else None
        start = time.perf_counter()
        try:
            step = case(problem)
            step()
            row["first_step_s"] = time.perf_counter() - start
            for _ in range(WARMUPS):
                result = step()
            got = branches(work.kind, *step.results(*result), problem.x, problem.dy)
        except Exception as error:  # what one library cannot do here must not cost the other figures; it is reported
            row["status"] = reason(error)
            continue
        row["error_y"], row["error_dx"] = (relative(*pair) for pair in zip(got, exact, strict=True))
        limits = bounds(name, work.kind)
        if not (row["error_y"] < limits[0] and row["error_dx"] < limits[1]):
            row["status"] = f"wrong: errors above {limits[0]:.3f}, {limits[1]:.3f}"
        del result, got
        if memory is not None:
            row["peak_gib"] = memory.peak_gib(step)
        steps[name] = step
    _time(rows, steps, o, device)
    return {"name": work.name, "kind": work.kind, "sizes": list(work.sizes), "batch": work.batch, "sequence": work.sequence,
            "cases": list(rows.values())}


def _time(rows: dict[str, dict[str, Any]], steps: dict[str, Any], o: argparse.Namespace, device: torch.device) -> None:
    """Fill in the times, and their ratio to torch eager's."""
    found = {"host_us": torch_timing.host_microseconds(steps, ft.as_view(torch.empty(1, device=device)).device, o.rounds, o.calls)}
    if device.type == "cuda":
        found["gpu_ms"] = torch_timing.gpu_milliseconds(steps, o.rounds, o.calls)
    for key, times in found.items():
        for name, value in times.items():
            rows[name][key] = value
            if EAGER in times:
                rows[name][f"{key[:-3]}_ratio"] = value / times[EAGER]


def gemms(o: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The layer's four forward products."""
    hidden, ffn, _, sequence, batch = o.layer
    tokens, found = sequence * batch, []
    for shape in ((tokens, 3 * hidden, hidden), (tokens, hidden, hidden), (tokens, ffn, hidden), (tokens, hidden, ffn)):
        generator = torch.Generator(device).manual_seed(o.seed)
        made, corner = torch_gemms.products(shape, device, generator)
        rows: dict[str, dict[str, Any]] = {}
        steps = {}
        for name, case in made.items():
            rows[name] = row = {"case": name, "status": "ok"}
            try:
                step = case()
                got = step()
            except Exception as error:  # as in ``measure``
                row["status"] = reason(error)
                continue
            row["error"] = relative(got[: torch_gemms.CORNER, : torch_gemms.CORNER], corner)
            if not row["error"] < torch_gemms.BOUND:
                row["status"] = f"wrong: error above {torch_gemms.BOUND:.4f}"
            steps[name] = step
        _time(rows, steps, o, device)
        for row in rows.values():
            if "gpu_ms" in row:
                row["tflops"] = 2e-9 * shape[0] * shape[1] * shape[2] / row["gpu_ms"]
        found.append({"rows": shape[0], "columns": shape[1], "depth": shape[2], "cases": list(rows.values())})
    return found


# --- the report -------------------------------------------------------------------------------------------------------

COLUMNS = {"gpu_ms": "9.3f", "gpu_ratio": "9.3f", "host_us": "10.1f", "host_ratio": "10.3f", "peak_gib": "8.3f", "error_y": "8.4f",
           "error_dx": "8.4f", "tflops": "7.0f", "error": "8.5f"}  # fmt: skip


def table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """The rows under a title, as aligned lines; figures that were not taken are left out, a status other than "ok" ends the line."""
    columns = {name: form for name, form in COLUMNS.items() if any(name in row for row in rows)}
    width = max(len(row["case"]) for row in rows)

    def cell(row: dict[str, Any], name: str, form: str) -> str:
        size = max(int(form.partition(".")[0]), len(name))
        return f"{row[name]:{size}.{form.partition('.')[2]}}" if name in row else " " * size

    header = "  ".join([" " * width, *(f"{name:>{max(int(form.partition('.')[0]), len(name))}}" for name, form in columns.items())])
    lines = [title, header]
    for row in rows:
        status = "" if row["status"] == "ok" else row["status"]
        lines.append("  ".join([f"{row['case']:{width}}", *(cell(row, *column) for column in columns.items()), status]).rstrip())
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, defaults filled in."""
    names = ("layer", "mlp", "linear", "small-layer", "small-linear", "gemms")
    layer = ("HIDDEN", "FFN", "HEADS", "SEQUENCE", "BATCH")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--layer", type=int, nargs=5, default=(4096, 16384, 32, 2048, 4), metavar=layer, help="of all but the small ones")
    parser.add_argument("--small", type=int, nargs=5, default=(768, 3072, 12, 1024, 8), metavar=layer, help="of small-layer")
    parser.add_argument("--linear", type=int, nargs=3, default=(64, 4096, 4096), metavar=("TOKENS", "IN", "OUT"), help="of small-linear")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"some of {', '.join(names)}")
    parser.add_argument("--compile", help="torch.compile's backend for the layer, or none (inductor; on the CPU aot_eager)")
    parser.add_argument("--layout", choices=("sbhd", "bshd"), default="sbhd", help="of fp8kit's and TE's data (%(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each case (%(default)s)")
    parser.add_argument("--calls", type=int, default=5, help="counted calls in a turn (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    options = parser.parse_args(arguments)
    options.compile = options.compile or ("inductor" if options.device == "cuda" else "aot_eager")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables as they come and write the JSON file, after each workload. Returns 1 where a case of fp8kit is not "ok"."""
    o = parse(arguments)
    start, device = time.perf_counter(), torch.device(o.device)
    gpu = device.type == "cuda"
    report: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "device": o.device, "python": platform.python_version(),
        "versions": versions() | {name: version_of(name) for name in PEERS},
        "settings": {key: value for key, value in vars(o).items() if key not in ("out", "device")},
        "clocks": [torch_timing.gpu_under_load()] if gpu else [], "workloads": [], "gemms": [],
    }  # fmt: skip
    o.out.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        report["seconds"] = time.perf_counter() - start
        o.out.write_text(json.dumps(report, indent=1) + "\n")

    for work in workloads(o):
        found = measure(work, o, device)
        report["workloads"].append(found)
        print(table(f"{work.name}: {work.kind}{work.sizes}, {work.batch} x {work.sequence} tokens", found["cases"]), flush=True)
        torch_timing.free_memory()
        write()
    if "gemms" in o.only:
        report["gemms"] = gemms(o, device)
        for product in report["gemms"]:
            print(table("product {rows} x {columns} x {depth}".format(**product), product["cases"]), flush=True)
    if gpu:
        report["clocks"].append(torch_timing.gpu_under_load())
    write()
    print(f"{report['machine']}, {report['seconds']:.0f} s, clocks under load: {report['clocks']}")
    every = [row for part in (*report["workloads"], *report["gemms"]) for row in part["cases"]]
    return int(any(row["status"] != "ok" for row in every if row["case"].startswith("fp8kit")))


if __name__ == "__main__":
    sys.exit(main())
