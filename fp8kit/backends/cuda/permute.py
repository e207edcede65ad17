"""Permutations of rows, without floating-point atomics."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div, kernel
from fp8kit.formats import float32, uint8

_COLUMNS = 1024  # of a warp of unpermute_rows (raw_kernels/permute.cu)
_WARPS = (32, 8)


def _kernel(function: str, like: ArrayView, probs: ArrayView | None) -> launch.Kernel:
    kind = float32 if probs is None else probs.dtype
    return kernel("permute.cu", function, like, P=launch.type_name(kind))


def permute_rows(
    x: ArrayView, row_map: ArrayView, probs: ArrayView | None, out: ArrayView, stream: int
) -> None:
    """See ``backends.protocol``."""
    (tokens, columns), rows = x.shape, out.shape[0]
    sizes = rows, columns, tokens, -1 if probs is None else probs.shape[1]
    arguments = (x.ptr, row_map.ptr, address(probs), out.ptr, *sizes)
    launch.launch(_kernel("permute_rows", x, probs), ceil_div(rows, 8), _WARPS, arguments, stream)


def unpermute_rows(
    x: ArrayView, row_map: ArrayView, probs: ArrayView | None, out: ArrayView, stream: int
) -> None:
    """See ``backends.protocol``. Every block reads the whole map."""
    (rows, columns), tokens = x.shape, out.shape[0]
    across = max(ceil_div(columns, _COLUMNS), 1)
    sizes = rows, columns, tokens, -1 if probs is None else probs.shape[1]
    arguments = (x.ptr, row_map.ptr, address(probs), out.ptr, *sizes, across)
    blocks = ceil_div(tokens, 8) * across
    launch.launch(_kernel("unpermute_rows", x, probs), blocks, _WARPS, arguments, stream)


def permute_probs(probs: ArrayView, row_map: ArrayView, out: ArrayView, stream: int) -> None:
    """See ``backends.protocol``."""
    arguments = (probs.ptr, row_map.ptr, out.ptr, out.size, *probs.shape)
    launch.launch(_kernel("permute_probs", probs, None), ceil_div(out.size, 256), 256, arguments, stream)


def unpermute_probs(
    rows: ArrayView, x: ArrayView | None, row_map: ArrayView, out: ArrayView, stream: int
) -> None:
    """See ``backends.protocol``."""
    zeros = _kernel("zero_probs", rows, out)
    launch.launch(zeros, ceil_div(out.size, 256), 256, (out.ptr, out.size), stream)
    arguments = (rows.ptr, address(x), row_map.ptr, out.ptr, *rows.shape, *out.shape)
    launch.launch(_kernel("row_probs", rows, out), ceil_div(rows.shape[0], 8), _WARPS, arguments, stream)


def expert_rows(
    routing: ArrayView, row_map: ArrayView, sizes: ArrayView, counts: ArrayView, align: int, stream: int
) -> None:
    """See ``backends.protocol``. A block an expert: it reads all that is routed."""
    experts, rows = counts.size, row_map.shape[0]
    function = launch.kernel("permute.cu", "count_expert", counts.device.index, P="f32", T="f32")
    given = routing.ptr, *routing.shape, int(routing.dtype is uint8)
    launch.launch(function, experts, 256, (*given, counts.ptr), stream)
    function = launch.kernel("permute.cu", "expert_rows", counts.device.index, P="f32", T="f32")
    arguments = (*given, counts.ptr, row_map.ptr, sizes.ptr, experts, rows, align)
    launch.launch(function, experts + 1, 256, arguments, stream)
