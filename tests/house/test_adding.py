"""What the diffs of docs/adding.md add to a copy of the tree works there, and touches as few files as the
page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.source import ROOT

PAGE = ROOT / "docs/adding.md"
FRONTENDS = "adapters/test_three_frontends.py"


class Added(NamedTuple):
    """The most files that adding it may touch, what is in the names of the tests that run it, the least
    number of those, and their files."""

    most: int
    words: tuple[str, ...]
    least: int
    files: tuple[str, ...]


ADDED = {
    "kernel": Added(
        6,
        ("multiply", "elementwise"),
        8,
        (
            "reference/test_contract.py",
            "lab/test_uses.py",
            "lab/test_verify.py",
            "raw_kernels/test_sources.py",
        ),
    ),
    "operation": Added(4, ("token_shift",), 2, ("autograd/test_ops.py", FRONTENDS)),
    "module": Added(5, ("position_embedding",), 1, (FRONTENDS,)),
    "recipe": Added(
        1,
        ("mxfp8_240",),
        6,
        (
            "nn/test_named_recipes.py",
            "nn/test_layer_recipes.py",
            "adapters/test_named_recipes.py",
            "models/test_named_recipes.py",
        ),
    ),
}


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "adapters")])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


DIFFS = {what: ROOT / f"docs/adding/{what}.diff" for what in ADDED}


def test_the_page_links_to_every_diff_and_there_are_no_others() -> None:
    linked = set(re.findall(r"\]\((adding/[^)]+)\)", PAGE.read_text()))
    there = {path.relative_to(PAGE.parent).as_posix() for path in (PAGE.parent / "adding").iterdir()}
    assert linked == there == {f"adding/{what}.diff" for what in ADDED}


@pytest.mark.parametrize("what", ADDED)
def test_few_files_are_touched(what: str) -> None:
    assert len(re.findall(r"^\+\+\+ ", DIFFS[what].read_text(), re.MULTILINE)) <= ADDED[what].most
    run(ROOT, "git", "apply", "--check", str(DIFFS[what]))


@pytest.mark.programs
def test_what_the_page_adds_works(tmp_path: Path) -> None:
    """All of it in one copy, since every process that imports the frameworks costs seconds."""
    for name in ("fp8kit", "adapters", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for diff in DIFFS.values():
        run(tmp_path, "git", "apply", str(diff))
    files = dict.fromkeys(f"tests/{name}" for added in ADDED.values() for name in added.files)
    chosen = " or ".join(word for added in ADDED.values() for word in added.words)
    said = run(tmp_path, sys.executable, "-m", "pytest", "-v", "-m", "not gpu", "-k", chosen, *files)
    passed = [line for line in said.splitlines() if " PASSED" in line]
    for what, added in ADDED.items():
        names = [line for line in passed if any(word in line for word in added.words)]
        assert len(names) >= added.least, (what, names)
