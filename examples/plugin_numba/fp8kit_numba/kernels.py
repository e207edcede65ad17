"""The kernels: functions on views with the contract's signatures, and the loops behind them.

float32 in, float32 out (``supported_dtypes`` says so), every operation rounded once: the contract's cases ask
for no more.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from fp8kit import ArrayView
from fp8kit.plugins import CannotTake

BLOCK = 128  # rows that are added up one after the other; then the blocks' sums are


def add(a: ArrayView, b: ArrayView, out: ArrayView, stream: int) -> None:
    """``out = a + b``, b repeated; see ``fp8kit.backends.protocol.Kernels.add``."""
    if a.size:
        _add(a.numpy().reshape(-1, b.size), b.numpy().reshape(-1), out.numpy().reshape(-1, b.size))


def amax(x: ArrayView, amax: ArrayView, tile: tuple[int, int], stream: int) -> None:
    """The largest magnitude of the whole; see ``Kernels.amax``. Tiles are left to others."""
    if tuple(tile) != x.shape:
        raise CannotTake("one amax for the whole array only")
    found = amax.numpy().reshape(-1)
    found[:] = np.fmax(found, _amax(x.numpy()))


def norm_fwd(
    x: ArrayView,
    weight: ArrayView | None,
    bias: ArrayView | None,
    y: ArrayView | None,
    mean: ArrayView | None,
    rstd: ArrayView,
    amax: ArrayView | None,
    cast: Any,
    normalization: str,
    epsilon: float,
    zero_centered_gamma: bool,
    stream: int,
) -> None:
    """RMSNorm without a cast; see ``Kernels.norm_fwd``. The other norms, and what is fused with them, are
    left to others."""
    if normalization != "RMSNorm" or cast is not None or amax is not None or y is None or weight is None:
        raise CannotTake("RMSNorm into a high-precision array only")
    gain = weight.numpy() + np.float32(1) if zero_centered_gamma else weight.numpy()
    _rms_norm(x.numpy(), gain, np.float32(epsilon), y.numpy(), rstd.numpy())


def sum_rows(x: ArrayView, out: ArrayView, workspace: ArrayView | None, stream: int) -> None:
    """Column sums, by blocks of rows; see ``Kernels.sum_rows``. The blocks' sums lie in the workspace."""
    if workspace is None:
        raise CannotTake("sums need a workspace")
    rows, columns = x.shape
    needed = column_sum_workspace(rows, columns)
    _sum_rows(x.numpy(), workspace.numpy()[:needed].view(np.float32).reshape(-1, columns), out.numpy())


def column_sum_workspace(rows: int, columns: int) -> int:
    """Bytes of ``sum_rows``'s workspace: a float32 sum for each block of rows and column."""
    return 4 * columns * -(-rows // BLOCK)


@numba.njit(nogil=True)
def _add(a: Any, b: Any, out: Any) -> None:
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            out[i, j] = a[i, j] + b[j]


@numba.njit(nogil=True)
def _amax(x: Any) -> Any:
    most = np.float32(0)
    for value in x.flat:
        if abs(value) > most:  # not where the value is NaN
            most = abs(value)
    return most


@numba.njit(nogil=True, error_model="numpy")
def _rms_norm(x: Any, gain: Any, epsilon: Any, y: Any, rstd: Any) -> None:
    rows, columns = x.shape
    for i in range(rows):
        total = np.float32(0)
        for j in range(columns):
            total += x[i, j] * x[i, j]
        factor = np.float32(1) / np.sqrt(total / np.float32(columns) + epsilon)
        rstd[i] = factor
        for j in range(columns):
            y[i, j] = x[i, j] * factor * gain[j]


@numba.njit(nogil=True)
def _sum_rows(x: Any, partial: Any, out: Any) -> None:
    partial[:] = 0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            partial[i // BLOCK, j] += x[i, j]
    out[:] = 0
    for block in range(partial.shape[0]):
        for j in range(x.shape[1]):
            out[j] += partial[block, j]
