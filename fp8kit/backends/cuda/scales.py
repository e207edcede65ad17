"""The contract's scaling factors: current scaling's rule and delayed scaling's update of many states in one launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch

_STATES = (8, 96)  # states that one launch takes as a parameter by value: the variants of scales.cu
_STATE = struct.Struct("=QQQiifi")
_KNOWN = 16  # batches whose tables are kept


class _Launch(NamedTuple):
    """One launch of the update: its kernel's variant, its grid, and the states as bytes."""

    states: str
    grid: tuple[int, int]
    table: bytes


class _Batch(NamedTuple):
    """States that are updated together, as they were handed over, and what is launched for them."""

    scales: Sequence[ArrayView]
    scale_invs: Sequence[ArrayView]
    histories: Sequence[ArrayView]
    fp8_maxes: Sequence[float]
    margin: int
    launches: list[_Launch]


_BATCHES: dict[int, _Batch] = {}  # by the identity of ``histories``, which an entry keeps alive


def scale_from_amax(amax: ArrayView, scale: ArrayView, scale_inv: ArrayView, fp8_max: float, power_2: bool, epsilon: float,
                    value_for_inf: float, stream: int) -> None:
    """See ``backends.protocol``."""
    n, index = amax.size, amax.device.index
    kernel = launch.kernel("scales.cu", "scale_from_amax", index, STATES="8")
    args = (amax.ptr, scale.ptr, scale_inv.ptr, n, fp8_max, epsilon, value_for_inf, power_2)
    launch.launch(kernel, launch.blocks(n, 256, index), 256, args, stream)


def update_delayed_(scales: Sequence[ArrayView], scale_invs: Sequence[ArrayView], histories: Sequence[ArrayView],
                    fp8_maxes: Sequence[float], margin: int, most_recent: bool, stream: int) -> None:
    """See ``backends.protocol``. One launch for every 96 states. Tuples are taken to hold the same states whenever they are the same
    tuples: what is launched for them is put together once."""
    if not scales:
        return
    batch = _BATCHES.get(id(histories))
    if (batch is None or batch.histories is not histories or batch.scales is not scales or batch.scale_invs is not scale_invs
            or batch.fp8_maxes != fp8_maxes or batch.margin != margin):
        batch = _Batch(scales, scale_invs, histories, fp8_maxes, margin, _launches(scales, scale_invs, histories, fp8_maxes, margin))
        if type(scales) is type(scale_invs) is type(histories) is tuple:
            if len(_BATCHES) >= _KNOWN:
                _BATCHES.clear()
            _BATCHES[id(histories)] = batch
    index = scales[0].device.index
    for states, grid, table in batch.launches:
        launch.launch(launch.kernel("scales.cu", "update_delayed", index, STATES=states), grid, 128, (most_recent, table), stream)


def _launches(scales: Sequence[ArrayView], scale_invs: Sequence[ArrayView], histories: Sequence[ArrayView], fp8_maxes: Sequence[float],
              margin: int) -> list[_Launch]:
    states = [
        (scale.ptr, scale_inv.ptr, history.ptr, history.shape[1], history.shape[0], fp8_max * 2.0**-margin, 0)
        for scale, scale_inv, history, fp8_max in zip(scales, scale_invs, histories, fp8_maxes, strict=True)
    ]
    found = []
    for start in range(0, len(states), _STATES[-1]):
        part = states[start : start + _STATES[-1]]
        room = next(n for n in _STATES if len(part) <= n)
        table = b"".join(_STATE.pack(*state) for state in part).ljust(room * _STATE.size, b"\0")
        found.append(_Launch(str(room), (len(part), max(state[3] for state in part)), table))
    return found
