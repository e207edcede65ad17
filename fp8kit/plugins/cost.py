"""What dispatch costs a call, measured."""

from __future__ import annotations

import timeit
from typing import NamedTuple

from fp8kit.arrays import CPU, Device
from fp8kit.backends import dispatch


class DispatchCost(NamedTuple):
    """Microseconds of one call's way to its implementation: ``plain`` outside of any block, ``block`` within
    one."""

    plain: float
    block: float


def dispatch_cost(device: Device = CPU, calls: int = 1000, repeats: int = 150) -> DispatchCost:
    """Measure ``kernels(device).NAME``, the policy's look-up included and the loop left out: the best of
    ``repeats`` times ``calls``: few calls and many times, so that one of them meets no other work of the
    machine."""
    found = dispatch.kernels(device)

    def best(statement: str) -> float:
        timer = timeit.Timer(
            statement, globals={"kernels": dispatch.kernels, "device": device, "found": found}
        )
        return min(timer.repeat(repeats, calls)) / calls * 1e6

    loop = best("found.add")
    plain = best("kernels(device).add") - loop
    with dispatch.deterministic():
        return DispatchCost(plain, best("kernels(device).add") - loop)
