"""A differentiable function of your own, and how to check its gradient.

Shows: ``fk.Function`` puts any array code on the tape, beside the layers; ``check_grads`` compares its
gradient with finite differences and finds a wrong one. Needs: a CPU, or a GPU (the arrays are then CuPy's,
and the same lines run there).
"""

from typing import Any

import numpy as np

import fp8kit as fk
from fp8kit.backends.dispatch import default_device
from fp8kit.testing import check_grads


class Softplus(fk.Function):
    """y = log(1 + exp(x)), written so that nothing overflows; dy/dx = 1 / (1 + exp(-x))."""

    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        """x: any shape; keeps it for backward."""
        context.save(x)
        return np.logaddexp(x, x.dtype.type(0))  # CuPy answers NumPy's functions on its arrays

    @staticmethod
    def backward(context: Any, dy: Any) -> Any:
        """One gradient an input."""
        (x,) = context.saved
        return dy / (1 + np.exp(-x))


class Wrong(Softplus):
    """The same with a slip in backward: the sign of x."""

    @staticmethod
    def backward(context: Any, dy: Any) -> Any:
        (x,) = context.saved
        return dy / (1 + np.exp(x))


def main() -> None:
    """Check both, then train through the right one."""
    device = default_device()
    x = fk.tensor(np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32), device=device)
    check_grads(Softplus.apply, [x.data])
    print("Softplus: the gradient agrees with finite differences")
    try:
        check_grads(Wrong.apply, [x.data])
    except AssertionError as error:
        print(f"Wrong: {error}")

    fk.manual_seed(0)
    layer = fk.nn.Linear(32, 16, device=device)
    optimizer = fk.optim.AdamW(layer.parameters(), lr=0.01)
    for step in range(31):
        with fk.autocast(recipe=fk.recipe.Float8CurrentScaling()):
            y = Softplus.apply(layer(x))
        if step % 10 == 0:
            print(f"step {step}: mean of the outputs {float(y.numpy().mean()):.4f}")
        y.backward(np.full(y.shape, 1 / (8 * 16), np.float32))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
