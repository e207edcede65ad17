"""Whole training steps, the optimiser's included, where layers cast their weights and where the optimiser
does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8kit.autocast import autocast
from fp8kit.autograd import tensor
from fp8kit.backends.dispatch import deterministic
from fp8kit.bench.layers import take_times
from fp8kit.bench.problem import RECIPES, Problem, native_module
from fp8kit.bench.report import NO_TIME, Row, Setting
from fp8kit.bench.timing import Step
from fp8kit.optim import AdamW
from fp8kit.recipe import Recipe

CASTS = {"weights cast by the layer": False, "weights cast by the optimiser": True}
COMPARED = 3  # steps after which the parameters are compared


def steps_part(setting: Setting) -> list[Row]:
    """A TransformerLayer's forward, backward and AdamW at every size and by every FP8 recipe; the parameters
    must be the same bits. ``ratio``: beside the step whose layer casts."""
    rows: list[Row] = []
    for workload, layer in setting.sizes.layers.items():
        problem = Problem(
            "TransformerLayer", layer[:3], layer.sequence, layer.batch, setting.device, setting.seed
        )
        for name, recipe in RECIPES.items():
            if recipe is None:
                continue
            if setting.left() <= 0:
                rows.append({"workload": workload, "case": name, "status": NO_TIME})
                continue
            made = {f"{name}, {said}": training(problem, recipe, write) for said, write in CASTS.items()}
            steps: dict[str, Step] = {case: step for case, (step, _) in made.items()}
            parameters = [after() for _, after in made.values()]
            same = all(np.array_equal(a, b) for a, b in zip(*parameters, strict=True))
            status = "ok" if same else "WRONG: other parameters than where the layer casts"
            found: dict[str, Row] = {
                case: {
                    "workload": f"{workload}, AdamW step",
                    "case": case,
                    "status": status,
                    "check": "both give the same parameters" if same else "",
                }
                for case in steps
            }
            take_times(found, steps, setting)
            first = next(iter(found.values()))["gpu_ms"]
            rows += [row | {"ratio": row["gpu_ms"] / first} for row in found.values()]
    return rows


def training(problem: Problem, recipe: Recipe, write: bool) -> tuple[Step, Callable[[], list[np.ndarray]]]:
    """A step, and what takes the first ``COMPARED`` ones, deterministically, and gives the parameters'
    bits."""
    module = native_module(problem)
    optimizer = AdamW(module.parameters(), lr=1e-4, write_fp8_weights=write)
    x, dy = tensor(problem.x, device=problem.device), tensor(problem.dy, device=problem.device).view

    def step() -> None:
        with autocast(recipe=recipe):
            y = module(x)
        y.backward(dy)
        optimizer.step()
        optimizer.zero_grad()

    def after() -> list[np.ndarray]:
        with deterministic(True):
            for _ in range(COMPARED):
                step()
        return [parameter.numpy().view(np.uint16).copy() for parameter in module.parameters()]

    return step, after
