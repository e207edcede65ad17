"""How time is taken, here and in ``benchmarks``: contenders in turn, again and again, so that each meets the
same clocks and the same load.

A GPU lowers its clocks under load, so only figures of one run, taken in turn, compare. A turn begins with
calls that are not counted and keep the device busy; the counted ones are queued behind them, back to back,
or, where the host's clock counts, once these are done. At its power limit a GPU still runs for some tens of
milliseconds as fast as the contender before allowed: so every other round goes backwards, and each has had
both neighbours before it.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fp8kit import arrays
from fp8kit.arrays import CPU, Device

Step = Callable[[], object]
# of nvidia-smi
QUERY = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "temperature.gpu",
    "clocks_event_reasons.active",
)


class Clock(Protocol):
    """What measures the counted calls of one turn."""

    def seconds(self, step: Step, calls: int) -> list[float]:
        """Times in seconds of ``calls`` calls of ``step`` queued back to back: of each, or their mean
        alone."""


class WallClock:
    """The host's clock: waits for the device before and after a turn's calls; one time, their mean. ``wait``,
    given a step's result, waits for it and for all that was queued before it: where steps return before they
    are done, one more that does not count begins the turn."""

    def __init__(self, device: Device = CPU, wait: Callable[[Any], object] | None = None) -> None:
        self._queues = wait is not None or device.kind != "cpu"
        self._wait = wait or (lambda result: arrays.synchronize(device))

    def seconds(self, step: Step, calls: int) -> list[float]:
        """See ``Clock``."""
        if self._queues:
            self._wait(step())
        start = time.perf_counter()
        for _ in range(calls):
            result = step()
        self._wait(result)
        return [(time.perf_counter() - start) / calls]


class HostClock:
    """The host's clock until a call returns, the device idle when it starts; one time, the turn's median."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def seconds(self, step: Step, calls: int) -> list[float]:
        """See ``Clock``."""
        turn = []
        for _ in range(calls):
            arrays.synchronize(self._device)
            start = time.perf_counter()
            step()
            turn.append(time.perf_counter() - start)
        return [statistics.median(turn)]


class EventClock:
    """CUDA events on the device's current stream around each call. Where the host is slower than the GPU,
    that is the host's time."""

    def __init__(self, device: Device) -> None:
        from fp8kit.backends.cuda import launch

        self._device, self._calls, self._current = device, launch.runtime(), launch.current_device

    def seconds(self, step: Step, calls: int) -> list[float]:
        """See ``Clock``."""
        runtime, stream = self._calls, arrays.current_stream(self._device)
        with self._current(self._device.index):
            marks = [runtime.eventCreate() for _ in range(calls + 1)]
            try:
                runtime.eventRecord(marks[0], stream)
                for mark in marks[1:]:
                    step()
                    runtime.eventRecord(mark, stream)
                runtime.eventSynchronize(marks[-1])
                return [runtime.eventElapsedTime(*pair) * 1e-3 for pair in itertools.pairwise(marks)]
            finally:
                for mark in marks:
                    runtime.eventDestroy(mark)


def clock_for(device: Device) -> Clock:
    """Events on a GPU, the host's clock on the CPU."""
    return EventClock(device) if device.kind == "cuda" else WallClock(device)


def interleaved(
    steps: Mapping[str, Step], clock: Clock, rounds: int, calls: int, warmups: int = 2
) -> dict[str, list[float]]:
    """Seconds of every counted call by contender. In each round every contender has its turn, the last one
    first in every other: ``warmups`` calls, then ``calls`` that count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, step in list(steps.items())[:: -1 if number % 2 else 1]:
            for _ in range(warmups):
                step()
            times[name] += clock.seconds(step, calls)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Returns the median of each."""
    return {name: statistics.median(found) for name, found in times.items()}


def host_seconds(
    steps: Mapping[str, Step], device: Device, rounds: int, calls: int, warmups: int
) -> dict[str, tuple[float, float]]:
    """Time until one call returns, the device idle when it starts; contenders in turn. On the CPU the whole
    computation's time. Of each the median of the calls of the quickest turn, and the median of the turns'.

    What others do on the host makes a contender slower for seconds at a time, up to 2.5 times
    (benchmarks/NOTES.md), and never quicker: so the quickest turn tells of the contender, as ``timeit`` takes
    the best of its repeats.
    """
    times = interleaved(steps, HostClock(device), rounds, calls, warmups)
    arrays.synchronize(device)
    return {name: (min(turns), statistics.median(turns)) for name, turns in times.items()}


def gpu_state(device: Device, load: Step, seconds: float = 1.0) -> dict[str, str]:
    """Returns what nvidia-smi says of this GPU's clocks and power while ``load`` runs, which also warms it
    up. Changes no setting.

    ``load`` should last some milliseconds, so that few calls, fewer than the driver queues, outlast
    nvidia-smi's start.
    """
    from fp8kit.backends.cuda import launch

    once = medians(interleaved({"load": load}, EventClock(device), 1, 5))["load"]
    for _ in range(max(1, int(seconds / once))):
        load()
    # by its place on the bus: nvidia-smi numbers devices in another way than the process does
    place = launch.runtime().deviceGetPCIBusId(device.index)
    order = ["nvidia-smi", "-i", place, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(order, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"nvidia-smi": f"{type(error).__name__}: {error}"}
    finally:
        arrays.synchronize(device)
    values = [value.strip() for value in done.stdout.strip().split(",")]
    if len(values) != len(QUERY):
        return {"nvidia-smi": (done.stdout + done.stderr).strip()}
    return dict(zip(QUERY, values, strict=True))
