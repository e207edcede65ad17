"""How far a training has come, or other work: a bar that rich draws in a terminal; of a training sparse lines
anywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, TextColumn, track
from rich.progress import Progress as Bar

LINES = 10  # of a whole run where there is no terminal


def duration(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


Made = TypeVar("Made")


def tracked(made: Iterable[Made], what: str, total: int) -> Iterator[Made]:
    """What ``made`` gives, ``total`` values of ``what``, one after another; on a terminal a bar on standard
    error shows how many there are yet."""
    console = Console(file=sys.stderr)
    yield from track(made, what, total, console=console, transient=True, disable=not console.is_terminal)


class Progress:
    """Shows how far ``total`` steps have come, with units per second and the time left. A context manager,
    which gives the terminal back at its end.

    ``label`` starts the line; a step is worth ``units``, named ``unit``. ``stream`` defaults to standard
    error; ``clock`` gives seconds. The rate is the mean since the first step ended, so that what the first
    step compiles does not distort the time left.
    """

    def __init__(
        self,
        label: str,
        total: int,
        units: int,
        unit: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._label, self._total, self._units, self._unit = label, total, units, unit
        self._stream = stream or sys.stderr
        columns = BarColumn(24), TextColumn("{task.description}", markup=False)
        console = Console(file=self._stream)
        self._bar = Bar(
            *columns,
            console=console,
            get_time=clock,
            speed_estimate_period=math.inf,
            disable=not console.is_terminal,
        )
        self._bar.add_task(label, total=total * units)
        self._task = self._bar.tasks[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, step: int, what: str) -> None:
        """Show that ``step`` steps are done, and ``what`` is now running as part of the next."""
        self._task.completed = step * self._units
        self._show(step, what)
        self._bar.start()

    def update(self, step: int, **values: float) -> None:
        """Show that ``step`` steps (of ``total``) are done, with ``values`` of 3 decimals."""
        self._bar.update(self._task.id, completed=step * self._units)
        due = step in (1, self._total) or step * LINES // self._total > (step - 1) * LINES // self._total
        if not due and self._bar.disable:
            return
        text = " ".join(f"{name} {value:.3f}" for name, value in values.items())
        if self._task.speed:
            left, spent = self._task.time_remaining or 0.0, self._task.elapsed or 0.0
            text += f"  {self._task.speed:,.0f} {self._unit}/s"
            text += f"  {duration(left)} left" if step < self._total else f"  {duration(spent)} in all"
        self._show(step, text)

    def _show(self, step: int, text: str) -> None:
        self._task.description = f"{self._label} {step}/{self._total} {text}"
        if self._bar.disable:
            print(self._task.description, file=self._stream, flush=True)
