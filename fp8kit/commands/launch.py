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

# seconds that the others have to say what they waited for, after one has failed, and all to end after SIGTERM
GRACE = 20.0
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
        f"are known too. Where one fails, the others have {GRACE:g} seconds to say what they waited for; "
        "those that still run then are ended.",
    )
    parser.add_argument("-n", "--ranks", type=positive, required=True, metavar="N", help="processes")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as of python -m")
    limit = f"SIGTERM to all processes after so many minutes, SIGKILL {GRACE:g} seconds later"
    parser.add_argument("--minutes", type=minutes, metavar="M", help=limit)
    label = "begin each line of what a process prints with its rank"
    parser.add_argument("--label", action="store_true", help=label)
    parser.add_argument("program", metavar="PROGRAM", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's arguments")


def _launch(options: argparse.Namespace) -> int:
    program = ["-m", options.program] if options.module else [options.program]
    if not options.module and not os.path.isfile(options.program):
        raise ArgumentError("launch", "PROGRAM", options.program, "a file that exists")
    seconds = None if options.minutes is None else 60 * options.minutes
    return launch(
        options.ranks, [sys.executable, *program, *options.arguments], "launch", seconds, options.label
    )


def launch(
    ranks: int, words: Sequence[str], name: str, seconds: float | None = None, label: bool = False
) -> int:
    """Run the command ``words`` as so many processes; the exit status is 0 where all of theirs are. ``name``:
    of the command of ``fp8kit`` that says what failed. Where one fails, the others get ``GRACE`` seconds to
    end by themselves, and are ended then. After so many ``seconds`` all get SIGTERM, and ``GRACE`` later
    SIGKILL. Where SIGTERM ends this process, all are ended. ``label``: lines of their output begin with
    their rank."""
    environment = places(ranks)
    until = None if seconds is None else time.monotonic() + seconds
    first = ""  # what failed first
    late = False
    processes: list[subprocess.Popen[bytes]] = []
    copies: list[threading.Thread] = []
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if label else {}
    shared = os.environ | ({"PYTHONUNBUFFERED": "1"} if label else {})

    def say(what: str) -> None:
        print(f"fp8kit {name}: {what}", file=sys.stderr, flush=True)

    with _terminable(), contextlib.ExitStack() as ends:
        ends.callback(_drain, copies)  # after _end
        ends.callback(_end, processes)
        for rank, own in enumerate(environment):
            process = subprocess.Popen(words, env=shared | own, **streams)
            processes.append(process)
            for number, source in ((1, process.stdout), (2, process.stderr)) if label else ():
                copies.append(threading.Thread(target=_copy, args=(source, number, rank), daemon=True))
                copies[-1].start()
        while None in (codes := [process.poll() for process in processes]):
            passed = until is not None and time.monotonic() > until
            if not first and not late and any(codes):
                first, until = _said(codes), time.monotonic() + GRACE
                say(f"{first}: all end; {_running(codes)}: {GRACE:g} s to say what was waited for")
            elif passed and seconds is not None and not first and not late:
                late, until = True, time.monotonic() + GRACE
                say(
                    f"not done after {seconds / 60:g} minutes: SIGTERM to {_running(codes)}, "
                    f"SIGKILL in {GRACE:g} s"
                )
                _ask(processes, signal.SIGTERM)
            elif passed:
                say(f"{_running(codes)} not done {GRACE:g} s later: ended")
                if late:
                    _ask(processes, signal.SIGKILL)
                break
            time.sleep(_POLL)
        codes = [process.poll() for process in processes]
    if first:  # again, below what the others said
        say(f"first failed: {first}")
    elif any(codes) and not late:
        say(first := _said(codes))
    return FAILED if first or late else 0


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
    """Returns the environment of each of so many processes. ArgumentError for more than there are GPUs, where
    there are any and no device is named."""
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


def _said(codes: Sequence[int | None]) -> str:
    """Returns which processes have failed, and which had ended before that."""
    said = ", ".join(f"rank {rank} {_how(code)}" for rank, code in enumerate(codes) if code)
    done = ", ".join(str(rank) for rank, code in enumerate(codes) if code == 0)
    return f"{said}; rank {done} had ended before, with status 0" if done else said


def _copy(source: Any, target: int, rank: int) -> None:
    """Write the lines of a process's stream to a descriptor, each whole and with the rank."""
    with source:
        for line in source:
            with contextlib.suppress(OSError):  # the reader has closed it
                os.write(target, b"[rank %d] %s\n" % (rank, line.removesuffix(b"\n")))


def _drain(copies: Sequence[threading.Thread]) -> None:
    for thread in copies:
        thread.join(3.0)  # a process that a rank has started may hold its stream


def _running(codes: Sequence[int | None]) -> str:
    return f"rank {', '.join(str(rank) for rank, code in enumerate(codes) if code is None)}"


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that run, those first that listen."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _ask(processes, number)
        until = time.monotonic() + 3
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            time.sleep(_POLL)


def _ask(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Send a signal to those that run."""
    for process in processes:
        process.send_signal(number)  # none to one that has ended


__all__ = ["add", "launch", "places"]
