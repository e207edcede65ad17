"""Turns, medians and the order of calls, with clocks that count instead of measuring."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fp8kit.arrays import CPU, Device
from fp8kit.backends.cuda import launch
from fp8kit.bench import timing
from fp8kit.bench.timing import WallClock, clock_for, host_seconds, interleaved, medians


class Counting:
    """A clock on which a call lasts as long as its number says."""

    def __init__(self, calls):
        self.calls = calls

    def seconds(self, step, calls):
        times = []
        for _ in range(calls):
            step()
            times.append(float(len(self.calls)))
        self.calls.append("|")
        return times


def test_contenders_take_turns():
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = interleaved(steps, Counting(calls), rounds=2, calls=3, warmups=1)
    assert "".join(calls) == "aaaa|bbbb|bbbb|aaaa|"  # every other round goes backwards
    # the number of calls before the end of each counted one
    assert times == {"a": [2, 3, 4, 17, 18, 19], "b": [7, 8, 9, 12, 13, 14]}
    assert medians(times) == {"a": 10.5, "b": 10.5}


def test_the_hosts_clock_counts_what_its_own_calls_take(monkeypatch):
    """On a device where a step is queued at once and takes a second: what the warm-ups have queued is over
    when the clock starts."""
    now, queued = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def step():
        queued.append("step")
        return len(queued)

    def wait(result):
        assert result == len(queued)
        now[0] += result
        queued.clear()

    assert interleaved({"step": step}, WallClock(CPU, wait), rounds=2, calls=3, warmups=5) == {
        "step": [1.0, 1.0]
    }


def test_the_hosts_clock_asks_for_no_more_calls_on_the_cpu(monkeypatch):
    """A step is done when it returns."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    assert interleaved(
        {"step": lambda: now.__setitem__(0, now[0] + 1)}, WallClock(), rounds=1, calls=3, warmups=2
    ) == {"step": [1.0]}
    assert now == [5.0]


def test_host_time_ends_when_the_call_returns(monkeypatch):
    """Waiting for the device is not counted."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.arrays, "synchronize", lambda device: now.__setitem__(0, now[0] + 100))
    lengths = iter([9, 3, 4, 9, 1, 2])  # the second turn is the quicker one

    def step():
        now[0] += next(lengths)

    assert host_seconds({"step": step}, CPU, rounds=2, calls=2, warmups=1) == {"step": (1.5, 2.5)}


def test_the_cpu_has_the_hosts_clock():
    assert isinstance(clock_for(CPU), WallClock)


class Runtime:
    """CUDA's events, as far as a clock needs them: an event is the time of its record, in milliseconds; all
    are destroyed."""

    def __init__(self):
        self.now, self.alive, self.times = 0.0, set(), {}

    def eventCreate(self):
        event = len(self.times) + 1
        self.times[event] = None
        self.alive.add(event)
        return event

    def eventRecord(self, event, stream):
        assert stream == 7
        self.times[event] = self.now

    def eventSynchronize(self, event):
        assert self.times[event] is not None

    def eventElapsedTime(self, start, end):
        return self.times[end] - self.times[start]

    def eventDestroy(self, event):
        self.alive.remove(event)

    def getDevice(self):
        return 0

    def deviceGetPCIBusId(self, index):
        return "0000:1b:00.0"


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(launch, "runtime", lambda: made)
    monkeypatch.setattr(timing.arrays, "current_stream", lambda device: 7)
    monkeypatch.setattr(timing.arrays, "synchronize", lambda device: None)
    return made


def test_events_stand_around_each_call(runtime):
    lengths = iter([5.0, 1.0, 2.0, 3.0])

    def step():
        runtime.now += next(lengths)

    clock = timing.EventClock(Device("cuda"))
    step()
    assert clock.seconds(step, 3) == [0.001, 0.002, 0.003]
    assert not runtime.alive

    def failing():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        clock.seconds(failing, 2)
    assert not runtime.alive


@pytest.mark.parametrize(
    ("printed", "wanted"),
    [
        (
            "1455 MHz, 3201 MHz, 1980 MHz, 700.00 W, 42, 0x4\n",
            {"clocks.sm": "1455 MHz", "power.draw": "700.00 W"},
        ),
        ("No devices were found\n", {"nvidia-smi": "No devices were found"}),
    ],
)
def test_the_state_under_load(runtime, monkeypatch, printed, wanted):
    """nvidia-smi is asked while work is queued: a second of a call that takes 250 ms."""
    calls, asked = [], []

    def load():
        calls.append(1)
        runtime.now += 250

    def smi(order, **options):
        asked.append((order[2], len(calls)))
        return SimpleNamespace(stdout=printed, stderr="")

    monkeypatch.setattr(timing.subprocess, "run", smi)
    found = timing.gpu_state(Device("cuda"), load)
    assert wanted.items() <= found.items()
    assert asked == [("0000:1b:00.0", 2 + 5 + 4)]


@pytest.mark.gpu
def test_events_see_what_the_device_does():
    """A copy of 1 GiB takes longer than one of 16 MiB, and less than a second; the state under load names a
    clock."""
    from fp8kit.bench.kernels import copier

    device = Device("cuda")
    steps = {"small": copier(device, 16 << 20), "large": copier(device, 1 << 30)}
    found = medians(interleaved(steps, clock_for(device), 3, 3))
    assert 0 < found["small"] < found["large"] < 1
    assert (1 << 30) / found["large"] > 1e11
    assert timing.gpu_state(device, steps["large"], 0.2)
