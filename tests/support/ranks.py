"""Ranks as threads: what tests of parallel layers share."""

from __future__ import annotations

from typing import Any

import numpy as np

import fp8kit as fk
from fp8kit.autograd import apply
from fp8kit.collectives import Collectives, FakeCollectives
from fp8kit.ops.linear import LinearSpec, linear
from fp8kit.ops.product import ProductSpec
from fp8kit.quantization import Quantization

LAYOUTS = [(mode, sequence) for mode in ("column", "row") for sequence in (False, True)]


def part(array: Any, dim: int, ranks: Collectives) -> Any:
    """Returns a rank's part of an array of the host."""
    return np.ascontiguousarray(np.split(array, ranks.size, dim)[ranks.rank])


class Operands:
    """x, weight, bias and the gradient of y of a linear layer, with an outlier in one rank's part of each."""

    def __init__(self, m: int, n: int, k: int) -> None:
        draw = np.random.default_rng(0).standard_normal
        self.x, self.w, self.b, self.g = (
            draw(shape).astype(np.float32) for shape in ((m, k), (n, k), (n,), (m, n))
        )
        self.x[1, 2], self.w[-1, 3], self.g[m // 2, n // 3] = 30, -20, 25


def alone(fp8: Quantization | None, own: Operands) -> list[Any]:
    """y, dx, dW and db of one rank."""
    spec = ProductSpec(own.w.shape[1], (own.w.shape[0],), fp8=fp8)
    return step(spec, own.x, own.w, own.b, own.g)


def together(fp8: Quantization | None, own: Operands, size: int, mode: str, sequence: bool) -> list[Any]:
    """Returns the same of so many ranks, put together."""
    n, k = own.w.shape
    column = mode == "column"

    def rank(ranks: Collectives) -> list[Any]:
        how = {"fp8": fp8, "parallel": mode, "group": ranks.name, "sequence": sequence}
        if column:
            spec = ProductSpec(k, (n // size,), **how)
            x = part(own.x, 0, ranks) if sequence else own.x
            w, b, g = part(own.w, 0, ranks), part(own.b, 0, ranks), part(own.g, 1, ranks)
        else:
            spec = ProductSpec(k // size, (n,), **how)
            x, w, b = part(own.x, 1, ranks), part(own.w, 1, ranks), own.b
            g = part(own.g, 0, ranks) if sequence else own.g
        return step(spec, x, w, b, g)

    y, dx, dw, db = zip(*FakeCollectives(size).run(rank), strict=True)
    rows = {"y": sequence and not column, "dx": sequence and column}

    def whole(parts: Any, split: int | None, own: str) -> Any:
        return (
            np.concatenate(parts, split)
            if split is not None
            else (np.concatenate(parts, 0) if rows[own] else parts[0])
        )

    both = np.concatenate(db) if column else sum(db) if sequence else db[0]
    return [
        whole(y, 1 if column else None, "y"),
        whole(dx, None if column else 1, "dx"),
        np.concatenate(dw, 0 if column else 1),
        both,
    ]


def step(spec: ProductSpec, x: Any, w: Any, b: Any, g: Any) -> list[Any]:
    """y and the gradients of x, w and b."""
    tensors = {
        name: fk.tensor(value, requires_grad=True, device="cpu")
        for name, value in (("x", x), ("weight0", w), ("bias0", b))
    }
    beside = {"rng": np.int64([7, 11])} if spec.fp8 is not None and spec.fp8.needs_rng else {}
    more = {name: fk.tensor(value, device="cpu") for name, value in beside.items()}
    y = apply(linear, LinearSpec(spec), tensors | more)["y"]
    y.backward(fk.tensor(g, device="cpu"))
    return [y.numpy(), *(tensor.grad.numpy() for tensor in tensors.values())]
