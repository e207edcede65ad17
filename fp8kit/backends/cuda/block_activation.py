"""Activations and their gradients with casts by blocks of 128, in one pass: what ``activation`` launches for
such a cast."""

from __future__ import annotations

from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import address, ceil_div, kernel
from fp8kit.backends.protocol import BLOCK, Cast
from fp8kit.errors import BackendError
from fp8kit.formats import E4M3, E5M2, DType

SOURCE = "block_activation.cu"
_THREADS = 256


def act_fwd(
    x: ArrayView,
    bias: ArrayView | None,
    y: ArrayView | None,
    cast: Cast,
    activation: str,
    numbers: tuple[float, ...],
    columns: int,
    stream: int,
) -> None:
    """y = activation(x + bias), (M, ``columns``), and its cast; see ``backends.protocol``. ``numbers``: the
    activation's, always three."""
    how, rows = _how("act_fwd", cast, x.dtype), x.shape[0]
    function = kernel(SOURCE, "block_act_fwd", x, ACT=activation)
    arguments = x.ptr, address(bias), address(y), rows, columns, *numbers, *how
    launch.launch(function, ceil_div(rows, BLOCK) * ceil_div(columns, BLOCK), _THREADS, arguments, stream)


def act_bwd(
    dy: ArrayView,
    x: ArrayView,
    bias: ArrayView | None,
    dx: ArrayView | None,
    partial: int,
    cast: Cast,
    activation: str,
    numbers: tuple[float, ...],
    walk: int,
    spans: list[tuple[int, int]],
    stream: int,
) -> None:
    """Its gradient, and the cast of that. ``partial``: address of the column sums of every ``walk`` squares,
    0 where they are not wanted; ``spans``: the rows that are done at once, the first ones of whole walks."""
    how, (rows, width) = _how("act_bwd", cast, x.dtype), x.shape
    function = kernel(SOURCE, "block_act_bwd", x, ACT=activation)
    pointers = dy.ptr, x.ptr, address(bias), address(dx), partial
    for start, stop in spans:
        begin, end = start // BLOCK, ceil_div(stop, BLOCK)
        arguments = *pointers, rows, dy.shape[1], begin, end, walk, *numbers, *how
        grid = ceil_div(end - begin, walk) * ceil_div(width, BLOCK)
        launch.launch(function, grid, _THREADS, arguments, stream)


def _how(operation: str, cast: Cast, dtype: DType) -> tuple[Any, ...]:
    """Returns what both kernels are told of a cast. BackendError for other formats than E4M3 and E5M2."""
    if cast.format != E4M3 and cast.format != E5M2:
        raise BackendError(operation, "cast.format", cast.format, "E4M3 or E5M2")
    assert cast.rule is not None and cast.tile is not None
    made = cast.q, cast.scale_inv, cast.q_t, cast.scale_inv_t
    return (
        *map(address, made),
        *(0 if codes is None else codes.shape[0] for codes in (cast.q, cast.q_t)),
        int(cast.tile[0] == BLOCK),
        cast.format.max,
        cast.rule.epsilon,
        dtype.max,
        int(cast.rule.power_2),
        int(cast.format == E5M2),
    )
