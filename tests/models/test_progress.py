"""The progress bar, in a terminal and in a file."""

from __future__ import annotations

import io

from fp8kit.models.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def run(stream, steps, seconds=1.0, units=100.0):
    clock = Clock()
    bar = Progress("FP8", steps, "tokens", stream, clock)
    for step in range(1, steps + 1):
        clock.now += seconds
        bar.update(step, units, loss=5.0 - step / 100)
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
    assert len(lines) == 11
    assert lines[0] == "FP8 1/200 loss 4.990"
    assert lines[1] == "FP8 20/200 loss 4.800  100 tokens/s  3:00 left"
    assert lines[-1] == "FP8 200/200 loss 3.000  100 tokens/s  3:20 in all"


def test_a_terminal_gets_one_line():
    text = run(Terminal(), 50)
    assert text.count("\n") == 1
    assert text.endswith("\n")
    drawn = text.strip().split("\r")
    assert len(drawn) == 50
    assert drawn[-1].startswith("[########################] FP8 50/50")
    assert "[############............] FP8 25/50" in text


def test_a_terminal_is_not_redrawn_too_often():
    drawn = run(Terminal(), 1000, seconds=0.01).strip().split("\r")
    assert 90 <= len(drawn) <= 110


def test_what_the_first_step_is_at_is_said_and_gives_way():
    bar = "\r[####....................] "
    for stream, wanted in (
        (io.StringIO(), "FP8 9/50 compiles or loads\nFP8 10/50 loss 1.000\n"),
        (Terminal(), f"{bar}FP8 9/50 compiles or loads{bar}FP8 10/50 loss 1.000"),
    ):
        progress = Progress("FP8", 50, "tokens", stream, Clock())
        progress.begin(9, "compiles or loads")
        progress.update(10, loss=1.0)
        assert stream.getvalue().rstrip(" ") == wanted


def test_rate_leaves_the_first_step_out():
    clock, stream = Clock(), io.StringIO()
    bar = Progress("x", 3, "tokens", stream, clock)
    for step, now in ((1, 100.0), (2, 101.0), (3, 102.0)):
        clock.now = now
        bar.update(step, 10)
    assert stream.getvalue().splitlines()[-1] == "x 3/3   10 tokens/s  1:42 in all"
