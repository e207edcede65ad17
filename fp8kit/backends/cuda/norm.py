"""LayerNorm, RMSNorm and L2 normalisation, in one pass with their casts, and their gradients."""

from __future__ import annotations

import functools
import math

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, cast_bytes, ceil_div, covered, kernel, sum_partials
from fp8kit.backends.protocol import NORMALIZATIONS, Cast, Normalization
from fp8kit.errors import BackendError, expected

_OPT_IN_SHARED = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
_STATIC_SHARED = 1024  # more than what the kernel itself declares


@functools.cache
def _blocking(columns: int, itemsize: int, transposed: bool, device: int) -> tuple[int, int, int, int]:
    """(rows a block, pitch of a row kept in shared memory or 0, bytes of that, threads) of ``norm_fwd``.

    Transposed codes want many rows a block, so that a row of q_t gets many neighbours; otherwise small blocks overlap better.
    """
    limit = int(launch.runtime().deviceGetAttribute(_OPT_IN_SHARED, device)) - _STATIC_SHARED
    pitch = ceil_div(columns, 8) * 8 + 16 // itemsize  # 16 bytes more: rows start in different banks
    for rows in (16, 8) if transposed else (4,):
        shared = rows * pitch * itemsize
        if shared <= limit:
            return rows, pitch, shared, 512 if transposed or shared > 32 * 1024 else 128
    return (16, 0, 0, 512) if transposed else (4, 0, 0, 128)


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
    tall, pitch, shared, threads = _blocking(columns, x.dtype.itemsize, cast is not None and cast.q_t is not None, x.device.index)
    down, right = covered(cast, rows, columns)
    small = epsilon / max(columns, 1) if normalization == "L2Normalization" else epsilon
    arguments = (
        x.ptr, address(weight), address(bias), address(y), address(mean), rstd.ptr, rows, columns, right, tall, pitch, small,
        _gain(weight, zero_centered_gamma, columns), cast_bytes(cast, amax),
    )
    grid = max(ceil_div(down, tall), 0 if cast is None else 1)
    launch.launch(kernel("norm.cu", "norm_fwd", x), grid, threads, arguments, stream, shared)


def _bwd_blocking(rows: int, columns: int) -> tuple[str, int, int]:
    """(function, threads, blocks) of ``norm_bwd``. Blocks are as many as a large GPU holds at once: each leaves a row of partial sums.

    The heads of an attention are many short rows: a block is one warp then, and more of them are needed to keep the memory busy.
    """
    if columns <= 256:
        return "norm_bwd", 32, min(rows, 132 * 16)
    if columns <= 2048:
        threads = max(32, ceil_div(columns, 256) * 32)
        return "norm_bwd", threads, min(rows, 132 * min(4, 768 // threads))
    if columns <= 8192:
        threads = ceil_div(columns, 512) * 32
        return "norm_bwd_two", threads, min(rows, 264 if threads <= 256 else 132)
    return "norm_bwd_any", 512, min(rows, 264)


def norm_bwd(dy: ArrayView, x: ArrayView, weight: ArrayView | None, mean: ArrayView | None, rstd: ArrayView, residual: ArrayView | None,
             dx: ArrayView, dweight: ArrayView | None, dbias: ArrayView | None, normalization: Normalization, zero_centered_gamma: bool,
             workspace: ArrayView | None, stream: int) -> None:
    """See ``backends.protocol``. BackendError for an unknown normalisation and a missing workspace."""
    _check(normalization, weight, mean)
    rows, columns = x.shape
    if workspace is None:
        raise BackendError(expected("norm_bwd", "workspace", None, f"{norm_bwd_workspace(rows, columns)} bytes"))
    function, threads, blocks = _bwd_blocking(rows, columns)
    arguments = (
        dy.ptr, x.ptr, address(weight), address(mean), rstd.ptr, address(residual), dx.ptr, workspace.ptr, rows, columns,
        _gain(weight, zero_centered_gamma, columns), int(dbias is not None),
    )
    launch.launch(kernel("norm.cu", function, x), blocks, threads, arguments, stream)
    if dweight is not None:
        sum_partials(workspace.ptr, blocks, dweight, dbias, stream)


def norm_bwd_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``."""
    return _bwd_blocking(rows, columns)[2] * 2 * columns * 4
