"""The tables of the documents are what the command makes of the committed runs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fp8kit.testing.compare import assert_close
from studies import cases, files, gaps, table
from tests.support.source import ROOT

FOLDER = ROOT / "benchmarks/results/h200/convergence"
# a text of other packages is another folder
FOLDERS = sorted(FOLDER.parent.glob("convergence*"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_committed_table_is_made_of_the_committed_runs(folder):
    runs = files.runs(folder)
    assert (folder / "table.md").read_text() == table.page(folder, runs)
    size, digests = cases.size("full", 500), {own["corpus"] for own in runs.values()}
    assert len(digests) == 1
    for (name, seed), own in runs.items():
        assert own["settings"]["size"]["steps"] == size.steps == len(own["losses"])
        assert files.run_path(folder, name, seed).exists()


def test_the_curves_hold_every_run_and_those_of_which_they_are_left():
    lines = (FOLDER / "curves.csv").read_text().splitlines()
    curves = np.array([line.split(",") for line in lines[1:]], np.float64)
    columns = dict(zip(lines[0].split(",")[1:], curves.T[1:], strict=True))
    runs = files.runs(FOLDER)
    earlier = gaps.earlier(FOLDER, runs).losses
    assert earlier.keys().isdisjoint(runs)
    wanted = {key: own["losses"] for key, own in runs.items()} | earlier
    assert columns.keys() == {f"{name}.{seed}" for name, seed in wanted}
    for (name, seed), losses in wanted.items():
        # five decimals
        assert_close(f"{name}.{seed}", columns[f"{name}.{seed}"], np.float64(losses), "float64", 0.5001e-5)


def test_the_document_has_the_table():
    said = re.findall(r"^\| (`\w+`(?: \*)?) \| ([^|]+(?:\|[^|]*){5}) \|$", document(), re.MULTILINE)
    wanted = [(row[0], " | ".join(row[2:])) for row in table.rows(FOLDER)]
    assert said == wanted


def document() -> str:
    return (ROOT / "docs/studies.md").read_text()


def test_bounds_of_the_study():
    """MXFP8 within 0.5 % of bf16, NVFP4 with the last blocks in bf16 within 1.5 %."""
    percents = {row[0].split("`")[1]: row[5] for row in table.rows(FOLDER)}
    assert abs(float(percents["mxfp8"])) <= 0.5
    assert abs(float(percents["nvfp4_last"])) <= 1.5
