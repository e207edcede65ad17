"""A progress bar: one line that redraws itself in a terminal, sparse lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

WIDTH = 24  # characters of the bar itself
REDRAW = 0.1  # seconds between two drawings in a terminal
LINES = 10  # lines of a whole run where there is no terminal


def duration(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """Shows how far ``total`` steps have come, with units per second and the time left.

    ``label`` starts the line; ``unit`` names what is counted per second. ``stream`` defaults to standard
    error; ``clock`` gives seconds. The rate is the mean since the first step ended, so that what the first
    step compiles does not distort the time left.
    """

    def __init__(
        self,
        label: str,
        total: int,
        unit: str = "steps",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._label, self._total, self._unit, self._clock = label, total, unit, clock
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._start = clock()
        self._first: tuple[float, int, float] | None = None
        self._drawn = float("-inf")
        self._units = 0.0
        self._wide = 0

    def begin(self, step: int, what: str) -> None:
        """Say, with ``step`` steps done and before the next has ended, ``what`` goes on."""
        self._draw(f"{self._bar(step)}{self._label} {step}/{self._total} {what}", False)

    def update(self, step: int, units: float = 1, **values: float) -> None:
        """Say that ``step`` steps (of ``total``) are done, the last one worth ``units``; ``values`` are shown
        with 3 decimals."""
        now = self._clock()
        self._units += units
        if self._first is None:
            self._first = (now, step, self._units)
        last = step >= self._total
        if self._terminal:
            due = last or now - self._drawn >= REDRAW
        else:
            due = last or step == 1 or step * LINES // self._total > (step - 1) * LINES // self._total
        if due:
            self._drawn = now
            self._draw(self._line(step, now, values), last)

    def _line(self, step: int, now: float, values: dict[str, float]) -> str:
        assert self._first is not None
        then, first_step, first_units = self._first
        shown = " ".join(f"{name} {value:.3f}" for name, value in values.items())
        line = f"{self._label} {step}/{self._total} {shown}"
        if step > first_step and now > then:
            line += f"  {(self._units - first_units) / (now - then):,.0f} {self._unit}/s"
            left = (now - then) / (step - first_step) * (self._total - step)
            line += (
                f"  {duration(left)} left"
                if step < self._total
                else f"  {duration(now - self._start)} in all"
            )
        return f"{self._bar(step)}{line}"

    def _bar(self, step: int) -> str:
        """What a terminal's line begins with."""
        filled = WIDTH * step // self._total
        return f"[{'#' * filled}{'.' * (WIDTH - filled)}] " if self._terminal else ""

    def _draw(self, line: str, last: bool) -> None:
        if self._terminal:
            padding = " " * max(0, self._wide - len(line))
            self._wide = len(line)
            self._stream.write(f"\r{line}{padding}" + ("\n" if last else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
