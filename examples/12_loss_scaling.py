"""Loss scaling for float16.

Shows: a gradient that is too small for float16 becomes 0; ``GradScaler`` multiplies the loss, so that it does
not, and takes the factor out inside the optimiser's step; a step whose gradients overflow changes nothing and
lowers the factor. Needs: a CPU, or a GPU.
"""

import numpy as np

import fp8kit as fk

WEIGHT = np.full(1, 1e-6, np.float32)  # of the loss: it makes every gradient small


def main() -> None:
    """Print the largest gradient without scaling, then factor, gradient and the weight's change over six
    steps with it."""
    rng = np.random.default_rng(0)
    fk.manual_seed(0)
    layer = fk.nn.Linear(32, 16, params_dtype=fk.float16)
    x = fk.tensor(rng.standard_normal((64, 32)).astype(np.float16), device=layer.weight.device)
    targets = fk.tensor(rng.integers(0, 16, 64), device=layer.weight.device)

    def loss() -> fk.Tensor:
        with fk.autocast(recipe=fk.recipe.Float8CurrentScaling()):
            logits = layer(x)
        return fk.nn.cross_entropy(logits, targets)

    def largest() -> float:
        return max(
            float(np.abs(parameter.grad.numpy().astype(np.float32)).max()) for parameter in layer.parameters()
        )

    loss().backward(WEIGHT)
    print(f"without scaling: largest gradient {largest():.3g}")
    layer.zero_grad()

    optimizer = fk.optim.SGD(layer.parameters(), lr=1e5)
    scaler = fk.optim.GradScaler(init_scale=2.0**44, backoff_factor=2.0**-8, growth_interval=2)
    for step in range(6):
        before, factor = layer.weight.numpy().astype(np.float32), scaler.get_scale()
        scaler.scale(loss()).backward(WEIGHT)
        seen = largest()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = np.abs(layer.weight.numpy().astype(np.float32) - before).max()
        print(
            f"step {step}: factor 2^{np.log2(factor):.0f}, largest gradient {seen:.3g}, "
            f"the weight moved by {moved:.3g}"
        )


if __name__ == "__main__":
    main()
