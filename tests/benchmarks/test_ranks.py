"""The part ``ranks``: two processes in small on the CPU, and what a trace says, by hand."""

from __future__ import annotations

import pytest

from benchmarks import ranks, targets, traces
from fp8kit.arrays import CPU
from fp8kit.bench.report import Setting
from fp8kit.bench.sizes import SMALL


@pytest.mark.programs
def test_two_processes_take_turns():
    rows = ranks.ranks_part(Setting(CPU, SMALL, 1, 1, 1))
    assert [row["status"] for row in rows] == ["ok"] * 14
    own = {row["case"]: row for row in rows}
    assert own[targets.EAGER]["ratio"] == 1
    assert own[targets.TORCH]["error_y"] > 4 * own["fp8kit_torch bf16"]["error_y"] > 0
    case = f"{targets.TORCH}, {targets.SHARDED}"
    base = own[f"{targets.TORCH}, {targets.ALONE}"]["gpu_ms"]
    assert own[case]["scaling"] == pytest.approx(base / own[case]["gpu_ms"])


def event(name, start, time, **args):
    return {"name": name, "ts": start, "dur": time, "args": args}


def gather(start, time, elements, dtype):
    about = {"Collective name": "_allgather_base", "In msg nelems": elements // 2}
    return event("ncclDevKernel_AllGather", start, time, dtype=dtype, **about, **{"Out msg nelems": elements})


def test_what_a_trace_says():
    """A gather of which 3 us of 10 lie beside kernels, and a sum beside nothing."""
    reduced = {"Collective name": "allreduce", "In msg nelems": 2**20, "Out msg nelems": 2**20}
    found = traces.figures(
        [
            event("gemm", 0, 5),
            event("gemm", 4, 9),
            gather(10, 10, 2**21, "Byte"),
            event("ncclDevKernel_AllReduce", 30, 2, dtype="Float", **reduced),
        ]
    )
    assert (found["gathered_mib"], found["reduced_mib"]) == (2, 4)
    assert (found["comm_ms"], found["hidden"]) == (pytest.approx(0.012), pytest.approx(3 / 12))
    assert (found["busy_ms"], found["span_ms"]) == (pytest.approx(0.022), pytest.approx(0.032))
    assert found["kernels"][0] == ("gemm", 0.014, 2)
    assert traces.figures([event("gemm", 0, 5)])["gathered_mib"] == 0
