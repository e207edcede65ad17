"""Calls of functions that a step takes on the host, with kernels that do nothing."""

from __future__ import annotations

import gc
import sys

from fp8kit import arrays
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import Kernels


def counted(step, monkeypatch):
    """(files of the Python functions that a step calls, number of all calls, kernels launched)."""
    for _ in range(3):
        step()
    kernels, files, calls, launched = dispatch.kernels(arrays.CPU), [], [], []
    for name in dir(Kernels):
        if not name.startswith("_") and not name.endswith("workspace"):
            monkeypatch.setattr(
                kernels, name, lambda *arguments, name=name: launched.append(name), raising=False
            )
    gc.collect()
    gc.disable()  # what other tests left behind is not this step's
    before = sys.getprofile()

    def count(frame, event, argument):
        if event == "call":
            files.append(frame.f_code.co_filename)
        if event in ("call", "c_call"):
            calls.append(event)

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
        gc.enable()
    return files, len(calls), launched
