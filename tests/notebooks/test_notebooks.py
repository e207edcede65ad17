"""The notebooks run from top to bottom on a CPU, each within a minute (``make notebooks``); they are stored
without outputs."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from tests.support.source import ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST = 60.0  # seconds of processor time of a kernel, with what Numba compiles for it
STUCK = 240  # seconds of one cell
by_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["formats_and_scales", "watching_a_training", "which_recipe"]


@by_notebook
def test_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert not [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None]
    long = [line for cell in cells for line in "".join(cell["source"]).splitlines() if len(line) > 110]
    assert not long


@pytest.mark.notebooks
@by_notebook
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient
    from nbformat import NO_CONVERT, read

    paths = [str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")]
    for name, value in (
        ("PYTHONPATH", os.pathsep.join(paths)),
        ("PYTHONWARNINGS", "error:::fp8kit,error:::__main__"),
        ("FP8KIT_DEVICE", "cpu"),
        ("IPYTHONDIR", str(tmp_path / "ipython")),
        ("JUPYTER_PLATFORM_DIRS", "1"),
    ):
        monkeypatch.setenv(name, value)
    notebook = read(path, NO_CONVERT)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    NotebookClient(notebook, timeout=STUCK, kernel_name="python3", resources=at(tmp_path)).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= 3
    assert 0 < seconds < MOST, f"{seconds:.0f} s"


def at(folder: Path) -> dict[str, dict[str, str]]:
    """What lets a notebook's files go to ``folder``."""
    return {"metadata": {"path": str(folder)}}
