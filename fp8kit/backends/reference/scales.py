"""Amax and scale: the statistics of a cast, per tile, and the rules that turn them into scaling factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.reference.cast_rows import INF, amax_row, bits
from fp8kit.backends.reference.threads import njit, prange
from fp8kit.recipe import DELAYED_SCALES, UNFILLED

Array = np.ndarray[Any, Any]
_LEAST, _MOST = map(np.float32, DELAYED_SCALES)


def tiles(shape: tuple[int, int], tile: Tile) -> tuple[int, int]:
    """Returns how many tiles, down and across, cover a matrix; an empty matrix has at least one."""
    pairs = zip(shape, tile, strict=True)
    return tuple(max(1, math.ceil(n / max(t, 1))) for n, t in pairs)  # type: ignore[return-value]


@njit(parallel=True)
def row_amax(x: Any, columns: Any, most: Any, out: Any) -> None:
    """out[i, t] = ``amax_row`` of x[i, t * columns : (t + 1) * columns]. x: bits (M, N); out: uint32."""
    for i in prange(x.shape[0]):
        for t in range(out.shape[1]):
            out[i, t] = amax_row(x[i, t * columns : min((t + 1) * columns, x.shape[1])], most)


def accumulate(row_bits: Array, tile_rows: int, amax: ArrayView) -> None:
    """Max-accumulate the amaxes of rows, uint32 bits (M, T), into the float32 amaxes of tiles of
    ``tile_rows`` rows."""
    if not row_bits.size:
        return
    found = np.maximum.reduceat(row_bits, np.arange(0, len(row_bits), tile_rows), axis=0).view(np.float32)
    total = amax.numpy().reshape(found.shape)
    np.fmax(total, found, out=total)


def amax(x: ArrayView, amax: ArrayView, tile: Tile, stream: int) -> None:
    """See ``Kernels.amax``."""
    if not x.size:  # rows without columns, of which there may be billions
        return
    rows = np.empty((x.shape[0], tiles(x.shape, tile)[1]), np.uint32)  # type: ignore[arg-type]
    row_amax(bits(x), max(tile[1], 1), INF, rows)
    accumulate(rows, max(tile[0], 1), amax)


def scales_of(amaxes: Any, fp8_max: float, power_2: bool, epsilon: float, value_for_inf: float) -> Any:
    """Returns what ``scale_from_amax`` makes of amaxes, float32."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        most = np.maximum(amaxes, np.float32(epsilon))  # a NaN amax must stay NaN, so no fmax
        found = np.float32(fp8_max) / most
        found = np.where(np.isinf(found), np.float32(value_for_inf), found)
        if power_2:
            found = (found.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
        return np.where((most > 0) & np.isfinite(most), found, np.float32(1))


def scale_from_amax(
    amax: ArrayView,
    scale: ArrayView,
    scale_inv: ArrayView,
    fp8_max: float,
    power_2: bool,
    epsilon: float,
    value_for_inf: float,
    stream: int,
) -> None:
    """See ``Kernels.scale_from_amax``."""
    found = scales_of(amax.numpy().reshape(-1), fp8_max, power_2, epsilon, value_for_inf)
    with np.errstate(divide="ignore", over="ignore"):
        scale.numpy().reshape(-1)[:] = found
        scale_inv.numpy().reshape(-1)[:] = np.float32(1) / found


def update_delayed_(
    scales: Sequence[ArrayView],
    scale_invs: Sequence[ArrayView],
    histories: Sequence[ArrayView],
    fp8_maxes: Sequence[float],
    margin: int,
    most_recent: bool,
    power_2: bool,
    growth: float | None,
    by_window: bool,
    stream: int,
) -> None:
    """See ``Kernels.update_delayed_``."""
    for scale, scale_inv, history, fp8_max in zip(scales, scale_invs, histories, fp8_maxes, strict=True):
        scaled_max = np.float32(fp8_max * 2.0**-margin)
        rule = scaled_max, most_recent, power_2, growth, by_window
        _update(scale.numpy(), scale_inv.numpy(), history.numpy(), *rule)


def _update(
    scale: Array,
    scale_inv: Array,
    history: Array,
    scaled_max: Any,
    most_recent: bool,
    power_2: bool,
    growth: float | None,
    by_window: bool,
) -> None:
    moved, kept = history[0] != 0, history[0].copy()
    oldest = history[min(1, len(history) - 1)]
    full = by_window & (oldest > np.float32(UNFILLED))
    most = history[0] if most_recent else np.fmax.reduce(history, axis=0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if growth is not None:
            rows, steps = history[1:], np.arange(len(history), 1, -1, dtype=np.float32)
            bounds = np.where(rows > 0, rows + (np.float32(growth) * steps)[:, None], np.float32(0))
            bound = bounds.max(axis=0, initial=0)
            most = np.where(bound > 0, bound, history[0] + np.float32(growth))
            kept[(bound > 0) | ~np.isfinite(kept)] = 0
        fresh = np.clip(scaled_max / most, _LEAST, _MOST)
        if power_2:
            fresh = (fresh.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
        usable = moved & np.isfinite(most) & (most > 0)
        if by_window:
            usable &= full | (oldest == 0)
        scale[...] = np.where(usable, fresh, scale)
        scale_inv[...] = np.where(moved, np.float32(1) / scale, scale_inv)
    rolled = np.roll(history, -1, axis=0)
    rolled[-1] = kept
    rolled[0] = 0
    rolled[1:, full] = np.float32(UNFILLED)
    history[...] = np.where(moved, rolled, history)
