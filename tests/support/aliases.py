"""Processes with an alias, and a folder in the place of site-packages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fp8kit.commands import alias
from tests.support.source import ROOT


def python(*arguments, **variables):
    known = [str(ROOT), str(ROOT / "adapters")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(known), "PYTHONWARNINGS": "error"} | variables
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240
    )


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder in the place of site-packages."""
    monkeypatch.setattr(alias.sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path
