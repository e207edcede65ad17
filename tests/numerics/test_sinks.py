"""Where rows go."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import fp8kit as fk
from fp8kit.errors import ArgumentError
from fp8kit.numerics.shown import Copy
from fp8kit.numerics.sinks import LogFile, TensorBoard, name_of, sink_of, text_of
from tests.support.inspected import LAYERS, Native, logged, section

CONFIG = section(logged(["max", "nan_count", "exponents"], ("activation", "wgrad")))


def run(sinks, **more):
    model = Native()
    with fk.inspect(model, CONFIG, sinks=sinks, **more) as log:
        for _ in range(2):
            model.train_step()
            log.step()
    assert len(log.rows()) == (0 if more.get("keep") is False else 36)
    return log.rows()


def test_json_lines(tmp_path):
    path = tmp_path / "run" / "statistics.jsonl"
    rows = run(path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    run(str(path))  # a second run goes on
    assert len(path.read_text().splitlines()) == 2 * len(rows)


def test_csv(tmp_path):
    path = tmp_path / "statistics.csv"
    rows = run([path])
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["stat"] for row in found] == [row["stat"] for row in rows]
    assert [json.loads(row["value"]) for row in found] == [row["value"] for row in rows]
    assert found[0]["gemm"] == ""
    assert found[0]["step"] == "0"


def test_callback():
    steps = []
    rows = run(steps.append)
    assert [row for own in steps for row in own] == rows
    assert len(steps) == 2
    run(steps.append, keep=False)
    assert len(steps) == 4


class Writer:
    """A SummaryWriter's methods."""

    def __init__(self):
        self.scalars, self.histograms = {}, {}

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value

    def add_histogram_raw(self, tag, **how):
        self.histograms[tag, how["global_step"]] = how


def test_tensorboard():
    writer = Writer()
    rows = run(writer)
    want = {f"{r['layer']}/{r['tensor']}/{r['stat']}": r["value"] for r in rows if r["step"] == 1}
    for tag, value in want.items():
        if not isinstance(value, list):
            assert writer.scalars[tag, 1] == value
            continue
        own = writer.histograms[tag, 1]
        assert own["bucket_counts"] == value[:256]
        assert own["num"] == sum(value[:256])
        assert own["bucket_limits"][0] == -126
        assert own["min"] < own["max"]


class FileWriter(Writer):
    """What ``tensorboardX.SummaryWriter`` is, where it is not installed."""

    def __init__(self, folder):
        super().__init__()
        self.path = Path(folder) / "events.out"

    def close(self):
        self.path.write_text(repr((self.scalars, self.histograms)))


def test_tensorboard_files(tmp_path, monkeypatch):
    """By the real package, where it is installed: a file of events."""
    if importlib.util.find_spec("tensorboardX") is None:
        stand_in = types.ModuleType("tensorboardX")
        stand_in.SummaryWriter = FileWriter
        monkeypatch.setitem(sys.modules, "tensorboardX", stand_in)
    run(TensorBoard(tmp_path))
    assert sum(path.stat().st_size for path in tmp_path.glob("events*")) > 1000


def test_tensorboard_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ArgumentError, match="tensorboard"):
        TensorBoard(tmp_path)


def test_weights_and_biases(monkeypatch):
    made = types.ModuleType("wandb")
    made.Histogram = lambda np_histogram: ("histogram", np_histogram)
    monkeypatch.setitem(sys.modules, "wandb", made)
    logged_ = []
    run_ = types.SimpleNamespace(log=lambda values, step: logged_.append((step, values)))
    rows = run(run_)
    assert [step for step, _ in logged_] == [0, 1]
    kind, (counts, edges) = logged_[0][1]["out/activation/exponents"]
    assert kind == "histogram"
    assert len(edges) == len(counts) + 1
    number = next(r["value"] for r in rows if name_of(r) == "out_activation_max")
    assert logged_[0][1]["out/activation/max"] == number


class Run:
    """A run of Weights & Biases, as far as steps go: those that go back are refused."""

    def __init__(self):
        self.step, self.rows, self.axes = 0, {}, {}

    def define_metric(self, name, step_metric):
        assert name not in self.axes
        self.axes[name] = step_metric

    def log(self, values, step=None, commit=None):
        if step is not None:
            assert step >= self.step, "refused"
            self.step = step
        row = self.rows.setdefault(self.step, {})
        assert not set(values) & set(row), "overwritten"
        row |= values
        if commit or (commit is None and step is None):
            self.step += 1


@pytest.mark.parametrize("own", ["with steps", "without", "none"])
def test_rows_of_weights_and_biases_do_not_depend_on_the_users_steps(own, monkeypatch):
    """Rows of a step come one later; all are there, with their own step, and no row of the user is lost."""
    monkeypatch.setattr(Copy, "on_host", False)
    model, log_to = Native(), Run()
    with fk.inspect(model, section(logged(["max"], ("activation",))), sinks=log_to) as log:
        for number in range(4):
            model.train_step()
            if own != "none":
                log_to.log({"loss": number}, **({"step": number} if own == "with steps" else {}))
            log.step()
    found = {row["inspect/step"]: row for row in log_to.rows.values() if "inspect/step" in row}
    assert sorted(found) == list(range(4))
    for row in log.rows():
        assert found[row["step"]][f"{row['layer']}/activation/max"] == row["value"]
    assert [row["loss"] for row in log_to.rows.values() if "loss" in row] == list(range(4)) * (own != "none")
    assert log_to.axes == {f"{layer}/*": "inspect/step" for layer in LAYERS}


def test_the_log_of_transformer_engine(tmp_path):
    """Its place, its names, and values with all digits: a small scale is no 0.0000."""
    rows = run((), log_dir=tmp_path)
    path = tmp_path / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log"
    lines = path.read_text().splitlines()
    line = re.compile(r"(\S+) \t iteration=(\d{6}) \t value=(\S+)")
    found = [line.fullmatch(text).groups() for text in lines]
    assert [(name, int(step)) for name, step, _ in found] == [(name_of(row), row["step"]) for row in rows]
    assert text_of(1e-6) == "1e-06"
    assert float(text_of(0.1)) == pytest.approx(0.1, rel=1e-7)
    assert text_of(3) == "3"
    assert text_of([1, 2]) == "[1,2]"
    for (*_, text), row in zip(found, rows, strict=True):
        if isinstance(row["value"], float):
            assert np.float32(text) == np.float32(row["value"])


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "folder.jsonl", tmp_path / "file" / "rows.csv"):
        with pytest.raises(ArgumentError, match=f"sinks: got {where}, expected a file that can be written"):
            sink_of(where)
    with pytest.raises(ArgumentError, match="nvdlfw_inspect_statistics_logs"):
        LogFile(tmp_path / "file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_disk_that_is_full_is_named_and_the_other_sinks_are_closed(tmp_path):
    class Other:
        closed = 0

        def write(self, rows):
            pass

        def close(self):
            self.closed += 1

    full, other = tmp_path / "full.jsonl", Other()
    full.symlink_to("/dev/full")
    wanted = r"sinks: got .*full\.jsonl, expected a file that can be written \(No space left on device\)"
    with pytest.raises(ArgumentError, match=wanted):
        run([full, other])
    assert other.closed == 1
    run([])


def test_a_folder_that_takes_no_dumps_is_named(tmp_path):
    (tmp_path / "tensor_dumps").write_text("in the way")
    config = section(
        {"DumpTensors": {"enabled": True, "tensors": ["activation"], "high_precision_tensor": True}}
    )
    model = Native()
    wanted = r"log_dir: got .*iter_000000, expected a folder in which tensors"
    with fk.inspect(model, config, log_dir=tmp_path) as log:
        model.train_step()
        with pytest.raises(ArgumentError, match=wanted):
            log.step()


def test_what_is_no_folder(tmp_path):
    with pytest.raises(ArgumentError, match="log_dir: got 3, expected the path of a folder, or None"):
        fk.inspect(Native(), CONFIG, log_dir=3)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"log_dir: got .*, expected a file that can be written"):
        fk.inspect(Native(), CONFIG, log_dir=tmp_path / "file")


def test_a_file_that_is_there_twice_is_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    with pytest.raises(ArgumentError, match=r"sinks: got .*rows.jsonl twice, expected each file once"):
        fk.inspect(Native(), CONFIG, sinks=[file, str(file)])


def test_what_is_no_sink():
    with pytest.raises(ArgumentError, match="sinks"), fk.inspect(Native(), None, sinks="file.txt"):
        pass
