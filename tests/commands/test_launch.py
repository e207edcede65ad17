"""``fp8kit launch`` and ``fp8kit train --ranks``: several processes, over Gloo on the CPU, or over NCCL on
two GPUs."""

from __future__ import annotations

import csv
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from fp8kit import cli, collectives, distributed, rendezvous, settings
from fp8kit.arrays import CPU, Device
from fp8kit.backends.cuda import nccl
from fp8kit.collectives import Collectives, everyone
from fp8kit.commands import launch
from fp8kit.errors import ArgumentError, BackendError, Fp8kitError
from fp8kit.models import text
from fp8kit.models.presets import preset
from fp8kit.models.train import fp8_recipe, train
from fp8kit.rendezvous import Store
from fp8kit.settings import Place
from tests.support import failing_rank, processes
from tests.support.source import ROOT
from tests.support.stops import Stop, Stopped

# seconds within which a rank that fails ends all: rank 0 waits for it first, then says so; the launcher gives
# the others GRACE and then a few seconds to each of two signals. As long again, where others use the machine
SECONDS = 2 * (failing_rank.TIMEOUT + launch.GRACE + 2 * 3)

LIMITS = {"cpu": 240.0, "cuda": 90.0}  # of a command, start included


def run(device, *words):
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    env |= {"FP8KIT_DEVICE": "cpu"} if device == "cpu" else {}
    process = processes.begin([sys.executable, "-m", "fp8kit", *words], env)
    ((out, err),) = processes.said([process], LIMITS[device])
    return SimpleNamespace(returncode=process.returncode, stdout=out, stderr=err)


DEVICES = [pytest.param("cpu", marks=pytest.mark.programs), pytest.param("cuda", marks=pytest.mark.gpu2)]
KNEW = "rank 0: in call 4, all_reduce sum of float32 (16, 16) in Linear fc2"
FAILURES = {
    "not": (0, []),
    "shapes": (1, [KNEW, "rank 1: in call 4, all_reduce sum of float32 (32, 16) in Linear fc2"]),
    "dies": (1, [KNEW, "rank 1: nothing: it hangs or has ended", "rank 1 was ended by SIGKILL"]),
    "hangs": (1, [KNEW, "rank 1: nothing"]),
    "raises": (1, [KNEW, "KeyError: 'mine'", "ended with status 1"]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_that_fails_ends_all_with_a_message(how, device):
    status, said = FAILURES[how]
    done = run(device, "launch", "-n", "2", "-m", "tests.support.failing_rank", how)
    ended = time.monotonic()
    assert done.returncode == status, done.stderr
    for text_ in said:
        assert text_ in done.stderr, done.stderr
    assert sorted(done.stdout.splitlines()) == (
        [] if status else ["rank 0 has done it", "rank 1 has done it"]
    )
    if how == "shapes" and device == "cpu":  # of what was called the program's own lines
        lines = [line for line in done.stderr.splitlines() if "File " in line]
        assert len(lines) >= 4
        assert all("failing_rank.py" in line or "runpy" in line for line in lines), done.stderr
        assert "calls within libraries are not shown" in done.stderr
    if status:  # when imports are done: how long those take is the machine's affair
        assert ended - float(re.search(r"fails at (\S+)", done.stderr)[1]) < SECONDS


@pytest.mark.parametrize("device", DEVICES)
def test_training_of_two_ranks_is_that_of_one_and_continues_its_file(device, tmp_path):
    """Begun by one process, continued by two."""
    size, corpus, quiet = preset("tiny"), text.standard_library(), Stop(None)
    where = CPU if device == "cpu" else distributed.arrays.device("cuda")
    recipe = fp8_recipe(size)
    whole = train(size, corpus, recipe, "FP8", where, 0, quiet)
    keep = tmp_path / "training.safetensors"
    with pytest.raises(Stopped):
        train(size, corpus, recipe, "FP8", where, 0, Stop(3), keep, 1)
    words = ["train", "--preset", "tiny", "--ranks", "2", "--out", str(tmp_path)]
    done = run(device, *words, "--resume", *(["--device", device] if device == "cpu" else []))
    assert done.returncode == 0, done.stderr
    assert "seed 0, 2 ranks" in done.stdout
    with (tmp_path / "loss.csv").open() as file:
        losses = [float(row["FP8"]) for row in csv.DictReader(file)]
    assert losses == pytest.approx(whole.losses, rel=1e-3)
    # what two have left is whole for one
    assert train(size, corpus, recipe, "FP8", where, 0, quiet, keep, 1, True).losses == pytest.approx(
        losses, rel=1e-6
    )


@pytest.mark.parametrize("device", DEVICES)
def test_the_example_learns_the_same_on_ranks_that_share_rows_or_weights(device):
    def losses(*words):
        done = run(device, *words)
        assert done.returncode == 0, done.stderr
        return [float(line.split()[-1]) for line in done.stdout.splitlines()]

    example = str(ROOT / "examples" / "24_several_ranks.py")
    one, rows, weights = (losses("launch", "-n", n, example, *more) for n, *more in ("1", "2", ("2", "2")))
    assert len(one) == 10
    assert 0.5 < one[0] < 2
    for found in (rows, weights):  # which are printed with four digits
        assert all(abs(a - b) <= 1e-3 + 1e-4 for a, b in zip(found, one, strict=True)), (found, one)


def test_what_launchers_say(monkeypatch):
    for names in settings._PLACES:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    assert settings.place() == Place()
    with monkeypatch.context() as sbatch:
        sbatch.setenv("SLURM_PROCID", "0")
        sbatch.setenv("SLURM_NTASKS", "8")
        assert settings.place() == Place()
    for names, values, wanted in (
        (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), "34", (3, 4, 3)),
        (("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"), "561", (5, 6, 1)),
        (("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"), "1207", (1, 2, 0)),  # before all others
    ):
        for name, value in zip(names, values, strict=True):
            monkeypatch.setenv(name, value)
        if names[0] == "SLURM_PROCID":
            monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
        assert settings.place()[:3] == wanted
    assert settings.place().port == 7
    assert [own["RANK"] for own in launch.places(3)] == ["0", "1", "2"]
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(Fp8kitError, match="RANK: got 2, expected below 2, which WORLD_SIZE says"):
        settings.place()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(Fp8kitError, match="RANK: got 'one', expected a number"):
        settings.place()


def test_one_process_is_a_group_of_one(monkeypatch):
    monkeypatch.setattr(collectives, "EVERYONE", [])
    for arguments, error, wanted in (
        ({"backend": "glo"}, ArgumentError, "backend: got 'glo', expected None or one of nccl, gloo"),
        ({"timeout": 0.0}, ArgumentError, "timeout"),
    ):
        with pytest.raises(error, match=wanted):
            distributed.init(device="cpu", **arguments)
    ranks = distributed.init(device="cpu")
    assert type(ranks) is Collectives
    assert (ranks.rank, ranks.size, ranks.device) == (0, 1, CPU)
    assert distributed.init() is ranks is everyone()
    assert distributed.grid(ranks) == (ranks, ranks)
    with pytest.raises(ArgumentError, match="tensor: got 2, expected a divisor of 1, the number of ranks"):
        distributed.grid(ranks, 2)
    with pytest.raises(ArgumentError, match="tensor: got 0, expected"):
        distributed.grid(ranks, 0)


@pytest.mark.parametrize(("gpus", "index"), [(1, 0), (4, 2)])
def test_the_gpu_of_a_process(gpus, index, monkeypatch):
    """That of its number on its machine, unless its launcher shows it one alone."""
    made = []
    monkeypatch.setattr(collectives, "EVERYONE", [])
    monkeypatch.setattr(settings, "place", lambda: Place(6, 8, 2))
    monkeypatch.setattr(settings, "device", str)
    monkeypatch.setattr(distributed.dispatch, "default_device", lambda: Device("cuda"))
    monkeypatch.setattr(distributed.arrays, "provider", lambda device: SimpleNamespace(count=lambda: gpus))
    monkeypatch.setattr(distributed.arrays, "usable", lambda name, *where: Device("cuda", int(name[-1])))
    monkeypatch.setattr(nccl, "connect", lambda place, where, s: made.append(where) or Collectives(6, 8))
    assert distributed.init().device == Device("cuda", index)
    assert made == [Device("cuda", index)]


def test_refusals_of_the_command(tmp_path, capsys):
    assert cli.main(["launch", "-n", "2", str(tmp_path / "none.py")]) == 2
    assert "PROGRAM: got" in capsys.readouterr().err
    assert cli.main(["train", "--preset", "tiny", "--ranks", "2", "--device", "cuda:1"]) == 2
    assert "--device: got cuda:1, expected cpu or cuda" in capsys.readouterr().err
    with pytest.raises(ArgumentError, match=r"preset.sequences: got 4, expected a multiple of 3"):
        train(preset("tiny"), None, None, "high", CPU, ranks=Collectives(0, 3))


def test_an_answer_may_take_longer_than_a_connection(monkeypatch):
    """Rank 0 answers when its interpreter is free."""
    answers = rendezvous._Answers.handle
    monkeypatch.setattr(rendezvous, "_CONNECT", 0.05)
    monkeypatch.setattr(rendezvous._Answers, "handle", lambda self: (time.sleep(0.2), answers(self)))
    store = Store(Place(0, 1, 0, "127.0.0.1", int(launch.places(1)[0]["MASTER_PORT"])), 5.0)
    store.set("a", "b")
    assert store.get("a", 1.0) == "b"
    store.close()


def test_an_answer_that_comes_too_late_answers_nothing_else(monkeypatch):
    """One may ask again, and gets the answer to that."""
    waits, answers = iter([0.6]), rendezvous._Answers.handle
    monkeypatch.setattr(rendezvous, "_ANSWER", 0.2)
    monkeypatch.setattr(
        rendezvous._Answers, "handle", lambda self: (time.sleep(next(waits, 0.0)), answers(self))
    )
    store = Store(Place(0, 1, 0, "127.0.0.1", int(launch.places(1)[0]["MASTER_PORT"])), 5.0)
    with pytest.raises(TimeoutError):
        store.set("a", "late")
    store.set("a", "b")
    store.set("c", "d")
    assert store.get("c", 1.0) == "d"
    store.close()


def test_ranks_share_texts():
    with_port = Place(0, 2, 0, "127.0.0.1", int(launch.places(1)[0]["MASTER_PORT"]))
    first = Store(with_port, 5.0)
    other = Store(with_port._replace(rank=1), 5.0)
    assert other.peek("a") is None
    first.set("a", "b\nc")
    assert other.get("a", 1.0) == "b\nc"
    with pytest.raises(BackendError, match=r"d: got nothing for 0.1 s, expected what another rank sets"):
        other.get("d", 0.1)
    with pytest.raises(BackendError, match="expected a free port"):
        Store(with_port, 1.0)
    other.close()
    first.close()
    with pytest.raises(BackendError, match="expected rank 0 there"):
        Store(with_port._replace(rank=1, port=1), 0.2)


LISTENING = {
    "127.0.0.1": (socket.AF_INET, "127.0.0.1"),
    "localhost": (socket.AF_INET, "127.0.0.1"),
    "::1": (socket.AF_INET6, "::1"),
    "10.1.2.3": (socket.AF_INET, ""),  # not an address of this machine, behind a translation
    "2001:db8::1": (socket.AF_INET6, "::"),
}


@pytest.mark.parametrize("address", LISTENING)
def test_where_rank_0_listens(address):
    """This machine alone by a loopback address, else all interfaces."""
    assert rendezvous.listening(address) == LISTENING[address]


def test_rank_0_is_met_by_a_name_that_it_does_not_know(monkeypatch):
    """As others resolve it: rank 0 listens at every address."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **kw: resolve("127.0.0.1", *rest, **kw))
    place = Place(0, 1, 0, "rank-zero.invalid", int(launch.places(1)[0]["MASTER_PORT"]))
    store = Store(place, 5.0)
    store.set("a", "b")
    assert store.get("a", 1.0) == "b"
    store.close()


def test_a_process_that_ends_is_noticed_while_an_earlier_one_runs(tmp_path, monkeypatch, capfd):
    """That of rank 0 is asked first."""
    monkeypatch.setattr(launch, "GRACE", 0.2)
    monkeypatch.setenv("FP8KIT_DEVICE", "cpu")
    program = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)"
    begin = time.monotonic()
    assert launch.launch(3, [sys.executable, "-c", program], "launch") == 1
    assert time.monotonic() - begin < 30
    assert capfd.readouterr().err.splitlines() == [
        "fp8kit launch: rank 1 ended with status 3: all end; rank 0, 2: 0.2 s to say what was waited for",
        "fp8kit launch: rank 0, 2 not done 0.2 s later: ended",
        "fp8kit launch: first failed: rank 1 ended with status 3",
    ]


def test_a_rank_that_ended_well_before_another_one_failed_is_named(monkeypatch, capfd):
    monkeypatch.setenv("FP8KIT_DEVICE", "cpu")
    program = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(0)\ntime.sleep(3)\nsys.exit(4)"
    assert launch.launch(2, [sys.executable, "-c", program], "launch") == 1
    said = "rank 0 ended with status 4; rank 1 had ended before, with status 0"
    assert capfd.readouterr().err.splitlines() == [f"fp8kit launch: {said}"]


def test_lines_with_their_rank(monkeypatch, capfd):
    """Whole, also where a process prints them in parts, and as soon as they are whole."""
    monkeypatch.setenv("FP8KIT_DEVICE", "cpu")
    program = (
        "import os, sys, time\n"
        "print('a', end='')\n"
        "time.sleep(0.3)\n"
        "print('b')\n"
        "print('no end of a line', end='', file=sys.stderr)\n"
        "os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else None\n"
    )
    assert launch.launch(2, [sys.executable, "-c", program], "launch", label=True) == 1
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] ab", "[rank 1] ab"]
    lines = err.splitlines()
    assert {"[rank 0] no end of a line", "[rank 1] no end of a line"} < set(lines)
    assert "rank 1 was ended by SIGKILL" in lines[-1]


@pytest.mark.parametrize("ignored", [False, True])
def test_at_the_limit_all_get_sigterm_and_then_sigkill(ignored, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(launch, "GRACE", 1.0 if ignored else 60.0)
    monkeypatch.setenv("FP8KIT_DEVICE", "cpu")
    program = "import signal, time\n"
    program += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if ignored else ""
    begin = time.monotonic()
    words = [sys.executable, "-c", f"{program}time.sleep(120)"]
    minutes = 0.05 if ignored else 0.01  # it takes a moment to begin to ignore it
    assert launch.launch(2, words, "launch", 60 * minutes) == 1
    assert time.monotonic() - begin < 30
    said = f"not done after {minutes} minutes: SIGTERM to rank 0, 1, SIGKILL in {launch.GRACE:g} s"
    then = ["fp8kit launch: rank 0, 1 not done 1 s later: ended"] if ignored else []
    assert capfd.readouterr().err.splitlines() == [f"fp8kit launch: {said}", *then]


def test_processes_end_with_their_launcher(tmp_path):
    """As a scheduler's SIGTERM ends it, and it alone."""
    program = tmp_path / "waits.py"
    # a line in one piece, also where Python does not buffer
    program.write_text("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)\n")
    words = [sys.executable, "-m", "fp8kit", "launch", "-n", "2", str(program)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "FP8KIT_DEVICE": "cpu"}
    with subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as launcher:
        numbers = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.terminate()
        assert launcher.wait(30) == 128 + signal.SIGTERM
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
