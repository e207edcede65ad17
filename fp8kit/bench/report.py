"""What a benchmark run leaves behind: rows of figures, part by part, as a table and as JSON with versions and clocks.

A part is a function from a ``Setting`` to rows. A row is a flat dictionary: ``workload`` and ``case`` name it, ``status`` is "ok", or why
there is no figure ("not installed", "left out: ...", "failed: ..."), or that it is one of a wrong result ("WRONG: ..."). The rest are
figures:

* ``gpu_ms``: median time of a call, calls queued back to back; ``host_us``: median time until a call returns, the device idle before.
* ``error_y``, ``error_dx``, ``error``: ||got - exact|| / ||exact|| against float32, of a layer without its residual stream.
* ``peak_gib``: parameters, gradients and all that a step allocates. ``first_step_s``: making the module and its first step.
* ``tbps``: 10^12 bytes a second, read and written; ``tflops``: 10^12 floating-point operations a second; ``of_copy``, ``of_best``: shares.
"""

from __future__ import annotations

import gc
import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import fp8kit
from fp8kit.arrays import CPU, Device
from fp8kit.bench.sizes import FULL, SMALL, Sizes

PACKAGES = ("numpy", "ml_dtypes", "numba", "tbb", "matplotlib", "cupy-cuda13x", "nvmath-python", "cuda-bindings",
            "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "torch", "jax", "jax-tvm-ffi")
Row = dict[str, Any]
# figure -> how it is printed
COLUMNS = {"gpu_ms": "9.3f", "host_us": "9.1f", "peak_gib": "8.3f", "first_step_s": "7.3f", "seconds": "7.3f", "tbps": "6.3f",
           "tflops": "6.0f", "of_copy": "7.3f", "of_best": "7.3f", "ratio": "6.3f", "value": "10.3f", "unit": "s", "mib": "9.3f",
           "error_y": "7.4f", "error_dx": "8.4f", "error": "8.5f"}  # fmt: skip


class Unavailable(Exception):
    """A case that cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """How a run is made. ``rounds`` turns of each contender, ``calls`` counted calls in a turn, after ``warmups``. ``deadline``: of the
    whole run, on ``time.monotonic``, None for none; a part begins nothing new after it. ``out``: folder of the plots, None for none."""

    device: Device = CPU
    sizes: Sizes = FULL
    rounds: int = 6
    calls: int = 5
    warmups: int = 2
    seed: int = 0
    deadline: float | None = None
    out: Path | None = None

    def left(self) -> float:
        """Seconds until the deadline, infinity without one."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def within(self, seconds: float) -> Setting:
        """The same, for a part that may take so many seconds at most."""
        end = time.monotonic() + seconds
        return replace(self, deadline=end if self.deadline is None else min(end, self.deadline))


def setting_for(device: Device, **given: Any) -> Setting:
    """Full sizes on a GPU, small ones and few rounds on the CPU."""
    usual: dict[str, Any] = {} if device.kind == "cuda" else {"sizes": SMALL, "rounds": 2, "calls": 2, "warmups": 1}
    return Setting(device, **usual | given)


@dataclass(frozen=True)
class Part:
    """``run`` under a name; ``about`` says in a line what it measures. ``usual``: whether it runs where no part is named."""

    name: str
    about: str
    run: Callable[[Setting], list[Row]]
    usual: bool = True


@dataclass
class Report:
    """A run's results: ``about`` the run, and the rows of its ``parts`` by name."""

    about: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    targets: list[Row] = field(default_factory=list)

    def rows(self, part: str) -> list[Row]:
        """The rows of a part, none where it did not run."""
        found: list[Row] = self.parts.get(part, {}).get("rows", [])
        return found

    def failures(self, ours: Callable[[Row], bool] = lambda row: True) -> list[str]:
        """A line for each part that failed and each row among ``ours`` that did or is wrong; not for what is left out or not installed."""
        lines = [f"{name}: {part['status']}" for name, part in self.parts.items() if bad(part["status"])]
        return lines + [f"{name}: {row['workload']}: {row['case']}: {row['status']}" for name in self.parts for row in self.rows(name)
                        if ours(row) and bad(row["status"])]

    def write(self, path: Path) -> None:
        """As JSON. The folder must be there."""
        path.write_text(json.dumps({"about": self.about, "parts": self.parts, "targets": self.targets}, indent=1) + "\n")


def read(path: Path) -> Report:
    """What ``Report.write`` wrote."""
    found = json.loads(path.read_text())
    return Report(found["about"], found["parts"], found["targets"])


def bad(status: str) -> bool:
    """Whether a status tells of a failure or a wrong result."""
    return status.startswith(("failed", "WRONG"))


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Package name -> installed version, or "not installed", of what fp8kit can use."""
    found = {"fp8kit": fp8kit.__version__}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def reason(error: Exception) -> str:
    """Why a case did not run, in one line: a status."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, Unavailable) else f"failed: {type(error).__name__}: {text}"


def machine(device: Device) -> str:
    """The GPU's or the processor's name."""
    if device.kind == "cpu":
        return platform.processor() or platform.machine()
    from fp8kit.backends.cuda import launch

    return str(launch.runtime().getDeviceProperties(device.index)["name"].decode())


def run(parts: Sequence[Part], setting: Setting, write: Callable[[Report], object] = lambda report: None,
        say: Callable[[str], object] = print, more: Mapping[str, Any] | None = None,
        clocks: Callable[[], dict[str, str]] | None = None) -> Report:
    """Run the parts in order; one that fails is reported and costs the others nothing. ``write`` gets the report after each of them.

    ``more``: further entries of ``Report.about``. ``clocks``: the GPU's state under load, asked before and after.
    """
    start = time.perf_counter()
    about = {"machine": machine(setting.device), "device": setting.device.kind, "python": platform.python_version(), "versions": versions(),
             "settings": {"rounds": setting.rounds, "calls": setting.calls, "warmups": setting.warmups, "seed": setting.seed,
                          "sizes": setting.sizes.name}, "clocks": []}  # fmt: skip
    report = Report(about | dict(more or {}))

    def look() -> None:
        if clocks is not None:
            report.about["clocks"].append(clocks())

    look()
    for part in parts:
        before = time.perf_counter()
        rows: list[Row] = []
        if setting.left() <= 0:
            status = "left out: no time"
        else:
            try:
                rows, status = part.run(setting), "ok"
            except Exception as error:  # one part's failure must not cost the figures of the others; it is reported
                status = reason(error)
        gc.collect()
        report.parts[part.name] = {"status": status, "seconds": time.perf_counter() - before, "rows": rows}
        say(text(part.name, report.parts[part.name]))
        report.about["seconds"] = time.perf_counter() - start
        write(report)
    look()
    write(report)
    return report


def text(name: str, part: Mapping[str, Any]) -> str:
    """A part as aligned lines, one block a workload; figures that nobody has are left out."""
    status = "" if part["status"] == "ok" else f": {part['status']}"
    lines = [f"== {name} ({part['seconds']:.1f} s){status}"]
    rows: list[Row] = part["rows"]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        lines += ["", *table(workload, [row for row in rows if row["workload"] == workload])]
    return "\n".join(lines) + "\n"


def table(title: str, rows: Sequence[Row]) -> list[str]:
    """The rows under a title, as aligned lines; a status other than "ok" ends the line."""
    columns = {name: form for name, form in COLUMNS.items() if any(name in row for row in rows)}
    width = max(len(title), *(len(row["case"]) for row in rows))
    longest = max(len(str(row.get("unit", ""))) for row in rows)
    widths = {name: max(longest if form == "s" else int(form.partition(".")[0]), len(name)) for name, form in columns.items()}

    def cell(row: Row, name: str) -> str:
        form = columns[name].partition(".")[2]
        value = "" if name not in row else format(row[name], f".{form}") if form else str(row[name])
        return value.rjust(widths[name])

    lines = ["  ".join([title.ljust(width), *(name.rjust(widths[name]) for name in columns)])]
    for row in rows:
        status = "" if row["status"] == "ok" else row["status"]
        lines.append("  ".join([row["case"].ljust(width), *(cell(row, name) for name in columns), status]).rstrip())
    return lines


def add_times(rows: Mapping[str, Row], key: str, times: Mapping[str, float], factor: float) -> None:
    """Put each time, in seconds, into the row of its name as ``key``."""
    for name, seconds in times.items():
        rows[name][key] = seconds * factor
