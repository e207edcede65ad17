"""The contract's scaling factors: current scaling's rule and delayed scaling's update of many states in one launch."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch

_STATES = (8, 96)  # states that one launch takes as a parameter by value: the variants of scales.cu
_STATE = "QQQiifi"  # one of them (scales.cu)
_BYTES = struct.calcsize(f"={_STATE}")


class _Launch(NamedTuple):
    """One launch of the update: its kernel's variant, its grid, and the states as bytes."""

    states: str
    grid: tuple[int, int]
    table: bytes


def scale_from_amax(amax: ArrayView, scale: ArrayView, scale_inv: ArrayView, fp8_max: float, power_2: bool, epsilon: float,
                    value_for_inf: float, stream: int) -> None:
    """See ``backends.protocol``."""
    n, index = amax.size, amax.device.index
    kernel = launch.kernel("scales.cu", "scale_from_amax", index, STATES="8")
    args = (amax.ptr, scale.ptr, scale_inv.ptr, n, fp8_max, epsilon, value_for_inf, power_2)
    launch.launch(kernel, launch.blocks(n, 256, index), 256, args, stream)


def update_delayed_(scales: Sequence[ArrayView], scale_invs: Sequence[ArrayView], histories: Sequence[ArrayView],
                    fp8_maxes: Sequence[float], margin: int, most_recent: bool, stream: int) -> None:
    """See ``backends.protocol``. One launch for every 96 states."""
    if not scales:
        return
    index = scales[0].device.index
    for states, grid, table in _launches(scales, scale_invs, histories, fp8_maxes, margin):
        launch.launch(launch.kernel("scales.cu", "update_delayed", index, STATES=states), grid, 128, (most_recent, table), stream)


@functools.cache
def _packer(states: int) -> struct.Struct:
    return struct.Struct("=" + states * _STATE)


def _launches(scales: Sequence[ArrayView], scale_invs: Sequence[ArrayView], histories: Sequence[ArrayView], fp8_maxes: Sequence[float],
              margin: int) -> Iterator[_Launch]:
    """Made anew at every call: 0.3 us a state, where knowing states again would keep their memory alive."""
    factor = 2.0**-margin
    rows = zip(scales, scale_invs, histories, fp8_maxes, strict=True)
    while part := list(islice(rows, _STATES[-1])):
        fields: list[float] = []
        longest = 0
        for scale, scale_inv, history, fp8_max in part:
            length, slots = history.shape
            fields += (scale.ptr, scale_inv.ptr, history.ptr, slots, length, fp8_max * factor, 0)
            longest = max(longest, slots)
        room = next(n for n in _STATES if len(part) <= n)
        yield _Launch(str(room), (len(part), longest), _packer(len(part)).pack(*fields).ljust(room * _BYTES, b"\0"))
