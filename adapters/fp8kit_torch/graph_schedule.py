"""In which order the passes of several modules and micro-batches are captured, and which of them share the
memory of their inputs: what ``make_graphed_callables`` needs to know of a pipeline. Knows no tensor."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from fp8kit.errors import ArgumentError

_OP = "make_graphed_callables"


class Pass(NamedTuple):
    """The forward or backward pass of one call, by the number of its sample."""

    call: int
    forward: bool


class Schedule(NamedTuple):
    """``owners``: for each sample the number of its callable; ``passes``: as they will run."""

    owners: tuple[int, ...]
    passes: tuple[Pass, ...]


def in_turn(callables: int) -> Schedule:
    """Each callable forward, one sample each, then each backward from the last one on."""
    numbers = range(callables)
    return Schedule(
        tuple(numbers), (*[Pass(i, True) for i in numbers], *[Pass(i, False) for i in reversed(numbers)])
    )


def interleaved(order: Any, layers: Any, callables: int, samples: int) -> Schedule:
    """The schedule of an interleaved pipeline.

    ``order``: ints: c is the forward pass of the next micro-batch through chunk c, counted from 1, -c its
    backward pass. ``layers``: callables of each chunk, an int where all have as many, None for what follows
    from ``samples``. Samples stand chunk by chunk, in a chunk micro-batch by micro-batch, in that callable by
    callable. ArgumentError for what does not fit. Source: Transformer Engine's ``_order``.
    """
    chunks, batches = _chunks(order)
    if layers is None:
        sizes = [samples // (chunks * batches)] * chunks
    else:
        sizes = [layers] * chunks if _is_count(layers) else layers
        if not isinstance(sizes, Sequence) or len(sizes) != chunks or not all(map(_is_count, sizes)):
            wanted = f"an int above 0, or {chunks} of them"
            raise ArgumentError(_OP, "_num_layers_per_chunk", repr(layers)[:80], wanted)
    if sum(sizes) != callables:
        wanted = f"{sum(sizes)} callables, {chunks} chunks of {list(sizes)}"
        raise ArgumentError(_OP, "modules", f"{callables} of them", wanted)
    if samples != sum(sizes) * batches:
        wanted = f"{sum(sizes) * batches}: {batches} micro-batches of {sum(sizes)} callables"
        raise ArgumentError(_OP, "sample_args", f"{samples} of them", wanted)
    starts = [sum(sizes[:chunk]) for chunk in range(chunks)]
    owners = [
        start + layer
        for start, size in zip(starts, sizes, strict=True)
        for _ in range(batches)
        for layer in range(size)
    ]
    done = {True: [0] * chunks, False: [0] * chunks}
    passes: list[Pass] = []
    for entry in order:
        chunk, forward = abs(entry) - 1, entry > 0
        first = starts[chunk] * batches + done[forward][chunk] * sizes[chunk]
        calls = range(first, first + sizes[chunk])
        passes += [Pass(call, forward) for call in (calls if forward else reversed(calls))]
        done[forward][chunk] += 1
    return Schedule(tuple(owners), tuple(passes))


def _chunks(order: Any) -> tuple[int, int]:
    """How many chunks and how many micro-batches an order has. ArgumentError where chunks differ in these, or
    a backward pass comes before its forward pass."""
    whole = isinstance(order, Sequence) and not isinstance(order, str | bytes)
    if not whole or not order or not all(_is_count(abs(c)) if isinstance(c, int) else False for c in order):
        wanted = "a list of ints: c for a forward pass of chunk c, from 1 on, -c for its backward pass"
        raise ArgumentError(_OP, "_order", repr(order)[:80], wanted)
    chunks = max(order)
    open_passes = [0] * (chunks + 1)
    for entry in order:
        if not 0 < abs(entry) <= chunks or open_passes[abs(entry)] + (1 if entry > 0 else -1) < 0:
            wanted = "backward passes of chunks whose forward pass came before"
            raise ArgumentError(_OP, "_order", f"{entry} in {list(order)}"[:80], wanted)
        open_passes[abs(entry)] += 1 if entry > 0 else -1
    counts = {order.count(sign * (chunk + 1)) for chunk in range(chunks) for sign in (1, -1)}
    if len(counts) != 1:
        wanted = "as many forward and backward passes of each chunk, one a micro-batch"
        raise ArgumentError(_OP, "_order", repr(list(order))[:80], wanted)
    return chunks, counts.pop()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def shared_inputs(schedule: Schedule, kinds: Sequence[Hashable]) -> list[int]:
    """For each call the call whose inputs' memory it may use: its own, or that of one whose backward pass has
    ended before, of the same kind (``kinds``: shapes and dtypes of each call's inputs)."""
    uses = list(range(len(kinds)))
    free: dict[Hashable, list[int]] = {}
    for call, forward in schedule.passes:
        ready = free.setdefault(kinds[call], [])
        if not forward:
            ready.append(uses[call])
        elif ready:
            uses[call] = ready.pop(0)
    return uses
