"""Processes that tests run: one that stands still, or waits for one that failed, ends and says where it
stood."""

from __future__ import annotations

import os
import sys
import time

import pytest

from tests.support import processes

STANDS = "import time\ndef stands():\n  time.sleep(600)\nstands()"
FAILS = "raise KeyError('mine')"
STARTS = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {STANDS!r}])"


def begin(*programs):
    return [processes.begin([sys.executable, "-c", text], dict(os.environ)) for text in programs]


def test_what_ends_is_heard():
    workers = begin("print('one')", "import sys\nprint('two', file=sys.stderr)\nsys.exit(3)")
    assert processes.said(workers, 60) == [("one\n", ""), ("", "two\n")]
    assert [worker.returncode for worker in workers] == [0, 3]


def test_a_process_that_stands_still_says_where():
    workers = begin("print('one')", STANDS)
    with pytest.raises(AssertionError, match=r"(?s)not done after 2 s.*process 1, status None.*in stands"):
        processes.said(workers, 2)
    assert workers[1].returncode


def test_a_process_ends_that_waits_for_one_that_failed(monkeypatch):
    monkeypatch.setattr(processes, "_OTHERS", 1.0)
    begun = time.monotonic()
    wanted = r"(?s)process 1 failed.*process 0, status None.*in stands.*process 1, status 1.*KeyError: 'mine'"
    with pytest.raises(AssertionError, match=wanted):
        processes.said(begin(STANDS, FAILS), 200)
    assert time.monotonic() - begun < 60


def test_what_a_process_started_ends_with_it():
    (worker,) = begin(STARTS)
    with pytest.raises(AssertionError, match="in stands"):  # whose words come when both have closed the pipe
        processes.said([worker], 3)


@pytest.mark.programs
def test_a_case_that_fails_in_one_process_ends_all(tmp_path):
    begun = time.monotonic()
    with pytest.raises(AssertionError, match="AssertionError: mine"):
        processes.run("tests.support.failing_case", 2, tmp_path, "cpu", ["fails"])
    assert time.monotonic() - begun < processes.ALONE / 2
