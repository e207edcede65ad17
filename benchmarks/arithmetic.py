"""cuBLASLt's FP8 products beside the model of Hopper's tensor cores, bit for bit.

    python -m benchmarks arithmetic --out DIR

Each row is a product in float32 of E4M3 or E5M2 codes: the share of its elements whose bits are those of
``fk.Accumulation``'s "hopper_fast" or "hopper_split". cuBLASLt may split the contraction of a product with
few outputs among blocks and then adds the parts in float32: ``splits`` says into how many. Such products
differ, and are not "WRONG".
"""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

import numpy as np

from fp8kit import arrays, codec, formats
from fp8kit.accumulation import ACCUMULATIONS, Accumulation
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.bench.report import Row, Setting
from fp8kit.formats import E4M3, E5M2, Format, float32, uint8

SIZES = (
    *((2048, 2048, k) for k in (32, 64, 128, 512, 4096)),
    (8192, 4096, 4096),
    (8192, 16384, 4096),
    (8192, 4096, 16384),
    (16, 16, 4096),
    (64, 128, 8192),
)
PAIRS = ((E4M3, E4M3), (E5M2, E4M3))
DATA = {"normal": 0.0, "wide": 2.0}  # standard deviation of the logarithm of the values' sizes


class Compared(NamedTuple):
    """Share of elements with the same bits; parts that cuBLASLt cuts the contraction into; the model's
    seconds."""

    same: float
    splits: int
    seconds: float


def operand(draw: np.random.Generator, rows: int, k: int, fmt: Format, spread: float) -> Any:
    """Codes of normal values, times e to the power of others; as if scaled by the tensor's amax."""
    x = draw.standard_normal((rows, k), np.float32)
    if spread:
        x *= np.exp(spread * draw.standard_normal((rows, k), np.float32))
    return codec.encode(x * np.float32(fmt.max / np.abs(x).max()), fmt)


def compare(
    a: Any, b: Any, pair: tuple[Format, Format], how: Accumulation, fast: bool, device: Device
) -> Compared:
    """The product of codes (M, K) and (N, K) by cuBLASLt and by the model."""
    from fp8kit.backends.cuda import cublaslt

    views = [arrays.to(arrays.as_view(codes), device) for codes in (a, b)]
    (m, k), n = a.shape, b.shape[0]
    dtypes = [formats.dtype_of_format(fmt) for fmt in pair]
    key = cublaslt.MatmulKey(
        m, n, k, "nt", *dtypes, float32, k, k, n, scaling=("tensor", "tensor"), fast_accumulate=fast
    )
    plan = cublaslt.plan(key, device.index)
    space = arrays.empty((cublaslt.WORKSPACE,), uint8, device)
    one = arrays.to(arrays.as_view(np.float32([[0.37]])), device)
    theirs, ours = (arrays.empty((m, n), float32, device) for _ in range(2))
    ends = space.ptr, cublaslt.WORKSPACE
    plan.run(views[0].ptr, views[1].ptr, theirs.ptr, one.ptr, one.ptr, 0, *ends, 0)
    kernels, whole = dispatch.kernels(device), (0, 0)
    seconds = 0.0
    for _ in range(2):  # the first call compiles
        arrays.synchronize(device)
        begin = time.perf_counter()
        kernels.model_gemm(*views, ours, *pair, one, one, whole, whole, how, None, None, 0)
        arrays.synchronize(device)
        seconds = time.perf_counter() - begin
    return Compared(float((_bits(theirs) == _bits(ours)).mean()), plan.splits, seconds)


def _bits(x: ArrayView) -> Any:
    return arrays.to(x, arrays.CPU).view(formats.uint32).numpy()


def arithmetic_part(setting: Setting) -> list[Row]:
    """A row a product; on a GPU of compute capability 9.0 alone."""
    if setting.device.kind != "cuda":
        return []
    from fp8kit.backends.cuda import launch

    if launch.capability(setting.device.index) != (9, 0):
        return []
    rows: list[Row] = []
    draw = np.random.default_rng(0)
    for (m, n, k), pair, (name, spread) in itertools.product(SIZES, PAIRS, DATA.items()):
        a, b = operand(draw, m, k, pair[0], spread), operand(draw, n, k, pair[1], spread)
        for mode in ("fast", "split"):
            found = compare(a, b, pair, ACCUMULATIONS[f"hopper_{mode}"], mode == "fast", setting.device)
            wrong = found.splits == 1 and found.same < 1
            rows.append(
                {
                    "workload": f"{m} x {n} x {k}, {pair[0]} x {pair[1]}, {name}",
                    "case": f"hopper_{mode}",
                    "status": "WRONG: bits differ" if wrong else "ok",
                    **found._asdict(),
                }
            )
    return rows
