"""What every published recipe costs: a TransformerLayer, forward and backward, through PyTorch.

    python -m benchmarks recipes --out DIR

``ratio`` is to the same layer in bfloat16, whose steps are taken in turn with the recipe's. Emulated recipes
are slower than that layer: the measure of what a study of them costs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import fp8kit_torch as ft
import torch

from fp8kit.bench.report import Row, Setting, attempt
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
    """Median seconds of each; of a recipe whose step takes long one step alone, its second."""
    clock = clock_for(setting.device)
    for step in steps.values():
        step()
    once = {name: clock.seconds(step, 1)[0] for name, step in steps.items()}
    return medians(interleaved(steps, clock, ROUNDS, CALLS)) if max(once.values()) < LONG else once


def recipes_part(setting: Setting) -> list[Row]:
    """A row a layer and recipe."""
    device = torch.device(str(setting.device))
    rows: list[Row] = []
    for hidden, heads, sequence, batch in FULL_LAYERS if setting.sizes is FULL else SMALL_LAYERS:
        step = _made(hidden, heads, sequence, batch, device)
        for name, entry in NAMED.items():
            row: Row = {"workload": f"layer {hidden}, {sequence} x {batch}", "case": name, "status": "ok"}
            rows.append(row)
            with attempt(row):
                times = _times({name: partial(step, entry.recipe), "bf16": partial(step, None)}, setting)
                row |= {"gpu_ms": times[name] * 1e3, "ratio": times[name] / times["bf16"]}
    return rows
