"""LayerNorm, RMSNorm and L2 normalisation, in one pass with their casts, and their gradients."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import (
    address,
    cast_bytes,
    ceil_div,
    covered,
    kernel,
    sum_partials,
    whole_warps,
)
from fp8kit.backends.protocol import NORMALIZATIONS, Cast, Normalization
from fp8kit.errors import BackendError
from fp8kit.formats import E4M3, DType
from fp8kit.raw_kernels import manifest

# cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaDevAttrMaxSharedMemoryPerMultiprocessor; what the kernels
# declare and CUDA reserves beside
_OPT_IN_SHARED, _SM_SHARED, _OTHER_SHARED = 97, 81, 2304
_MOST_LANES, _MOST_GROUPS = 256, 15  # raw_kernels/norm.cuh: barriers that rows of more than a warp have
_MOST_THREADS = 1024  # of norm_bwd.cu

# --- tables, found by measurement ---------------------------------------------------------------------------

# By bytes of an element: norm_fwd.cu's variants, chunks of eight columns that a thread takes of a row ...
CHUNKS = {2: (1, 2, 3, 4, 6, 8, 12, 16), 4: (1, 2, 3, 4, 6, 8)}
# ... and for rows of so many chunks at most, how many a thread shall take at most: that makes a row's
# threads, in every kernel the same
SHARES = {2: ((256, 8), (2**31, 16)), 4: ((128, 4), (2**31, 8))}


class Pace(NamedTuple):
    """How ``norm_fwd`` walks: at most ``rows`` a tile (a power of two from 16 on), ``threads`` a block,
    ``blocks`` a multiprocessor."""

    rows: int
    threads: int
    blocks: int


# By chunks a thread: the pace with transposed codes, for 16 bits and for 32, and without.
_NARROW = {
    1: Pace(64, 256, 4),
    2: Pace(32, 256, 4),
    3: Pace(32, 256, 4),
    4: Pace(32, 256, 3),
    6: Pace(32, 256, 2),
}
TRANSPOSED = {
    2: _NARROW | {8: Pace(32, 256, 2), 12: Pace(32, 512, 1), 16: Pace(32, 512, 1)},
    4: _NARROW | {8: Pace(64, 512, 1)},
}
PLAIN = _NARROW | {6: Pace(64, 128, 4), 8: Pace(64, 256, 2), 12: Pace(32, 512, 1), 16: Pace(32, 512, 1)}


class Depth(NamedTuple):
    """How ``norm_bwd`` walks: ``threads`` a block (more where a row needs them), ``stages`` of rows on their
    way (2 to 4), ``blocks`` in all, as many as a large GPU holds at once, and the same on every device: each
    leaves a row of partial sums."""

    threads: int
    stages: int
    blocks: int


BACKWARD = {2: Depth(1024, 2, 132), 4: Depth(512, 4, 132)}  # by bytes of an element


def variants(columns: int, dtype: DType) -> list[tuple[str, dict[str, str]]]:
    """(source, defines beside T) that rows of ``columns`` take, with their gradients, where nothing lies at
    an odd address."""
    chunks = 0 if columns % 8 else chunks_of(columns, columns, dtype.itemsize)
    found: list[tuple[str, dict[str, str]]] = []
    if chunks:
        known = [columns] if (launch.type_name(dtype), chunks, columns) in _for_whole_tiles() else []
        found = [("norm_fwd.cu", {"CHUNKS": str(chunks), "COLUMNS": str(n)}) for n in (0, *known)]
    backward = not columns % 8 and columns <= 8 * _MOST_THREADS
    found += [("norm_bwd.cu", {})] if backward else []
    return found if chunks and backward else [*found, ("norm_any.cu", {})]


# --- forward ------------------------------------------------------------------------------------------------


class Forward(NamedTuple):
    """Launch of ``norm_fwd``: the variant's ``chunks``, threads a row and rows at a time in ``block``,
    ``rows`` a tile, bytes of ``shared`` memory, and the blocks that the device holds at once."""

    chunks: int
    block: tuple[int, int]
    rows: int
    shared: int
    resident: int


def _lanes(columns: int, itemsize: int) -> int:
    """Threads a row: a power of two that holds the row's chunks."""
    chunks = ceil_div(columns, 8)
    share = next(share for most, share in SHARES[itemsize] if chunks <= most)
    return min(1 << max(0, ceil_div(chunks, share) - 1).bit_length(), _MOST_LANES)


def chunks_of(columns: int, covered: int, itemsize: int) -> int:
    """norm_fwd.cu's variant for rows of ``columns`` whose casts cover ``covered``; 0: none holds them."""
    lanes, places = _lanes(columns, itemsize), max(ceil_div(covered, 8), 1)
    return next((n for n in CHUNKS[itemsize] if n * lanes >= places), 0)


@functools.cache
def _for_whole_tiles() -> frozenset[tuple[str, int, int]]:
    """(T, chunks a thread, columns) of norm_fwd.cu's variants for whole tiles."""
    found = (dict(defines) for defines in manifest.source("norm_fwd.cu").variants)
    return frozenset((v["T"], int(v["CHUNKS"]), int(v["COLUMNS"])) for v in found if v["COLUMNS"] != "0")


def columns_of(
    chunks: int, tall: int, x: ArrayView, y: ArrayView | None, cast: Cast | None, padded: bool
) -> int:
    """COLUMNS of norm_fwd.cu's variant: x's, where nothing is wanted but whole tiles of ``tall`` rows as E4M3
    codes in both orientations, without padding; otherwise 0, the one for any."""
    rows, columns = x.shape
    if (
        y is not None
        or cast is None
        or cast.q is None
        or cast.q_t is None
        or cast.format != E4M3
        or padded
        or not rows
        or rows % tall
    ):
        return 0
    return columns if (launch.type_name(x.dtype), chunks, columns) in _for_whole_tiles() else 0


@functools.cache
def forward(columns: int, covered: int, itemsize: int, transposed: bool, device: int) -> Forward | None:
    """Returns how ``norm_fwd`` takes rows of ``columns`` whose casts cover ``covered``, None where they do
    not fit a block."""
    lanes, chunks = _lanes(columns, itemsize), chunks_of(columns, covered, itemsize)
    if not chunks:
        return None
    attribute = launch.runtime().deviceGetAttribute
    available, places = int(attribute(_SM_SHARED, device)), ceil_div(covered, 8)
    most = int(attribute(_OPT_IN_SHARED, device)) - _OTHER_SHARED
    rows, threads, blocks = (TRANSPOSED[itemsize] if transposed else PLAIN)[chunks]
    if lanes <= 32:
        rows = max(rows, threads // lanes)  # short rows: a tile has work for all threads
    least = max(16, min(rows, threads // lanes))
    line = 8 * places if transposed else 0  # bytes of codes that a row of a tile has in shared memory
    gains = 64 * places
    while rows > least and (gains + rows * line + _OTHER_SHARED) * blocks > available:
        rows //= 2
    shared = gains + rows * line
    if shared > most:
        return None
    held = max(1, min(blocks, available // (shared + _OTHER_SHARED)))
    if 2 * chunks * itemsize >= 32:  # variants that allow blocks of 512 threads
        threads = min(512, 1 << (threads * blocks // held).bit_length() - 1)
    groups = max(1, threads // lanes if lanes <= 32 else min(threads // lanes, rows, _MOST_GROUPS))
    return Forward(chunks, (lanes, min(groups, rows)), rows, shared, held * launch.sm_count(device))


def _check(normalization: str, weight: ArrayView | None, mean: ArrayView | None) -> None:
    if normalization not in NORMALIZATIONS:
        raise BackendError(
            "norm", "normalization", repr(normalization), f"one of {', '.join(NORMALIZATIONS)}"
        )
    if (mean is not None) != (normalization == "LayerNorm"):
        raise BackendError(
            "norm", "mean", "None" if mean is None else "an array", "an array for LayerNorm, None otherwise"
        )
    if (weight is None) != (normalization == "L2Normalization"):
        raise BackendError(
            "norm",
            "weight",
            "None" if weight is None else "an array",
            "None for L2Normalization, else an array",
        )


def _gain(weight: ArrayView | None, zero_centered_gamma: bool, columns: int) -> float:
    """Returns what the kernels add to the weight, which is 0 where there is none."""
    if weight is None:
        return 1 / math.sqrt(max(columns, 1))
    return 1.0 if zero_centered_gamma else 0.0


def norm_fwd(
    x: ArrayView,
    weight: ArrayView | None,
    bias: ArrayView | None,
    y: ArrayView | None,
    mean: ArrayView | None,
    rstd: ArrayView,
    amax: ArrayView | None,
    cast: Cast | None,
    normalization: Normalization,
    epsilon: float,
    zero_centered_gamma: bool,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError for an unknown normalisation and for a cast to a format other
    than E4M3 and E5M2."""
    _check(normalization, weight, mean)
    if cast is not None:
        cast.by_tensor("norm_fwd")
    rows, columns = x.shape
    down, right = covered(cast, rows, columns)
    small = epsilon / max(columns, 1) if normalization == "L2Normalization" else epsilon
    gain, packed = _gain(weight, zero_centered_gamma, columns), cast_bytes(cast, amax)
    transposed = cast is not None and cast.q_t is not None
    at = x.ptr, address(weight), address(bias), address(y), address(mean), rstd.ptr
    walk = (
        forward(columns, right, x.dtype.itemsize, transposed, x.device.index) if _whole(x, y, cast) else None
    )
    if walk is None:
        tall, lanes = 16 if transposed else 4, _lanes(columns, x.dtype.itemsize)
        block = lanes, max(512 if transposed else 128, lanes) // lanes
        grid = max(ceil_div(down, tall), int(cast is not None))
        function, each = kernel("norm_any.cu", "norm_fwd_any", x), (rows, columns, right, tall)
        launch.launch(function, grid, block, (*at, *each, small, gain, packed), stream)
        return
    tall, least = walk.rows, max(walk.block[1], 16 if transposed else 1)
    while tall >= 2 * least and down <= (tall // 2) * walk.resident:  # rather all blocks than tall tiles
        tall //= 2
    tiles = ceil_div(down, tall)
    whole = columns_of(walk.chunks, tall, x, y, cast, (down, right) != x.shape)
    function = kernel("norm_fwd.cu", "norm_fwd", x, CHUNKS=str(walk.chunks), COLUMNS=str(whole))
    arguments = (*at, rows, columns, ceil_div(right, 8), tall, tiles, small, gain, packed)
    grid = max(min(tiles, walk.resident), int(cast is not None))
    launch.launch(function, grid, walk.block, arguments, stream, walk.shared)


def _whole(x: ArrayView, y: ArrayView | None, cast: Cast | None) -> bool:
    """Whether everything that norm_fwd.cu reads and writes lies as it wants it: in whole chunks at multiples
    of their size."""
    whole = (x.ptr | address(y) | (2 * x.shape[1])) % 16 == 0
    if cast is not None and cast.q is not None:
        whole &= (cast.q.ptr | cast.q.strides[0] | cast.q.shape[1]) % 8 == 0
    if cast is not None and cast.q_t is not None:
        whole &= (cast.q_t.ptr | cast.q_t.strides[0] | cast.q_t.shape[1]) % 16 == 0
    return whole


# --- gradients ----------------------------------------------------------------------------------------------


class Backward(NamedTuple):
    """Launch of ``norm_bwd``: threads a row and rows at a time in ``block``, ``stages``, bytes of ``shared``
    memory."""

    block: tuple[int, int]
    stages: int
    shared: int


@functools.cache
def backward(columns: int, itemsize: int, device: int) -> Backward | None:
    """Returns how ``norm_bwd`` takes rows of ``columns``, None where one does not fit a block. ``block`` does
    not depend on the device."""
    chunks = max(1, ceil_div(columns, 8))
    lanes = 1 << (chunks - 1).bit_length() if chunks <= 32 else ceil_div(chunks, 32) * 32
    if lanes > _MOST_THREADS:
        return None
    threads, stages, _ = BACKWARD[itemsize]
    groups = max(1, threads // lanes if lanes <= 32 else min(threads // lanes, _MOST_GROUPS))
    stage = lanes * groups * 3 * 8 * itemsize
    stages = min(
        stages, (int(launch.runtime().deviceGetAttribute(_OPT_IN_SHARED, device)) - _OTHER_SHARED) // stage
    )
    return (
        Backward((lanes, groups), stages, max(stages * stage, lanes * groups * 64)) if stages >= 2 else None
    )


def _any_blocking(rows: int, columns: int) -> tuple[int, int]:
    """(threads, blocks) of ``norm_bwd_any``: each block leaves a row of partial sums."""
    threads = whole_warps(columns, 512)
    return threads, min(rows, 132 * max(2, 512 // threads))


def norm_bwd(
    dy: ArrayView,
    x: ArrayView,
    weight: ArrayView | None,
    mean: ArrayView | None,
    rstd: ArrayView,
    residual: ArrayView | None,
    dx: ArrayView,
    dweight: ArrayView | None,
    dbias: ArrayView | None,
    normalization: Normalization,
    zero_centered_gamma: bool,
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError for an unknown normalisation and a missing workspace."""
    _check(normalization, weight, mean)
    rows, columns = x.shape
    if workspace is None:
        raise BackendError("norm_bwd", "workspace", None, f"{norm_bwd_workspace(rows, columns)} bytes")
    saved = address(weight), address(mean), rstd.ptr, address(residual)
    at = (dy.ptr, x.ptr, *saved, dx.ptr, workspace.ptr, rows, columns)
    rest = _gain(weight, zero_centered_gamma, columns), int(dbias is not None)
    whole = (dy.ptr | x.ptr | at[5] | dx.ptr | (2 * columns)) % 16 == 0
    walk = backward(columns, x.dtype.itemsize, x.device.index) if whole else None
    if walk is None:
        threads, blocks = _any_blocking(rows, columns)
        launch.launch(kernel("norm_any.cu", "norm_bwd_any", x), blocks, threads, (*at, *rest), stream)
    else:
        blocks = min(ceil_div(rows, walk.block[1]), BACKWARD[x.dtype.itemsize].blocks)
        function, arguments = kernel("norm_bwd.cu", "norm_bwd", x), (*at, walk.stages, *rest)
        launch.launch(function, blocks, walk.block, arguments, stream, walk.shared)
    if dweight is not None:
        sum_partials(workspace.ptr, blocks, dweight, dbias, stream)


def norm_bwd_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``."""
    blocks = max(_any_blocking(rows, columns)[1], *(min(rows, depth.blocks) for depth in BACKWARD.values()))
    return blocks * 2 * columns * 4
