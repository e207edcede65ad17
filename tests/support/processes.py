"""Processes of one machine that run a test's cases together, and what becomes of them when they stand still.

``python -m MODULE RANK RANKS FOLDER PLACE CASE...`` is one of them; a case is a function of the module that
takes (rank, ranks) and checks its own numbers. PLACE: "cpu" (Gloo), or "cuda" (NCCL, a GPU for each process).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.source import ROOT

PLACES = [pytest.param("cpu", marks=pytest.mark.programs), pytest.param("cuda", marks=pytest.mark.gpu2)]
# seconds for a case, the first includes the start: of a process that waits for no other, or on the CPU; of
# several GPUs, which are lent by the minute
ALONE, TOGETHER = 240.0, 60.0
_WORDS = 6.0  # seconds that a process has to say where it stands
_OTHERS = 10.0  # seconds that the others may go on when one has failed
_LOOK = 0.1


def start(module: str, ranks: int, *arguments: object, **environment: str) -> list[subprocess.Popen[str]]:
    """Returns the processes ``python -m MODULE RANK RANKS ARGUMENT...``, one for each rank."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"} | environment
    return [
        begin([sys.executable, "-m", module, *map(str, (rank, ranks, *arguments))], env)
        for rank in range(ranks)
    ]


def begin(words: Sequence[str], env: dict[str, str]) -> subprocess.Popen[str]:
    """Returns the process of a command, which leads a group of its own with all that it starts."""
    env = env | {"PYTHONFAULTHANDLER": "1"}  # SIGABRT has Python print where every thread stands
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def said(workers: Sequence[subprocess.Popen[str]], timeout: float) -> list[tuple[str, str]]:
    """Returns what each process, of ``begin``, wrote to its standard output and error by its end.
    AssertionError, with where all stand, where one has not ended after so many seconds, or ``_OTHERS`` after
    another one failed; no process is left then."""
    results: dict[int, tuple[str, str]] = {}
    end, why = time.monotonic() + timeout, f"not done after {timeout:g} s"
    try:
        while len(results) < len(workers) and time.monotonic() < end:
            for i, worker in enumerate(workers):
                if i not in results and (found := _heard(worker, _LOOK)) is not None:
                    results[i] = found
                    if worker.returncode and end > time.monotonic() + _OTHERS:
                        end, why = time.monotonic() + _OTHERS, f"process {i} failed"
        if len(results) < len(workers):
            status = [worker.poll() for worker in workers]
            _signal(workers, signal.SIGABRT)
            late = {i: _heard(worker, _WORDS) for i, worker in enumerate(workers) if i not in results}
            texts = {i: found[1] for i, found in (results | late).items() if found is not None}
            words = [f"process {i}, status {status[i]}: {texts[i][-6000:]}" for i in sorted(texts)]
            raise AssertionError("\n".join([why, *words]))
    finally:
        _signal(workers, signal.SIGKILL)
    return [results[i] for i in range(len(workers))]


def _heard(worker: subprocess.Popen[str], seconds: float) -> tuple[str, str] | None:
    """All that a process wrote, where it has ended by then."""
    try:
        return worker.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _signal(workers: Sequence[subprocess.Popen[str]], number: signal.Signals) -> None:
    """To each process and all that it has started."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, number)


def run(
    module: str, ranks: int, folder: Path, place: str, cases: Sequence[str], timeout: float = 250.0
) -> None:
    """Run the cases in so many processes; AssertionError with the end of what those said that failed."""
    if place == "cuda":
        import torch

        found = torch.cuda.device_count()
        assert found >= ranks, f"a gpu2 test needs {ranks} CUDA devices, torch finds {found}"
    workers = start(module, ranks, folder, place, *cases)
    results = said(workers, timeout)
    failures = [err[-4000:] for (_, err), worker in zip(results, workers, strict=True) if worker.returncode]
    assert not failures, "\n".join(failures)
    for out, _ in results:
        assert out.split()[::2] == list(cases)


def work(module: dict[str, Any], arguments: Sequence[str]) -> None:
    """What such a module's process does: the cases by name, one after the other, in one group. One that takes
    too long ends the process, which says where it stands."""
    rank, ranks, folder, place, *cases = arguments
    limit = TOGETHER if place == "cuda" and int(ranks) > 1 else ALONE
    faulthandler.dump_traceback_later(limit, exit=True)
    import torch
    import torch.distributed as dist

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
            faulthandler.dump_traceback_later(limit, exit=True)
    except BaseException:  # the end of a group may wait for the others
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()
