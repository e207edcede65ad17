"""The layer's twelve FP8 products: fp8kit's call beside every algorithm that cuBLASLt's heuristic proposes,
and their relatives, in turn.

An algorithm that is the fastest alone and cool need not be it within a step: the turns keep the chip under
load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fp8kit import arrays, codec, formats
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.bench import random
from fp8kit.bench.contest import Contest, row_of, within_time
from fp8kit.bench.report import Row, Setting
from fp8kit.bench.sizes import Layer
from fp8kit.bench.timing import Step, clock_for, interleaved, medians
from fp8kit.formats import E4M3, E5M2, DType, Format
from fp8kit.testing import relative_error
from fp8kit.testing.contract import poisoned, put, workspace

CORNER = 64  # rows and columns of the result that are compared with float64
# bfloat16's rounding of the result, and the tensor cores' 14-bit sums where they are fast; see
# docs/numerics.md
BOUND = 2.0**-7
FINALISTS = 8  # algorithms that are timed beside the others
OURS, BEST = "fp8kit FP8", "cuBLASLt, best algorithm"
# of the codes: normal values use the format's upper binades and never its limit
_SPREAD = {"E4M3": 64.0, "E5M2": 8192.0}


@dataclass(frozen=True)
class Product:
    """out (m, n) = a (m, k) b (n, k)^T in FP8. ``fast``: the accumulation that delayed scaling takes
    there."""

    name: str
    m: int
    n: int
    k: int
    a: Format
    fast: bool

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.m * self.n * self.k


def products(layer: Layer) -> list[Product]:
    """Forward, gradient of the input and gradient of the weight of the layer's four products, in a step's
    order."""
    t, shapes = layer.tokens, layer.weights
    found = [Product(f"{name} forward", t, out, into, E4M3, True) for name, (out, into) in shapes.items()]
    for name, (out, into) in reversed(shapes.items()):
        found += [
            Product(f"{name} dgrad", t, into, out, E5M2, False),
            Product(f"{name} wgrad", out, into, t, E5M2, False),
        ]
    return found


@dataclass(frozen=True)
class Operands:
    """A product's arrays on a device: ``codes`` of a and b, their scale_inv ``inverse`` (both 2**-6 or what
    makes them 1), ``out``."""

    product: Product
    codes: tuple[ArrayView, ArrayView]
    inverse: tuple[ArrayView, ArrayView]
    out: ArrayView
    workspace: ArrayView

    def exact(self) -> np.ndarray[Any, Any]:
        """Returns the corner of the result in float64."""
        parts = []
        for view, scale, fmt in zip(self.codes, self.inverse, (self.product.a, E4M3), strict=True):
            rows = view.slice(0, 0, min(CORNER, view.shape[0])).numpy()
            parts.append(codec.decode(rows, fmt).astype(np.float64) * float(scale.numpy()[0]))
        return np.asarray(parts[0] @ parts[1].T)

    def error(self) -> float:
        """Relative error of the corner of ``out``; NaN where it was not written, anywhere."""
        got = self.out.numpy().astype(np.float32, copy=False)
        return relative_error(got[:CORNER, :CORNER], self.exact()) if np.isfinite(got).all() else float("nan")

    def poison(self) -> None:
        """Overwrite ``out``."""
        arrays.copy(self.out, poisoned(self.out.shape, self.out.dtype, self.out.device))


def operands(product: Product, device: Device, kernels: Any) -> Operands:
    """Random codes on ``device`` and a poisoned output."""

    def operand(rows: int, fmt: Format, seed: int) -> tuple[ArrayView, ArrayView]:
        codes = random.codes((rows, product.k), seed, _dtype(fmt), _SPREAD[fmt.name])
        inverse = np.array([1 / _SPREAD[fmt.name]], np.float32)
        return put(codes, device), put(inverse, device)

    (a, a_inv), (b, b_inv) = operand(product.m, product.a, 5), operand(product.n, E4M3, 6)
    out = poisoned((product.m, product.n), formats.bfloat16, device)
    space = workspace(kernels.fp8_gemm_workspace(product.m, product.n), device)
    return Operands(product, (a, b), (a_inv, b_inv), out, space)


def _dtype(fmt: Format) -> DType:
    dtype = formats.dtype_of_format(fmt)
    assert dtype is not None
    return dtype


def ours(given: Operands, kernels: Any) -> Step:
    """Returns the contract's product."""
    p, (a, b), (a_inv, b_inv) = given.product, given.codes, given.inverse
    stream = arrays.current_stream(given.out.device)
    return lambda: kernels.fp8_gemm(
        a, b, given.out, p.a, E4M3, a_inv, b_inv, None, None, p.fast, given.workspace, stream
    )


def _plan(given: Operands, fast: bool | None = None) -> tuple[Any, Callable[[int], None]]:
    """Returns a plan of its own for the product, and a call that runs it onto an address. A CUDA device
    only."""
    from fp8kit.backends.cuda.cublaslt import WORKSPACE, MatmulKey, MatmulPlan

    p, device = given.product, given.out.device
    plan = MatmulPlan(
        MatmulKey(
            p.m,
            p.n,
            p.k,
            "nt",
            _dtype(p.a),
            _dtype(E4M3),
            formats.bfloat16,
            p.k,
            p.k,
            p.n,
            scaling=("tensor", "tensor"),
            fast_accumulate=p.fast if fast is None else fast,
            timed=True,
        ),
        device.index,
    )
    plan.tuned = True  # callers choose
    (a, b), (a_inv, b_inv), stream = given.codes, given.inverse, arrays.current_stream(device)
    rest = a_inv.ptr, b_inv.ptr, 0, given.workspace.ptr, 0
    return plan, lambda out: plan.run((a.ptr, b.ptr, out, *rest), WORKSPACE, stream)


def algorithms(given: Operands) -> dict[str, Step]:
    """Calls by the best algorithms at a first look, by their number: cuBLASLt's heuristic's come first, then
    relatives of theirs. A CUDA device only."""
    plan, run = _plan(given)
    plan.widen()

    def call(index: int) -> Step:
        def step() -> None:
            plan.choose(index)
            run(given.out.ptr)

        return step

    steps = {str(index): call(index) for index in range(plan.algorithms)}
    look = medians(interleaved(steps, clock_for(given.out.device), 2, 2))
    return {name: steps[name] for name in sorted(steps, key=look.__getitem__)[:FINALISTS]}


def fastest(given: Operands, fast: bool | None) -> Step:
    """Returns the product by the algorithm that the engine finds the fastest. ``fast``: the accumulation,
    None as the product has it. A CUDA device only."""
    from fp8kit.backends.cuda.algorithms import TIMED_AT, tune

    plan, run = _plan(given, fast)
    plan.tune, plan.tuned = tune, False
    for _ in range(TIMED_AT):
        run(given.out.ptr)
    return lambda: run(given.out.ptr)


Made = tuple[Step, Callable[[], float]]  # a step, and what tells its error
Peers = Callable[[Operands], Mapping[str, Callable[[], Made]]]


def measure(
    product: Product, setting: Setting, peers: Peers = lambda given: {}, kernels: Any | None = None
) -> list[Row]:
    """fp8kit's call, the best algorithm (on a GPU) and the ``peers``: name -> a function that makes a step
    and what tells its error."""
    device = setting.device
    kernels = dispatch.kernels(device) if kernels is None else kernels
    workload = f"{product.name}, {product.m} x {product.n} x {product.k}, {product.a.name} x E4M3"
    contest = Contest(setting.fewer_rounds(), workload, product=product.name)
    given = operands(product, device, kernels)

    def make(made: Callable[[], Made], row: Row) -> Step:
        given.poison()
        step, error = made()
        step()
        row["error"] = error()
        if not row["error"] < BOUND:
            row["status"] = f"WRONG: error {row['error']:.5f}, bound {BOUND:.5f}"
        return step

    for name, made in {OURS: lambda: (ours(given, kernels), given.error), **peers(given)}.items():
        contest.enter(name, partial(make, made))
    proposed = algorithms(given) if device.kind == "cuda" else {}
    times = contest.setting.medians(contest.steps | proposed)
    if proposed:
        best = min(proposed, key=times.__getitem__)
        times[BEST] = times[best]
        contest.enter(BEST, partial(make, lambda: (proposed[best], given.error)), algorithm=int(best))
    for name, row in contest.rows.items():
        if name in times:
            row |= {"gpu_ms": times[name] * 1e3, "tflops": product.flops / times[name] * 1e-12}
            if proposed:
                row["of_best"] = times[BEST] / times[name]
    return list(contest.rows.values())


def gemm_part(setting: Setting, peers: Peers = lambda given: {}) -> list[Row]:
    """Returns the twelve products of the largest layer."""
    return within_time(
        setting,
        products(setting.sizes.large),
        lambda product: measure(product, setting, peers),
        lambda product: row_of(product.name, OURS, product=product.name),
    )
