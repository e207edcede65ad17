"""Contenders of one workload beside each other: rows of those that fail or have no time left, steps of the
others timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from fp8kit.bench.report import NO_TIME, Row, Setting, attempt
from fp8kit.bench.timing import Step, host_seconds

T = TypeVar("T")


def row_of(workload: str, case: str, status: str = "ok", **figures: Any) -> Row:
    """Returns a row of a report."""
    return {"workload": workload, "case": case, "status": status, **figures}


def within_time(
    setting: Setting, cases: Iterable[T], measure: Callable[[T], Sequence[Row]], left_out: Callable[[T], Row]
) -> list[Row]:
    """Returns the rows of all cases; ``left_out(case)``, with its status, stands for one that would begin
    after the deadline."""
    rows: list[Row] = []
    for case in cases:
        rows += measure(case) if setting.left() > 0 else [left_out(case) | {"status": NO_TIME}]
    return rows


class Contest:
    """The contenders of a workload, by name: their ``rows``, all with ``figures``, and the ``steps`` of those
    that run, which are timed in turn."""

    def __init__(self, setting: Setting, workload: str, **figures: Any) -> None:
        self.setting, self.workload, self.figures = setting, workload, figures
        self.rows: dict[str, Row] = {}
        self.steps: dict[str, Step] = {}
        self.kept: list[object] = []  # what lives as long as the steps

    def enter(self, case: str, make: Callable[[Row], Step], **figures: Any) -> Row:
        """Let a contender take part. ``make`` gives its step, checked, and fills in its row; where it fails
        there is no step."""
        self.rows[case] = own = row_of(self.workload, case, **self.figures, **figures)
        with attempt(own):
            self.steps[case] = make(own)
        return own

    def leave_out(self, case: str) -> None:
        """Note that there is no time for a contender."""
        self.rows[case] = row_of(self.workload, case, NO_TIME, **self.figures)

    def time(self, host: bool = True) -> list[Row]:
        """Fill in ``gpu_ms``, and with ``host`` ``host_us`` where there is another device than the host; the
        rows."""
        for case, seconds in self.setting.medians(self.steps).items():
            self.rows[case]["gpu_ms"] = seconds * 1e3
        if host and self.setting.device.kind != "cpu":
            # the quickest turn counts: many short ones find it sooner than few long ones
            self.time_host(self.setting.rounds, min(self.setting.calls, 10))
        return list(self.rows.values())

    def time_host(self, rounds: int, calls: int) -> list[Row]:
        """Fill in ``host_us``; the rows."""
        found = host_seconds(self.steps, self.setting.device, rounds, calls, self.setting.warmups)
        for case, (quickest, median) in found.items():
            self.rows[case] |= {"host_us": quickest * 1e6, "host_us_median": median * 1e6}
        return list(self.rows.values())
