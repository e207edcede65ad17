"""The error of an FP8 Linear against float64: output, input gradient and weight gradient, for each recipe.

    python -m benchmarks.linear_error --out benchmarks/results/linear_error.json

The error is ||got - exact|| / ||exact||, where exact is the product of the same bfloat16 values in float64. Input, weight and output
gradient are random normal. Rounding a normal variable to E4M3 costs about 2.6 % (a step of 2**-3, relative, has an error of 1/sqrt(12) of
itself, spread evenly over a binade), to E5M2 twice that; a product of two independently rounded operands has both errors. Runs on the
default device; the default sizes want a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fp8kit as fk
from fp8kit import arrays, nn
from fp8kit.backends import dispatch
from fp8kit.bench import versions
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

RECIPES: dict[str, Recipe | None] = {
    "bfloat16": None, "DelayedScaling": DelayedScaling(), "Float8CurrentScaling": Float8CurrentScaling(),
    "Float8BlockScaling": Float8BlockScaling(),
}  # fmt: skip
# What Transformer Engine's Linear gives at the default sizes on an H200.
TRANSFORMER_ENGINE = {
    "DelayedScaling": (0.0376, 0.0592, 0.0592), "Float8CurrentScaling": (0.0376, 0.0592, 0.0592),
    "Float8BlockScaling": (0.0377, 0.0377, 0.0377),
}  # fmt: skip
RESULTS = ("y", "dx", "dW")


def relative(got: Any, exact: Any) -> float:
    """``||got - exact|| / ||exact||`` on the arrays' own device, the sums in float64."""
    return float(((got - exact) ** 2).sum() ** 0.5 / (exact**2).sum() ** 0.5)


def errors(recipe: Recipe | None, layer: nn.Linear, x: Any, g: Any, exact: Sequence[Any], wide: Any) -> dict[str, float]:
    """The errors of the third step, when delayed scaling has seen these values. ``wide``: a float64 array of any fp8kit value."""
    for _ in range(3):
        layer.zero_grad()
        leaf = fk.tensor(x, requires_grad=True)
        with fk.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(leaf)
        y.backward(g)
    return {name: relative(wide(got), true) for name, got, true in zip(RESULTS, (y, leaf.grad, layer.weight.grad), exact, strict=True)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write it. Returns 1 where an error is above Transformer Engine's by more than the last digit of its figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs=3, default=(8192, 4096, 16384), metavar=("M", "K", "N"), help="rows, in, out")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    options = parser.parse_args(arguments)
    m, k, n = options.sizes
    device = dispatch.default_device()
    draw = np.random.default_rng(0)
    host = [draw.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for shape in ((m, k), (n, k), (m, n))]
    x, w, g = (fk.tensor(a, device=device).view for a in host)
    xp = np
    if device.kind == "cuda":
        import cupy as xp

    def wide(value: Any) -> Any:
        return xp.asarray(arrays.as_view(value).numpy().astype(np.float64))

    x64, w64, g64 = (wide(v) for v in (x, w, g))
    exact = (x64 @ w64.T, g64 @ w64, g64.T @ x64)
    layer = nn.Linear(k, n, bias=False, params_dtype=fk.bfloat16, device=device)
    layer.load_state_dict({"weight": host[1]})
    found = {name: errors(recipe, layer, x, g, exact, wide) for name, recipe in RECIPES.items()}
    worse = False
    for name, values in found.items():
        theirs = TRANSFORMER_ENGINE.get(name, ("", "", ""))
        cells = (f"  {key} {value:.4f} ({their or '-'})" for (key, value), their in zip(values.items(), theirs, strict=True))
        print(f"{name:22s}" + "".join(cells))
        worse |= any(their and round(value, 4) > their for value, their in zip(values.values(), theirs, strict=True))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"sizes": {"M": m, "K": k, "N": n}, "relative_error": found, "transformer_engine": TRANSFORMER_ENGINE, "versions": versions()}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    return int(worse and (m, k, n) == (8192, 4096, 16384))


if __name__ == "__main__":
    sys.exit(main())
