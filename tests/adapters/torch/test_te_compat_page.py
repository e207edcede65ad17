"""docs/te_compat.md against the code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.source import ROOT


@pytest.mark.programs
def test_the_page_is_what_its_program_writes():
    """In a process of its own: names are asked under Transformer Engine's name, which is not given back."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")])}
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "te_compat_table.py"), "--check"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr or "run docs/te_compat_table.py"
