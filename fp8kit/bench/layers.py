"""Modules beside each other: the layer at four sizes, also in whole training steps, LayerNormMLP and Linear,
and the host's time on a tiny Linear."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from fp8kit import arrays, nn
from fp8kit.autograd import tensor
from fp8kit.bench.breakeven import compare
from fp8kit.bench.contest import Contest, row_of, within_time
from fp8kit.bench.memory import Peak
from fp8kit.bench.problem import (
    RECIPES,
    Contender,
    Problem,
    Results,
    errors,
    layer_problem,
    native_call,
    native_contenders,
    native_module,
    reference,
    verdict,
)
from fp8kit.bench.report import Row, Setting
from fp8kit.bench.skeleton import skeletons
from fp8kit.bench.timing import Step
from fp8kit.optim import AdamW
from fp8kit.recipe import Recipe

# of a turn that count on a GPU, after ten that do not: a layer's clocks at the power limit settle in about
# 0.1 s
LAYER_CALLS = 30
WARM_STEPS = 3  # steps before a result is compared: delayed scaling has seen the values then


def native_only(problem: Problem, workload: str) -> Mapping[str, Contender]:
    """Returns the contenders of ``fp8kit bench``."""
    return native_contenders(graph=problem.kind == "TransformerLayer" and problem.device.kind == "cuda")


class Field(NamedTuple):
    """Who takes part in a problem, of which the workload is named too, what is right, and how memory is
    measured."""

    contenders: Callable[[Problem, str], Mapping[str, Contender]] = native_only
    exact: Callable[[Problem], Results] = reference
    peak: type[Peak] = Peak


NATIVE = Field()


def entered(contest: Contest, problem: Problem, contenders: Mapping[str, Contender], field: Field) -> Contest:
    """Returns the contest, its contenders made and warmed up, with the checks of their results and their
    memory in their rows."""
    wanted = field.exact(problem)

    def make(contender: Contender, row: Row) -> Step:
        memory, begin = field.peak(problem.device), time.perf_counter()
        running = contender(problem)
        running.step()
        arrays.synchronize(problem.device)
        row["first_step_s"] = time.perf_counter() - begin
        row |= (found := errors(running.branches(problem, WARM_STEPS - 1), wanted))
        row["status"] = verdict(row["case"], problem.kind, found)
        if problem.device.kind == "cuda" or row["case"].startswith("fp8kit native"):
            row["peak_gib"] = memory.bytes(running.step) / 2**30
        contest.kept.append(running)
        return running.step

    for name, contender in contenders.items():
        if contest.setting.left() > 0:
            contest.enter(name, partial(make, contender))
        else:
            contest.leave_out(name)
    return contest


def layer_part(setting: Setting, field: Field = NATIVE) -> list[Row]:
    """Returns a TransformerLayer at every size, forward and backward; beside the largest the skeleton of the
    same run, which has no check of its own."""
    rows: list[Row] = []
    for workload, layer in setting.layers.items():
        problem, contest = layer_problem(layer, setting), Contest(setting.warmed(LAYER_CALLS), workload)
        entered(contest, problem, field.contenders(problem, workload), field)
        if layer is setting.sizes.large and setting.device.kind == "cuda":
            for name, step in skeletons(layer, setting).items():
                contest.rows[name], contest.steps[name] = row_of(workload, name), step
        rows += contest.time()
    return rows


def modules_part(setting: Setting, field: Field = NATIVE) -> list[Row]:
    """LayerNormMLP and Linear of the largest layer."""
    rows: list[Row] = []
    for workload, kind in (("mlp", "LayerNormMLP"), ("linear", "Linear")):
        problem = layer_problem(setting.sizes.large, setting, kind)
        contenders = field.contenders(problem, workload)
        rows += entered(Contest(setting, workload), problem, contenders, field).time()
    return rows


def host_part(setting: Setting, field: Field = NATIVE) -> list[Row]:
    """Returns the host's time on a Linear so small that the GPU has nothing to do."""
    tokens, columns, out = setting.sizes.linear
    problem = Problem("Linear", (columns, out), tokens, 1, setting.device, setting.seed)
    contest = Contest(setting.warmed(), f"Linear, {tokens} tokens, {columns} to {out}")
    entered(contest, problem, field.contenders(problem, "host"), field)
    rows = contest.time_host(4 * contest.setting.rounds, 2 * contest.setting.calls)
    return [{key: value for key, value in row.items() if key != "peak_gib"} for row in rows]


# --- training steps -----------------------------------------------------------------------------------------


def steps_part(setting: Setting) -> list[Row]:
    """Returns a TransformerLayer's forward, backward and AdamW at every size, in bfloat16 and by every FP8
    recipe; the first step's parameters must be finite. ``ratio``: beside bfloat16."""
    return within_time(
        setting,
        setting.layers,
        lambda name: _steps(name, layer_problem(setting.layers[name], setting), setting),
        lambda name: row_of(name, "all"),
    )


def _steps(workload: str, problem: Problem, setting: Setting) -> list[Row]:
    contest = Contest(setting, f"{workload}, AdamW step")

    def make(recipe: Recipe | None, row: Row) -> Step:
        module, step = training(problem, recipe)
        step()
        finite = all(np.isfinite(p.numpy().astype(np.float32)).all() for p in module.parameters())
        row["status"] = "ok" if finite else "WRONG: parameters that are not finite"
        row["check"] = "finite parameters" if finite else ""
        return step

    for name, recipe in RECIPES.items():
        contest.enter(name, partial(make, recipe))
    rows = contest.time()
    compare(rows)
    return rows


def training(problem: Problem, recipe: Recipe | None) -> tuple[nn.Module, Step]:
    """Returns a module and its training step."""
    module = native_module(problem)
    optimizer = AdamW(module.parameters(), lr=1e-4)
    x, dy = (tensor(host, device=problem.device) for host in (problem.x, problem.dy))
    call = native_call(module, x, dy.view, recipe)

    def step() -> None:
        call()
        optimizer.step()

    return module, step
