"""The examples of the PyTorch frontend."""

from __future__ import annotations

import ast
import re
import runpy
import sys

import pytest

from fp8kit.errors import ArgumentError
from tests.support.examples import EXAMPLES, HALF_STEP, numbers


def test_quick_start(printed):
    found = re.findall(
        r"^(\d) .* ([\d.]+) ms, difference ([\d.]+)$", printed("torch_quick_start"), re.MULTILINE
    )
    assert [int(step) for step, *_ in found] == [1, 2, 3, 4, 5]
    assert all(float(time) > 0 for _, time, _ in found)
    differences = [float(difference) for *_, difference in found]
    assert max(differences[:4]) < 2.0**-8  # bfloat16's half step on a GPU; float32's on a CPU is not printed
    assert 0 < differences[4] < HALF_STEP


def test_linear(printed):
    text = printed("torch_linear")
    errors, (weight,) = (
        numbers(r"step \d: .* error ([\d.]+)", text),
        numbers(r"weight gradient: error ([\d.]+)", text),
    )
    assert len(errors) == 3
    assert max(errors[1:]) < HALF_STEP
    assert weight < 2 * HALF_STEP  # of the gradient and of the input
    assert "the same bits True" in text


@pytest.mark.programs
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fine_tune(printed):
    text = printed("torch_fine_tune")
    losses = numbers(r"loss ([\d.]+)", text)
    before, after = re.search(r"(\d+) parameters before and (\d+) after", text).groups()
    assert before == after
    assert losses[-2] < 0.7 * losses[0]
    assert abs(losses[-1] - losses[-2]) < 0.2 * losses[0]


@pytest.mark.programs
def test_packed_text(printed):
    text = printed("torch_packed_text", "25")
    losses, tokens = numbers(r"loss ([\d.]+)", text), numbers(r"(\d+) tokens", text)
    assert losses[-1] < 0.7 * losses[0]
    assert len(set(tokens)) > 2
    first, second = map(ast.literal_eval, text.splitlines()[-2:])
    assert first.startswith("def ")
    assert "\n    # " in first
    assert len(second) == len("    return ") + 24


def test_mesh_of_more_ranks_than_there_are(monkeypatch):
    """As ``fk.distributed.grid`` says it in the example of several ranks."""
    path = EXAMPLES[26]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", [str(path), "2"])
    with pytest.raises(ArgumentError, match="tensor: got 2, expected a divisor of 1, the number of ranks"):
        runpy.run_path(str(path), run_name="__main__")
