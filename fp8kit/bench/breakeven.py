"""From which size on FP8 pays: a layer of many hidden sizes and token counts, eager and as a captured graph.

Most contenders keep their module over the numbers of tokens. Steps are timed in turn. The largest sizes come
first and get fewer rounds; what they take beyond their share of the time costs the small ones rounds, of
which these need less, so that the whole grid fits. Results are compared with the first contender's, whose own
error the part ``layer`` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fp8kit import arrays
from fp8kit.bench.problem import (
    RECIPES,
    Contender,
    Modules,
    Problem,
    Results,
    Running,
    bounds,
    errors,
    native,
    native_module,
)
from fp8kit.bench.report import NO_TIME, Row, Setting, reason
from fp8kit.bench.sizes import layer_of
from fp8kit.bench.timing import Step, clock_for, interleaved, medians
from fp8kit.recipe import Recipe

SECONDS = 240.0  # for the whole grid; 150 were over on an H200 when the hidden sizes 256 and 512 were left
Contenders = Callable[[Problem, Modules], Mapping[str, Contender]]


def native_door(
    name: str, recipe: Recipe | None, modules: Modules, graph: bool = False
) -> dict[str, Contender]:
    """The native frontend under ``name``, its module kept in ``modules`` over the token counts."""
    return {
        name: lambda p: native(p, recipe, graph=graph, module=modules.of(p, name, lambda: native_module(p)))
    }


def native_only(problem: Problem, modules: Modules) -> Mapping[str, Contender]:
    """The native frontend, bfloat16 first: what the others are compared with."""
    fp8 = RECIPES["FP8 delayed"]
    found = native_door("fp8kit native bf16", None, modules) | native_door("fp8kit native FP8", fp8, modules)
    if problem.device.kind == "cuda":
        found |= native_door("fp8kit native bf16, graph", None, modules, True) | native_door(
            "fp8kit native FP8, graph", fp8, modules, True
        )
    return found


def breakeven_part(setting: Setting, contenders: Contenders = native_only) -> list[Row]:
    """A row a cell and contender: ``gpu_ms`` and ``ratio`` to the first contender of the cell, of the same
    kind (eager, graph)."""
    own, modules = setting.within(SECONDS), Modules()
    cells = [(hidden, tokens) for hidden in setting.sizes.hidden for tokens in setting.sizes.tokens]
    found: list[list[Row]] = []
    for hidden, tokens in reversed(cells):
        layer = layer_of(hidden, tokens)
        problem = Problem(
            "TransformerLayer", layer[:3], layer.sequence, layer.batch, setting.device, setting.seed
        )
        workload = f"hidden {hidden}, {tokens} tokens"
        if own.left() <= 0:
            found.append(
                [{"workload": workload, "case": "all", "hidden": hidden, "tokens": tokens, "status": NO_TIME}]
            )
            continue
        place, seconds = {"hidden": hidden, "tokens": tokens}, own.left() / (len(cells) - len(found))
        found.append(_cell(workload, problem, contenders(problem, modules), own, seconds, place))
    return [row for cell in reversed(found) for row in cell]


def _cell(
    workload: str,
    problem: Problem,
    contenders: Mapping[str, Contender],
    setting: Setting,
    seconds: float,
    place: Mapping[str, int],
) -> list[Row]:
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    kept: list[Running] = []
    first: Results | None = None
    for name, make in contenders.items():
        rows[name] = row = {"workload": workload, "case": name, "status": "ok", **place}
        try:
            running = make(problem)
            for _ in range(2):
                running.step()
            running.poison()
            running.step()
            got = problem.branches(*running.results())
        # what one contender cannot do here must not cost the others' figures; it is reported
        except Exception as error:
            row["status"] = reason(error)
            continue
        if first is None:
            first, row["check"] = got, "the others are compared with it"
        else:
            row |= (found := errors(got, first))
            limits = bounds(name, problem.kind)
            if not (found["error_y"] < limits[0] and found["error_dx"] < limits[1]):
                row["status"] = (
                    f"WRONG: errors {found['error_y']:.3f}, {found['error_dx']:.3f} to the first contender"
                )
        kept.append(running)
        steps[name] = running.step
    for name, time in medians(_timed(steps, setting, seconds)).items():
        rows[name]["gpu_ms"] = time * 1e3
    compare(list(rows.values()))
    return list(rows.values())


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
    """Fill in ``ratio``: to the first row of the same kind, which is a plain bfloat16 one."""
    for graph in (False, True):
        own = [row for row in rows if row["case"].endswith("graph") == graph and "gpu_ms" in row]
        for row in own:
            row["ratio"] = row["gpu_ms"] / own[0]["gpu_ms"]


def curve(rows: list[Row], case: str) -> dict[int, int | None]:
    """Hidden size -> the fewest tokens from which on a case's ratio stays below 1, None where it does at no
    measured number."""
    found: dict[int, int | None] = {}
    for hidden in dict.fromkeys(row["hidden"] for row in rows):
        cells = sorted(
            (row["tokens"], row["ratio"])
            for row in rows
            if row["hidden"] == hidden and row["case"] == case and "ratio" in row
        )
        paying = [tokens for i, (tokens, _) in enumerate(cells) if all(ratio < 1 for _, ratio in cells[i:])]
        found[hidden] = min(paying, default=None)
    return found
