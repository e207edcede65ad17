"""Other projects' packages on this frontend: the programs of ``programs/``, each run once, in a process of
its own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.source import ROOT

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = pytest.mark.clients


def checks() -> list[tuple[str, str]]:
    """(program, the name of a function in it), read from the source."""
    found = []
    for path in sorted(PROGRAMS.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("check_"):
                found.append((path.stem, node.name))
    return found


@cache
def outcomes(program: str) -> dict[str, str]:
    """Name of a check -> the traceback of what failed, "" for nothing. A program that does not end, or not by
    itself, fails in all of them, once."""
    places = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    variables = {
        "PYTHONPATH": places,
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            [sys.executable, str(PROGRAMS / f"{program}.py")],
            cwd=ROOT,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=280,
            check=True,
        )
    except subprocess.SubprocessError as error:
        why = f"{error}\n{str(error.stdout)[-2000:]}\n{str(error.stderr)[-4000:]}"
        return {name: why for each, name in checks() if each == program}
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("program", "name"),
    [pytest.param(*each, marks=pytest.mark.xdist_group(each[0]), id="-".join(each)) for each in checks()],
)
def test_client(program, name):
    failed = outcomes(program)[name]
    assert not failed, failed
