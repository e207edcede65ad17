"""Activations with bias, and their gradients, in one pass with their casts, amax and bias gradient."""

from __future__ import annotations

from fp8kit.arrays import ArrayView
from fp8kit.backends.activation import ACTIVATIONS, Activation
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import BLOCKS, address, cast_bytes, ceil_div, covered, kernel, sum_partials
from fp8kit.backends.protocol import Cast
from fp8kit.errors import BackendError, expected

_TILE_ROWS, _TILE_COLUMNS, _THREADS = 64, 128, 256  # raw_kernels/activation.cu
MOST_TILES = 8  # that a block walks, one below the other; found by measurement
_NO_PARAMS = (0.0, 0.0, 0.0)


def _known(activation: str, params: tuple[float, ...]) -> tuple[Activation, tuple[float, ...]]:
    """The activation's row, and the numbers that the kernels take: all there are, 0 where the activation has none."""
    row = ACTIVATIONS.get(activation)
    if row is None:
        raise BackendError(expected("activation", "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}"))
    if len(params) != len(row.params):
        raise BackendError(expected("activation", "params", params, f"{len(row.params)} numbers for {activation}"))
    return row, params or _NO_PARAMS


def _tiles(rows: int, columns: int) -> int:
    """Tiles that one block takes: more where there are many, so that partial sums are few."""
    return max(1, min(MOST_TILES, ceil_div(rows, _TILE_ROWS) * ceil_div(columns, _TILE_COLUMNS) // BLOCKS))


def _row_blocks(rows: int, columns: int) -> int:
    return ceil_div(ceil_div(rows, _TILE_ROWS), _tiles(rows, columns))


def _grid(rows: int, columns: int, walked: tuple[int, int], cast: Cast | None) -> tuple[int, int, int]:
    """(blocks, tiles across, tiles a block) for a (rows, columns) y of which ``walked`` is covered, padding included."""
    tiles, across = _tiles(rows, columns), ceil_div(walked[1], _TILE_COLUMNS)
    blocks = across * ceil_div(ceil_div(walked[0], _TILE_ROWS), tiles)
    return (max(blocks, 1) if cast is not None else blocks), max(across, 1), tiles


def act_fwd(x: ArrayView, bias: ArrayView | None, y: ArrayView | None, amax: ArrayView | None, cast: Cast | None,
            activation: str, params: tuple[float, ...], stream: int) -> None:
    """See ``backends.protocol``. BackendError for an unknown activation and for a cast to a format other than E4M3 and E5M2."""
    row, numbers = _known(activation, params)
    rows, columns = x.shape[0], x.shape[1] // row.parts
    grid, across, tiles = _grid(rows, columns, covered(cast, rows, columns), cast)
    function = kernel("activation.cu", "act_fwd", x, ACT=activation)
    arguments = (x.ptr, address(bias), address(y), rows, columns, across, tiles, *numbers, cast_bytes(cast, amax))
    launch.launch(function, grid, _THREADS, arguments, stream)


def act_bwd(dy: ArrayView, x: ArrayView, bias: ArrayView | None, dx: ArrayView | None, dbias: ArrayView | None,
            amax: ArrayView | None, cast: Cast | None, activation: str, params: tuple[float, ...], workspace: ArrayView | None,
            stream: int) -> None:
    """See ``backends.protocol``. BackendError as in ``act_fwd``, and for a dbias without a workspace."""
    row, numbers = _known(activation, params)
    rows, width = x.shape
    columns = width // row.parts
    if dbias is not None and workspace is None:
        raise BackendError(expected("act_bwd", "workspace", None, f"{act_bwd_workspace(rows, width)} bytes"))
    down, right = covered(cast, rows, width)
    grid, across, tiles = _grid(rows, columns, (down, max(columns, right - (width - columns))), cast)
    partial = address(workspace) if dbias is not None else 0
    function = kernel("activation.cu", "act_bwd", x, ACT=activation)
    arguments = (dy.ptr, x.ptr, address(bias), address(dx), partial, rows, columns, across, tiles, *numbers, cast_bytes(cast, amax))
    launch.launch(function, grid, _THREADS, arguments, stream)
    if dbias is not None:
        sum_partials(partial, _row_blocks(rows, columns), dbias, None, stream)


def act_bwd_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``. Enough for every activation."""
    return max(_row_blocks(rows, columns), _row_blocks(rows, columns // 2)) * columns * 4
