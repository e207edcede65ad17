"""Kernels over many tensors at once: AdamW, SGD, loss scaling, the global gradient norm, clipping by it.

Tensors of one type are listed in a table that travels by value with the launch, so that a step costs a launch
for every 64 (AdamW, SGD) or 128 tensors, and no memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch
from fp8kit.backends.cuda._rows import TYPE_CODES, address, ceil_div, kernel
from fp8kit.errors import BackendError
from fp8kit.formats import DType

# raw_kernels/optim.cu: elements a block takes, its threads, and the tables' layouts (columns of so many rows)
_PIECE, _THREADS = 8192, 256
_STEP_TENSORS = 64
_LIST_TENSORS = 128
_ADAMW = struct.Struct(f"={6 * _STEP_TENSORS}q{_STEP_TENSORS}I{_STEP_TENSORS}f")
_SGD = struct.Struct(f"={5 * _STEP_TENSORS}q{_STEP_TENSORS}I{_STEP_TENSORS}f")
_LIST = struct.Struct(f"={2 * _LIST_TENSORS}q{_LIST_TENSORS}I")


def _pieces(sizes: Sequence[int]) -> tuple[list[int], int]:
    """First block of each tensor, and the number of blocks."""
    first, total = [], 0
    for size in sizes:
        first.append(total)
        total += ceil_div(size, _PIECE)
    return first, total


def _pack(layout: struct.Struct, length: int, columns: Iterable[Sequence[Any]]) -> bytes:
    """A table's columns one after the other, each filled up with zeros to ``length``."""
    return layout.pack(
        *(value for column in columns for value in (*column, *(0 for _ in range(length - len(column)))))
    )


def _by_dtype(xs: Sequence[ArrayView]) -> dict[DType, list[ArrayView]]:
    """The non-empty tensors of each type, in order."""
    found: dict[DType, list[ArrayView]] = {}
    for x in xs:
        if x.size:
            found.setdefault(x.dtype, []).append(x)
    return found


def _lists(xs: Sequence[ArrayView]) -> Iterator[tuple[ArrayView, int, bytes, int]]:
    """(a tensor of the list, number of tensors, table, blocks) for each launch over ``xs``."""
    for views in _by_dtype(xs).values():
        for start in range(0, len(views), _LIST_TENSORS):
            part = views[start : start + _LIST_TENSORS]
            sizes = [x.size for x in part]
            first, blocks = _pieces(sizes)
            yield (
                part[0],
                len(part),
                _pack(_LIST, _LIST_TENSORS, ([x.ptr for x in part], sizes, first)),
                blocks,
            )


def _number(value: float | ArrayView) -> tuple[float, int]:
    """(the number, 0), or (0, the address) of one that lies on the device."""
    return (0.0, value.ptr) if isinstance(value, ArrayView) else (float(value), 0)


def _count(op: str, step: int | ArrayView) -> tuple[int, int]:
    """As ``_number`` for a step; BackendError for one below 1."""
    if isinstance(step, ArrayView):
        return 0, step.ptr
    if step < 1:
        raise BackendError(op, "step", step, "at least 1")
    return step, 0


def _step(
    function: str,
    layout: struct.Struct,
    columns: Sequence[Sequence[Any]],
    weight_decays: Sequence[float],
    scalars: tuple[Any, ...],
    stream: int,
) -> None:
    """Launch an optimiser's kernel over tensors; ``columns``: parameters, gradients, and what else has an
    address in the table."""
    rows: dict[tuple[DType, DType], list[tuple[Any, ...]]] = {}
    for row in zip(*columns, weight_decays, strict=True):
        if row[0].size:
            rows.setdefault((row[0].dtype, row[1].dtype), []).append(row)
    for (_, grad_type), group in rows.items():
        for start in range(0, len(group), _STEP_TENSORS):
            part = group[start : start + _STEP_TENSORS]
            sizes = [row[0].size for row in part]
            first, blocks = _pieces(sizes)
            pointers = [[address(view) for view in column] for column in list(zip(*part, strict=True))[:-1]]
            packed = _pack(layout, _STEP_TENSORS, (*pointers, sizes, first, [row[-1] for row in part]))
            arguments = (*scalars, TYPE_CODES[grad_type.name], len(part), packed)
            launch.launch(kernel("optim.cu", function, part[0][0]), blocks, _THREADS, arguments, stream)


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
    rate, rate_at = _number(lr)
    count, count_at = _count("adamw_", step)
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
    rate, rate_at = _number(lr)
    count, count_at = _count("sgd_", step)
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
        launch.launch(kernel("optim.cu", "scale", like), blocks, _THREADS, arguments, stream)


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
        launch.launch(
            kernel("optim.cu", "l2norm_parts", like),
            blocks,
            _THREADS,
            (workspace.ptr + 4 * parts, count, table),
            stream,
        )
        parts += blocks
    launch.launch(
        kernel("optim.cu", "l2norm_total", out), 1, _THREADS, (address(workspace), out.ptr, parts), stream
    )


def l2norm_workspace(sizes: Sequence[int]) -> int:
    """See ``backends.protocol``."""
    return 4 * sum(ceil_div(size, _PIECE) for size in sizes)


def clip_(xs: Sequence[ArrayView], norm: ArrayView, max_norm: float, stream: int) -> None:
    """See ``backends.protocol``. A NaN norm makes every element NaN, as the formula says."""
    for like, count, table, blocks in _lists(xs):
        launch.launch(
            kernel("optim.cu", "clip", like),
            blocks,
            _THREADS,
            (norm.ptr, float(max_norm), count, table),
            stream,
        )
