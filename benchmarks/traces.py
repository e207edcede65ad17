"""What a step of a rank communicates, and how much of that runs beside kernels, by torch's profiler."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Event = dict[str, Any]
Span = tuple[float, float]
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_BYTES = {"Byte": 1, "Char": 1, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8}
_LARGEST = 12  # kernels that a row names


def communication(step: Callable[[], object], keep: Path | None = None) -> dict[str, Any]:
    """Figures of one step after another: ``gathered_mib``, ``reduced_mib``: what this rank's all-gathers
    give, and what its reductions take; ``comm_ms``: time in which NCCL's kernels run, waiting for the other
    ranks included, and ``hidden``, the share of it beside other kernels; ``busy_ms`` of ``span_ms``: with any
    kernel, of the step; ``kernels``: (name, ms, calls) of the largest. ``keep``: a file for the trace of the
    GPU (chrome://tracing, gzip)."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as made:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        made.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") in _GPU]
    if keep is not None:
        keep.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return figures(events)


def figures(events: Sequence[Event]) -> dict[str, Any]:
    """See ``communication``; ``events``: a trace's, of the GPU."""
    ours = [event for event in events if event["name"].startswith("ncclDev")]
    others = [event for event in events if not event["name"].startswith("ncclDev")]
    moved = {"gathered_mib": 0.0, "reduced_mib": 0.0}
    for event in ours:
        about = event["args"]
        gathers = "gather" in about["Collective name"]
        elements = about["Out msg nelems" if gathers else "In msg nelems"]
        moved["gathered_mib" if gathers else "reduced_mib"] += elements * _BYTES[about["dtype"]] / 2**20
    comm, kernels, every = (union([_span(event) for event in some]) for some in (ours, others, events))
    time = length(comm)
    found: dict[str, Any] = dict(moved) | {"comm_ms": time / 1e3}
    if time:
        found["hidden"] = (time + length(kernels) - length(every)) / time
    found |= {"busy_ms": length(every) / 1e3, "span_ms": (every[-1][1] - every[0][0]) / 1e3 if every else 0.0}
    totals: dict[str, tuple[float, int]] = {}
    for event in events:
        ms, calls = totals.get(event["name"], (0.0, 0))
        totals[event["name"]] = ms + event["dur"] / 1e3, calls + 1
    largest = sorted(totals.items(), key=lambda item: -item[1][0])[:_LARGEST]
    found["kernels"] = [(name[:80], round(ms, 3), calls) for name, (ms, calls) in largest]
    found["detail"] = (
        f"gathers {found['gathered_mib']:.1f} MiB, {found['comm_ms']:.2f} ms of communication, "
        f"{100 * found.get('hidden', 0.0):.0f}% of it beside kernels"
    )
    return found


def _span(event: Event) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def union(spans: Sequence[Span]) -> list[Span]:
    """The same times as spans that do not overlap, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(spans: Sequence[Span]) -> float:
    """Of spans that do not overlap, together."""
    return sum(end - start for start, end in spans)
