"""Every example runs, and says what its docstring promises."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.house.source import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
ARGUMENTS = {"04_train_gpt": ["6"]}


def run(path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "FP8KIT_DEVICE": "cpu"}
    command = [sys.executable, str(path), *ARGUMENTS.get(path.stem, [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def test_examples_are_numbered_and_documented():
    assert [int(path.name[:2]) for path in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))
    for path in EXAMPLES:
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert "Shows:" in text
        assert "Needs:" in text


def test_quantize():
    printed = run(EXAMPLES[0])
    rows = dict(re.findall(r"^(\w+) +error .* outliers ([\d.]+)$", printed, re.MULTILINE))
    assert float(rows["tensor"]) > 0.9  # one scale loses what is beside the outliers
    assert float(rows["row"]) < 2.0**-4  # half of E4M3's epsilon
    assert float(rows["mx_1x32"]) < 2.0**-4


def test_fp8_gemm():
    errors = numbers(r"relative error ([\d.]+)", run(EXAMPLES[1]))
    assert len(errors) == 3
    assert max(errors) < 2.0**-4


def test_linear_autograd():
    errors = numbers(r"relative error ([\d.]+)", run(EXAMPLES[2]))
    assert max(errors[1:3]) < 2.0**-4
    assert errors[3] < 2.0**-3  # E5M2 keeps a bit less


@pytest.mark.timeout(200)
def test_train_gpt():
    losses = numbers(r"step \d+: ([\d.]+)", run(EXAMPLES[3]))
    assert losses[-1] < losses[0] - 0.1
