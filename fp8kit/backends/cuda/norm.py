"""LayerNorm, RMSNorm and L2 normalisation, in one pass with their casts, and their gradients."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, cast_bytes, ceil_div, covered, kernel, sum_partials
from fp8kit.backends.protocol import NORMALIZATIONS, Cast, Normalization
from fp8kit.errors import BackendError, expected

# cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaDevAttrMaxSharedMemoryPerMultiprocessor, and what the kernels declare and CUDA reserves beside
_OPT_IN_SHARED, _SM_SHARED, _OTHER_SHARED = 97, 81, 2048
_MOST_LANES, _MOST_GROUPS = 256, 15  # raw_kernels/norm.cuh: barriers that rows of more than a warp have


class Pace(NamedTuple):
    """How ``norm_fwd`` walks: ``rows`` a tile at most (16, 32 or 64), ``threads`` a block, ``blocks`` a multiprocessor at most."""

    rows: int
    threads: int
    blocks: int


# Found by measurement. The kernel's variants, chunks of eight columns a thread, by bytes of an element; with transposed codes and without:
# the pace of each.
CHUNKS = {2: (1, 2, 3, 4, 6, 8, 12, 16), 4: (1, 2, 3, 4, 6, 8)}
TRANSPOSED = {1: Pace(64, 256, 4), 2: Pace(32, 256, 4), 3: Pace(32, 256, 4), 4: Pace(32, 256, 3), 6: Pace(32, 256, 3), 8: Pace(32, 256, 2),
              12: Pace(16, 256, 2), 16: Pace(16, 256, 2)}
PLAIN = {1: Pace(64, 256, 4), 2: Pace(32, 256, 4), 3: Pace(32, 256, 3), 4: Pace(32, 256, 3), 6: Pace(32, 256, 3), 8: Pace(32, 256, 3),
         12: Pace(16, 256, 2), 16: Pace(16, 256, 2)}


class Depth(NamedTuple):
    """How ``norm_bwd`` walks: ``threads`` a block at most (but a row's at least), ``stages`` of rows on their way, ``blocks`` in all."""

    threads: int
    stages: int
    blocks: int


BACKWARD = {2: Depth(1024, 4, 132), 4: Depth(512, 4, 132)}  # by bytes of an element


class Forward(NamedTuple):
    """Launch of ``norm_fwd``: the variant's ``chunks``, threads a row and rows at a time in ``block``, ``rows`` a tile, bytes of ``shared``
    memory, and the blocks that the device holds at once."""

    chunks: int
    block: tuple[int, int]
    rows: int
    shared: int
    resident: int


def _lanes(columns: int, most_chunks: int) -> int:
    """Threads a row: a power of two up to a warp while one chunk each suffices, then as many warps as hold the row's chunks."""
    chunks = max(1, ceil_div(columns, 8))
    if chunks <= 32:
        return 1 << (chunks - 1).bit_length()
    lanes = 32
    while lanes * most_chunks < chunks and lanes < _MOST_LANES:
        lanes *= 2
    return lanes


@functools.cache
def forward(columns: int, covered: int, itemsize: int, transposed: bool, device: int) -> Forward | None:
    """How ``norm_fwd`` takes rows of ``columns`` whose casts cover ``covered``, None where they do not fit a block."""
    lanes = _lanes(columns, CHUNKS[itemsize][-1])
    places = ceil_div(covered, 8)
    chunks = next((n for n in CHUNKS[itemsize] if n * lanes >= places), 0)
    if not chunks:
        return None
    attribute = launch.runtime().deviceGetAttribute
    limit = int(attribute(_OPT_IN_SHARED, device)) - _OTHER_SHARED
    rows, threads, blocks = (TRANSPOSED if transposed else PLAIN)[chunks]
    tile = 8 * places if transposed else 0  # bytes a row
    while rows > 16 and (64 * places + rows * tile) * blocks > limit:
        rows //= 2
    shared = 64 * places + rows * tile
    if shared > limit:
        return None
    groups = min(max(threads // lanes, 1), rows, threads if lanes <= 32 else 8)
    held = int(attribute(_SM_SHARED, device)) // (shared + _OTHER_SHARED)
    return Forward(chunks, (lanes, groups), rows, shared, max(1, min(blocks, held)) * launch.sm_count(device))


def _check(normalization: str, weight: ArrayView | None, mean: ArrayView | None) -> None:
    if normalization not in NORMALIZATIONS:
        raise BackendError(expected("norm", "normalization", repr(normalization), f"one of {', '.join(NORMALIZATIONS)}"))
    if (mean is not None) != (normalization == "LayerNorm"):
        raise BackendError(expected("norm", "mean", "None" if mean is None else "an array", "an array for LayerNorm, None otherwise"))
    if (weight is None) != (normalization == "L2Normalization"):
        raise BackendError(expected("norm", "weight", "None" if weight is None else "an array", "None for L2Normalization, else an array"))


def _gain(weight: ArrayView | None, zero_centered_gamma: bool, columns: int) -> float:
    """What the kernels add to the weight, which is 0 where there is none."""
    if weight is None:
        return 1 / math.sqrt(max(columns, 1))
    return 1.0 if zero_centered_gamma else 0.0


def norm_fwd(x: ArrayView, weight: ArrayView | None, bias: ArrayView | None, y: ArrayView | None, mean: ArrayView | None,
             rstd: ArrayView, amax: ArrayView | None, cast: Cast | None, normalization: Normalization, epsilon: float,
             zero_centered_gamma: bool, stream: int) -> None:
    """See ``backends.protocol``. BackendError for an unknown normalisation and for a cast to a format other than E4M3 and E5M2."""
    _check(normalization, weight, mean)
    rows, columns = x.shape
    down, right = covered(cast, rows, columns)
    small = epsilon / max(columns, 1) if normalization == "L2Normalization" else epsilon
    gain, packed = _gain(weight, zero_centered_gamma, columns), cast_bytes(cast, amax)
    transposed = cast is not None and cast.q_t is not None
    at = x.ptr, address(weight), address(bias), address(y), address(mean), rstd.ptr
    walk = forward(columns, right, x.dtype.itemsize, transposed, x.device.index) if _whole(x, y, cast) else None
    if walk is None:
        tall, lanes = 16 if transposed else 4, _lanes(columns, CHUNKS[x.dtype.itemsize][-1])
        function = kernel("norm_any.cu", "norm_fwd_any", x)
        grid = ceil_div(down, tall)
        block = lanes, (512 if transposed else max(128, lanes)) // lanes
        launch.launch(function, max(grid, int(cast is not None)), block, (*at, rows, columns, right, tall, small, gain, packed), stream)
        return
    tiles = ceil_div(down, walk.rows)
    function = kernel("norm_fwd.cu", "norm_fwd", x, CHUNKS=str(walk.chunks))
    arguments = (*at, rows, columns, ceil_div(right, 8), walk.rows, tiles, small, gain, packed)
    launch.launch(function, max(min(tiles, walk.resident), int(cast is not None)), walk.block, arguments, stream, walk.shared)


def _whole(x: ArrayView, y: ArrayView | None, cast: Cast | None) -> bool:
    """Whether everything that norm_fwd.cu reads and writes lies as it wants it: in whole chunks at multiples of their size."""
    whole = (x.ptr | address(y) | (2 * x.shape[1])) % 16 == 0
    if cast is not None and cast.q is not None:
        whole &= (cast.q.ptr | cast.q.strides[0] | cast.q.shape[1]) % 8 == 0
    if cast is not None and cast.q_t is not None:
        whole &= (cast.q_t.ptr | cast.q_t.strides[0] | cast.q_t.shape[1]) % 16 == 0
    return whole


class Backward(NamedTuple):
    """Launch of ``norm_bwd``: threads a row and rows at a time in ``block``, ``stages``, bytes of ``shared`` memory, ``blocks``."""

    block: tuple[int, int]
    stages: int
    shared: int
    blocks: int


@functools.cache
def backward(rows: int, columns: int, itemsize: int, device: int) -> Backward | None:
    """How ``norm_bwd`` takes (rows, columns), None where a row does not fit a block. Sums are cut up the same way whatever the device."""
    chunks = max(1, ceil_div(columns, 8))
    lanes = 1 << (chunks - 1).bit_length() if chunks <= 32 else ceil_div(chunks, 32) * 32
    threads, stages, blocks = BACKWARD[itemsize]
    groups = max(1, threads // lanes if lanes <= 32 else min(threads // lanes, _MOST_GROUPS))
    limit = int(launch.runtime().deviceGetAttribute(_OPT_IN_SHARED, device)) - _OTHER_SHARED
    stage = lanes * groups * 3 * 8 * itemsize
    stages = min(stages, limit // stage)
    if lanes > threads or stages < 2:
        return None
    return Backward((lanes, groups), stages, max(stages * stage, lanes * groups * 64), min(ceil_div(rows, groups), blocks))


def _any_blocking(rows: int, columns: int) -> tuple[int, int]:
    """(threads, blocks) of ``norm_bwd_any``: each block leaves a row of partial sums."""
    threads = max(32, min(512, ceil_div(columns, 32) * 32))
    return threads, min(rows, 132 * max(2, 512 // threads))


def norm_bwd(dy: ArrayView, x: ArrayView, weight: ArrayView | None, mean: ArrayView | None, rstd: ArrayView, residual: ArrayView | None,
             dx: ArrayView, dweight: ArrayView | None, dbias: ArrayView | None, normalization: Normalization, zero_centered_gamma: bool,
             workspace: ArrayView | None, stream: int) -> None:
    """See ``backends.protocol``. BackendError for an unknown normalisation and a missing workspace."""
    _check(normalization, weight, mean)
    rows, columns = x.shape
    if workspace is None:
        raise BackendError(expected("norm_bwd", "workspace", None, f"{norm_bwd_workspace(rows, columns)} bytes"))
    at = dy.ptr, x.ptr, address(weight), address(mean), rstd.ptr, address(residual), dx.ptr, workspace.ptr, rows, columns
    rest = _gain(weight, zero_centered_gamma, columns), int(dbias is not None)
    whole = (dy.ptr | x.ptr | at[5] | dx.ptr | (2 * columns)) % 16 == 0
    walk = backward(rows, columns, x.dtype.itemsize, x.device.index) if whole else None
    if walk is None:
        threads, blocks = _any_blocking(rows, columns)
        launch.launch(kernel("norm_any.cu", "norm_bwd_any", x), blocks, threads, (*at, *rest), stream)
    else:
        blocks = walk.blocks
        launch.launch(kernel("norm_bwd.cu", "norm_bwd", x), blocks, walk.block, (*at, walk.stages, *rest), stream, walk.shared)
    if dweight is not None:
        sum_partials(workspace.ptr, blocks, dweight, dbias, stream)


def norm_bwd_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``."""
    blocks = max(_any_blocking(rows, columns)[1], *(min(rows, depth.blocks) for depth in BACKWARD.values()))
    return blocks * 2 * columns * 4
