"""Our FP8 product for Hopper beside cuBLASLt's, each with the algorithm that is the fastest under load: the
layer's twelve products with scales per tensor and with scales of blocks, its forward products over numbers of
rows, and with epilogues the products of the feed-forward layer, beside cuBLASLt's and a pass of our own.

    python -m benchmarks own --out DIR

``of_best`` is cuBLASLt's time over the contender's. The turns keep the chip at its power limit; a product of
few rows is a CUDA graph of many, since the host takes longer for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.moe import as_graph
from fp8kit import arrays, codec
from fp8kit.arrays import ArrayView, Device
from fp8kit.backends import dispatch
from fp8kit.backends.composed import composed
from fp8kit.backends.cuda.fused_gemm import fused_workspace, place
from fp8kit.backends.policy import SelectionPolicy, policy_context
from fp8kit.backends.protocol import SPECS, block_shapes
from fp8kit.bench import gemms, random
from fp8kit.bench.contest import Contest, row_of, within_time
from fp8kit.bench.report import Row, Setting, Unavailable
from fp8kit.bench.sizes import FULL
from fp8kit.bench.timing import Step
from fp8kit.formats import E4M3, E5M2, bfloat16
from fp8kit.testing import relative_error
from fp8kit.testing.contract import kernel_test, poisoned, put, workspace
from fp8kit.testing.contract.sampler import Sampler

OURS, LIBRARY = "fp8kit", "cuBLASLt"
FUSED = "fp8_gemm_act", "fp8_gemm_act_bwd", "fp8_gemm_cast", "fp8_gemm_lines"
TENSORS, BLOCKS, FEW, EPILOGUES = "tensors", "blocks", "few rows", "epilogues"
ROWS = 16, 32, 64, 256, 1024, 4096, 16384  # of hidden x hidden; of the others a few rows alone
FEW_ROWS = 16, 64
REPEATS = 20  # of a product of few rows in a graph
_SCALE = 2.0**-6
_LINE, _SQUARE = (1, 128), (128, 128)


class Case(NamedTuple):
    """A product and how its operands are scaled: "tensors", "blocks", or "few rows", which is "tensors" over
    numbers of rows."""

    product: gemms.Product
    scales: str

    def __str__(self) -> str:
        p = self.product
        return f"{self.scales}: {p.name}, {p.m} x {p.n} x {p.k}"


def cases(full: bool, layer: Any) -> Iterator[Case]:
    """The twelve products in both ways, then the forward ones over numbers of rows."""
    for scales in (TENSORS, BLOCKS):
        yield from (Case(product, scales) for product in gemms.products(layer))
    for product in gemms.products(layer) if full else gemms.products(layer)[:1]:
        if product.name.endswith("forward"):
            square = product.n == product.k
            yield from (Case(replace(product, m=rows), FEW) for rows in (ROWS if square else FEW_ROWS))


class Epilogue(NamedTuple):
    """A product with an epilogue: the contract's operation, (rows, columns, terms) of its result, options of
    its sample."""

    name: str
    operation: str
    shape: tuple[int, int, int]
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{EPILOGUES}: {self.name}, {' x '.join(map(str, self.shape))}"


def epilogues(layer: Any) -> Iterator[Epilogue]:
    """Of the feed-forward layer: fc1 forward and fc2 dgrad with the activation, whose result the next product
    reads in FP8; a cast and lines of 128 codes at both products' shapes."""
    wide, narrow = (layer.tokens, layer.ffn, layer.hidden), (layer.tokens, layer.hidden, layer.ffn)
    gated = layer.tokens, layer.ffn // 2, layer.hidden  # so that fc1's product is as large
    for kind, shape in (("gelu", wide), ("swiglu", gated)):
        yield Epilogue(f"{kind} forward", "fp8_gemm_act", shape, {"kind": kind})
        options = {"kind": kind, "a": E5M2, "fast": False}
        yield Epilogue(f"{kind} dgrad", "fp8_gemm_act_bwd", shape, options)
    for shape in (wide, narrow):
        yield Epilogue("cast", "fp8_gemm_cast", shape, {})
        yield Epilogue("lines of blocks", "fp8_gemm_lines", shape, {"blocks": True})


def measure_epilogue(case: Epilogue, setting: Setting, own: Any, library: Any) -> list[Row]:
    """Ours, and cuBLASLt's product with our pass."""
    spec, test, (rows, columns, terms) = SPECS[case.operation], kernel_test(case.operation), case.shape
    given = test.arguments(
        Sampler(library, setting.device, bfloat16), rows, columns, **test.timed | case.options, k=terms
    )
    given["stream"] = arrays.current_stream(setting.device)
    given["workspace"] = workspace(fused_workspace(rows, 2 * columns, bfloat16.itemsize), setting.device)
    separate = SimpleNamespace(**dict(zip(FUSED, composed(library, place, __name__), strict=True)))
    assert spec.flops is not None
    flops = spec.flops(SimpleNamespace(**given))
    contest = Contest(setting.sustained(flops), str(case), scales=EPILOGUES)
    for name, kernels in ((OURS, own), (LIBRARY, separate)):
        contest.enter(name, lambda row, kernels=kernels: _timed(partial(spec.call, kernels, given)))
    return _of_best(contest, contest.time(host=False), flops)


def _timed(step: Step) -> Step:
    """cuBLASLt's algorithm is timed when a product comes for the third time."""
    for _ in range(4):
        step()
    return step


def _of_best(contest: Contest, rows: list[Row], flops: float, repeats: int = 1) -> list[Row]:
    """Fills in the speed of each, and cuBLASLt's time over it."""
    for row in rows:
        if "gpu_ms" in row:
            row["gpu_ms"] /= repeats
            row["tflops"] = flops / row["gpu_ms"] * 1e-9
    best = contest.rows[LIBRARY].get("gpu_ms")
    for row in rows:
        if best is not None and "gpu_ms" in row:
            row["of_best"] = best / row["gpu_ms"]
    return rows


def _kernels(device: Device, tensors: str, blocks: str) -> Any:
    chosen: Any = {"fp8_gemm": (f"impl:cuda.{tensors}",), "block_gemm": (f"impl:cuda.{blocks}",)}
    chosen |= {name: (f"impl:cuda.hopper_{name}",) for name in FUSED}
    with policy_context(SelectionPolicy(per_op=chosen)):
        return dispatch.kernels(device)


def _corner_error(out: ArrayView, exact: Any) -> float:
    """The relative error of the result's corner, all that is compared; of the whole ``gemm`` looks at NaN."""
    corner = out.slice(0, 0, exact.shape[0]).numpy()[:, : exact.shape[1]]
    return relative_error(corner.astype(np.float32), exact)


def _of_blocks(product: gemms.Product, device: Device) -> tuple[Callable[[Any], Step], Callable[[], float]]:
    """What makes a step by an engine's kernels, and the error of its result. Both operands are in E4M3."""
    tiles = (_LINE, _LINE if "wgrad" in product.name else _SQUARE)
    codes, inverse, exact = list[ArrayView](), list[ArrayView](), []
    for seed, rows, tile in zip((5, 6), (product.m, product.n), tiles, strict=True):
        shape, scales = block_shapes(rows, product.k, tile)
        drawn = random.codes(shape, seed)
        codes.append(put(drawn, device))
        inverse.append(put(np.full(scales, _SCALE, np.float32), device))
        exact.append(codec.decode(drawn[: gemms.CORNER], E4M3).astype(np.float64) * _SCALE)
    out, stream = poisoned((product.m, product.n), bfloat16, device), arrays.current_stream(device)

    def step(kernels: Any) -> Step:
        arrays.copy(out, poisoned(out.shape, out.dtype, device))
        space = workspace(kernels.fp8_gemm_workspace(product.m, product.n), device)
        call = (*codes, out, E4M3, E4M3, *inverse, *tiles, None, None, space, stream)
        return partial(kernels.block_gemm, *call)

    return step, partial(_corner_error, out, exact[0] @ exact[1].T)


def _repeated(given: gemms.Operands, kernels: Any) -> Step:
    """``gemms.ours``, ``REPEATS`` times as a graph."""
    p, (a, b), (a_inv, b_inv) = given.product, given.codes, given.inverse

    def loop(stream: int) -> None:
        for _ in range(REPEATS):
            call = (a, b, given.out, p.a, E4M3, a_inv, b_inv, None, None, p.fast, given.workspace, stream)
            kernels.fp8_gemm(*call)

    return as_graph(loop)


def measure(case: Case, setting: Setting, own: Any, library: Any) -> list[Row]:
    """Ours and cuBLASLt's."""
    turns = setting.warmed() if case.scales == FEW else setting.sustained(case.product.flops)
    contest, repeats = Contest(turns, str(case), scales=case.scales), 1
    if case.scales == BLOCKS:
        step, error = _of_blocks(case.product, setting.device)
    else:
        given = gemms.operands(case.product, setting.device, library)

        def step(kernels: Any) -> Step:
            given.poison()
            return gemms.ours(given, kernels)

        exact, repeats = given.exact(), REPEATS if case.scales == FEW else 1
        error = partial(_corner_error, given.out, exact)

    def make(kernels: Any, row: Row) -> Step:
        made = _timed(step(kernels))
        row["error"] = error()
        if not row["error"] < gemms.BOUND:
            row["status"] = f"WRONG: error {row['error']:.5f}, bound {gemms.BOUND:.5f}"
        return made if repeats == 1 else _repeated(given, kernels)

    for name, kernels in ((OURS, own), (LIBRARY, library)):
        contest.enter(name, partial(make, kernels))
    return _of_best(contest, contest.time(host=False), case.product.flops, repeats)


def own_part(setting: Setting) -> list[Row]:
    """A row for each product and contender."""
    device = setting.device
    if device.kind != "cuda":
        raise Unavailable("a GPU of compute capability 9.0")
    own = _kernels(device, "hopper_fp8_gemm", "hopper_block_gemm")
    library = _kernels(device, "timed_fp8_gemm", "timed_block_gemm")
    fused = within_time(
        setting,
        list(epilogues(setting.sizes.large)),
        lambda case: measure_epilogue(case, setting, own, library),
        lambda case: row_of(str(case), OURS, scales=EPILOGUES),
    )
    return fused + within_time(
        setting,
        list(cases(setting.sizes is FULL, setting.sizes.large)),
        lambda case: measure(case, setting, own, library),
        lambda case: row_of(str(case), OURS, scales=case.scales),
    )


def speed(rows: list[Row], scales: str, least: bool = False) -> float | None:
    """The geometric mean of our speed over cuBLASLt's, or the ``least``; of "few rows" up to 64 rows. None
    where a product has no figure."""
    found = [row for row in rows if row["case"] == OURS and row["scales"] == scales]
    if scales == FEW:
        found = [row for row in found if int(row["workload"].split(", ")[1].split(" x ")[0]) <= 64]
    shares = [float(row["of_best"]) for row in found if row["status"] == "ok" and "of_best" in row]
    if not found or len(shares) < len(found):
        return None
    return min(shares) if least else math.prod(shares) ** (1 / len(shares))
