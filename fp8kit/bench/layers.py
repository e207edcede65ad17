"""Modules beside each other: the layer at four sizes, LayerNormMLP and Linear, and the host's time on a tiny
Linear."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fp8kit import arrays
from fp8kit.bench.memory import Peak
from fp8kit.bench.problem import (
    Contender,
    Problem,
    Results,
    Running,
    errors,
    native_contenders,
    reference,
    verdict,
)
from fp8kit.bench.report import NO_TIME, Row, Setting, reason
from fp8kit.bench.skeleton import skeletons
from fp8kit.bench.timing import Step, clock_for, host_seconds, interleaved, medians

# of a turn that count on a GPU, after ten that do not: a layer's clocks at the power limit settle in about
# 0.1 s
LAYER_CALLS = 30
WARM_STEPS = 3  # steps before a result is compared: delayed scaling has seen the values then

# of a problem and whether it is the layer: name -> contender
Contenders = Callable[[Problem, str], Mapping[str, Contender]]


def native_only(problem: Problem, workload: str) -> Mapping[str, Contender]:
    """The contenders of ``fp8kit bench``."""
    return native_contenders(graph=problem.kind == "TransformerLayer" and problem.device.kind == "cuda")


def start(
    name: str, make: Contender, problem: Problem, exact: Results | None, row: Row, peak: type[Peak] = Peak
) -> Running | None:
    """Make a contender, take its first steps, check the result and its memory, and fill in the row. None
    where it does not run."""
    memory = peak(problem.device)
    begin = time.perf_counter()
    try:
        running = make(problem)
        running.step()
        arrays.synchronize(problem.device)
        row["first_step_s"] = time.perf_counter() - begin
        for _ in range(WARM_STEPS - 1):
            running.step()
        running.poison()
        running.step()
        found = errors(problem.branches(*running.results()), exact) if exact is not None else {}
    # what one library cannot do here must not cost the other figures; it is reported
    except Exception as error:
        row["status"] = reason(error)
        return None
    if found:
        row |= found
        row["status"] = verdict(name, problem.kind, found)
    if problem.device.kind == "cuda" or name.startswith("fp8kit native"):
        row["peak_gib"] = memory.bytes(running.step) / 2**30
    return running


def measure(
    workload: str,
    problem: Problem,
    contenders: Mapping[str, Contender],
    setting: Setting,
    exact: Callable[[Problem], Results] = reference,
    extra: Mapping[str, Step] | None = None,
    peak: type[Peak] = Peak,
) -> list[Row]:
    """All figures of one problem; ``extra``: further calls that are timed in turn with the contenders,
    without a check of their own."""
    wanted = exact(problem)
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    kept = []
    for name, make in contenders.items():
        rows[name] = {"workload": workload, "case": name, "status": "ok"}
        if setting.left() <= 0:
            rows[name]["status"] = NO_TIME
            continue
        running = start(name, make, problem, wanted, rows[name], peak)
        if running is not None:
            kept.append(running)
            steps[name] = running.step
    for name, step in (extra or {}).items():
        rows[name], steps[name] = {"workload": workload, "case": name, "status": "ok"}, step
    take_times(rows, steps, setting)
    return list(rows.values())


def take_times(
    rows: Mapping[str, Row], steps: Mapping[str, Step], setting: Setting, host: bool = True
) -> None:
    """Fill in ``gpu_ms``, and ``host_us`` where there is another device than the host."""
    times = medians(
        interleaved(steps, clock_for(setting.device), setting.rounds, setting.calls, setting.warmups)
    )
    for name, seconds in times.items():
        rows[name]["gpu_ms"] = seconds * 1e3
    if host and setting.device.kind != "cpu":
        # the quickest turn counts: many short ones find it sooner than few long ones
        calls = min(setting.calls, 10)
        for name, found in host_seconds(
            steps, setting.device, setting.rounds, calls, setting.warmups
        ).items():
            rows[name] |= found.row()


def layer_part(
    setting: Setting,
    contenders: Contenders = native_only,
    exact: Callable[[Problem], Results] = reference,
    peak: type[Peak] = Peak,
) -> list[Row]:
    """A TransformerLayer at every size, forward and backward; beside the largest the skeleton of the same
    run."""
    rows: list[Row] = []
    for workload, layer in setting.sizes.layers.items():
        problem = Problem(
            "TransformerLayer", layer[:3], layer.sequence, layer.batch, setting.device, setting.seed
        )
        extra: dict[str, Any] = (
            skeletons(layer, setting)
            if layer is setting.sizes.large and setting.device.kind == "cuda"
            else {}
        )
        rows += measure(
            workload, problem, contenders(problem, workload), setting.warmed(LAYER_CALLS), exact, extra, peak
        )
    return rows


def modules_part(
    setting: Setting,
    contenders: Contenders = native_only,
    exact: Callable[[Problem], Results] = reference,
    peak: type[Peak] = Peak,
) -> list[Row]:
    """LayerNormMLP and Linear of the largest layer."""
    layer = setting.sizes.large
    rows: list[Row] = []
    for workload, kind in (("mlp", "LayerNormMLP"), ("linear", "Linear")):
        problem = Problem(kind, layer[:2], layer.sequence, layer.batch, setting.device, setting.seed)
        rows += measure(workload, problem, contenders(problem, workload), setting, exact, None, peak)
    return rows


def host_part(
    setting: Setting, contenders: Contenders = native_only, exact: Callable[[Problem], Results] = reference
) -> list[Row]:
    """The host's time on a Linear so small that the GPU has nothing to do."""
    tokens, columns, out = setting.sizes.linear
    problem = Problem("Linear", (columns, out), tokens, 1, setting.device, setting.seed)
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    kept = []
    wanted = exact(problem)
    for name, make in contenders(problem, "host").items():
        rows[name] = {
            "workload": f"Linear, {tokens} tokens, {columns} to {out}",
            "case": name,
            "status": "ok",
        }
        running = start(name, make, problem, wanted, rows[name])
        if running is not None:
            kept.append(running)
            steps[name] = running.step
    how = setting.warmed()
    for name, found in host_seconds(steps, how.device, 4 * how.rounds, 2 * how.calls, how.warmups).items():
        rows[name] |= found.row()
    for row in rows.values():
        row.pop("peak_gib", None)
    return list(rows.values())
