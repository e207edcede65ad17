"""Which layers will break first: a rule on a log of statistics, stated by ``RULE``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError
from fp8kit.numerics.operands import prefixes, quantizer_of
from fp8kit.numerics.run_folder import HostArray, Key, Series, layer_order
from fp8kit.recipes import TE_RECIPES

RECENT = 0.2  # of a statistic's values: those that say where it is now
TREND = 0.5  # of them: those that say where it goes
LEAST = 8  # values, for a trend
MOST = 60  # values that a trend is taken of
CLEAR = 4.0  # a trend counts where it moves so many times the scatter around it

# of the elements, in %: one scale for a tensor or a row clips its largest, blocks clip a little everywhere;
# NVFP4's scales are rounded to the nearest E4M3, half of them down, and such a block clips its largest
CLIPPED, CLIPPED_BLOCKS = 0.1, 1.0
FLUSHED, FLUSHED_4_BITS = 5.0, 25.0
DECIBEL_A_BIT, DECIBEL = 6.02, 13.5  # SQNR of normal values in a format of m mantissa bits: 6.02 m + 13.5
LOST = 10.0  # dB below that, sqrt(10) times the noise
NOISE = 3**-0.5  # of a gradient, relative: FP4 All the Way, arXiv 2505.19115

RULE = (
    f"Each tensor of each layer has limits. NaN or Inf: none. Overflow: {CLIPPED:g} % of the elements, "
    f"{CLIPPED_BLOCKS:g} % with scales of blocks, with NVFP4's one element of each block. "
    f"Underflow: {FLUSHED:g} %, {FLUSHED_4_BITS:g} % in 4 bits. "
    f"SQNR: {LOST:g} dB below what the format gives normal values, {DECIBEL_A_BIT:g} m + {DECIBEL:g} dB with "
    "m mantissa bits. Relative error of a gradient: 1/sqrt(3). "
    f"Where a statistic is now is the median of the last {RECENT:.0%} of its values. Where it goes is the "
    f"median slope (Theil and Sen) of the last {TREND:.0%}, if that moves it by more than {CLEAR:g} times "
    "the scatter around it. First come NaN and Inf, then those beyond a limit, by how far, then those that "
    "move towards one, by the steps that are left, then the others, by the distance."
)


class Limit(NamedTuple):
    """``value``, and ``sign``: 1 where more is worse, -1 where less is; ``unit``: what a distance from it is
    divided by."""

    value: float
    sign: int
    unit: float


class Verdict(NamedTuple):
    """What is said of one tensor of one layer. ``state``: "broken", "beyond", "moving" or "holds"; ``now``,
    ``limit``: of the statistic ``stat``; ``left``: steps until the limit, Inf where it does not move there;
    ``why``: a sentence."""

    layer: str
    tensor: str
    stat: str
    state: str
    now: float
    limit: float
    left: float
    why: str


_STATES = ("broken", "beyond", "moving", "holds")


def rank(log: dict[Key, Series], recipe: str | None) -> list[Verdict]:
    """Returns a verdict for each tensor of each layer that has a limit, the first to break first. ``recipe``:
    of the run, a name of ``fp8kit.recipes.NAMED``. ArgumentError if ``log`` is not such a mapping."""
    given: Any = log
    if not isinstance(given, Mapping):
        wanted = "statistics by Key: the statistics of run_folder.read(RUN), or run_folder.series_of(rows)"
        raise ArgumentError("rank", "log", shown(given), wanted)
    best: dict[tuple[str, str], tuple[tuple[float, ...], Verdict]] = {}
    for logged, series in log.items():
        key = logged._replace(stat=own_name(logged.stat, recipe))
        limit = limit_of(key, recipe)
        if limit is None or not series.steps.size:
            continue
        order, verdict = _judge(key, series, limit, recipe)
        place = key.layer, key.tensor
        if place not in best or order < best[place][0]:
            best[place] = order, verdict
    ranked = sorted(best.values(), key=lambda pair: (pair[0], layer_order(pair[1].layer), pair[1].tensor))
    return [verdict for _, verdict in ranked]


def own_name(stat: str, recipe: str | None) -> str:
    """Returns a statistic's name without the run's own recipe before it, which it may have as a what-if
    has."""
    before, rest = prefixes(stat)
    own = before is not None and recipe is not None and TE_RECIPES.get(before, before) == recipe
    return rest if own and not stat.endswith("_columnwise") else stat


def limit_of(key: Key, recipe: str | None) -> Limit | None:
    """Returns the limit of a statistic; None where there is none."""
    if key.stat in ("nan_count", "inf_count"):
        return Limit(0.0, 1, 1.0)
    if key.stat == "relative_error" and key.tensor in ("dgrad", "wgrad", "gradient"):
        return Limit(NOISE, 1, NOISE)
    quantizer = quantizer_of(recipe, key.tensor)
    if quantizer is None:
        return None
    if key.stat == "overflows%":
        value = CLIPPED if quantizer.granularity in ("tensor", "row") else CLIPPED_BLOCKS
        if quantizer.granularity.startswith("nvfp4"):
            value = max(value, 100 / math.prod(quantizer.tile))
        return Limit(value, 1, value)
    if key.stat == "underflows%":
        value = FLUSHED_4_BITS if quantizer.format.bits <= 4 else FLUSHED
        return Limit(value, 1, value)
    if key.stat == "sqnr":
        return Limit(DECIBEL_A_BIT * quantizer.format.mantissa_bits + DECIBEL - LOST, -1, LOST)
    return None


def _judge(key: Key, series: Series, limit: Limit, recipe: str | None) -> tuple[tuple[float, ...], Verdict]:
    """(what it is sorted by, the verdict) of one statistic."""
    steps, values = series
    place = key.layer, key.tensor, key.stat
    if key.stat in ("nan_count", "inf_count"):
        what = "NaN" if key.stat == "nan_count" else "Inf"
        bad = np.nonzero(values > 0)[0]
        if not bad.size:
            return (_STATES.index("holds"), math.inf), Verdict(
                *place, "holds", 0.0, 0.0, math.inf, f"It has no {what}."
            )
        count, first = float(values[bad[0]]), int(steps[bad[0]])
        why = f"{count:g} of its elements are {what} at step {first}, the first time."
        return (_STATES.index("broken"), float(first)), Verdict(*place, "broken", count, 0.0, 0.0, why)
    finite = np.isfinite(values)
    if not finite.all():  # an exact cast has an infinite SQNR
        steps, values = steps[finite], values[finite]
    if not values.size:
        why = f"{_name(key.stat)} has no finite value."
        verdict = Verdict(*place, "holds", math.nan, limit.value, math.inf, why)
        return (_STATES.index("holds"), math.inf), verdict
    now = float(np.median(values[-max(1, round(RECENT * values.size)) :]))
    slope = slope_of(steps, values)
    past = limit.sign * (now - limit.value)
    towards = limit.sign * slope
    left = -past / towards if towards > 0 and past <= 0 else math.inf
    if left > int(steps[-1] - steps[0]):  # no forecast is longer than what it follows from
        left = math.inf
    state = "beyond" if past > 0 else "moving" if left < math.inf else "holds"
    why = _sentence(key, now, slope, limit, left, state, recipe, int(steps[-1]))
    verdict = Verdict(*place, state, now, limit.value, 0.0 if past > 0 else left, why)
    weight = {"beyond": -past / limit.unit, "moving": left, "holds": -past / limit.unit}[state]
    return (_STATES.index(state), weight), verdict


def slope_of(steps: HostArray, values: HostArray) -> float:
    """Change per step, the median over all pairs of the last values (Theil 1950, Sen 1968); 0 where there are
    too few, or where it is not clear. steps int64 (n,), values float64 (n,), finite."""
    count = round(TREND * values.size)
    if count < LEAST:
        return 0.0
    at = np.unique(np.linspace(values.size - count, values.size - 1, min(MOST, count)).astype(np.int64))
    x, y = steps[at].astype(np.float64), values[at]
    one, other = np.triu_indices(x.size, 1)
    slope = float(np.median((y[other] - y[one]) / (x[other] - x[one])))
    rest = y - slope * x
    scatter = float(np.median(np.abs(rest - np.median(rest))))
    return slope if abs(slope) * float(x[-1] - x[0]) > CLEAR * scatter else 0.0


def _name(stat: str) -> str:
    names = {"sqnr": "Its SQNR", "relative_error": "Its relative error"}
    return names.get(stat, stat)


def _sentence(
    key: Key, now: float, slope: float, limit: Limit, left: float, state: str, recipe: str | None, last: int
) -> str:
    """Why, in plain words."""
    said = {
        "underflows%": (f"{now:.3g} % of its elements become 0", " %"),
        "overflows%": (f"{now:.3g} % of its elements are clipped", " %"),
        "sqnr": (f"its SQNR is {now:.1f} dB", " dB"),
        "relative_error": (f"its relative error is {now:.3g}", ""),
    }
    what, unit = said[key.stat]
    quantizer = quantizer_of(recipe, key.tensor)
    whose = f"the limit of {limit.value:.3g}{unit}"
    if quantizer is not None and key.stat != "relative_error":
        whose += f" for {quantizer.format.name}"
    what = what[0].upper() + what[1:]
    if state == "beyond":
        side = "above" if limit.sign > 0 else "below"
        return f"{what}, {side} {whose}."
    if state == "moving":
        moves = "grows" if slope > 0 else "falls"
        by = f"{moves} by {100 * abs(slope):.2g}{unit} in 100 steps"
        return f"{what} and {by}: it passes {whose} near step {_round(last + left):,}."
    side = "below" if limit.sign > 0 else "above"
    return f"{what}, {side} {whose}, and will not reach it soon."


def _round(step: float) -> int:
    """Returns a step that is a forecast, to two digits."""
    return int(float(f"{min(step, 1e15):.2g}"))
