"""The example plugin, how pip installs it, and an interpreter that runs with it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from tests.support.source import ROOT

EXAMPLE = ROOT / "examples/plugin_numba"
# no network and no environment of its own for the build: what is there is enough
OFFLINE = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
Run = Callable[..., subprocess.CompletedProcess[str]]
