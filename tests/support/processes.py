"""Processes of one machine that run a test's cases together.

``python -m MODULE RANK RANKS FOLDER PLACE CASE...`` is one of them; a case is a function of the module that
takes (rank, ranks) and checks its own numbers. PLACE: "cpu" (Gloo), or "cuda" (NCCL, a GPU for each process).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.source import ROOT

PLACES = [pytest.param("cpu", marks=pytest.mark.programs), pytest.param("cuda", marks=pytest.mark.gpu2)]


def start(module: str, ranks: int, *arguments: object, **environment: str) -> list[subprocess.Popen[str]]:
    """The processes ``python -m MODULE RANK RANKS ARGUMENT...``, one for each rank."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"} | environment
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, (rank, ranks, *arguments))],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def run(
    module: str, ranks: int, folder: Path, place: str, cases: Sequence[str], timeout: float = 250.0
) -> None:
    """Run the cases in so many processes; AssertionError with the end of what one said that failed."""
    if place == "cuda":
        import torch

        found = torch.cuda.device_count()
        assert found >= ranks, f"a gpu2 test needs {ranks} CUDA devices, torch finds {found}"
    workers = start(module, ranks, folder, place, *cases)
    try:
        results = [worker.communicate(timeout=timeout) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for (out, err), worker in zip(results, workers, strict=True):
        assert worker.returncode == 0, err[-4000:]
        assert out.split()[::2] == list(cases)


def work(module: dict[str, Any], arguments: Sequence[str]) -> None:
    """What such a module's process does: the cases by name, one after the other, in one group."""
    import torch
    import torch.distributed as dist

    rank, ranks, folder, place, *cases = arguments
    torch.set_num_threads(1)
    options = {}
    if place == "cuda":
        torch.cuda.set_device(int(rank))
        options["device_id"] = torch.device("cuda", int(rank))
    backend = "nccl" if place == "cuda" else "gloo"
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=int(rank), world_size=int(ranks), **options)
    try:
        for case in cases:
            module[case](int(rank), int(ranks))
            print(case, "passed", flush=True)
            dist.barrier()
    finally:
        dist.destroy_process_group()
