"""Loss curves by kind of run: means and spreads over seeds, and the gap to a reference."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fp8kit.arguments import choice
from fp8kit.numerics.run_folder import Curve, HostArray

FINAL = 0.05  # of the steps: their mean is the final loss
SMOOTH = 30  # a running mean is over one in so many of the steps
_HIGH = re.compile(r"^(float32|fp32|f32|bfloat16|bf16|float16|fp16|high|baseline|reference)\b", re.IGNORECASE)

RULE = (
    f"Lines: running means of 1/{SMOOTH} of the steps, over the seeds of one kind; the band is from the "
    "least to the largest of the seeds. Gap: (loss - reference) / reference of these lines. Final loss: "
    f"the mean of the last {FINAL:.0%} of the steps. Spread: the standard deviation over the seeds, the "
    "larger of this kind's and the reference's."
)


class Group(NamedTuple):
    """The runs of one kind. ``steps``: int64 (n,), those that all its seeds have; ``smooth``: float64 (seeds,
    n), running means; ``final``: final losses, one a seed; ``validation``: the last validation losses."""

    name: str
    steps: HostArray
    smooth: HostArray
    final: tuple[float, ...]
    validation: tuple[float, ...]


class Comparison(NamedTuple):
    """A group beside the reference. ``gap``: in %, of final losses; ``spread``: of them, None with one seed;
    ``gap_in_spreads``: None likewise; ``validation``: mean, None where there is none; ``diverged``: the first
    step whose loss is not finite."""

    name: str
    seeds: int
    final: float
    spread: float | None
    gap: float | None
    gap_in_spreads: float | None
    validation: float | None
    diverged: int | None


def running_mean(values: HostArray, span: int) -> HostArray:
    """Returns the mean of each value and up to ``span - 1`` before it, float64 (n,); NaN from a value on that
    is not finite."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, values.size + 1)
    starts = np.maximum(ends - span, 0)
    with np.errstate(invalid="ignore"):
        return (sums[ends] - sums[starts]) / (ends - starts)  # type: ignore[no-any-return]


def grouped(curves: Iterable[Curve]) -> dict[str, Group]:
    """Returns the curves by kind, in their order; kinds without a training loss are left out."""
    by_name: dict[str, list[Curve]] = {}
    for curve in curves:
        if curve.steps.size:
            by_name.setdefault(curve.group, []).append(curve)
    return {name: _group(name, own) for name, own in by_name.items()}


def _group(name: str, curves: list[Curve]) -> Group:
    shared = curves[0].steps
    for curve in curves[1:]:
        shared = np.intersect1d(shared, curve.steps)
    smooth, final, validation = [], [], []
    for curve in curves:
        span = max(1, curve.steps.size // SMOOTH)
        mean = running_mean(curve.losses, span)
        smooth.append(mean[np.isin(curve.steps, shared)])
        final.append(float(np.mean(curve.losses[-max(1, round(FINAL * curve.losses.size)) :])))
        if curve.validation:
            validation.append(curve.validation[-1][1])
    return Group(name, shared, np.array(smooth).reshape(len(curves), -1), tuple(final), tuple(validation))


def reference_of(groups: dict[str, Group], asked: str | None) -> str | None:
    """Returns the name of the group that the others are compared with: the one that was asked for, else the
    first whose name is that of a high precision, else the first. ArgumentError for one that is not there."""
    if asked is not None:
        return choice("report", "--reference", asked, groups)
    return next((name for name in groups if _HIGH.match(name)), next(iter(groups), None))


def compared(groups: dict[str, Group], curves: Iterable[Curve], reference: str | None) -> list[Comparison]:
    """Returns a row for each group, in their order."""
    diverged: dict[str, int] = {}
    for curve in curves:
        bad = np.nonzero(~np.isfinite(curve.losses))[0]
        if bad.size:
            step = int(curve.steps[bad[0]])
            diverged[curve.group] = min(step, diverged.get(curve.group, step))
    rows = []
    base = groups[reference] if reference is not None else None
    for name, group in groups.items():
        final = float(np.mean(group.final))
        gap = in_spreads = spread = None
        if base is not None:
            spreads = [float(np.std(each.final, ddof=1)) for each in (group, base) if len(each.final) > 1]
            spread = max(spreads) if spreads else None
            if name != reference:
                apart = final - float(np.mean(base.final))
                gap = 100 * apart / float(np.mean(base.final))
                in_spreads = apart / spread if spread else None
        validation = float(np.mean(group.validation)) if group.validation else None
        first = diverged.get(name)
        rows.append(Comparison(name, len(group.final), final, spread, gap, in_spreads, validation, first))
    return rows


def gap_of(group: Group, base: Group) -> tuple[HostArray, HostArray]:
    """(steps int64 (n,), gaps float64 (seeds, n) in %) of the running means of each seed against the mean of
    the reference's."""
    shared = np.intersect1d(group.steps, base.steps)
    ours = group.smooth[:, np.isin(group.steps, shared)]
    mean = base.smooth[:, np.isin(base.steps, shared)].mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return shared, np.asarray(100 * (ours / mean - 1))
