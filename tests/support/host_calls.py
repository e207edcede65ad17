"""Calls of functions that a step takes on the host, with kernels that do nothing."""

from __future__ import annotations

import gc
import sys

from fp8kit import arrays
from fp8kit.autocast import finite_checks
from fp8kit.backends import dispatch
from fp8kit.backends.protocol import Kernels


def _idle(step, monkeypatch):
    """Run a step, and let kernels do nothing from then on but put their names into the list that is
    returned."""
    monkeypatch.setattr(finite_checks, "ever", False)  # as in a process without tests of check_finite
    for _ in range(3):
        step()
    kernels, launched = dispatch.kernels(arrays.CPU), []
    for name in dir(Kernels):
        if not name.startswith("_") and not name.endswith("workspace"):
            monkeypatch.setattr(
                kernels, name, lambda *arguments, name=name: launched.append(name), raising=False
            )
    return launched


def opcodes(step, monkeypatch):
    """Instructions of Python that a step takes within fp8kit's files: a loop within a function counts, and
    not what C does for it."""
    _idle(step, monkeypatch)
    count = 0

    def within(frame, event, argument):
        nonlocal count
        count += event == "opcode"
        return within

    def trace(frame, event, argument):
        if "fp8kit" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return within

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)
    assert count > 0, "nothing was traced"
    return count


def counted(step, monkeypatch):
    """(files of the Python functions that a step calls, number of all calls, kernels launched)."""
    files, calls, launched = [], [], _idle(step, monkeypatch)
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
