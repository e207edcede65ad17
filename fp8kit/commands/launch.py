"""``fp8kit launch``: a program as several processes of this machine, a GPU each where there are GPUs; when
one fails, all end."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from fp8kit import arrays, settings
from fp8kit.commands import FAILED, command, minutes, positive
from fp8kit.errors import ArgumentError

GRACE = 20.0  # seconds that the others have to say what they know, after one has failed
_POLL = 0.05


def add(commands: Any) -> None:
    """Register the subcommand; ``commands`` is what ``ArgumentParser.add_subparsers`` returned."""
    about = "a Python program as several processes, which fk.distributed.init() makes a group"
    parser = command(
        commands,
        "launch",
        about,
        _launch,
        epilog="Each process finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its "
        "environment, as torchrun's do. On several machines, use torchrun, mpirun or Slurm: their variables "
        "are known too.",
    )
    parser.add_argument("-n", "--ranks", type=positive, required=True, metavar="N", help="processes")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as of python -m")
    limit = "end all processes after so many minutes"
    parser.add_argument("--minutes", type=minutes, metavar="M", help=limit)
    parser.add_argument("program", metavar="PROGRAM", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's arguments")


def _launch(options: argparse.Namespace) -> int:
    program = ["-m", options.program] if options.module else [options.program]
    if not options.module and not os.path.isfile(options.program):
        raise ArgumentError("launch", "PROGRAM", options.program, "a file that exists")
    seconds = None if options.minutes is None else 60 * options.minutes
    return launch(options.ranks, [sys.executable, *program, *options.arguments], "launch", seconds)


def launch(ranks: int, words: Sequence[str], name: str, seconds: float | None = None) -> int:
    """Run the command ``words`` as so many processes; the exit status is 0 where all of theirs are. ``name``:
    of the command of ``fp8kit`` that says what failed. Where one fails, or after so many ``seconds``, the
    others get ``GRACE`` seconds to end by themselves, and are ended then; so are all where SIGTERM ends this
    process."""
    environment = places(ranks)
    began, failed = time.monotonic(), None
    processes: list[subprocess.Popen[bytes]] = []
    with _terminable(), contextlib.ExitStack() as ends:
        ends.callback(_end, processes)
        for own in environment:
            processes.append(subprocess.Popen(words, env=os.environ | own))
        while None in (codes := [process.poll() for process in processes]):
            if failed is None and any(code not in (None, 0) for code in codes):
                failed = time.monotonic()
                _say(name, codes)
            if failed is None and seconds is not None and time.monotonic() - began > seconds:
                failed = time.monotonic()
                print(f"fp8kit {name}: not done after {seconds / 60:g} minutes: ended", file=sys.stderr)
            if failed is not None and time.monotonic() - failed > GRACE:
                break
            time.sleep(_POLL)
        codes = [process.poll() for process in processes]
        if failed is None and any(codes):
            _say(name, codes)
        return 0 if all(code == 0 for code in codes) and failed is None else FAILED


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Within, SIGTERM is an exception, as Ctrl-C is; signals are the main thread's alone."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def places(ranks: int) -> list[dict[str, str]]:
    """The environment of each of so many processes. ArgumentError for more than there are GPUs, where there
    are any and no device is named."""
    gpus = arrays.provider(arrays.device("cuda")).count()
    if gpus and not settings.device() and ranks > gpus:
        raise ArgumentError("launch", "--ranks", ranks, f"at most {gpus}, the number of GPUs here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # processes on CPUs share the cores
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _say(name: str, codes: Sequence[int | None]) -> None:
    """Which processes have failed."""
    said = [f"rank {rank} {_how(code)}" for rank, code in enumerate(codes) if code]
    print(f"fp8kit {name}: {', '.join(said)}: all end", file=sys.stderr)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that run, those first that listen."""
    for ask in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for process in processes:
            if process.poll() is None:
                ask(process)
        until = time.monotonic() + 3
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            time.sleep(_POLL)


__all__ = ["add", "launch", "places"]
