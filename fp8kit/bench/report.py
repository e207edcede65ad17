"""What a benchmark run leaves behind: rows of figures, part by part, as a table and as JSON with versions and
clocks.

A part is a function from a ``Setting`` to rows. A row is a flat dictionary: ``workload`` and ``case`` name
it, ``status`` is "ok", or why there is no figure ("not installed", "left out: ...", "failed: ..."), or that
it is one of a wrong result ("WRONG: ..."). The rest are figures:

* ``gpu_ms``: median time of a call, calls queued back to back, ``cpu_ms`` where the CPU computes;
  ``host_us``: time until a call returns, the device idle before: the quickest turn's
  (``timing.host_seconds``); ``host_us_median``: the median turn's.
* ``error_y``, ``error_dx``, ``error``: ||got - exact|| / ||exact|| against float32, of a layer without its
  residual stream.
* ``of_bound``: an error as a share of the largest that is allowed; ``check``: in words how else the result
  was checked.
* ``peak_gib``: parameters, gradients and all that a step allocates (on the CPU that alone). ``first_step_s``:
  making the module and its first step.
* ``tbps``: 10^12 bytes a second, read and written; ``tflops``: 10^12 floating-point operations a second;
  ``of_copy``, ``of_best``: shares. ``same``: share of elements with another program's bits; ``splits``: parts
  that a contraction is cut into.
"""

from __future__ import annotations

import gc
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import fp8kit
from fp8kit.arrays import CPU, Device
from fp8kit.bench.sizes import FULL, SMALL, Layer, Sizes
from fp8kit.bench.timing import Step, clock_for, interleaved, medians

ABSENT = "not installed"
# what fp8kit's extras bring, "" for fp8kit itself
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "": ("numpy", "ml_dtypes", "numba", "tbb", "rich"),
    "cuda13": (
        "cupy-cuda13x",
        "nvmath-python",
        "cuda-bindings",
        "nvidia-cudnn-cu13",
        "nvidia-cudnn-frontend",
    ),
    "distributed": ("nccl4py", "nvidia-nccl-cu13"),
    "torch": ("torch",),
    "jax": ("jax", "jax-tvm-ffi", "apache-tvm-ffi"),
    "flax": ("flax",),
    "demo": ("matplotlib",),
    "inspect": ("pyyaml",),
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
}
# those, and what CuPy and Flax bring
PACKAGES = (*(name for own in EXTRAS.values() for name in own), "nvidia-cuda-nvrtc", "optax")
Row = dict[str, Any]
# figure -> how it is printed
COLUMNS = {
    "gpu_ms": "9.3f",
    "cpu_ms": "9.3f",
    "host_us": "9.1f",
    "peak_gib": "8.3f",
    "first_step_s": "7.3f",
    "seconds": "7.3f",
    "same": "9.6f",
    "splits": "6.0f",
    "tbps": "6.3f",
    "tflops": "6.0f",
    "of_copy": "7.3f",
    "of_best": "7.3f",
    "ratio": "6.3f",
    "value": "10.3f",
    "unit": "s",
    "mib": "9.3f",
    "error_y": "7.4f",
    "error_dx": "8.4f",
    "error_dW": "8.4f",
    "error": "8.5f",
    "of_bound": "8.3f",
    "check": "s",
    "detail": "s",
}
# figure -> the unit it is printed in where the largest is below SMALL_FIGURE, how many of these make one, and
# how they are printed
SMALL_UNITS = {
    "peak_gib": ("peak_mib", 1024.0, "9.3f"),
    "mib": ("kib", 1024.0, "9.3f"),
    "tbps": ("gbps", 1e3, "8.3f"),
    "tflops": ("gflops", 1e3, "8.3f"),
}
SMALL_FIGURE = 0.1
NO_TIME = "left out: no time"
# distributions that a figure depends on most, by the kind of device
_HEAD = {
    "cpu": ("numpy", "ml_dtypes", "numba"),
    "cuda": ("numpy", "cupy-cuda13x", "nvmath-python", "nvidia-cudnn-cu13"),
}


TURN, SPEED = 40e-3, 1.2e15  # seconds and operations a second: see ``Setting.sustained``


class Unavailable(Exception):
    """A case that cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """How a run is made. ``rounds`` turns of each contender, ``calls`` counted calls in a turn, after
    ``warmups``. ``deadline``: of the whole run, on ``time.monotonic``, None for none; a part begins nothing
    new after it. ``out``: folder of the plots, None for none. ``only``: the name of one of the sizes' layers,
    None for all."""

    device: Device = CPU
    sizes: Sizes = FULL
    rounds: int = 6
    calls: int = 5
    warmups: int = 2
    seed: int = 0
    deadline: float | None = None
    out: Path | None = None
    only: str | None = None

    @property
    def layers(self) -> dict[str, Layer]:
        """The layers that a part over them measures, by name."""
        return {name: layer for name, layer in self.sizes.layers.items() if self.only in (None, name)}

    def left(self) -> float:
        """Seconds until the deadline, infinity without one."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def within(self, seconds: float) -> Setting:
        """Returns the same, for a part that may take so many seconds at most."""
        end = time.monotonic() + seconds
        return replace(self, deadline=end if self.deadline is None else min(end, self.deadline))

    def warmed(self, calls: int = 10) -> Setting:
        """Returns the same, for layers and for what may take the host's time: on a GPU ten calls of a turn do
        not count, and ``calls`` do. Contenders take turns in one allocator and on one chip: what it gives,
        and the clocks at the power limit, are the contender's own only some calls after each change, as in a
        training."""
        if self.device.kind == "cpu":
            return self
        return replace(self, warmups=max(self.warmups, 10), calls=max(self.calls, calls))

    def sustained(self, flops: float) -> Setting:
        """Returns the same, for products of so many floating-point operations in FP8, whose turns keep a GPU
        at its power limit. After a change of work its clocks take some tens of milliseconds until they are
        the contender's own: so ``TURN`` seconds of a turn do not count, and as many do."""
        if self.device.kind == "cpu":
            return self
        calls = math.ceil(TURN * SPEED / flops)
        return replace(self, warmups=max(self.warmups, calls), calls=max(self.calls, calls))

    def fewer_rounds(self) -> Setting:
        """Returns the same in half as many rounds, two at least: for parts that have many cases."""
        return replace(self, rounds=max(2, self.rounds // 2))

    def medians(self, steps: Mapping[str, Step]) -> dict[str, float]:
        """Seconds of a call of each, timed in turn."""
        clock = clock_for(self.device)
        return medians(interleaved(steps, clock, self.rounds, self.calls, self.warmups))


def setting_for(device: Device, **given: Any) -> Setting:
    """Full sizes on a GPU, small ones and few rounds on the CPU."""
    small: dict[str, Any] = {"sizes": SMALL, "rounds": 2, "calls": 2, "warmups": 1}
    return Setting(device, **({} if device.kind == "cuda" else small) | given)


@dataclass(frozen=True)
class Part:
    """``run`` under a name; ``about`` says in a line what it measures. ``usual``: whether it runs where no
    part is named. ``takes``: how long on an H200, None where that is unknown."""

    name: str
    about: str
    run: Callable[[Setting], list[Row]]
    usual: bool = True
    takes: str | None = None

    def __str__(self) -> str:
        """Its line in a list of parts."""
        known = [part for part in (self.takes, "" if self.usual else "only where it is named") if part]
        return f"{self.name:12}{self.about}" + (f" ({', '.join(known)})" if known else "")


@dataclass
class Report:
    """A run's results: ``about`` the run, and the rows of its ``parts`` by name."""

    about: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    targets: list[Row] = field(default_factory=list)

    def rows(self, part: str) -> list[Row]:
        """Returns the rows of a part, none where it did not run."""
        return self.parts.get(part, {}).get("rows", [])  # type: ignore[no-any-return]

    def failures(self, ours: Callable[[Row], bool] = lambda row: True) -> list[str]:
        """Returns a line for each part that failed and each row among ``ours`` that did or is wrong; not for
        what is left out or not installed."""
        lines = [f"{name}: {part['status']}" for name, part in self.parts.items() if bad(part["status"])]
        return lines + [
            f"{name}: {row['workload']}: {row['case']}: {row['status']}"
            for name in self.parts
            for row in self.rows(name)
            if ours(row) and bad(row["status"])
        ]

    def conclude(self, command: str, ours: Callable[[Row], bool] = lambda row: True) -> int:
        """Say on standard error what failed, or that nothing was measured; the exit status of ``command``."""
        failures = self.failures(ours)
        if not failures and not self.measured():
            failures = ["nothing was measured: there was no time"]
        for failure in failures:
            print(f"{command}: FAILED: {failure}", file=sys.stderr)
        return int(bool(failures))

    def measured(self) -> bool:
        """Whether there is any row that was not left out for want of time."""
        parts = self.parts.values()
        found = any(row["status"] != NO_TIME for part in parts for row in part["rows"])
        return found or any(bad(part["status"]) for part in parts)

    def write(self, path: Path) -> None:
        """As JSON. The folder must be there."""
        path.write_text(json.dumps(vars(self), indent=1) + "\n")


def read(path: Path) -> Report:
    """Returns what ``Report.write`` wrote."""
    return Report(**json.loads(path.read_text()))


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
            found[name] = ABSENT
    return found


def reason(error: Exception) -> str:
    """Why a case did not run, in one line: a status."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, Unavailable) else f"failed: {type(error).__name__}: {text}"


@contextmanager
def attempt(own: Row) -> Iterator[None]:
    """What fails within is the status of a row, or of a part: what one contender or library cannot do here
    must not cost the other figures."""
    try:
        yield
    except Exception as error:
        own["status"] = reason(error)


def machine(device: Device) -> str:
    """Returns the GPU's or the processor's name."""
    if device.kind == "cpu":
        return _processor()
    from fp8kit.backends.cuda import launch

    return str(launch.runtime().getDeviceProperties(device.index)["name"].decode())


def _processor() -> str:
    """As Linux calls it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def about_of(setting: Setting) -> dict[str, Any]:
    """Returns what a run's figures depend on: machine, device, versions, how they are taken, and the
    sizes."""
    layers = {name: str(layer) for name, layer in setting.sizes.layers.items()}
    return {
        "machine": machine(setting.device),
        "device": setting.device.kind,
        "python": platform.python_version(),
        "versions": versions(),
        "settings": {name: getattr(setting, name) for name in ("rounds", "calls", "warmups", "seed")}
        | {"sizes": setting.sizes.name, "layers": layers},
        "clocks": [],
    }


def head(about: Mapping[str, Any]) -> str:
    """Returns what ``about_of`` says, as the lines before the first part."""
    known, how = about["versions"], about["settings"]
    used = ", ".join(f"{name} {known[name]}" for name in _HEAD[about["device"]])
    small = ": whether it runs, not how fast it can be" if how["sizes"] != FULL.name else ""
    what = f"fp8kit {known['fp8kit']} on {about['device']}: {about['machine']}"
    rounds = f"{how['rounds']} rounds of {how['calls']} calls, each after {how['warmups']} that do not count"
    lines = [f"{what}; Python {about['python']}, {used}", f"{how['sizes']} sizes{small}; {rounds}"]
    lines += [f"{name}: {size}" for name, size in how["layers"].items()]
    return "\n".join([*lines, f"modules, kernels, gemm and memory are of {next(iter(how['layers']))}", ""])


def _where(rows: list[Row], device: Device) -> list[Row]:
    """Rows whose times are called what they are: of a call on the CPU there is one, and it is no GPU's."""
    if device.kind != "cpu":
        return rows
    return [{"cpu_ms" if key == "gpu_ms" else key: row[key] for key in row} for row in rows]


def run(
    parts: Sequence[Part],
    setting: Setting,
    write: Callable[[Report], object] = lambda report: None,
    say: Callable[[str], object] = print,
    clocks: Callable[[], dict[str, str]] | None = None,
) -> Report:
    """Run the parts in order; one that fails is reported and costs the others nothing. ``write`` gets the
    report after each of them.

    ``clocks``: the GPU's state under load, asked before and after.
    """
    start = time.perf_counter()
    report = Report(about_of(setting))
    say(head(report.about))

    def look() -> None:
        if clocks is not None:
            report.about["clocks"].append(clocks())

    look()
    for part in parts:
        before = time.perf_counter()
        report.parts[part.name] = own = {"status": NO_TIME, "seconds": 0.0, "rows": []}
        if setting.left() > 0:
            own["status"] = "ok"
            with attempt(own):
                own["rows"] = _where(part.run(setting), setting.device)
        gc.collect()
        own["seconds"] = time.perf_counter() - before
        say(text(part.name, own))
        report.about["seconds"] = time.perf_counter() - start
        write(report)
    look()
    write(report)
    return report


def text(name: str, part: Mapping[str, Any]) -> str:
    """Returns a part as aligned lines, one block a workload; figures that no row has are left out."""
    status = "" if part["status"] == "ok" else f": {part['status']}"
    lines = [f"== {name} ({part['seconds']:.1f} s){status}"]
    rows: list[Row] = part["rows"]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        lines += ["", *table(workload, [row for row in rows if row["workload"] == workload])]
    return "\n".join(lines) + "\n"


def table(title: str, rows: Sequence[Row]) -> list[str]:
    """Returns the rows under a title, as aligned lines; a status other than "ok" ends the line. Small figures
    are in smaller units."""
    names = [title, *(row["case"] for row in rows)]
    columns = [[name.ljust(max(map(len, names))) for name in names]]
    for name, form in COLUMNS.items():
        found = [row.get(name) for row in rows]
        known = [value for value in found if value is not None]
        if not known:
            continue
        if form == "s":
            cells = [name, *("" if value is None else str(value) for value in found)]
            columns.append([cell.ljust(max(map(len, cells))) for cell in cells])
            continue
        factor = 1.0
        if name in SMALL_UNITS and max(map(abs, known)) < SMALL_FIGURE:
            name, factor, form = SMALL_UNITS[name]
        width, _, digits = form.partition(".")
        cells = [name, *("" if value is None else format(value * factor, f".{digits}") for value in found)]
        columns.append([cell.rjust(max(int(width), len(name))) for cell in cells])
    columns.append(["", *("" if row["status"] == "ok" else row["status"] for row in rows)])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
