"""FP8 products by a kernel of our own, for Hopper (raw_kernels/hopper_gemm.cu), without cuBLASLt.

The order of sums does not depend on sizes, tiles or the device: an element is what ``fk.Accumulation``'s
"hopper_fast" or "hopper_split" says, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fp8kit.accumulation import Accumulation, on_chip
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div
from fp8kit.backends.cuda.own_gemm import Product, contract
from fp8kit.backends.cuda.structures import Packer
from fp8kit.backends.cuda.tensor_maps import CODES, NONE, tensor_map
from fp8kit.backends.registry import CannotTake
from fp8kit.lru import memoized
from fp8kit.raw_kernels import manifest

CAPABILITY, ARCHS = (9, 0), (90, 90)
SOURCE, SHARED = "hopper_gemm.cu", 227 * 1024
THREADS, FINISHERS = 384, 128  # of a block, and with the epilogue backward so many more
DEPTH = 128  # codes of a row in a tile
_JOB = Packer(6 * CODES + "7P13q")  # struct Job without an epilogue's part
_NO_EPILOGUE = bytes(32)  # up to a multiple of 64
KINDS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


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


# What a tile costs: to write it, and for each 128 codes of the contraction; the last where multipliers take
# turns. Microseconds, of which only the ratios count (benchmarks/NOTES.md).
_COSTS = {
    Tiling(128, 256): (0.9, 0.72),
    Tiling(256, 128): (0.9, 0.72),
    Tiling(128, 128): (0.5, 0.38),
    Tiling(128, 96): (0.45, 0.35),
    Tiling(128, 64): (0.3, 0.27),
    Tiling(128, 32): (0.9, 0.16),
    Tiling(64, 224): (0.5, 0.4),
    Tiling(64, 96): (0.4, 0.19),
    Tiling(64, 64): (0.4, 0.165),
    Tiling(64, 32): (0.4, 0.125),
}
_COSTS_IN_TURN, _LAST_TURN = (0.1, 0.372), 0.9  # and once what the last tile costs, which hides behind none
_FROM_MEMORY = 0.0041  # 128 codes of a row of b for each multiprocessor, at 4.1 TB/s


def in_turn(promote: int, groups: str, at: Tiling, epilogue: str = "bare") -> bool:
    """Whether a block's two multipliers make tiles in turn: the source's TURNS."""
    return not promote and groups == "none" and at == Tiling(128, 128) and epilogue != "backward"


def cost(
    at: Tiling,
    tiles: int,
    depths: float,
    promote: int,
    groups: str,
    multiprocessors: int,
    tall: float = math.inf,
) -> float:
    """What so many ``tiles`` of ``depths`` times 128 terms cost, by rounds of all multiprocessors. ``tall``:
    how many of them are made of the same rows of b, which come from memory once."""
    turns = in_turn(promote, groups, at)
    first, each = _COSTS_IN_TURN if turns else _COSTS[at]
    each = max(each, _FROM_MEMORY * at.columns / tall)
    return ceil_div(tiles, multiprocessors) * (first + depths * each) + (_LAST_TURN if turns else 0)


def tiling(
    m: int, n: int, k: int, scales: str, promote: int, multiprocessors: int, epilogue: str = "bare"
) -> Tiling:
    """The tiling that a product of m x n elements, k terms each, is made by: one that the source lists."""
    large = Tiling(256, 128) if promote else Tiling(128, 256)
    if epilogue != "bare":
        among = [Tiling(128, 128)] if epilogue == "backward" or not promote else [large, Tiling(128, 128)]
        return cheapest(among, m, n, k, promote, multiprocessors)
    if scales not in ("whole", "lines_squares"):
        return large
    widest = 128 if promote else 224  # promoted sums take twice the registers
    among = [at for at in _COSTS if at == large or (at.rows <= 128 and at.columns <= widest)]
    if scales != "whole":  # a tile's columns have the scale of one square
        among = [at for at in among if 128 % at.columns == 0]
    among = [at for at in among if (at.rows == 64) == (m <= 64)]
    return cheapest(among, m, n, k, promote, multiprocessors)


def cheapest(among: Sequence[Tiling], m: int, n: int, k: int, promote: int, multiprocessors: int) -> Tiling:
    """The tiling that costs the least."""

    def of(one: Tiling) -> float:
        tall, wide = ceil_div(m, one.rows), ceil_div(n, one.columns)
        return cost(one, tall * wide, ceil_div(k, DEPTH), promote, "none", multiprocessors, tall)

    return min(among, key=of)


def want_hopper(index: int, *strides: int) -> None:
    """CannotTake for a device that is no Hopper, and rows that are not a multiple of 16 bytes apart."""
    if launch.capability(index) != CAPABILITY:
        major, minor = launch.capability(index)
        raise CannotTake("hopper_gemm", "device", f"compute capability {major}.{minor}", "9.0")
    if any(stride % 16 for stride in strides):
        wanted = "multiples of 16"
        raise CannotTake(
            "hopper_gemm", "a, b", f"{', '.join(map(str, strides))} bytes from row to row", wanted
        )


def result_map(
    shape: Shape, stride: int, out: str, scales: str, groups: str, at: Tiling, fused: bool = False
) -> bytes:
    """The map by which copies write a result, ([groups,] m, n), from shared memory: the source's STAGED. That
    of ``NONE`` where the kernel writes from registers: others, and those whose rows do not begin at multiples
    of 16 bytes."""
    matrices, m, n = (1, *shape)[-3:]
    large = at.columns == 256 or (groups == "none" and at.rows == 256)
    blocks = groups == "none" and scales != "whole" and at.columns > 32
    itemsize = 4 if out == "f32" else 2
    if not fused and (itemsize == 4 or not (groups == "terms" or large or blocks)):
        return NONE[1]
    if stride * itemsize % 16:
        return NONE[1]
    box = 128 // itemsize, 16, 1
    return tensor_map(KINDS[out], (n, m, matrices), (stride, m * stride), box, True)


def blocks_together(promote: int, groups: str, at: Tiling, epilogue: str = "bare") -> int:
    """How many blocks are a cluster, which is as many tiles wide: the source's CLUSTER. A grid is a multiple
    of it."""
    halved = in_turn(promote, groups, at, epilogue) or epilogue == "backward"
    return 2 if halved or (groups == "terms" and at.rows == 256) else 1


def rows_map(m: int, k: int, stride: int, rows: int) -> bytes:
    """The map of a's codes, of which so many ``rows`` are copied at a time."""
    return tensor_map("uint8", (k, m), (stride,), (DEPTH, rows), True)


def last_rows(m: int, k: int, stride: int, at: Tiling, together: int) -> bytes:
    """The map by which a's rows are copied where there are fewer than a tile's: each block of a cluster
    copies its share, by eights. Rows that do not exist take longer than others (benchmarks/NOTES.md)."""
    left = m % at.rows
    return rows_map(m, k, stride, ceil_div(left, 8 * together) * 8) if left else NONE[1]


def band_of(blocks: int, rows: int, columns: int, turns: bool = False) -> int:
    """Rows of tiles of so many elements that are made together: what is worked on at once is about square, so
    that the L2 cache serves most of it. With ``turns`` twice as many, of which up to a sixth is gained where
    the result is wide (benchmarks/NOTES.md)."""
    return max(1, round((2 if turns else 1) * math.sqrt(blocks * columns / rows)))


def compiled(
    index: int,
    types: tuple[str, str, str],
    scales: str,
    promote: int,
    at: Tiling,
    groups: str,
    epilogue: str = "bare",
    act: str = "identity",
    layout: str = "nt",
) -> launch.Kernel:
    """The kernel for the source's names of a's, b's and out's types, of its kinds of scales, groups,
    epilogues and layouts, and of an activation."""
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
        LAYOUT=layout,
    )


@functools.cache
def _fused() -> frozenset[frozenset[tuple[str, str]]]:
    """What is compiled with epilogues, without tilings."""
    own = {"ACT", "EPILOGUE", "LEFT", "PROMOTE", "RIGHT", "SCALES", "T"}
    variants = manifest.source(SOURCE).variants
    return frozenset(frozenset(pair for pair in variant if pair[0] in own) for variant in variants)


@memoized("Hopper products by call")
def planned(
    index: int,
    m: int,
    n: int,
    k: int,
    a_stride: int,
    b_stride: int,
    out_stride: int,
    a_rows: int,
    b_rows: int,
    types: tuple[str, str, str],
    scales: str,
    steps: tuple[int, int],
    promote: int,
    epilogue: str = "bare",
    act: str = "identity",
    halves: int = 1,
    writes_product: bool = True,
) -> Planned:
    """``n``: columns of the product; ``a_rows``, ``b_rows``: of the operands, with their padding; ``types``,
    ``scales``, ``epilogue``, ``act``: the sources' names; ``steps``: strides of scales of rows and squares;
    ``halves``: in which a tile has some of each; ``writes_product``: whether it is written.

    CannotTake for devices, rows and epilogues that the kernel does not have.
    """
    want_hopper(index, a_stride, b_stride, k)
    if epilogue != "bare":
        left, right, out = types
        wanted = {"ACT": act, "EPILOGUE": epilogue, "LEFT": left, "PROMOTE": str(promote), "RIGHT": right}
        if frozenset({**wanted, "SCALES": scales, "T": out}.items()) not in _fused():
            what = f"{epilogue} {act} of {left} x {right}, scales {scales}"
            raise CannotTake("hopper_fused", "epilogue", what, f"one that {SOURCE} lists")
    at = tiling(m, n, k, scales, promote, launch.sm_count(index), epilogue)
    together = blocks_together(promote, "none", at, epilogue)  # what is counted from here on are clusters
    tall, wide = ceil_div(m, at.rows), ceil_div(n, at.columns * together)
    clusters = min(tall * wide, launch.sm_count(index) // together)
    turns = in_turn(promote, "none", at, epilogue)
    band = min(tall, band_of(clusters, at.rows, at.columns * together, turns))
    lines = [NONE[1], NONE[1]]
    if scales != "whole":
        for i, (kind, rows, box) in enumerate(
            zip(scales.split("_"), (a_rows, b_rows), (at.rows, at.columns), strict=True)
        ):
            if kind == "lines":
                lines[i] = tensor_map("float32", (rows, ceil_div(k, DEPTH)), (rows,), (box, 1))
    result = NONE[1]
    if writes_product:
        result = result_map((m, n), out_stride, types[2], scales, "none", at, epilogue != "bare")
    maps = (
        rows_map(m, k, a_stride, at.rows // together),
        tensor_map("uint8", (k, n), (b_stride,), (DEPTH, at.columns // halves), True),
        *lines,
        result,
        last_rows(m, k, a_stride, at, together),
    )
    kernel = compiled(index, types, scales, promote, at, "none", epilogue, act)
    sizes = m, n, out_stride, ceil_div(k, DEPTH), *steps, tall, wide, band, 0, 0, 0, together
    return Planned(kernel, clusters * together, maps, sizes)


def packed(
    plan: Planned,
    a: ArrayView,
    b: ArrayView,
    scale_invs: tuple[ArrayView | None, ArrayView | None],
    out: ArrayView | None,
    bias: ArrayView | None = None,
    addend: ArrayView | None = None,
    sizes: ArrayView | None = None,
    counter: ArrayView | None = None,
    further: bytes = _NO_EPILOGUE,
) -> bytes:
    """Struct Job, with an epilogue's part. A map that describes nothing has no address."""
    described: list[Any] = []
    for view, one in zip((a, b, *scale_invs, out, a), plan.maps, strict=True):
        described += [address(view) if one != NONE[1] else 0, one]
    pointers = (address(view) for view in (*scale_invs, bias, addend, out, sizes, counter))
    return _JOB.pack(*described, *pointers, *plan.sizes) + further


def _addresses(call: Any) -> int:
    return int(call.a.ptr | call.b.ptr | call.a_scale_inv.ptr | call.b_scale_inv.ptr)


def _run(product: Product, stream: int) -> None:
    """CannotTake on devices that are not of compute capability 9.0, beside the contract's refusals."""
    a, b, out, scale_invs = product.a, product.b, product.out, (product.a_scale_inv, product.b_scale_inv)
    if _addresses(product) % 16:
        raise CannotTake("hopper_gemm", "a, b, scales", "addresses", "multiples of 16")
    plan = planned(
        out.device.index,
        out.shape[0],
        out.shape[1],
        a.shape[1],
        launch.row_stride(a),
        launch.row_stride(b),
        launch.row_stride(out),
        a.shape[0],
        b.shape[0],
        (product.left, product.right, launch.type_name(out.dtype)),
        product.scales,
        product.steps,
        product.promote,
    )
    job = packed(plan, a, b, scale_invs, out, product.bias, product.addend)
    launch.launch(plan.kernel, plan.blocks, THREADS, (job,), stream, SHARED)


def sums(call: Any) -> Accumulation | None:
    """How a call's terms are added; None for one that another kernel takes."""
    apart = launch.row_stride(call.a) | launch.row_stride(call.b) | call.a.shape[1]
    how = on_chip(launch.capability(call.out.device.index), getattr(call, "fast_accumulate", False))
    return None if (_addresses(call) | apart) % 16 else how


fp8_gemm, block_gemm = contract("hopper_gemm", _run)
fp8_gemm._sums = block_gemm._sums = sums  # type: ignore[attr-defined]
