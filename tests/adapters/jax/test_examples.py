"""The examples of the JAX frontend run, say what their docstrings promise, and learn; the benchmark of the
layer checks its results."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from benchmarks import jax_cases
from fp8kit import arrays
from fp8kit.bench.report import setting_for
from fp8kit.bench.sizes import SMALL
from tests.support.source import ROOT


def printed(stem, capsys, monkeypatch, *arguments):
    (path,) = (ROOT / "examples").glob(f"[0-9][0-9]_{stem}.py")
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


@pytest.mark.programs
def test_jax_training(capsys, monkeypatch):
    text = printed("jax_training", capsys, monkeypatch, "20")
    losses = numbers(r"step \d+: ([\d.]+) nats", text)
    assert losses[-1] < losses[0] - 1.0  # of ln 256 = 5.5: bytes by frequency alone are 2.5 below
    assert all(scale != 1.0 for scale in numbers(r"(?:input|gradient) ([\d.e+-]+)", text))


@pytest.mark.programs
def test_flax_training(capsys, monkeypatch):
    text = printed("flax_training", capsys, monkeypatch, "20")
    losses = numbers(r"step \d+: ([\d.]+) nats", text)
    assert losses[-1] < losses[0] - 1.0
    assert numbers(r"validation: ([\d.]+)", text)[0] < losses[0] - 1.0
    assert "quantised tensors: 24\n" in text


@pytest.mark.programs
def test_flax_decode(capsys, monkeypatch):
    text = printed("flax_decode", capsys, monkeypatch, "8")
    (apart,) = numbers(r"([\d.]+)% of the largest apart", text)
    assert apart < 0.01  # the same casts; sums in another order, in float32
    assert "cache: cache_index, cached_key, cached_value\n" in text


@pytest.mark.programs
def test_jax_devices(capsys, monkeypatch):
    text = printed("jax_devices", capsys, monkeypatch)
    losses = numbers(r"step \d+: ([\d.]+)", text)
    assert losses[-1] < 0.7 * losses[0]
    assert numbers(r"scale of the MLP's input: ([\d.e+]+)", text)[0] > 1


@pytest.mark.programs
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_benchmark_checks_its_results(device):
    setting = setting_for(arrays.device(device), sizes=SMALL, rounds=1, calls=1, warmups=1)
    rows = {row["case"]: row for row in jax_cases.jax_part(setting)}
    assert len(rows) == 4
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert rows[jax_cases.PLAIN]["ratio"] == 1.0
    ours, native = (rows[name]["error_y"] for name in ("fp8kit_jax FP8", "fp8kit native FP8"))
    assert ours == pytest.approx(native, rel=0.1)  # the same casts, sums in another order
