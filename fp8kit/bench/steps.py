"""Whole training steps, the optimiser's included."""

from __future__ import annotations

import numpy as np

from fp8kit.autocast import autocast
from fp8kit.autograd import tensor
from fp8kit.bench.layers import take_times
from fp8kit.bench.problem import RECIPES, Problem, native_module
from fp8kit.bench.report import NO_TIME, Row, Setting
from fp8kit.bench.timing import Step
from fp8kit.nn import Module
from fp8kit.optim import AdamW
from fp8kit.recipe import Recipe


def steps_part(setting: Setting) -> list[Row]:
    """A TransformerLayer's forward, backward and AdamW at every size, in bfloat16 and by every FP8 recipe;
    the first step's parameters must be finite. ``ratio``: beside bfloat16."""
    rows: list[Row] = []
    for workload, layer in setting.sizes.layers.items():
        if setting.left() <= 0:
            rows += [{"workload": workload, "case": name, "status": NO_TIME} for name in RECIPES]
            continue
        problem = Problem(
            "TransformerLayer", layer[:3], layer.sequence, layer.batch, setting.device, setting.seed
        )
        found: dict[str, Row] = {}
        steps: dict[str, Step] = {}
        for name, recipe in RECIPES.items():
            module, steps[name] = training(problem, recipe)
            steps[name]()
            finite = all(np.isfinite(p.numpy().astype(np.float32)).all() for p in module.parameters())
            found[name] = {
                "workload": f"{workload}, AdamW step",
                "case": name,
                "status": "ok" if finite else "WRONG: parameters that are not finite",
                "check": "finite parameters" if finite else "",
            }
        take_times(found, steps, setting)
        first = next(iter(found.values()))["gpu_ms"]
        rows += [row | {"ratio": row["gpu_ms"] / first} for row in found.values()]
    return rows


def training(problem: Problem, recipe: Recipe | None) -> tuple[Module, Step]:
    """A module and its training step."""
    module = native_module(problem)
    optimizer = AdamW(module.parameters(), lr=1e-4)
    x, dy = tensor(problem.x, device=problem.device), tensor(problem.dy, device=problem.device).view

    def step() -> None:
        with autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x)
        y.backward(dy)
        optimizer.step()
        optimizer.zero_grad()

    return module, step
