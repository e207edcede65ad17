"""The command line: what it prints, writes and returns."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from fp8kit import bench, cli
from fp8kit.arrays import CPU


def test_info_names_every_engine_and_attention(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for word in ("default device", "numpy", "engine reference", "kernels", "engine cuda", "cuBLASLt", "attention on cuda"):
        assert word in printed
    for line in printed.splitlines():
        if "missing" in line:
            assert line.split("missing", 1)[1].strip(), f"says not what is missing: {line}"


def test_module_runs_like_the_command():
    done = subprocess.run([sys.executable, "-m", "fp8kit", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("fp8kit 0.")


def test_train_writes_a_checkpoint(tmp_path, capsys):
    assert cli.main(["train", "--preset", "tiny", "--steps", "3", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "nats/byte" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.csv", "model.safetensors", "scales.csv", "training.safetensors"]


def test_demo_fails_when_a_bound_fails(tmp_path, capsys):
    assert cli.main(["demo", "--preset", "tiny", "--steps", "2", "--device", "cpu", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "FAILED: the FP8 loss" in said.err
    assert "unigram entropy" in said.out


def test_errors_are_one_line(capsys):
    assert cli.main(["train", "--preset", "tiny", "--device", "moon"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("fp8kit train: device: value: got 'moon'")
    assert said.count("\n") == 1


@pytest.mark.parametrize("arguments", [["demo", "--preset", "tiny", "--out"], ["train", "--preset", "tiny", "--out"], ["bench", "--json"]])
def test_results_have_a_place_before_the_work(arguments, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("kept")
    assert cli.main([*arguments, str(file / "results")]) == 1
    said = capsys.readouterr().err
    assert "expected a folder that can be made" in said
    assert said.count("\n") == 1
    assert file.read_text() == "kept"


@pytest.mark.parametrize("name", ["cuda", "cuda:99"])
def test_a_device_that_is_not_there_is_named(name, monkeypatch, capsys):
    monkeypatch.setattr(cli.arrays.provider(cli.arrays.device("cuda")), "count", lambda: 0, raising=False)
    assert cli.main(["train", "--preset", "tiny", "--device", name]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"fp8kit train: device: {cli.arrays.device(name)} is not usable, 0 cuda devices are")
    assert said.count("\n") == 1


def test_interruption_is_one_line(monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", stopped)
    assert cli.main(["bench"]) == 130
    assert capsys.readouterr().err == "\nfp8kit bench: interrupted\n"


@pytest.mark.parametrize("arguments", [[], ["train"], ["train", "--preset", "tiny", "--steps", "0"],
                                       ["demo", "--steps", "many"], ["demo", "--preset", "huge"]])
def test_wrong_usage_is_refused(arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2


def test_bench_measures_and_checks(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "CAST_SHAPE", (64, 256))
    monkeypatch.setitem(bench.PRESETS, "demo-cpu", bench.PRESETS["tiny"])
    results = bench.run(CPU)
    assert all(result.correct for result in results)
    assert all(np.isfinite(result.value) and result.value > 0 for result in results)
    assert any("ml_dtypes" in result.name for result in results)
    table = bench.table(results)
    assert "WRONG" not in table
    assert len(table.splitlines()) == len(results)
    bench.write(tmp_path / "bench.json", results)
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["versions"]["fp8kit"] == bench.versions()["fp8kit"]
    assert len(written["results"]) == len(results)


@pytest.mark.gpu
def test_bench_on_a_gpu():
    from fp8kit.backends import dispatch

    results = bench.run(dispatch.default_device())
    wrong = [result for result in results if not result.correct]
    assert not wrong, wrong
    assert any("TFLOP/s" in result.unit for result in results)
