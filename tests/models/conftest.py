"""An example as a script."""

from __future__ import annotations

import runpy
import sys
import tracemalloc

import pytest

from tests.support.examples import EXAMPLES


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def printed(request, monkeypatch, capsys):
    """A function that runs an example as a script on the device and gives what it printed."""

    def run(stem, *arguments):
        (path,) = (path for path in EXAMPLES if path.stem[3:] == stem)
        monkeypatch.setenv("FP8KIT_DEVICE", request.param)
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    yield run
    # an example leaves it on, as a script may; it would make Python several times slower for all later tests
    tracemalloc.stop()
