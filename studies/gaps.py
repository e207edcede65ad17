"""What the runs say: means, the spread over seeds, and gaps in its units."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from studies import files
from studies.cases import CASES

Runs = Mapping[tuple[str, int], Mapping[str, Any]]


class Result(NamedTuple):
    """Of one case: ``seeds`` that ended with a finite loss, and ``diverged``, those that did not. ``mean`` of
    the validation losses in nats a byte; ``deviation`` of them over the seeds, None of fewer than two.

    ``gap``: the mean over the seeds of what the loss is above that of the yardstick's run from the same seed,
    which has the same weights and batches, and ``percent`` of the latter's. ``units``: the gap over the
    yardstick's ``spread``, the standard deviation of its losses over the seeds; below 1 it counts as none.
    None where a run that it needs is missing."""

    seeds: tuple[int, ...]
    diverged: tuple[int, ...]
    mean: float | None = None
    deviation: float | None = None
    gap: float | None = None
    percent: float | None = None
    spread: float | None = None
    units: float | None = None

    @property
    def counts(self) -> bool:
        """Whether there is a gap: one above the spread, or a run that diverged."""
        return bool(self.diverged) or (self.units is not None and abs(self.units) > 1)


def losses(runs: Runs, case: str) -> dict[int, float]:
    """Seed -> validation loss, of a case's runs that have one."""
    return {
        seed: own["validation_loss"]
        for (name, seed), own in sorted(runs.items())
        if name == case and own["validation_loss"] is not None
    }


def result(runs: Runs, case: str) -> Result:
    """What there is of a case."""
    own = losses(runs, case)
    diverged = tuple(seed for name, seed in sorted(runs) if name == case and seed not in own)
    if not own:
        return Result((), diverged)
    mean = statistics.fmean(own.values())
    deviation = statistics.stdev(own.values()) if len(own) > 1 else None
    known = CASES.get(case)
    base = losses(runs, known.against) if known and known.against else {}
    both = sorted(set(own) & set(base))
    whole = Result(tuple(own), diverged, mean, deviation)
    if known is None or not both or case == known.against:
        return whole
    gap = statistics.fmean(own[seed] - base[seed] for seed in both)
    percent = 100 * gap / statistics.fmean(base[seed] for seed in both)
    # a yardstick of one seed borrows the relative spread of the main one
    spread = _spread(runs, known.against)
    return whole._replace(gap=gap, percent=percent, spread=spread, units=gap / spread if spread else None)


class Earlier(NamedTuple):
    """What is left of a call whose files of runs are gone, ``earlier.json`` of a folder: ``about`` in
    words, the ``results`` of cases, and the ``losses`` of each step by case and seed."""

    about: str
    results: Mapping[str, Result]
    losses: Mapping[tuple[str, int], list[float]]


def earlier(folder: Path, runs: Runs) -> Earlier:
    """Of the cases that the folder has no run of; of others its runs count alone."""
    path = folder / "earlier.json"
    if not path.exists():
        return Earlier("", {}, {})
    found, here = files.read(path), {name for name, _ in runs}
    gone = {name: own for name, own in found["cases"].items() if name not in here}
    results = {
        name: Result(
            tuple(range(len(own["losses"]))),
            (),
            own["mean"],
            own["deviation"],
            None,
            own["percent"],
            None,
            own["units"],
        )
        for name, own in gone.items()
    }
    curves = {(name, seed): losses for name, own in gone.items() for seed, losses in enumerate(own["losses"])}
    return Earlier(found["about"], results, curves)


def _spread(runs: Runs, case: str) -> float | None:
    own = losses(runs, case)
    if len(own) > 1:
        return statistics.stdev(own.values())
    main = next(iter(CASES))
    return None if case == main or not own else _relative(runs, main, own)


def _relative(runs: Runs, case: str, own: Mapping[int, float]) -> float | None:
    base = losses(runs, case)
    if len(base) < 2:
        return None
    return statistics.stdev(base.values()) / statistics.fmean(base.values()) * statistics.fmean(own.values())
