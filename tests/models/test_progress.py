"""The progress of a training, in a terminal and in a file."""

from __future__ import annotations

import io
import re

import pytest

from fp8kit.models.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def terminal(monkeypatch):
    """A stream that rich takes for a terminal of 100 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def shown(stream):
    """The text of a terminal without its control sequences, line by line as it was drawn."""
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n").splitlines()


def run(stream, steps, seconds=1.0, units=100):
    clock = Clock()
    with Progress("FP8", steps, units, "tokens", stream, clock) as progress:
        progress.begin(0, "compiles or loads")
        for step in range(1, steps + 1):
            clock.now += seconds
            progress.update(step, loss=5.0 - step / 100)
    return stream.getvalue()


def test_duration():
    assert [duration(s) for s in (0.4, 59.6, 61, 3600, 3725)] == [
        "0:00",
        "1:00",
        "1:01",
        "1:00:00",
        "1:02:05",
    ]


def test_a_file_gets_sparse_lines():
    lines = run(io.StringIO(), 200).splitlines()
    assert len(lines) == 12
    assert lines[0] == "FP8 0/200 compiles or loads"
    assert lines[1] == "FP8 1/200 loss 4.990"
    assert lines[2] == "FP8 20/200 loss 4.800  100 tokens/s  3:00 left"
    assert lines[-1] == "FP8 200/200 loss 3.000  100 tokens/s  3:20 in all"


def test_a_terminal_gets_one_line(terminal):
    text = run(terminal, 50)
    assert text.count("\n") == 1
    lines = [line for line in shown(terminal) if line]
    assert re.fullmatch(r"[━╸╺ ]{24} FP8 0/50 compiles or loads", lines[0].rstrip())
    assert lines[-1].rstrip() == f"{'━' * 24} FP8 50/50 loss 4.500  100 tokens/s  0:50 in all"
    assert all(len(line) <= 100 for line in lines)


def test_a_narrow_terminal_gets_one_line(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert run(terminal, 50).count("\n") == 1
    assert all(len(line) <= 40 for line in shown(terminal))


def test_the_terminal_is_given_back_after_an_error(terminal):
    def stopped():
        with Progress("FP8", 50, 1, "steps", terminal, Clock()) as progress:
            progress.begin(9, "compiles or loads")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    text = terminal.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
    assert "\n" in text[text.rindex("compiles") :]


def test_nothing_is_shown_of_a_run_that_is_complete(terminal):
    for stream in (terminal, io.StringIO()):
        with Progress("FP8", 50, 1, "steps", stream, Clock()):
            pass
        assert stream.getvalue() == ""


def test_what_the_first_step_is_at_is_said():
    stream = io.StringIO()
    with Progress("FP8", 50, 1, "tokens", stream, Clock()) as progress:
        progress.begin(9, "compiles or loads")
        progress.update(10, loss=1.0)
    assert stream.getvalue() == "FP8 9/50 compiles or loads\nFP8 10/50 loss 1.000\n"


def test_rate_leaves_the_first_step_out():
    clock, stream = Clock(), io.StringIO()
    with Progress("x", 3, 10, "tokens", stream, clock) as progress:
        for step, now in ((1, 100.0), (2, 101.0), (3, 102.0)):
            clock.now = now
            progress.update(step)
    assert stream.getvalue().splitlines()[-1] == "x 3/3   10 tokens/s  1:42 in all"


def test_a_rate_after_a_resume_is_of_the_steps_since(terminal):
    clock, stream = Clock(), io.StringIO()
    with Progress("x", 400, 10, "tokens", stream, clock) as progress:
        progress.begin(100, "compiles")
        for step, now in ((110, 50.0), (120, 52.0), (400, 108.0)):  # read every ten steps
            clock.now = now
            progress.update(step)
    assert stream.getvalue().splitlines()[-2:] == [
        "x 120/400   50 tokens/s  0:56 left",
        "x 400/400   50 tokens/s  1:48 in all",
    ]
