"""FP8 products by a kernel of our own, for Hopper (raw_kernels/hopper_gemm.cu), without cuBLASLt.

The order of sums does not depend on sizes, tiles or the device: an element is what ``fk.Accumulation``'s
"hopper_fast" or "hopper_split" says, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fp8kit.accumulation import Accumulation, on_chip
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div
from fp8kit.backends.cuda.own_gemm import Product, contract
from fp8kit.backends.cuda.structures import Packer
from fp8kit.backends.cuda.tensor_maps import CODES, NONE, tensor_map
from fp8kit.backends.registry import CannotTake
from fp8kit.lru import memoized

CAPABILITY, LEAST_ARCH = (9, 0), 90
SOURCE, THREADS, SHARED = "hopper_gemm.cu", 384, 227 * 1024
DEPTH = 128  # codes of a row in a tile
BOX = 64, 16, 1  # columns and rows of a result that a copy writes
JOB_CODES = 4 * CODES + "6P13q"  # struct Job without an epilogue's part
JOB = Packer(JOB_CODES + "40x" + CODES)  # with the map of the result, at a multiple of 64 bytes
_SIXTEEN_BITS = {"bf16": "bfloat16", "f16": "float16"}
_ALONE = (0,) * 4  # what it says of groups, where there are none


class Tiling(NamedTuple):
    """How the result is cut: ``rows`` x ``columns`` a block at a time."""

    rows: int
    columns: int


class Planned(NamedTuple):
    """What follows from shapes and types: the kernel, its blocks, the maps without addresses, sizes."""

    kernel: launch.Kernel
    blocks: int
    maps: tuple[bytes, ...]
    sizes: tuple[int, ...]


# What a tile costs, by its elements: to write it, and for each 128 codes of the contraction. Microseconds of
# an H200, of which only the ratios count (benchmarks/NOTES.md).
COSTS = {32768: (0.9, 0.72), 16384: (0.5, 0.38), 8192: (0.3, 0.27)}
_SMALL = {"whole": (128, 64), "lines_squares": (128, 64)}  # columns of the other tiles that are compiled


def tiling(m: int, n: int, k: int, scales: str, promote: int, multiprocessors: int) -> Tiling:
    """The tiling that a product of m x n elements, k terms each, is made by: the one whose tiles' costs, by
    rounds of all multiprocessors, are the least."""
    large = Tiling(256, 128) if promote else Tiling(128, 256)
    tilings = [large, *(Tiling(128, columns) for columns in _SMALL.get(scales, ()))]

    def cost(one: Tiling) -> float:
        first, each = COSTS[one.rows * one.columns]
        tiles = ceil_div(m, one.rows) * ceil_div(n, one.columns)
        return ceil_div(tiles, multiprocessors) * (first + ceil_div(k, DEPTH) * each)

    return min(tilings, key=cost)


def want_hopper(index: int, *strides: int) -> None:
    """CannotTake for a device that is no Hopper, and rows that are not a multiple of 16 codes apart."""
    if launch.capability(index) != CAPABILITY:
        major, minor = launch.capability(index)
        raise CannotTake("hopper_gemm", "device", f"compute capability {major}.{minor}", "9.0")
    if any(stride % 16 for stride in strides):
        wanted = "multiples of 16"
        raise CannotTake(
            "hopper_gemm", "a, b", f"{', '.join(map(str, strides))} codes from row to row", wanted
        )


def result_map(shape: tuple[int, ...], stride: int, out: str, scales: str, groups: str, at: Tiling) -> bytes:
    """The map by which copies write a result of 16 bits, ([groups,] m, n), from shared memory: the source's
    STAGED. That of ``NONE`` where the kernel writes from registers: other results, and those whose rows do
    not begin at multiples of 16 bytes."""
    matrices, m, n = (1, *shape)[-3:]
    staged = groups == "terms" or (groups == "none" and (scales != "whole" or at.columns == 256))
    if not staged or out not in _SIXTEEN_BITS or stride % 8:
        return NONE[1]
    return tensor_map(_SIXTEEN_BITS[out], (n, m, matrices), (stride, m * stride), BOX, True)


def blocks_together(groups: str, at: Tiling) -> int:
    """How many blocks are a cluster, which is as many tiles wide: the source's CLUSTER. A grid is a multiple
    of it."""
    return 2 if groups == "terms" and at.rows == 256 else 1


def band_of(blocks: int, rows: int, columns: int) -> int:
    """Rows of tiles of so many elements that are made together: what is worked on at once is about square, so
    that the L2 cache serves most of it."""
    return max(1, round(math.sqrt(blocks * columns / rows)))


def compiled(
    index: int,
    types: tuple[str, str, str],
    scales: str,
    promote: int,
    at: Tiling,
    groups: str,
    epilogue: str = "bare",
    act: str = "identity",
) -> launch.Kernel:
    """The kernel for the source's names of a's, b's and out's types, of its kinds of scales, groups and
    epilogues, and of an activation."""
    left, right, out = types
    return launch.kernel(
        SOURCE,
        "hopper_gemm",
        index,
        LEFT=left,
        RIGHT=right,
        T=out,
        SCALES=scales,
        PROMOTE=str(promote),
        BM=str(at.rows),
        BN=str(at.columns),
        GROUPS=groups,
        EPILOGUE=epilogue,
        ACT=act,
    )


@memoized("Hopper products by call")
def _plan(
    index: int,
    m: int,
    n: int,
    k: int,
    a_stride: int,
    b_stride: int,
    out_stride: int,
    a_rows: int,
    b_rows: int,
    left: str,
    right: str,
    out: str,
    scales: str,
    steps: tuple[int, int],
    promote: int,
) -> Planned:
    """``a_rows``, ``b_rows``: of the operands, with their padding; ``left``, ``right``, ``out``: the sources'
    names of their types; ``steps``: strides of scales of rows and squares."""
    want_hopper(index, a_stride, b_stride, k)
    at = tiling(m, n, k, scales, promote, launch.sm_count(index))
    tall, wide = ceil_div(m, at.rows), ceil_div(n, at.columns)
    blocks = min(tall * wide, launch.sm_count(index))
    band = min(tall, band_of(blocks, *at))
    lines = [NONE[1], NONE[1]]
    if scales != "whole":
        for i, (kind, rows, box) in enumerate(
            zip(scales.split("_"), (a_rows, b_rows), (at.rows, at.columns), strict=True)
        ):
            if kind == "lines":
                lines[i] = tensor_map("float32", (rows, ceil_div(k, DEPTH)), (rows,), (box, 1))
    maps = (
        tensor_map("uint8", (k, m), (a_stride,), (DEPTH, at.rows), True),
        tensor_map("uint8", (k, n), (b_stride,), (DEPTH, at.columns), True),
        *lines,
        result_map((m, n), out_stride, out, scales, "none", at),
    )
    kernel = compiled(index, (left, right, out), scales, promote, at, "none")
    sizes = m, n, out_stride, ceil_div(k, DEPTH), *steps, tall, wide, band, *_ALONE
    return Planned(kernel, blocks, maps, sizes)


def _run(product: Product, stream: int) -> None:
    """CannotTake on devices that are not of compute capability 9.0, beside the contract's refusals."""
    a, b, out, scale_invs = product.a, product.b, product.out, (product.a_scale_inv, product.b_scale_inv)
    if (a.ptr | b.ptr | scale_invs[0].ptr | scale_invs[1].ptr) % 16:
        raise CannotTake("hopper_gemm", "a, b, scales", "addresses", "multiples of 16")
    plan = _plan(
        out.device.index,
        out.shape[0],
        out.shape[1],
        a.shape[1],
        launch.row_stride(a),
        launch.row_stride(b),
        launch.row_stride(out),
        a.shape[0],
        b.shape[0],
        product.left,
        product.right,
        launch.type_name(out.dtype),
        product.scales,
        product.steps,
        product.promote,
    )
    a_map, b_map, *lines, out_map = plan.maps
    described = [scale.ptr if any(line) else 0 for scale, line in zip(scale_invs, lines, strict=True)]
    job = JOB.pack(
        a.ptr,
        a_map,
        b.ptr,
        b_map,
        described[0],
        lines[0],
        described[1],
        lines[1],
        *(scale.ptr for scale in scale_invs),
        address(product.bias),
        address(product.addend),
        out.ptr,
        0,
        *plan.sizes,
        out.ptr,
        out_map,
    )
    launch.launch(plan.kernel, plan.blocks, THREADS, (job,), stream, SHARED)


def sums(call: Any) -> Accumulation | None:
    """How a call's terms are added; None on other chips, where another kernel makes the product."""
    capability = launch.capability(call.out.device.index)
    return on_chip(capability, getattr(call, "fast_accumulate", False))


fp8_gemm, block_gemm = contract("hopper_gemm", _run)
fp8_gemm._sums = block_gemm._sums = sums  # type: ignore[attr-defined]
