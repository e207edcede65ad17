"""Kernels over many tensors at once: AdamW, SGD, loss scaling, the global gradient norm, clipping by it.

Tensors of one type are listed in a table that travels by value with the launch, so that a step costs a launch
for every 64 (AdamW, SGD) or 128 tensors, and no memory.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import TYPE_CODES, address, ceil_div, kernel
from fp8kit.errors import BackendError
from fp8kit.formats import DType

# raw_kernels/optim.cuh: elements a block takes, its threads; optim.cu: the tables' layouts (columns of so
# many rows)
PIECE, THREADS = 8192, 256
_STEP_TENSORS = 64
_LIST_TENSORS = 128
_ADAMW = struct.Struct(f"={6 * _STEP_TENSORS}q{_STEP_TENSORS}I{_STEP_TENSORS}f")
_SGD = struct.Struct(f"={5 * _STEP_TENSORS}q{_STEP_TENSORS}I{_STEP_TENSORS}f")
_LIST = struct.Struct(f"={2 * _LIST_TENSORS}q{_LIST_TENSORS}I")


class _ListLaunch(NamedTuple):
    """One launch over tensors: the first of each column, how many rows there are, their table, and blocks."""

    like: tuple[ArrayView, ...]
    rows: int
    table: bytes
    blocks: int


def launches(
    layout: struct.Struct, most: int, columns: Sequence[Sequence[ArrayView | None]], *numbers: Sequence[float]
) -> Iterator[_ListLaunch]:
    """Launches over at most ``most`` rows each, of the same types. ``columns``: tensors, first those that are
    counted and perhaps gradients, then whatever else has an address in the table; behind these it has sizes,
    first blocks and ``numbers``, each filled up with zeros."""
    kinds: dict[tuple[DType, ...], list[tuple[Any, ...]]] = {}
    for row in zip(*columns, *numbers, strict=True):
        if row[0].size:
            kinds.setdefault(tuple(view.dtype for view in row[:2]), []).append(row)
    for rows in kinds.values():
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            sizes = [row[0].size for row in part]
            *first, blocks = itertools.accumulate((ceil_div(size, PIECE) for size in sizes), initial=0)
            fields = list(zip(*part, strict=True))
            pointers = [map(address, column) for column in fields[: len(columns)]]
            table: list[Any] = []
            for column in (*pointers, sizes, first, *fields[len(columns) :]):
                table += column
                table += [0] * (most - len(part))
            yield _ListLaunch(part[0], len(part), layout.pack(*table), blocks)


def _lists(xs: Sequence[ArrayView]) -> Iterator[_ListLaunch]:
    return launches(_LIST, _LIST_TENSORS, [xs])


def number_of(value: float | ArrayView) -> tuple[float, int]:
    """(the number, 0), or (0, the address) of one that lies on the device."""
    return (0.0, value.ptr) if isinstance(value, ArrayView) else (float(value), 0)


def count_of(op: str, step: int | ArrayView) -> tuple[int, int]:
    """As ``number_of`` for a step; BackendError for one below 1."""
    if isinstance(step, ArrayView):
        return 0, step.ptr
    if step < 1:
        raise BackendError(op, "step", step, "at least 1")
    return step, 0


def _step(
    function: str,
    layout: struct.Struct,
    columns: Sequence[Sequence[ArrayView | None]],
    weight_decays: Sequence[float],
    scalars: tuple[Any, ...],
    stream: int,
) -> None:
    """Launch an optimiser's kernel over tensors; ``columns``: as in ``launches``."""
    for like, count, table, blocks in launches(layout, _STEP_TENSORS, columns, weight_decays):
        arguments = (*scalars, TYPE_CODES[like[1].dtype.name], count, table)
        launch.launch(kernel("optim.cu", function, like[0]), blocks, THREADS, arguments, stream)


def adamw_(
    params: Sequence[ArrayView],
    grads: Sequence[ArrayView],
    exp_avgs: Sequence[ArrayView],
    exp_avg_sqs: Sequence[ArrayView],
    masters: Sequence[ArrayView | None],
    lr: float | ArrayView,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decays: Sequence[float],
    step: int | ArrayView,
    inv_scale: ArrayView | None,
    found_inf: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. ``step`` counts from 1. BackendError for a step below 1."""
    rate, rate_at = number_of(lr)
    count, count_at = count_of("adamw_", step)
    scalars = (
        rate,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        epsilon,
        1 - beta1**count,
        1 - beta2**count,
        rate_at,
        count_at,
        address(inv_scale),
        address(found_inf),
    )
    _step("adamw", _ADAMW, (params, grads, exp_avgs, exp_avg_sqs, masters), weight_decays, scalars, stream)


def sgd_(
    params: Sequence[ArrayView],
    grads: Sequence[ArrayView],
    buffers: Sequence[ArrayView | None],
    masters: Sequence[ArrayView | None],
    lr: float | ArrayView,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decays: Sequence[float],
    step: int | ArrayView,
    inv_scale: ArrayView | None,
    found_inf: ArrayView | None,
    stream: int,
) -> None:
    """See ``backends.protocol``. ``step`` counts from 1. BackendError for a step below 1."""
    rate, rate_at = number_of(lr)
    count, count_at = count_of("sgd_", step)
    scalars = (
        rate,
        momentum,
        1 - dampening,
        int(nesterov),
        count,
        rate_at,
        count_at,
        address(inv_scale),
        address(found_inf),
    )
    _step("sgd", _SGD, (params, grads, buffers, masters), weight_decays, scalars, stream)


def scale_(
    xs: Sequence[ArrayView], factor: ArrayView | None, found_inf: ArrayView | None, stream: int
) -> None:
    """See ``backends.protocol``."""
    for like, count, table, blocks in _lists(xs):
        arguments = (address(factor), address(found_inf), count, table)
        launch.launch(kernel("optim.cu", "scale", *like), blocks, THREADS, arguments, stream)


def loss_scale_(
    scale: ArrayView,
    inv_scale: ArrayView,
    good_steps: ArrayView,
    found_inf: ArrayView,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    stream: int,
) -> None:
    """See ``backends.protocol``."""
    arguments = (
        scale.ptr,
        inv_scale.ptr,
        good_steps.ptr,
        found_inf.ptr,
        float(growth_factor),
        float(backoff_factor),
        growth_interval,
    )
    launch.launch(kernel("optim.cu", "loss_scale", scale), 1, 1, arguments, stream)


def count_(counter: ArrayView, found_inf: ArrayView | None, stream: int) -> None:
    """See ``backends.protocol``."""
    function = launch.kernel("optim.cu", "count", counter.device.index, T="f32")
    launch.launch(function, 1, 1, (counter.ptr, address(found_inf)), stream)


def l2norm(xs: Sequence[ArrayView], out: ArrayView, workspace: ArrayView | None, stream: int) -> None:
    """See ``backends.protocol``. Squares are summed in float32 over 8192 elements, those sums in float64."""
    parts = 0
    for like, count, table, blocks in _lists(xs):
        if workspace is None:
            raise BackendError("l2norm", "workspace", None, f"{l2norm_workspace([x.size for x in xs])} bytes")
        arguments = (workspace.ptr + 4 * parts, count, table)
        launch.launch(kernel("optim.cu", "l2norm_parts", *like), blocks, THREADS, arguments, stream)
        parts += blocks
    total = (address(workspace), out.ptr, parts)
    launch.launch(kernel("optim.cu", "l2norm_total", out), 1, THREADS, total, stream)


def l2norm_workspace(sizes: Sequence[int]) -> int:
    """See ``backends.protocol``."""
    return 4 * sum(ceil_div(size, PIECE) for size in sizes)


def clip_(xs: Sequence[ArrayView], norm: ArrayView, max_norm: float, stream: int) -> None:
    """See ``backends.protocol``. A NaN norm makes every element NaN, as the formula says."""
    for like, count, table, blocks in _lists(xs):
        arguments = (norm.ptr, float(max_norm), count, table)
        launch.launch(kernel("optim.cu", "clip", *like), blocks, THREADS, arguments, stream)
