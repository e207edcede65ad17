"""Three recipes on one layer.

Shows: delayed scaling starts with the scale 1 and is right from the second step on; current scaling and block
scaling look at the tensor itself. Where one row of the input is a million times larger than the others, one
scale for the tensor loses the other rows, and scales of blocks do not. Needs: a CPU, or a GPU.
"""

import numpy as np

import fp8kit as fk

RECIPES = {
    "delayed": fk.recipe.DelayedScaling(amax_history_len=4),
    "current": fk.recipe.Float8CurrentScaling(),
    "block": fk.recipe.Float8BlockScaling(),
}


def error(got: np.ndarray, exact: np.ndarray) -> float:
    """Relative error in the 2-norm."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact))


def run(
    recipe: fk.recipe.Recipe, layer: fk.nn.Linear, x: np.ndarray, dy: np.ndarray, steps: int
) -> list[tuple[np.ndarray, ...]]:
    """(y, dx, dW) of each step on the same data."""
    found = []
    for _ in range(steps):
        layer.zero_grad()
        leaf = fk.tensor(x, requires_grad=True, device=layer.weight.device)
        with fk.autocast(recipe=recipe):
            y = layer(leaf)
        y.backward(dy)
        found.append((y.numpy(), leaf.grad.numpy(), layer.weight.grad.numpy()))
    return found


def main() -> None:
    """Print the errors of y, dx and dW for the first and the second step, then of the rows of y beside an
    outlier."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((256, size)).astype(np.float32) for size in (384, 128))
    loud = x * np.where(np.arange(256) == 3, np.float32(1e6), np.float32(1))[:, None]
    for name, recipe in RECIPES.items():
        fk.manual_seed(0)
        layer = fk.nn.Linear(384, 128, bias=False)
        w = layer.weight.numpy().astype(np.float64)
        exact = (x @ w.T, dy @ w, dy.T.astype(np.float64) @ x)
        for step, results in enumerate(run(recipe, layer, x, dy, 2)):
            errors = ", ".join(
                f"{what} {error(got, true):.4f}"
                for what, got, true in zip(("y", "dx", "dW"), results, exact, strict=True)
            )
            print(f"{name:8} step {step}: {errors}")
        y = run(recipe, layer, loud, dy, 6)[-1][0]
        print(
            f"{name:8} y of the rows beside the outlier: "
            f"{error(np.delete(y, 3, 0), np.delete(x @ w.T, 3, 0)):.4f}"
        )


if __name__ == "__main__":
    main()
