"""Which runs are made, in what order, and that a killed command goes on."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fp8kit import cli
from fp8kit.errors import ArgumentError, CheckpointError
from studies import __main__ as command
from studies import cases, files, gaps, pack, schedule, table
from studies.training import settings_of

SIZE = cases.size("tiny", 2)
WORKER = (
    "import json, sys, time; from pathlib import Path; path = Path(sys.argv[1]); time.sleep({seconds}); "
    "part = path.with_suffix('.part'); part.write_text(sys.argv[2]); part.replace(path)"
)


def found_of(name, seed, loss, seconds=1.0):
    settings = files.plain(settings_of(cases.CASES[name], SIZE, seed))
    return {"settings": settings, "corpus": "text", "validation_loss": loss, "losses": [3.0, loss]} | {
        "seconds": seconds,
        "parameters": 1,
        "machine": "a machine",
        "versions": {},
        "device": "cpu",
    }


def write(folder, *runs):
    for name, seed, loss in runs:
        files.write(files.run_path(folder, name, seed), found_of(name, seed, loss))


def options(**more):
    return argparse.Namespace(jobs=2, steps=2, size="tiny", device="cpu", **more)


def quick(folder, seconds=0.0):
    """In place of a training's command: a program that writes what it would."""

    def made(job, *rest):
        (folder / "runs").mkdir(exist_ok=True)
        with (folder / "begun.txt").open("a") as file:
            file.write(f"{job}\n")
        found = json.dumps(found_of(job.case.name, job.seed, 2.0))
        path = files.run_path(folder, job.case.name, job.seed)
        return [sys.executable, "-c", WORKER.format(seconds=seconds), str(path), found]

    return made


def test_seeds_of_main_cases_and_of_variants_with_a_gap():
    names = ["bf16", "current", "rowwise", "static"]
    first = schedule.wanted({}, names)
    assert [(j.case.name, j.seed) for j in first] == [
        *(("bf16", seed) for seed in range(3)), *(("current", seed) for seed in range(3)),
        ("rowwise", 0), ("static", 0),
    ]  # fmt: skip
    losses = {("bf16", 0): 2.00, ("bf16", 1): 2.02, ("bf16", 2): 1.98, ("rowwise", 0): 2.01,
              ("static", 0): 2.03}  # fmt: skip
    done = {key: found_of(*key, loss) for key, loss in losses.items()}
    more = {(j.case.name, j.seed) for j in schedule.wanted(done, names)}
    assert more - {(j.case.name, j.seed) for j in first} == {("static", 1), ("static", 2)}
    done["rowwise", 0]["validation_loss"] = None  # diverged
    assert ("rowwise", 2) in {(j.case.name, j.seed) for j in schedule.wanted(done, names)}


def test_gaps_by_hand():
    losses = {("bf16", 0): 2.00, ("bf16", 1): 2.02, ("bf16", 2): 1.98, ("current", 0): 2.05,
              ("current", 1): 2.05, ("current", 2): 2.05, ("smooth_swiglu", 0): 1.9}  # fmt: skip
    runs = {key: found_of(*key, loss) for key, loss in losses.items()}
    own = gaps.result(runs, "current")
    assert own.seeds == (0, 1, 2)
    assert own.gap == pytest.approx(0.05)
    assert own.percent == pytest.approx(2.5)
    assert own.spread == pytest.approx(0.02)
    assert own.units == pytest.approx(2.5)
    assert own.counts
    assert gaps.result(runs, "smooth_swiglu").gap is None  # its yardstick is missing
    runs["swiglu_bf16", 0] = found_of("swiglu_bf16", 0, 1.8)
    own = gaps.result(runs, "smooth_swiglu")
    assert own.percent == pytest.approx(100 / 18)
    assert own.spread == pytest.approx(0.02 / 2.0 * 1.8)  # of one seed: the main yardstick's, relatively


def test_the_longest_first_and_what_is_there_is_left_out(tmp_path, monkeypatch, capsys):
    write(tmp_path, ("bf16", 1, 2.0))
    monkeypatch.setattr(schedule, "command", quick(tmp_path))
    names = ["bf16", "attention", "mxfp8"]
    one = options()
    one.jobs = 1
    assert schedule.make(tmp_path, SIZE, tmp_path, "text", names, one, float("inf"))
    begun = (tmp_path / "begun.txt").read_text().splitlines()
    assert begun == ["attention seed 0", *(f"mxfp8 seed {i}" for i in range(3)), "bf16 seed 0", "bf16 seed 2"]
    assert len(files.runs(tmp_path)) == 7
    assert schedule.make(tmp_path, SIZE, tmp_path, "text", names, one, float("inf"))
    assert (tmp_path / "begun.txt").read_text().splitlines() == begun
    assert "0 runs to make" in capsys.readouterr().out


def test_nothing_begins_that_would_not_end_in_time(tmp_path, monkeypatch, capsys):
    write(tmp_path, ("bf16", 0, 2.0), ("bf16", 1, 2.0), ("bf16", 2, 2.0))  # a second each
    monkeypatch.setattr(schedule, "command", quick(tmp_path))
    end = time.monotonic() + 2.5  # of the costs 3 and 1
    assert not schedule.make(tmp_path, SIZE, tmp_path, "text", ["attention", "static"], options(), end)
    assert set(files.runs(tmp_path)) == {("static", 0), *(("bf16", i) for i in range(3))}
    assert "not begun, they would not end in time: attention seed 0" in capsys.readouterr().out


def test_runs_of_other_settings_or_another_text_are_refused(tmp_path):
    write(tmp_path, ("bf16", 0, 2.0))
    with pytest.raises(ArgumentError, match="a run of other settings"):
        schedule.left(tmp_path, cases.size("tiny", 4), "text", ["bf16"])
    with pytest.raises(ArgumentError, match="on another text"):
        schedule.left(tmp_path, SIZE, "other", ["bf16"])


def test_a_failed_run_leaves_the_others(tmp_path, monkeypatch, capsys):
    good = quick(tmp_path)

    def made(job, *rest):
        return [sys.executable, "-c", "raise SystemExit(3)"] if job.seed == 1 else good(job)

    monkeypatch.setattr(schedule, "command", made)
    assert not schedule.make(tmp_path, SIZE, tmp_path, "text", ["bf16"], options(), float("inf"))
    assert set(files.runs(tmp_path)) == {("bf16", 0), ("bf16", 2)}
    assert "bf16 seed 1: failed with status 3" in capsys.readouterr().out


@pytest.mark.programs
def test_a_killed_command_goes_on(tmp_path):
    out, source = tmp_path / "out", tmp_path / "text"
    source.mkdir()
    for i in range(40):
        (source / f"m{i}.py").write_text(f"value_{i} = {i}\n" * 1000)
    line = [
        *(sys.executable, "-m", "studies", "convergence", "--out", str(out), "--size", "tiny", "--device"),
        *("cpu", "--steps", "2", "--only", "bf16,current", "--part", "train", "--text", str(source)),
    ]
    first = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    while not list(out.glob("runs/*.json")):
        assert first.poll() is None
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    there = {path: path.stat().st_mtime_ns for path in out.glob("runs/*.json")}
    assert 0 < len(there) < 6
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert f"{6 - len(there)} runs to make" in done.stdout or f"{5 - len(there)} runs to make" in done.stdout
    runs = files.runs(out)
    assert set(runs) == {(name, seed) for name in ("bf16", "current") for seed in range(3)}
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in there.items())
    assert "| `current` |" in done.stdout
    assert not list(out.glob("runs/*.part"))


def test_the_table_and_its_files(tmp_path, capsys):
    write(tmp_path, ("bf16", 0, 2.00), ("bf16", 1, 2.02), ("bf16", 2, 1.98), ("current", 0, 2.05))
    files.write(tmp_path / "speed.json", {"cases": {"current": {"tokens_per_second": 1234.5}}})
    assert command.main(["table", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    row = "| `current` | one scale a tensor, of the tensor | 1 | 2.0500 |  | +2.50 | +2.5 | 1,234 |"
    assert row in text
    assert "| 3 | 2.0000 | 0.0200 |  |  | not measured |" in text  # bf16, whose speed is not there
    assert (tmp_path / "table.md").read_text() in text
    assert (tmp_path / "curves.csv").read_text().splitlines()[1] == "1,3.00000,3.00000,3.00000,3.00000"
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert len((tmp_path / "losses.jsonl").read_text().splitlines()) == 4 * 3
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("4 loss curves, 0 statistics of 0 layers\n")
    assert command.main(["table", str(tmp_path / "none")]) == 2
    assert "a folder with finished runs" in capsys.readouterr().err


def test_a_case_of_an_earlier_call_counts_until_it_has_runs(tmp_path):
    write(tmp_path, ("bf16", 0, 2.00), ("bf16", 1, 2.02), ("bf16", 2, 1.98))
    own = {"mean": 2.1, "deviation": None, "percent": 5.0, "units": 5.0, "losses": [[4.0, 3.0]]}
    files.write(tmp_path / "earlier.json", {"about": "of a first call.", "cases": {"current": own}})
    text = table.write(tmp_path)
    assert (
        "| `current` * | one scale a tensor, of the tensor | 1 | 2.1000 |  | +5.00 | +5.0 | not measured |"
        in text
    )
    assert "*: of a first call." in text
    assert (tmp_path / "curves.csv").read_text().splitlines()[:2] == [
        "step,bf16.0,bf16.1,bf16.2,current.0", "1,3.00000,3.00000,3.00000,4.00000"
    ]  # fmt: skip
    left = schedule.left(tmp_path, SIZE, "text", ["current"])
    assert ("current", 0) in {(job.case.name, job.seed) for job in left}
    write(tmp_path, ("current", 0, 2.05))
    text = table.write(tmp_path)
    assert (
        "| `current` | one scale a tensor, of the tensor | 1 | 2.0500 |  | +2.50 | +2.5 | not measured |"
        in text
    )
    assert "first call" not in text


def test_wrong_arguments(capsys, tmp_path):
    out = ["--out", str(tmp_path)]
    for line in (["convergence", *out, "--only", "bf61"], ["convergence"], ["nothing"]):
        try:
            status = command.main(line)
        except SystemExit as error:
            status = error.code
        assert status == 2
    assert "bf16" in capsys.readouterr().err
    none = tmp_path / "none.npz"
    assert command.main(["run", "bf16", "--seed", "0", *out, "--text", str(none), "--device", "cpu"]) != 0
    assert f"--text: got {none}" in capsys.readouterr().err


def test_one_file_holds_a_folder_and_a_command_goes_on_from_it(tmp_path, monkeypatch):
    """Written while the command runs, so that a kill leaves it; half-written files are left out."""
    monkeypatch.setattr(pack, "EVERY", 0.01)
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "far" / "runs.tar.gz"
    here.mkdir()
    with pack.packed(here, file):
        write(here, ("bf16", 0, 2.0), ("rowwise", 0, 2.1))
        (here / "runs" / "bf16.1.json.7.part").write_text("half")
        deadline = time.monotonic() + 20
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert file.exists()
        write(here, ("bf16", 1, 2.02))
    there.mkdir()
    write(there, ("rowwise", 0, 3.0))  # what is there stays
    with pack.packed(there, file):
        found = files.runs(there)
        assert {key: own["validation_loss"] for key, own in found.items()} == {
            ("bf16", 0): 2.0, ("bf16", 1): 2.02, ("rowwise", 0): 3.0
        }  # fmt: skip
        assert [str(job) for job in schedule.left(there, SIZE, "text", ["bf16"])] == ["bf16 seed 2"]
    assert sorted(path.name for path in (there / "runs").iterdir()) == [
        "bf16.0.json", "bf16.1.json", "rowwise.0.json"
    ]  # fmt: skip
    file.write_text("no archive")
    with pytest.raises(CheckpointError, match="--pack"), pack.packed(there, file):
        pass
