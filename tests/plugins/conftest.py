"""What the tests of plugins share: the process's choices as they were, and the example plugin as pip installs
it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8kit.backends import dispatch, policy
from tests.support.plugin import EXAMPLE, OFFLINE, Run
from tests.support.source import ROOT


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """The process's registry and policy after each test are those before it."""
    manager = dispatch.get_default_manager()
    manager.ensure_initialized()
    before = manager.registry.snapshot()
    yield
    manager.ensure_initialized()
    manager.registry.restore(before)
    policy.reset_global_policy()


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example plugin installed in it, and nothing else."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *OFFLINE, "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """``python(*arguments, paths=(), **variables)``: another interpreter with this checkout, further paths
    and variables."""

    def run(
        *arguments: str, paths: tuple[Path, ...] = (), check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([*map(str, paths), str(ROOT), str(ROOT / "adapters")])
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FP8KIT_", "TE_FL_", "TEFL_"))
        }
        kept = {name: os.environ[name] for name in ("FP8KIT_CACHE_DIR",) if name in os.environ}
        environment = {**clean, **kept, "PYTHONPATH": path, "PYTHONWARNINGS": "error", **variables}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run
