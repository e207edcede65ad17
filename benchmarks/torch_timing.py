"""How the PyTorch benchmark takes time and memory: all cases in turn, again and again, so that each meets the same clocks and load."""

from __future__ import annotations

import gc
import itertools
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fp8kit import arrays
from fp8kit.bench import host_seconds

Step = Callable[[], Any]
QUERY = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu", "clocks_event_reasons.active")


def gpu_milliseconds(steps: Mapping[str, Step], rounds: int, calls: int, warmups: int = 2) -> dict[str, float]:
    """Median over rounds and calls of the time between CUDA events around each call, the calls queued back to back.

    In each round every case has its turn: ``warmups`` calls that are not counted and keep the GPU busy, then ``calls`` that are.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
            for _ in range(warmups):
                step()
            marks[0].record()
            for mark in marks[1:]:
                step()
                mark.record()
            marks[-1].synchronize()
            times[name] += [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
    return {name: statistics.median(found) for name, found in times.items()}


def host_microseconds(steps: Mapping[str, Step], where: arrays.Device, rounds: int, calls: int) -> dict[str, float]:
    """Median over rounds of the median time until a call returns, the device idle when it starts, every case in its turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(host_seconds(step, where, rounds=calls, warmups=2) * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


class Memory:
    """Bytes of the GPU that a case holds, in torch's allocator and in CuPy's, which the native library takes from."""

    def __init__(self) -> None:
        import cupy

        gc.collect()
        self.pool = cupy.get_default_memory_pool()
        self.before = torch.cuda.memory_allocated() + self.pool.used_bytes()

    def peak_gib(self, step: Step) -> float:
        """The most that was held during ``step``, beyond what was held when this object was made."""
        torch.cuda.reset_peak_memory_stats()
        start = self.pool.used_bytes()
        with _cupy_growth() as growth:
            step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() + start + growth[0] - self.before) / 2**30


@contextmanager
def _cupy_growth() -> Iterator[list[int]]:
    """A list of one number: the most that CuPy's pool held within, less what it held at the beginning."""
    import cupy

    most = [0]

    class Growth(cupy.cuda.MemoryHook):
        name = "growth"
        held = 0

        def malloc_postprocess(self, **block: int) -> None:
            self.held += block["mem_size"]
            most[0] = max(most[0], self.held)

        def free_postprocess(self, **block: int) -> None:
            self.held -= block["mem_size"]

    with Growth():
        yield most


def free_memory() -> None:
    """Hand back what no case holds any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        import cupy

        torch.cuda.empty_cache()
        cupy.get_default_memory_pool().free_all_blocks()


def gpu_under_load(seconds: float = 2.0) -> dict[str, str]:
    """What nvidia-smi says of this GPU's clocks and power while matrix products run; also a warm-up. Changes no setting.

    The products are large, so that few of them, fewer than the driver queues, last longer than nvidia-smi takes to start.
    """
    a = torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    once = gpu_milliseconds({"product": lambda: torch.mm(a, b)}, rounds=1, calls=10)["product"]
    for _ in range(int(seconds * 1e3 / once)):
        torch.mm(a, b)
    uuid = f"GPU-{torch.cuda.get_device_properties(a.device).uuid}"
    try:
        done = subprocess.run(["nvidia-smi", "-i", uuid, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"nvidia-smi": f"{type(error).__name__}: {error}"}
    finally:
        torch.cuda.synchronize()
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(QUERY, values, strict=True)) if len(values) == len(QUERY) else {"nvidia-smi": (done.stdout + done.stderr).strip()}
