"""What every published recipe costs: a TransformerLayer, forward and backward, through PyTorch.

    python -m benchmarks recipes --out DIR

``ratio`` is to the same layer in bfloat16, whose steps are taken in turn with the recipe's. Emulated recipes
are slower than that layer: the measure of what a study of them costs. Recipes with a chip's sums are slower
by far, and are measured last, on a small layer alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import fp8kit_torch as ft
import torch

from fp8kit.accumulation import Accumulation
from fp8kit.bench.report import NO_TIME, Row, Setting, attempt
from fp8kit.bench.sizes import FULL
from fp8kit.bench.timing import Step, clock_for, interleaved, medians
from fp8kit.recipe import Recipe
from fp8kit.recipes import NAMED

# hidden size, heads, sequence, batch
ROUNDS, CALLS = 2, 5
LONG = 0.2  # seconds
FULL_LAYERS, SMALL_LAYERS = ((4096, 32, 2048, 4), (1024, 16, 1024, 4)), ((128, 2, 64, 2),)


def _step(layer: torch.nn.Module, recipe: Recipe | None, x: torch.Tensor, g: torch.Tensor) -> None:
    with ft.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    y.backward(g)
    layer.zero_grad(set_to_none=True)


def _made(hidden: int, heads: int, sequence: int, batch: int, device: Any) -> Callable[..., None]:
    kind = {"params_dtype": torch.bfloat16, "device": device}
    layer = ft.TransformerLayer(hidden, 4 * hidden, heads, hidden_dropout=0.0, attention_dropout=0.0, **kind)
    x, g = (torch.randn(sequence, batch, hidden, dtype=torch.bfloat16, device=device) for _ in range(2))
    x.requires_grad_()
    return lambda recipe: _step(layer, recipe, x, g)


def _times(steps: dict[str, Step], setting: Setting) -> dict[str, float]:
    """Median seconds of each; of a recipe whose step takes long one step alone, its fourth: kernels are
    compiled in the first, and GEMM algorithms timed in the second."""
    clock = clock_for(setting.device)
    for step in steps.values():
        for _ in range(3):
            step()
    once = {name: clock.seconds(step, 1)[0] for name, step in steps.items()}
    return medians(interleaved(steps, clock, ROUNDS, CALLS)) if max(once.values()) < LONG else once


def _modelled(recipe: Recipe) -> bool:
    """Whether a GEMM's sums are a chip's."""
    return any(isinstance(gemm.how, Accumulation) for gemm in recipe.quantization.gemms.values())


def recipes_part(setting: Setting) -> list[Row]:
    """A row a layer and recipe."""
    device = torch.device(str(setting.device))
    slow = [name for name, entry in NAMED.items() if _modelled(entry.recipe)]
    usual = [name for name in NAMED if name not in slow]
    layers = [(sizes, usual) for sizes in (FULL_LAYERS if setting.sizes is FULL else SMALL_LAYERS)]
    rows: list[Row] = []
    for (hidden, heads, sequence, batch), names in [*layers, (SMALL_LAYERS[0], slow)]:
        step = _made(hidden, heads, sequence, batch, device)
        for name in names:
            row: Row = {"workload": f"layer {hidden}, {sequence} x {batch}", "case": name, "status": "ok"}
            rows.append(row)
            if setting.left() <= 0:
                row["status"] = NO_TIME
                continue
            with attempt(row):
                steps: dict[str, Step] = {
                    name: partial(step, NAMED[name].recipe),
                    "bf16": partial(step, None),
                }
                times = _times(steps, setting)
                row |= {"gpu_ms": times[name] * 1e3, "ratio": times[name] / times["bf16"]}
    return rows
