"""The error of an FP8 Linear against float64: output, input gradient and weight gradient, for each recipe.

    python -m benchmarks error --out DIR

The error is ||got - exact|| / ||exact||, where exact is the product of the same bfloat16 values in float64.
Input, weight and output gradient are random normal, every value drawn by itself (a pool that repeats has the
sampling error of its length). Rounding a normal variable to E4M3 costs about 2.6 % (a step of 2**-3,
relative, has an error of 1/sqrt(12) of itself, spread evenly over a binade), to E5M2 twice that; a product of
two independently rounded operands has both errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.bench.report import Row, Setting
from fp8kit.bench.sizes import FULL
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

RECIPES: dict[str, Recipe | None] = {
    "bfloat16": None,
    "DelayedScaling": DelayedScaling(),
    "Float8CurrentScaling": Float8CurrentScaling(),
    "Float8BlockScaling": Float8BlockScaling(),
}
# What Transformer Engine's Linear gives at the default sizes on an H200.
TRANSFORMER_ENGINE = {
    "DelayedScaling": (0.0376, 0.0592, 0.0592),
    "Float8CurrentScaling": (0.0376, 0.0592, 0.0592),
    "Float8BlockScaling": (0.0377, 0.0377, 0.0377),
}
HALF_DIGIT = 0.00005  # of those figures, which have four digits after the point
RESULTS = ("y", "dx", "dW")


def relative(got: Any, exact: Any) -> float:
    """``||got - exact|| / ||exact||`` on the arrays' own device, the sums in float64."""
    return float(((got - exact) ** 2).sum() ** 0.5 / (exact**2).sum() ** 0.5)


def errors(
    recipe: Recipe | None, layer: nn.Linear, x: Any, g: Any, exact: Sequence[Any], wide: Any
) -> dict[str, float]:
    """The errors of the third step, when delayed scaling has seen these values. ``wide``: a float64 array of
    any fp8kit value."""
    for _ in range(3):
        layer.zero_grad()
        leaf = fk.tensor(x, requires_grad=True)
        with fk.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(leaf)
        y.backward(g)
    return {
        name: relative(wide(got), true)
        for name, got, true in zip(RESULTS, (y, leaf.grad, layer.weight.grad), exact, strict=True)
    }


def error_part(setting: Setting) -> list[Row]:
    """A row a recipe. "WRONG" where an error is above Transformer Engine's at the full sizes as it is
    written."""
    m, k, n = setting.sizes.error
    device = setting.device
    draw = np.random.default_rng(0)
    host = [
        draw.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        for shape in ((m, k), (n, k), (m, n))
    ]
    x, w, g = (fk.tensor(a, device=device).view for a in host)
    library: Any = np
    if device.kind == "cuda":
        import cupy as library

    def wide(value: Any) -> Any:
        return library.asarray(arrays.as_view(value).numpy().astype(np.float64))

    x64, w64, g64 = (wide(v) for v in (x, w, g))
    exact = (x64 @ w64.T, g64 @ w64, g64.T @ x64)
    layer = nn.Linear(k, n, bias=False, params_dtype=fk.bfloat16, device=device)
    layer.load_state_dict({"weight": host[1]})
    rows: list[Row] = []
    for name, recipe in RECIPES.items():
        found = errors(recipe, layer, x, g, exact, wide)
        theirs = TRANSFORMER_ENGINE.get(name)
        worse = theirs is not None and any(
            value >= their + HALF_DIGIT for value, their in zip(found.values(), theirs, strict=True)
        )
        row: Row = {
            "workload": f"Linear, {m} x {k} to {n}",
            "case": name,
            "status": "ok",
            "transformer_engine": theirs,
        }
        row |= {f"error_{key}": value for key, value in found.items()}
        if worse and setting.sizes is FULL:
            row["status"] = f"WRONG: above Transformer Engine's {theirs}"
        rows.append(row)
    return rows
