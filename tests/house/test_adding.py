"""What docs/adding.md adds to a copy of the tree works there, and touches as few files as it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source import ROOT

DIFFS = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs/adding.md").read_text(), re.MULTILINE | re.DOTALL)
# what is added -> (files at most, tests that run it, and the words that pick them)
ADDED = {
    "kernel": (
        6,
        (
            "reference/test_contract.py",
            "lab/test_uses.py",
            "lab/test_verify.py",
            "raw_kernels/test_sources.py",
        ),
        "multiply or elementwise",
    )
}


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "adapters")])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("what", "diff"), [*zip(ADDED, DIFFS, strict=True)], ids=list(ADDED))
def test_what_the_page_adds_works(what: str, diff: str, tmp_path: Path) -> None:
    most, tests, words = ADDED[what]
    assert len(re.findall(r"^\+\+\+ ", diff, re.MULTILINE)) <= most
    for name in ("fp8kit", "adapters", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "added.diff").write_text(diff)
    run(tmp_path, "git", "apply", "added.diff")
    chosen = ("-m", "not gpu", "-k", words, *(f"tests/{name}" for name in tests))
    said = run(tmp_path, sys.executable, "-m", "pytest", "-q", *chosen)
    assert int(re.findall(r"(\d+) passed", said)[-1]) > 20
