"""Checking gradients of functions on the tape against finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fp8kit import arrays, formats
from fp8kit.autograd import Tensor, no_grad, tensor
from fp8kit.errors import FormatError


def check_grads(
    function: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Any],
    step: float = 2.0**-7,
    directions: int = 2,
    seed: int = 0,
) -> None:
    """Compare a function's gradients with central differences along random directions.

    ``function`` takes one Tensor per entry of ``inputs`` (float32 arrays on one device) and returns a Tensor
    or several; it must be smooth within ``step`` of the inputs and give the same result each time (no
    dropout). Raises AssertionError that names the input.

    For a weighted sum L of the outputs and a direction d, (L(x + h d) - L(x - h d)) / 2h has a truncation
    error near a third of its difference from the same at 2h (Richardson), and a rounding error of at most ``u
    * sum|c y| / h`` with u = 2**-24 for each rounding in a chain of a few dozen operations. The tolerance is
    ten times the first, 64 times the second, and 2**-16 of ``sum|g d|``.
    """
    hosts = [np.array(arrays.as_view(x).numpy(), np.float64) for x in inputs]
    device = arrays.as_view(inputs[0]).device
    for i, x in enumerate(inputs):
        if arrays.as_view(x).dtype is not formats.float32:
            raise FormatError("check_grads", f"inputs[{i}]", arrays.as_view(x).dtype.name, "float32")
    rng = np.random.default_rng(seed)

    def run(values: Sequence[np.ndarray[Any, Any]], grad: bool) -> tuple[list[Tensor], list[Tensor]]:
        args = [tensor(v.astype(np.float32), grad, device=device) for v in values]
        out = function(*args)
        return args, [out] if isinstance(out, Tensor) else list(out)

    args, outs = run(hosts, True)
    weights = [rng.standard_normal(o.shape).astype(o.dtype.numpy) for o in outs]
    for o, c in zip(outs, weights, strict=True):
        o.backward(c, retain_graph=True)

    def loss(values: Sequence[np.ndarray[Any, Any]]) -> tuple[float, float]:
        with no_grad():
            _, ys = run(values, False)
        products = [
            c.astype(np.float64) * y.numpy().astype(np.float64) for c, y in zip(weights, ys, strict=True)
        ]
        return sum(float(p.sum()) for p in products), sum(float(np.abs(p).sum()) for p in products)

    for i, x in enumerate(hosts):
        grad = args[i].grad
        if grad is None:
            raise AssertionError(f"check_grads: input {i} has no gradient")
        g = grad.numpy().astype(np.float64)
        for _ in range(directions):
            d = rng.standard_normal(x.shape)
            slopes, size = [], 0.0
            for h in (step, 2 * step):
                moved = [[*hosts[:i], x + s * h * d, *hosts[i + 1 :]] for s in (1, -1)]
                (up, size), (down, _) = loss(moved[0]), loss(moved[1])
                slopes.append((up - down) / (2 * h))
            got = float((g * d).sum())
            limit = (
                10 * abs(slopes[0] - slopes[1])
                + 64 * 2.0**-24 * size / step
                + 2.0**-16 * float(np.abs(g * d).sum())
            )
            what = f"slope {got:.6g}, differences give {slopes[0]:.6g} +- {limit:.2g}"
            if not abs(got - slopes[0]) <= limit:  # no assert statement: python -O would make the check pass
                raise AssertionError(f"check_grads: input {i}: {what}")
