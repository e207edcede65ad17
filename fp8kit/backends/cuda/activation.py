"""Activations with bias, and their gradients, in one pass with their casts, amax and bias gradient."""

from __future__ import annotations

import functools

from fp8kit.arrays import ArrayView
from fp8kit.backends.activation import known, rows_in_dy
from fp8kit.backends.cuda import block_activation, launch
from fp8kit.backends.cuda._rows import BLOCKS, address, cast_bytes, ceil_div, covered, kernel, sum_partials
from fp8kit.backends.protocol import BLOCK, Cast
from fp8kit.errors import BackendError
from fp8kit.formats import E4M3
from fp8kit.raw_kernels import manifest

_TILE_ROWS, _TILE_COLUMNS, _THREADS = 64, 128, 256  # raw_kernels/activation.cu
MOST_TILES = 8  # that a block walks, one below the other; found by measurement
_NO_PARAMS = (0.0, 0.0, 0.0)
_MIXED = "mixed"


def _tiles(rows: int, columns: int) -> int:
    """Tiles that one block takes: more where there are many, so that partial sums are few; a power of two,
    which divides more heights."""
    most = max(1, min(MOST_TILES, ceil_div(rows, _TILE_ROWS) * ceil_div(columns, _TILE_COLUMNS) // BLOCKS))
    return 1 << (most.bit_length() - 1)


def _row_blocks(rows: int, columns: int) -> int:
    return ceil_div(ceil_div(rows, _TILE_ROWS), _tiles(rows, columns))


def _squares(rows: int, columns: int) -> int:
    """Squares of 128 rows that one block takes of a gradient cast by blocks: as many rows as tiles have, so
    that partial sums are no more, or the least there is."""
    return max(1, _tiles(rows, columns) * _TILE_ROWS // BLOCK)


def _grid(rows: int, columns: int, walked: tuple[int, int], cast: Cast | None) -> tuple[int, int, int]:
    """(blocks, tiles across, tiles a block) for a (rows, columns) y of which ``walked`` is covered, padding
    included."""
    tiles, across = _tiles(rows, columns), ceil_div(walked[1], _TILE_COLUMNS)
    blocks = across * ceil_div(ceil_div(walked[0], _TILE_ROWS), tiles)
    return (max(blocks, 1) if cast is not None else blocks), max(across, 1), tiles


@functools.cache
def _for_whole_tiles() -> frozenset[tuple[str, str]]:
    """(activation, element type) of what has kernels for whole tiles."""
    variants = (dict(defines) for defines in manifest.source("activation.cu").variants)
    return frozenset((v["ACT"], v["T"]) for v in variants if v["TILES"] != _MIXED)


def tiles_of(
    activation: str,
    arrays: tuple[ArrayView, ...],
    rows: int,
    columns: int,
    plain: ArrayView | None,
    cast: Cast | None,
    padded: bool,
) -> str:
    """Returns which of the kernels takes a (rows, columns) y: that for whole tiles of a format, where
    ``arrays`` are read, there is something to read, and only both orientations of the cast are written,
    without padding, or nothing but the amax; otherwise the one for any."""
    if plain is not None or padded or not (rows and columns):
        return _MIXED
    tall, places = _TILE_ROWS * _tiles(rows, columns), 0
    if cast is not None:
        if cast.q is None or cast.q_t is None:
            return _MIXED
        # of q_t multiples of 16 are wanted; of q, written 8 codes at a time, multiples of 8, whose doubles
        # are such
        places = cast.q_t.ptr | cast.q_t.strides[0] | (2 * cast.q.ptr) | (2 * cast.q.strides[0])
    for array in arrays:
        places |= array.ptr
    kind = activation, launch.type_name(arrays[0].dtype)
    large = rows * arrays[0].shape[1] >= 8 << 32  # elements are counted in eights there, in 32 bits
    if large or rows % tall or columns % _TILE_COLUMNS or places % 16 or kind not in _for_whole_tiles():
        return _MIXED
    return "none" if cast is None else "e4m3" if cast.format == E4M3 else "e5m2"


def act_fwd(
    x: ArrayView,
    bias: ArrayView | None,
    y: ArrayView | None,
    amax: ArrayView | None,
    cast: Cast | None,
    activation: str,
    params: tuple[float, ...],
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError for an unknown activation and for a cast to a format other than
    E4M3 and E5M2."""
    row, numbers = known(activation, params), params or _NO_PARAMS
    rows, columns = x.shape[0], x.shape[1] // row.parts
    if cast is not None and cast.tile is not None:
        block_activation.act_fwd(x, bias, y, cast, activation, numbers, columns, stream)
        return
    walked = covered(cast, rows, columns)
    grid, across, tiles = _grid(rows, columns, walked, cast)
    form = tiles_of(activation, (x,), rows, columns, y, cast, walked != (rows, columns))
    function = kernel("activation.cu", "act_fwd", x, ACT=activation, TILES=form)
    arguments = (
        x.ptr,
        address(bias),
        address(y),
        rows,
        columns,
        across,
        tiles,
        *numbers,
        cast_bytes(cast, amax),
    )
    launch.launch(function, grid, _THREADS, arguments, stream)


def act_bwd(
    dy: ArrayView,
    x: ArrayView,
    bias: ArrayView | None,
    dx: ArrayView | None,
    dbias: ArrayView | None,
    amax: ArrayView | None,
    cast: Cast | None,
    second: Cast | None,
    activation: str,
    params: tuple[float, ...],
    workspace: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. BackendError as in ``act_fwd``, and for a dbias without a workspace."""
    row, numbers = known(activation, params), params or _NO_PARAMS
    rows, width = x.shape
    columns = width // row.parts
    if dbias is not None and workspace is None:
        raise BackendError("act_bwd", "workspace", None, f"{act_bwd_workspace(rows, width)} bytes")
    partial = 0 if dbias is None else address(workspace)
    if cast is not None and cast.tile is not None:
        if second is not None:
            raise BackendError("act_bwd", "second", second.format, "None beside a cast by blocks")
        inside, walk = _in_dy(dy, rows, cast), _squares(rows, width)
        spans = [(inside, rows), (0, inside)] if inside else [(0, rows)]
        how = activation, numbers, walk, spans, stream
        block_activation.act_bwd(dy, x, bias, dx, partial, cast, *how)
        if dbias is not None:
            sum_partials(partial, ceil_div(rows, walk * BLOCK), dbias, None, stream)
        return
    if second is None:
        down, right = covered(cast, rows, width)
        walked, padded = max(columns, right - (width - columns)), (down, right) != (rows, width)
        form = tiles_of(activation, (x, dy), rows, columns, dx, cast, padded)
    else:
        down, walked = covered(second, *covered(cast, rows, columns))
        padded = (down, walked) != (rows, columns)
        forms = {tiles_of(activation, (x, dy), rows, columns, dx, own, padded) for own in (cast, second)}
        form = forms.pop() if len(forms) == 1 else _MIXED
    function = kernel("activation.cu", "act_bwd", x, ACT=activation, TILES=form)
    for start, stop, part in _spans(dy, rows, cast):
        most = down if stop == rows else stop
        grid, across, tiles = _grid(rows, columns, (most - start, walked), cast)
        first, last = (part, second) if second is not None else _halves(part, columns, row.parts)
        arguments = (
            dy.ptr + start * columns * dy.dtype.itemsize,
            x.ptr + start * width * x.dtype.itemsize,
            address(bias),
            address(dx),
            partial and partial + start // (_TILE_ROWS * tiles) * width * 4,
            stop - start,
            columns,
            across,
            tiles,
            *numbers,
            cast_bytes(first, amax) + cast_bytes(last, amax),
        )
        launch.launch(function, grid, _THREADS, arguments, stream)
    if dbias is not None:
        sum_partials(partial, _row_blocks(rows, columns), dbias, None, stream)


def _halves(cast: Cast | None, columns: int, parts: int) -> tuple[Cast | None, Cast | None]:
    """Returns a cast of both halves of a gated activation's gradient as one of each, the first of
    ``columns``."""
    if cast is None or parts == 1:
        return cast, None
    made = []
    for start, stop in ((0, columns), (columns, None)):
        q = None if cast.q is None else cast.q.slice(1, start, (stop or cast.q.shape[1]) - start)
        q_t = None if cast.q_t is None else cast.q_t.slice(0, start, (stop or cast.q_t.shape[0]) - start)
        made.append(Cast(cast.format, q, q_t, cast.scale, cast.scale_inv, cast.amax, cast.rule))
    return made[0], made[1]


def _in_dy(dy: ArrayView, rows: int, cast: Cast | None) -> int:
    """Returns how many of the first rows of a cast's codes lie in dy's memory; 0 where they lie apart."""
    q = None if cast is None else cast.q
    if q is None or not dy.ptr <= q.ptr < dy.ptr + dy.nbytes:
        return 0
    first = rows_in_dy(rows, dy.nbytes // rows, q.strides[0])
    if q.ptr != dy.ptr + dy.nbytes - first * q.strides[0]:
        raise BackendError(
            "act_bwd",
            "cast.q",
            f"codes within dy, whose first {first} rows are not its end",
            "memory apart from dy, or as rows_in_dy says",
        )
    return first


def _spans(dy: ArrayView, rows: int, cast: Cast | None) -> list[tuple[int, int, Cast | None]]:
    """Returns the rows that are done at once, with their cast: where the first of the codes lie in dy's
    memory, those behind them before them."""
    first = _in_dy(dy, rows, cast)
    if cast is None or cast.q is None or not first:
        return [(0, rows, cast)]
    q, q_t = cast.q, cast.q_t
    found: list[tuple[int, int, Cast | None]] = []
    for start, stop in ((first, rows), (0, first)):
        codes = q.slice(0, start, stop - start)
        transposed = None if q_t is None else q_t.slice(1, start, stop - start)
        own = Cast(cast.format, codes, transposed, cast.scale, cast.scale_inv, cast.amax, cast.rule)
        found.append((start, stop, own))
    return found


def act_bwd_workspace(rows: int, columns: int) -> int:
    """See ``backends.protocol``. Enough for every activation."""
    return max(_row_blocks(rows, columns), _row_blocks(rows, columns // 2)) * columns * 4
