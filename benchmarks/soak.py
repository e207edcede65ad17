"""A training over 1,000 lengths, each met twice: whether memory stays as it is, and no plan is made again.

    python -m benchmarks soak --out DIR

One TransformerLayer in FP8 with AdamW, through PyTorch: 2,000 steps. The longest batch comes first, so that
every later one fits the memory that there is. The verdict is the status of the rows; the series of figures
are in ``soak.json``.
"""

from __future__ import annotations

import gc
import json
import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import fp8kit_torch as ft
import torch

import fp8kit as fk
from fp8kit.bench.contest import row_of
from fp8kit.bench.report import NO_TIME, Row, Setting
from fp8kit.bench.sizes import FULL

FILE = "soak.json"
MIB = 2**20
# share of what there was after the warm-up that a kind of memory may grow by: allocators keep blocks of ever
# other sizes, and the interpreter its arenas
GROWTH = 0.05
# bytes of the process for each length that is new after the warm-up: its plans on the host, 0.17 MiB by the
# CPU engine (400 steps over 200 lengths), and half as much again
A_LENGTH = MIB // 4
# caches that make an entry whenever they lack one
MAKE = ("plans", "attention calls", "torch: chains")
Caches = dict[str, dict[str, int]]


class Size(NamedTuple):
    """Features, heads, sequences of a batch; lengths, of which the shortest is ``first`` and every other one
    two longer; steps after which memory must be flat."""

    hidden: int
    heads: int
    batch: int
    lengths: int
    first: int
    warm: int


# batches of 8, so that all token counts are multiples of 16, which FP8 products want
LARGE, TINY = Size(1024, 16, 8, 1000, 50, 200), Size(32, 2, 8, 12, 6, 4)


def visits(size: Size, seed: int) -> list[int]:
    """The length of every step: all of them in a random order, the longest first, and then in another."""
    draw = random.Random(seed)
    lengths = [size.first + 2 * i for i in range(size.lengths)]
    longest, rest = lengths[-1], lengths[:-1]
    again = list(lengths)
    draw.shuffle(rest)
    draw.shuffle(again)
    return [longest, *rest, *again]


def process_bytes() -> int:
    """Of this process in memory, as Linux counts them."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory(device: torch.device) -> dict[str, int]:
    """Bytes: of the process; on a GPU what torch's and CuPy's allocators have given out (``used``), what each
    of them holds, and what the device is without, whoever took it."""
    found = {"process": process_bytes()}
    if device.type == "cuda":
        from fp8kit.backends.cuda.device import cupy

        pool = cupy().get_default_memory_pool()
        free, total = torch.cuda.mem_get_info(device)
        found |= {
            "used": torch.cuda.memory_allocated(device) + int(pool.used_bytes()),
            "held by torch": torch.cuda.memory_reserved(device),
            "held by CuPy": int(pool.total_bytes()),
            "device": total - free,
        }
    return found


def too_small(before: Caches, after: Caches) -> list[str]:
    """The caches that are full and were asked for what they do not have, while nothing new came."""
    return [
        name
        for name, now in after.items()
        if now["size"] >= now["limit"] and now["misses"] > before.get(name, now)["misses"]
    ]


def made_again(before: Caches, after: Caches) -> dict[str, int]:
    """How many entries each of ``MAKE`` made while nothing new came."""
    made = {name: after[name]["misses"] - before[name]["misses"] for name in MAKE}
    return {name: count for name, count in made.items() if count}


def steady(name: str, series: list[int], size: Size) -> tuple[int, int, int]:
    """Of a kind of memory: after the warm-up, the most from there on, and the most in the second half less
    the most before. What is ``used`` counts by the least of every ``size.warm`` steps: a thread that times
    products or builds a graph takes memory and gives it back, between which a step may end."""
    every = size.warm if name == "used" else 1
    least = [min(series[i : i + every]) for i in range(size.warm, len(series), every)]
    half = (size.lengths - size.warm) // every
    start = least[0] if name == "used" else series[size.warm - 1]
    return start, max(least), max(least[half:]) - max(least[:half])


def verdict(name: str, series: list[int], size: Size) -> str:
    """ "ok", or what has grown after the warm-up: by more than ``GROWTH`` of what it was then, and of the
    process by more than its plans of the lengths that came later take, too. An allocator's share is a figure
    that says where the device's memory is, and always "ok"."""
    if name.startswith("held by"):
        return "ok"
    start, most, later = steady(name, series, size)
    allowed = GROWTH * start + (A_LENGTH * max(0, size.lengths - size.warm) if name == "process" else 0)
    # nothing new comes in the second half: no plan is an excuse there
    if most - start <= allowed and later <= GROWTH * start:
        return "ok"
    said = f"{(most - start) / MIB:.1f} MiB more than after step {size.warm}, allowed {allowed / MIB:.1f}"
    return f"WRONG: {said}; {later / MIB:.1f} of them in the second half, allowed {GROWTH * start / MIB:.1f}"


def soak_part(setting: Setting) -> list[Row]:
    """A row for each kind of memory (``mib``: at the end; ``value``: MiB more than after the warm-up), one
    for the caches, and one for the time of a step."""
    full = setting.sizes is FULL
    size, kind = LARGE if full else TINY, setting.device.kind
    device = torch.device(kind, setting.device.index) if kind == "cuda" else torch.device("cpu")
    workload = f"{2 * size.lengths} steps over {size.lengths} lengths, hidden {size.hidden}"
    torch.manual_seed(setting.seed)
    layer = ft.TransformerLayer(
        size.hidden,
        4 * size.hidden,
        size.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        device=device,
    )
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4, fused=device.type == "cuda")
    recipe, series = ft.recipe.DelayedScaling(), dict[str, list[int]]()
    half: Caches = {}
    lengths, begin, done = visits(size, setting.seed), time.perf_counter(), 0
    data = torch.randn(max(lengths), size.batch, size.hidden, device=device, dtype=torch.bfloat16)
    for done, length in enumerate(lengths, 1):
        x = data[:length].detach().requires_grad_()
        with ft.autocast(recipe=recipe):
            y = layer(x)
        y.backward(data[:length])
        optimizer.step()
        optimizer.zero_grad()
        del x, y
        if done % size.warm == 0:
            gc.collect()
        for name, held in memory(device).items():
            series.setdefault(name, []).append(held)
        if done == size.lengths:
            half = fk.cache_info()
        if setting.left() <= 0:
            break
    if done < len(lengths):
        return [row_of(workload, "all", f"{NO_TIME} after {done} steps")]
    seconds, after = time.perf_counter() - begin, fk.cache_info()
    if setting.out is not None:
        made = {"lengths": lengths, "memory": series, "caches": {"half": half, "end": after}}
        (setting.out / FILE).write_text(json.dumps(made) + "\n")
    return _rows(workload, size, series, half, after, seconds)


def _rows(
    workload: str, size: Size, series: dict[str, list[int]], half: Caches, after: Caches, seconds: float
) -> list[Row]:
    rows = [
        row_of(
            workload,
            name,
            verdict(name, found, size),
            mib=found[-1] / MIB,
            value=(steady(name, found, size)[1] - steady(name, found, size)[0]) / MIB,
            unit=f"MiB more than after step {size.warm}",
        )
        for name, found in series.items()
    ]
    small, again = too_small(half, after), made_again(half, after)
    wrong = [f"{name} is too small" for name in small]
    wrong += [f"{name} made {count} entries again" for name, count in again.items()]
    fullest = max(after, key=lambda name: after[name]["size"] / after[name]["limit"])
    detail = f"the fullest, {fullest}, has {after[fullest]['size']} of {after[fullest]['limit']} entries"
    rows.append(row_of(workload, "caches", f"WRONG: {'; '.join(wrong)}" if wrong else "ok", detail=detail))
    return [*rows, row_of(workload, "a step", value=1e3 * seconds / (2 * size.lengths), unit="ms")]
