"""The examples of the JAX door run, say what their docstrings promise, and learn; the benchmark of the layer checks its results."""

from __future__ import annotations

import json
import re
import runpy
import sys

import pytest

from benchmarks import jax_layer
from tests.house.source import ROOT


def printed(stem, capsys, monkeypatch, *arguments):
    (path,) = (ROOT / "examples").glob(f"[0-9][0-9]_{stem}.py")
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def test_jax_training(capsys, monkeypatch):
    text = printed("jax_training", capsys, monkeypatch, "20")
    losses = numbers(r"step \d+: ([\d.]+) nats", text)
    assert losses[-1] < losses[0] - 1.0  # of ln 256 = 5.5: bytes by frequency alone are 2.5 below
    assert all(scale != 1.0 for scale in numbers(r"(?:input|gradient) ([\d.e+-]+)", text))


def test_flax_training(capsys, monkeypatch):
    text = printed("flax_training", capsys, monkeypatch, "20")
    losses = numbers(r"step \d+: ([\d.]+) nats", text)
    assert losses[-1] < losses[0] - 1.0
    assert numbers(r"validation: ([\d.]+)", text)[0] < losses[0] - 1.0
    assert "quantised tensors: 24\n" in text
    assert "it writes: '    return " in text or 'it writes: "    return ' in text


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_the_benchmark_checks_its_results(device, capsys, tmp_path):
    out = tmp_path / "layer.json"
    sizes = {"hidden": 64, "ffn": 128, "heads": 2, "sequence": 64, "batch": 2, "rounds": 2, "calls": 1, "warmups": 2}
    assert jax_layer.main([*(f"--{name}={value}" for name, value in sizes.items()), "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["sizes"] == sizes
    assert len(report["results"]) == 4
    assert all(result["correct"] for result in report["results"].values())
    assert report["results"]["plain JAX bfloat16"]["of plain JAX"] == 1.0
    ours, native = (report["results"][name]["relative error of y - x, dx - g"] for name in ("fp8kit_jax FP8", "fp8kit FP8 (native door)"))
    assert ours == pytest.approx(native, rel=0.1)  # the same casts, sums in another order
    assert "WRONG" not in capsys.readouterr().out
