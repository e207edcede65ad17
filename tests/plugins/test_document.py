"""The manual's shell commands run as they stand, and print what it shows. Its Python blocks run in
tests/house/test_documents.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.plugin import EXAMPLE, OFFLINE
from tests.support.source import ROOT

TEXT = (ROOT / "docs/plugins.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.programs
def test_commands_run_and_print_what_is_shown(tmp_path: Path) -> None:
    commands, site, bin_ = tmp_path / "bin", tmp_path / "site", sys.executable
    commands.mkdir()
    shutil.copytree(EXAMPLE, tmp_path / "examples/plugin_numba")
    for name, line in {
        "python": f'exec "{bin_}" "$@"',
        "fp8kit": f'exec "{bin_}" -m fp8kit "$@"',
        "pip": f'exec "{bin_}" -m pip "$@" {" ".join(OFFLINE)} --target "{site}"',
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{line}\n")
        (commands / name).chmod(0o755)
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FP8KIT_P", "FP8KIT_S", "TE_FL_", "TEFL_"))
    }
    environment = {
        **clean,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT, ROOT / "adapters"))),
    }
    script = "".join(blocks("sh"))
    done = subprocess.run(
        ["bash", "-e"],
        input=script,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        pytest.fail(f"exit status {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
    assert done.stderr == ""
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    shown = [" ".join(line.split()) for block in blocks("text") for line in block.splitlines()]
    assert len(shown) > 4
    missing = [line for line in shown if not any(said.endswith(line) for said in printed)]
    assert not missing, f"{missing}\n{done.stdout}"
    assert sum("keep the contract" in line for line in printed) == 1
