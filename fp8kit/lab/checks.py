"""Whether what serves an operation is right: the contract's cases, a grid of shapes, dtypes and edge values,
against codec or float64."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fp8kit import arrays
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.errors import ArgumentError, Fp8kitError
from fp8kit.testing.contract import Case, cases


@dataclass
class Report:
    """What came out: ``implementation`` (its id), ``device``, the number of ``cases`` that ran, ``failures``
    as (case, what was wrong, with the first wrong coordinate), and ``seconds``."""

    operation: str
    implementation: str
    device: Device
    cases: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        verdict = "all right" if not self.failures else f"{len(self.failures)} WRONG"
        return (
            f"{self.operation}: {self.implementation} on {self.device}: {self.cases} cases, "
            f"{verdict} ({self.seconds:.1f} s)"
        )


def chosen(operation: str, only: str = "") -> list[Case]:
    """Returns the contract's cases of an operation with that word in their name."""
    return [case for case in cases() if case.kernel == operation and only in case.name]


def check(operation: str, device: Device | str, only: str = "") -> Report:
    """Run the contract's cases of ``operation`` on ``device`` with the implementation in force; ``only``
    those with that word in the name. ``device``: a Device or its name.

    ArgumentError for an operation without cases and for a word that no case has, BackendError where nothing
    serves the device.
    """
    wanted = chosen(operation, only)
    if not wanted:
        names = [case.name for case in chosen(operation)]
        if names:
            some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            said = f"a word in the name of a case of {operation}: {some}"
            raise ArgumentError("check", "only", repr(only), said)
        said = "an operation of the contract that writes arrays"
        raise ArgumentError("check", "operation", repr(operation), said)
    device = arrays.device(device)
    kernels = dispatch.kernels(device)
    usable, _ = dispatch.candidates(operation, device)
    report = Report(operation, usable[0].impl_id, device)
    start = time.perf_counter()
    for case in wanted:
        report.cases += 1
        try:
            case.run(kernels, device)
        except (AssertionError, Fp8kitError) as error:
            report.failures.append((case.name, str(error)))
    report.seconds = time.perf_counter() - start
    return report
