"""Many runs, each in a process of its own: several at once, the longest first, none that is finished."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from fp8kit.errors import ArgumentError
from fp8kit.models.presets import Preset
from studies import files, gaps
from studies.cases import CASES, SEEDS, Case
from studies.training import settings_of

START = 15.0  # seconds of a run besides its steps, before one was measured
STEP = 0.02  # of the yardstick's step, before it was measured


class Job(NamedTuple):
    """A run to be made."""

    case: Case
    seed: int

    def __str__(self) -> str:
        return f"{self.case.name} seed {self.seed}"


@dataclass
class Running:
    """A process that makes a run."""

    job: Job
    process: subprocess.Popen[bytes]
    log: TextIO
    start: float


def wanted(done: gaps.Runs, names: Sequence[str]) -> list[Job]:
    """The runs that are to be: of main cases ``SEEDS``; of others one, and the rest where their gap exceeds
    the spread, or that one diverged; and for each that of its yardstick from the same seed."""
    jobs = []
    for name in names:
        case = CASES[name]
        more = case.main or gaps.result(done, name).counts
        jobs += [Job(case, seed) for seed in range(SEEDS if more else 1)]
    yardsticks = [Job(CASES[job.case.against], job.seed) for job in jobs if job.case.against in names]
    return list(dict.fromkeys([*jobs, *yardsticks]))


def left(folder: Path, size: Preset, digest: str, names: Sequence[str]) -> list[Job]:
    """Those that are not finished, the longest first. ArgumentError where a finished run is of another size
    or text."""
    done = files.runs(folder)
    for (name, seed), own in done.items():
        if name not in CASES:
            continue
        path = files.run_path(folder, name, seed)
        if own["settings"] != files.plain(settings_of(CASES[name], size, seed)):
            raise ArgumentError(
                "studies", "--out", f"{path}, a run of other settings", "another folder, or the same --size"
            )
        if own["corpus"] != digest:
            raise ArgumentError("studies", "--out", f"{path}, a run on another text", "another folder")
    jobs = [job for job in wanted(done, names) if (job.case.name, job.seed) not in done]
    return sorted(jobs, key=lambda job: -job.case.cost)


def seconds(job: Job, size: Preset, folder: Path, at_once: int) -> float:
    """What a run is expected to take while others run: from the runs that are finished, else from the speed
    of each case alone, else from ``Case.cost``."""
    done = files.runs(folder)
    ratios = [own["seconds"] / CASES[name].cost for (name, _), own in done.items() if name in CASES]
    if ratios:
        return max(ratios) * job.case.cost
    return START + size.steps * step_seconds(job.case, folder) * at_once


def step_seconds(case: Case, folder: Path) -> float:
    """Of one step alone, from ``speed.json`` where that has it."""
    path = folder / "speed.json"
    speeds = files.read(path)["cases"] if path.exists() else {}
    own = speeds.get(case.name, {}).get("milliseconds")
    return STEP * case.cost if own is None else own / 1000


def command(job: Job, folder: Path, corpus: Path, options: Any) -> list[str]:
    """The command line of the process that makes a run."""
    more = ["--steps", str(options.steps)] if options.steps else []
    more += ["--device", options.device] if options.device else []
    return [
        *(sys.executable, "-m", "studies", "run", job.case.name, "--seed", str(job.seed)),
        *("--size", options.size, "--out", str(folder), "--text", str(corpus), *more),
    ]


def environment(at_once: int) -> dict[str, str]:
    """Of such a process: its share of the processor's cores, unless the caller says how many threads."""
    threads = str(max(1, (os.cpu_count() or 1) // at_once))
    own = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), threads)
    return {**own, "PYTHONUNBUFFERED": "1", **os.environ}


def make(
    folder: Path, size: Preset, corpus: Path, digest: str, names: Sequence[str], options: Any, end: float
) -> bool:
    """Make the runs that are left, ``options.jobs`` at once, none that would end after ``end`` (by
    ``time.monotonic``); returns whether all are there. An interrupt ends the processes; what is finished
    stays."""
    jobs = left(folder, size, digest, names)
    running: list[Running] = []
    failed: list[Job] = []
    late: list[Job] = []
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    print(f"{len(jobs)} runs to make, {options.jobs} at once", flush=True)
    own = environment(options.jobs)
    try:
        while jobs or running:
            while jobs and len(running) < options.jobs:
                job = jobs.pop(0)
                if time.monotonic() + seconds(job, size, folder, options.jobs) > end:
                    late.append(job)
                    continue
                log = (logs / f"{job.case.name}.{job.seed}.log").open("w")
                process = subprocess.Popen(
                    command(job, folder, corpus, options), stdout=log, stderr=subprocess.STDOUT, env=own
                )
                running.append(Running(job, process, log, time.monotonic()))
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                each.log.close()
                took = f"{time.monotonic() - each.start:.0f} s, {len(jobs)} left"
                if each.process.returncode:
                    failed.append(each.job)
                    print(f"{each.job}: failed with status {each.process.returncode}; {each.log.name}")
                print(f"{each.job}: {took}", flush=True)
            time.sleep(0.05)
    finally:
        for each in running:
            each.process.terminate()
        for each in running:
            each.process.wait()
            each.log.close()
    if late:
        print(f"not begun, they would not end in time: {', '.join(map(str, late))}; call again")
    return not failed and not late
