"""From which size on FP8 pays: a layer of many hidden sizes and token counts, eager and as a captured graph.

Most contenders keep their module over the numbers of tokens. Steps are timed in turn. The largest sizes come
first and get fewer rounds; what they take beyond their share of the time costs the small ones rounds, of
which these need less, so that the whole grid fits. Results are compared with the first contender's, whose own
error the part ``layer`` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from fp8kit import arrays
from fp8kit.bench.contest import Contest
from fp8kit.bench.problem import (
    RECIPES,
    Contender,
    Modules,
    Problem,
    Results,
    errors,
    layer_problem,
    native,
    native_module,
    verdict,
)
from fp8kit.bench.report import Row, Setting
from fp8kit.bench.sizes import layer_of
from fp8kit.bench.timing import Step, clock_for, interleaved, medians
from fp8kit.recipe import Recipe

SECONDS = 240.0  # for the whole grid; 150 were over on an H200 when the hidden sizes 256 and 512 were left
Contenders = Callable[[Problem, Modules], Mapping[str, Contender]]


def native_kept(
    name: str, recipe: Recipe | None, modules: Modules, graph: bool = False
) -> dict[str, Contender]:
    """Returns the native frontend under ``name``, its module kept in ``modules`` over the token counts."""
    return {
        name: lambda p: native(p, recipe, graph=graph, module=modules.of(p, name, lambda: native_module(p)))
    }


def native_only(problem: Problem, modules: Modules) -> Mapping[str, Contender]:
    """Returns the native frontend, bfloat16 first: what the others are compared with."""
    found: dict[str, Contender] = {}
    for end, graph in (("", False), (", graph", True)):
        if not graph or problem.device.kind == "cuda":
            for name, recipe in (("bf16", None), ("FP8", RECIPES["FP8 delayed"])):
                found |= native_kept(f"fp8kit native {name}{end}", recipe, modules, graph)
    return found


def breakeven_part(setting: Setting, contenders: Contenders = native_only) -> list[Row]:
    """Returns a row a cell and contender: ``gpu_ms`` and ``ratio`` to the first contender of the cell, of the
    same kind (eager, graph)."""
    own, modules = setting.within(SECONDS), Modules()
    cells = [(hidden, tokens) for hidden in setting.sizes.hidden for tokens in setting.sizes.tokens]
    found: list[list[Row]] = []
    for hidden, tokens in reversed(cells):
        problem = layer_problem(layer_of(hidden, tokens), setting)
        contest = Contest(own, f"hidden {hidden}, {tokens} tokens", hidden=hidden, tokens=tokens)
        seconds = own.left() / (len(cells) - len(found))
        if seconds > 0:
            found.append(_cell(contest, problem, contenders(problem, modules), seconds))
        else:
            contest.leave_out("all")
            found.append(list(contest.rows.values()))
    return [row for cell in reversed(found) for row in cell]


def _cell(
    contest: Contest, problem: Problem, contenders: Mapping[str, Contender], seconds: float
) -> list[Row]:
    first: list[Results] = []

    def make(contender: Contender, row: Row) -> Step:
        running = contender(problem)
        got = running.branches(problem, 2)
        if first:
            row |= (found := errors(got, first[0]))
            row["status"] = verdict(row["case"], problem.kind, found)
        else:
            row["check"] = "the others are compared with it"
            first.append(got)
        contest.kept.append(running)
        return running.step

    for name, contender in contenders.items():
        contest.enter(name, partial(make, contender))
    for name, time in medians(_timed(contest.steps, contest.setting, seconds)).items():
        contest.rows[name]["gpu_ms"] = time * 1e3
    compare(list(contest.rows.values()))
    return list(contest.rows.values())


def _timed(steps: Mapping[str, Step], setting: Setting, seconds: float) -> dict[str, list[float]]:
    """As many rounds as fit into half of the cell's seconds, the other half being for making the modules: at
    least one."""
    clock = clock_for(setting.device)
    found = interleaved(steps, clock, 1, 2, 1)
    arrays.synchronize(setting.device)
    each = sum(sum(times) / len(times) for times in found.values())
    for how in (setting.warmed(), setting):
        rounds = min(how.rounds, int(seconds / 2 / max(each * (how.calls + how.warmups), 1e-9)))
        if rounds:
            return interleaved(steps, clock, rounds, how.calls, how.warmups)
    return found


def compare(rows: list[Row]) -> None:
    """Fill in ``ratio``: to the first row of the same kind, which is a plain bfloat16 one; none where that
    was not measured."""
    for graph in (False, True):
        own = [row for row in rows if row["case"].endswith("graph") == graph]
        for row in own if own and "gpu_ms" in own[0] else ():
            if "gpu_ms" in row:
                row["ratio"] = row["gpu_ms"] / own[0]["gpu_ms"]


def cells(rows: list[Row], case: str, hidden: int) -> list[tuple[int, float]]:
    """(tokens, ratio) of a case at a hidden size, where measured, by tokens."""
    own = (row for row in rows if (row["case"], row["hidden"]) == (case, hidden) and "ratio" in row)
    return sorted((row["tokens"], row["ratio"]) for row in own)


def curve(rows: list[Row], case: str) -> dict[int, int | None]:
    """Hidden size -> the fewest tokens from which on a case's ratio stays below 1, None where it does at no
    measured number."""
    found: dict[int, int | None] = {}
    for hidden in dict.fromkeys(row["hidden"] for row in rows):
        found[hidden] = None
        for tokens, ratio in reversed(cells(rows, case, hidden)):
            if not ratio < 1:
                break
            found[hidden] = tokens
    return found
