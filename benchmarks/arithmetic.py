"""cuBLASLt's FP8 products beside the model of Hopper's tensor cores, bit for bit, and the model's speed.

    python -m benchmarks arithmetic --out DIR

On a GPU each row is a product in float32 of E4M3 or E5M2 codes: ``same``, the share of its elements whose
bits are those of ``fk.Accumulation``'s "hopper_fast" or "hopper_split", and the model's ``seconds``. cuBLASLt
may split the contraction of a product with few outputs among blocks and then adds the parts in float32:
``splits`` says into how many. Such products differ, and are not "WRONG". On the CPU, and of the other chips'
sums, rows have ``seconds`` alone.

Sizes go from small to large. After each a line is printed, and all rows so far are in DIR/arithmetic.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import fp8kit as fk
from fp8kit import arrays, formats
from fp8kit.accumulation import ACCUMULATIONS, Accumulation
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.bench.report import NO_TIME, Row, Setting
from fp8kit.formats import E4M3, E5M2, Format, float32, uint8

FILE = "arithmetic.json"
CUBE = (4096, 4096, 4096)  # whose time every chip's sums are measured on
CPU_CUBE = (512, 512, 512)
SIZES = (
    (16, 16, 4096),
    (64, 128, 8192),
    *((2048, 2048, k) for k in (32, 64, 128, 512, 4096)),
    CUBE,
    (8192, 4096, 4096),
    (8192, 16384, 4096),
    (8192, 4096, 16384),
)
PAIRS = ((E4M3, E4M3), (E5M2, E4M3))
DATA = {"normal": 0.0, "wide": 2.0}  # standard deviation of the logarithm of the values' sizes
MODES = ("fast", "split")
_WARM = 64  # rows and columns of a product that only compiles


class Compared(NamedTuple):
    """Share of elements with the same bits; parts that cuBLASLt cuts the contraction into; the model's
    seconds."""

    same: float
    splits: int
    seconds: float


def values(draw: np.random.Generator, rows: int, k: int, spread: float, device: Device) -> ArrayView:
    """Normal values, times e to the power of others: float32 (rows, k) on ``device``."""
    x = draw.standard_normal((rows, k), np.float32)
    if spread:
        x *= np.exp(spread * draw.standard_normal((rows, k), np.float32))
    return arrays.to(arrays.as_view(x), device)


def codes(x: ArrayView, fmt: Format) -> ArrayView:
    """Codes of values by the scale of their tensor."""
    return arrays.as_view(fk.quantize(x, fmt).data)


def compare(
    a: ArrayView, b: ArrayView, pair: tuple[Format, Format], how: Accumulation, fast: bool, device: Device
) -> Compared:
    """The product of codes (M, K) and (N, K) on ``device`` by cuBLASLt and by the model."""
    from fp8kit.backends.cuda import cublaslt

    (m, k), n = a.shape, b.shape[0]
    dtypes = [formats.dtype_of_format(fmt) for fmt in pair]
    key = cublaslt.MatmulKey(
        m, n, k, "nt", *dtypes, float32, k, k, n, scaling=("tensor", "tensor"), fast_accumulate=fast
    )
    plan = cublaslt.plan(key, device.index)
    space = arrays.empty((cublaslt.WORKSPACE,), uint8, device)
    one = _scale(device)
    theirs, ours = (arrays.empty((m, n), float32, device) for _ in range(2))
    addresses = a.ptr, b.ptr, theirs.ptr, one.ptr, one.ptr, 0, space.ptr, 0
    plan.run(addresses, cublaslt.WORKSPACE, 0)
    seconds = _model(a, b, ours, pair, how)
    native = arrays.provider(device).native
    same = native(theirs.view(formats.uint32)) == native(ours.view(formats.uint32))
    return Compared(float(same.mean()), plan.splits, seconds)


def _scale(device: Device) -> ArrayView:
    return arrays.to(arrays.as_view(np.float32([[0.37]])), device)


def _model(a: ArrayView, b: ArrayView, out: ArrayView, pair: tuple[Format, Format], how: Accumulation) -> Any:
    """out by the model; its seconds, what it compiles aside."""
    device, whole = out.device, (0, 0)
    kernels, one = dispatch.kernels(device), _scale(device)

    def run(left: ArrayView, right: ArrayView, to: ArrayView) -> None:
        kernels.model_gemm(left, right, to, *pair, one, one, whole, whole, how, None, None, 0)
        arrays.synchronize(device)

    (m, n), few = out.shape, min(_WARM, *out.shape)
    run(a.slice(0, 0, few), b.slice(0, 0, few), arrays.empty((few, few), float32, device))
    begin = time.perf_counter()
    run(a.slice(0, 0, m), b.slice(0, 0, n), out)
    return time.perf_counter() - begin


def _products(size: tuple[int, int, int], device: Device) -> Iterator[Row]:
    """Every pair of formats, data and mode of a size, by cuBLASLt and the model."""
    m, n, k = size
    draw = np.random.default_rng(0)
    for name, spread in DATA.items():
        x, y = values(draw, m, k, spread, device), values(draw, n, k, spread, device)
        for pair in PAIRS:
            a, b = codes(x, pair[0]), codes(y, pair[1])
            for mode in MODES:
                found = compare(a, b, pair, ACCUMULATIONS[f"hopper_{mode}"], mode == "fast", device)
                wrong = found.splits == 1 and found.same < 1
                status = "WRONG: bits differ" if wrong else "ok"
                yield _row(size, pair, name, f"hopper_{mode}", status) | found._asdict()


def _times(size: tuple[int, int, int], device: Device) -> Iterator[Row]:
    """The model's seconds for the sums of every chip."""
    m, n, k = size
    draw = np.random.default_rng(0)
    a, b = (codes(values(draw, rows, k, 0.0, device), E4M3) for rows in (m, n))
    out = arrays.empty((m, n), float32, device)
    for name, how in ACCUMULATIONS.items():
        seconds = _model(a, b, out, PAIRS[0], how)
        yield _row(size, PAIRS[0], "normal", f"{name}, time") | {"seconds": seconds}


def _row(size: tuple[int, ...], pair: tuple[Format, Format], data: str, case: str, status: str = "ok") -> Row:
    by = " x ".join(map(str, size))
    return {"workload": f"{by}, {pair[0]} x {pair[1]}, {data}", "case": case, "status": status}


def arithmetic_part(setting: Setting) -> list[Row]:
    """A row a product and mode: on a GPU of compute capability 9.0; elsewhere the model's times alone."""
    device = setting.device
    jobs = [(_times, CPU_CUBE if device.kind == "cpu" else CUBE)]
    if device.kind == "cuda":
        from fp8kit.backends.cuda import launch

        if launch.capability(device.index) == (9, 0):
            jobs += [(_products, size) for size in SIZES]
    rows: list[Row] = []
    for make, size in jobs:
        if setting.left() <= 0:
            rows.append(_row(size, PAIRS[0], "normal", make.__name__.strip("_"), NO_TIME))
            continue
        begin = time.perf_counter()
        made = list(make(size, device))
        rows += made
        wrong = sum(row["status"] != "ok" for row in made)
        by = " x ".join(map(str, size))
        took = f"{time.perf_counter() - begin:.1f} s"
        print(f"arithmetic: {by}: {len(made)} rows, {wrong} wrong, {took}", flush=True)
        if setting.out is not None:
            (setting.out / FILE).write_text(json.dumps(rows, indent=1) + "\n")
    return rows
