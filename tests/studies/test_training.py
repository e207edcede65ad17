"""Every case of the study really trains: three steps at one tiny size."""

from __future__ import annotations

import json

import pytest

from fp8kit.arrays import CPU
from studies import cases, corpus, files
from studies.training import run
from tests.support.combinations import combinations

# what has bf16's first loss: forward is in high precision
MOMENTS = [name for name, case in cases.CASES.items() if case.states != "fp32"]


def nothing(line):
    """Say nothing."""


YARDSTICKS = [name for name, case in cases.CASES.items() if case.against in ("", name)]
TRAINED = [name for name in cases.CASES if name not in YARDSTICKS]


@pytest.fixture(scope="module")
def yardsticks(text, size):
    """The runs that others are compared with, by name."""
    return {name: run(cases.CASES[name], size, text, CPU, 0, nothing) for name in YARDSTICKS}


@combinations({"name": TRAINED}, usual=TRAINED[::12])
def test_every_case_trains(name, text, size, yardsticks):
    case = cases.CASES[name]
    found = run(case, size, text, CPU, 0, nothing)
    base = yardsticks[case.against]
    assert len(found["losses"]) == size.steps
    assert found["diverged"] is None
    assert all(1 < loss < 8 for loss in found["losses"])
    # the same weights and batches, and something else was computed: forward, or by the second update, after
    # which one loss alone can be the same by rounding
    assert found["losses"][0] == pytest.approx(base["losses"][0], rel=0.02)
    assert (found["losses"], found["validation_loss"]) != (base["losses"], base["validation_loss"])
    assert (found["losses"][0] == base["losses"][0]) == (name in MOMENTS)
    assert found["settings"]["recipe"] == (None if name in MOMENTS else case.recipe(2).short_name())


def test_a_run_is_the_same_twice_and_its_file_is_json(text, size, yardsticks, tmp_path):
    again = run(cases.CASES["bf16"], size, text, CPU, 0, nothing)
    base = yardsticks["bf16"]
    for name in ("losses", "validation_loss", "settings", "corpus"):
        assert again[name] == base[name]
    files.write(tmp_path / "a.json", again)
    assert files.read(tmp_path / "a.json") == files.plain(again)
    other = run(cases.CASES["bf16"], size, text, CPU, 1, nothing)
    assert other["losses"] != base["losses"]
    assert json.loads(json.dumps(other))["settings"]["seed"] == 1


def test_the_last_blocks_stay_in_high_precision():
    recipe = cases.CASES["nvfp4_last"].recipe(12)
    quantised = [i for i in range(12) if recipe.for_layer("Linear", f"layers.{i}.layernorm_mlp") is not None]
    assert quantised == list(range(10))


def test_the_text_is_of_its_files_alone(tmp_path):
    for i in range(40):
        (tmp_path / f"m{i}.py").write_text(f"# {i}\n" * 1500)
    first, again = corpus.sources(tmp_path), corpus.sources(tmp_path)
    assert first.digest == again.digest
    assert 0 < first.validation.size < first.train.size
    first.save(tmp_path / "text.npz")
    assert corpus.Text.load(tmp_path / "text.npz").digest == first.digest
    (tmp_path / "m7.py").write_text("# another\n")
    assert corpus.sources(tmp_path).digest != first.digest
