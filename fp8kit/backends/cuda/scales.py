"""The contract's scaling factors: current scaling's rule and delayed scaling's update of many states in one launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from fp8kit.arrays import ArrayView
from fp8kit.backends.cuda import launch

_STATES = 96  # states that one launch takes as a parameter by value, scales.cu's STATES
_STATE = struct.Struct("=QQQiifi")


def scale_from_amax(amax: ArrayView, scale: ArrayView, scale_inv: ArrayView, fp8_max: float, power_2: bool, epsilon: float,
                    value_for_inf: float, stream: int) -> None:
    """See ``backends.protocol``."""
    n, index = amax.size, amax.device.index
    kernel = launch.kernel("scales.cu", "scale_from_amax", index)
    args = (amax.ptr, scale.ptr, scale_inv.ptr, n, fp8_max, epsilon, value_for_inf, power_2)
    launch.launch(kernel, launch.blocks(n, 256, index), 256, args, stream)


def update_delayed_(scales: Sequence[ArrayView], scale_invs: Sequence[ArrayView], histories: Sequence[ArrayView],
                    fp8_maxes: Sequence[float], margin: int, most_recent: bool, stream: int) -> None:
    """See ``backends.protocol``. One launch for every 96 states."""
    states = [
        (scale.ptr, scale_inv.ptr, history.ptr, history.shape[1], history.shape[0], fp8_max * 2.0**-margin, 0)
        for scale, scale_inv, history, fp8_max in zip(scales, scale_invs, histories, fp8_maxes, strict=True)
    ]
    if not states:
        return
    kernel = launch.kernel("scales.cu", "update_delayed", scales[0].device.index)
    for start in range(0, len(states), _STATES):
        part = states[start : start + _STATES]
        table = b"".join(_STATE.pack(*state) for state in part).ljust(_STATES * _STATE.size, b"\0")
        launch.launch(kernel, (len(part), max(state[3] for state in part)), 128, (most_recent, table), stream)
