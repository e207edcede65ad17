"""One HTML page of a RUN folder: losses, heat maps, histograms, what will break first, the settings.

The page holds all that it needs: its style, its script and the data stand in the file, and a policy in its
head forbids requests. What a run has more of than a page can show is down-sampled by rules that the page
states (``rules``).
"""

from __future__ import annotations

import html
import json
import math
from collections import defaultdict
from importlib import resources
from typing import Any

import numpy as np

import fp8kit
from fp8kit.numerics import losses as loss_curves
from fp8kit.numerics import operands, ranking
from fp8kit.numerics.run_folder import TENSORS, HostArray, Key, RunFolder, Series, kind_of, layer_order
from fp8kit.recipe_info import gemm_facts
from fp8kit.recipes import NAMED

COLUMNS = 240  # of a heat map, at most
CELLS = 400_000  # of all heat maps
HISTOGRAMS, TIMES = 2500, 12  # in all, and of one tensor
POINTS, LOSSES = 400, 60_000  # of one loss curve, and of all
BROKEN = 14  # rows of the table
_LEAST = ("sqnr", "cosine", "scale_inv_min", "min")  # of these the least value of several is shown
DEFAULT_PANELS = ("underflows%", "overflows%", "sqnr", "scale_inv_max")
SCRIPTS = ("tools", "lines", "losses", "maps", "layer", "tables", "start")  # files of the script, in order
_ZEROS = 256  # place of the zeros in a histogram


def rules(shown: dict[str, Any]) -> list[str]:
    """Returns how what is shown follows from the log, a sentence or two a rule; ``shown``: what ``digest``
    made."""
    maps = (
        f"A heat map has at most {COLUMNS} columns, all maps together {CELLS:,} cells ({shown['cells']:,} "
        "here). Where more steps are logged a column stands for equally many of them and shows the worst: "
        f"the largest value, of {', '.join(_LEAST)} the least. Bright is worse, but for scales."
    )
    histograms = (
        f"Histograms: at most {TIMES} steps of a tensor, evenly, with the first and the last, {HISTOGRAMS:,} "
        "in all. The two lines are the smallest and the largest magnitude of the format at the logged "
        "scales; where no scale is logged, at the scale that current scaling would take."
    )
    curves = (
        f"A loss curve has at most {POINTS} points, the means of equally many steps each. The first 3 % of "
        "the steps do not decide how high a picture is."
    )
    return [loss_curves.RULE, curves, maps, histograms]


def digest(run: RunFolder, reference: str | None = None) -> dict[str, Any]:
    """Returns what the page shows of a run, as data for JSON. ``reference``: the group of losses that others
    are compared with, None: run.json's ``settings.reference``, else one in high precision. ArgumentError for
    a group that is not there."""
    recipe = run.about["recipe"]
    asked = reference if reference is not None else run.about["settings"].get("reference")
    maps, cells = _maps(run.statistics)
    made = {
        "about": run.about,
        "made_by": f"fp8kit {fp8kit.__version__}",
        "steps": _steps(run),
        "losses": _losses(run, asked if isinstance(asked, str) else None),
        "maps": maps,
        "panels": DEFAULT_PANELS,
        "cells": cells,
        "histograms": _histograms(run.statistics, recipe),
        "breaks": [_verdict(each) for each in ranking.rank(run.statistics, recipe)[:BROKEN]],
        "breaks_rule": ranking.RULE,
        "gemms": gemm_facts(NAMED[recipe].recipe) if recipe in NAMED else {},
        "source": NAMED[recipe].source if recipe in NAMED else "",
    }
    return {**made, "rules": rules(made)}


def page(shown: dict[str, Any]) -> str:
    """Returns the HTML of ``digest``'s data, one file that asks no network for anything."""
    folder = resources.files("fp8kit.numerics") / "page"
    text, style, *scripts = (
        (folder / name).read_text("utf-8")
        for name in ("page.html", "page.css", *(f"{part}.js" for part in SCRIPTS))
    )
    script = "\n".join(('"use strict";', *scripts))
    data = json.dumps(shown, separators=(",", ":"), allow_nan=False)
    # no tag can end within the data
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    parts = {"title": html.escape(_title(shown["about"])), "style": style, "script": script, "data": data}
    for name, part in parts.items():
        before, mark, after = text.partition(f"<!--{name}-->")
        assert mark, name
        text = before + part + after
    return text


def _steps(run: RunFolder) -> int:
    """Returns how many steps the run has: from the first that is numbered, 0 or 1 as a rule, to the last."""
    every = [curve.steps for curve in run.curves] + [series.steps for series in run.statistics.values()]
    numbers = [steps for steps in every if steps.size]
    return int(max(own[-1] for own in numbers) - min(own[0] for own in numbers)) + 1 if numbers else 0


def _title(about: dict[str, Any]) -> str:
    model = about["model"].get("name") or about["model"].get("kind") or "run"
    return f"{model}, {about['recipe'] or 'high precision'}"


def number(value: float) -> float | str | None:
    """Returns a number for JSON, to four digits; Inf and NaN as words."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    short = float(f"{value:.4g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def _numbers(values: HostArray) -> list[float | str | None]:
    return [number(float(value)) for value in values]


# --- losses -------------------------------------------------------------------------------------------------


def _losses(run: RunFolder, asked: str | None) -> dict[str, Any]:
    """Curves of each group, its gap and its row of the table."""
    groups = loss_curves.grouped(run.curves)
    name = loss_curves.reference_of(groups, asked)
    if name is None:
        return {"groups": [], "reference": None, "table": []}
    count = sum(len(group.final) + 6 for group in groups.values())
    points = max(2, min(POINTS, LOSSES // count))
    shown = []
    for group in groups.values():
        steps, smooth = _thinned(group.steps, group.smooth, points)
        own = [curve for curve in run.curves if curve.group == group.name and curve.steps.size]
        raw = [(curve, *_thinned(curve.steps, curve.losses[None], points)) for curve in own]
        found: dict[str, Any] = {
            "name": group.name,
            "steps": steps.tolist(),
            **_band(smooth),
            "seeds": [
                {"name": curve.name, "steps": at.tolist(), "values": _numbers(values[0])}
                for curve, at, values in raw
            ],
            "validation": [
                {"name": curve.name, "points": [[step, number(loss)] for step, loss in curve.validation]}
                for curve in own
                if curve.validation
            ],
        }
        gap_steps, gap = loss_curves.gap_of(group, groups[name])
        at, gap = _thinned(gap_steps, gap, points)
        found["gap"] = {"steps": at.tolist(), **_band(gap)}
        shown.append(found)
    table = [
        {key: number(value) if isinstance(value, float) else value for key, value in row._asdict().items()}
        for row in loss_curves.compared(groups, run.curves, name)
    ]
    return {"groups": shown, "reference": name, "table": table}


def _thinned(steps: HostArray, values: HostArray, most: int) -> tuple[HostArray, HostArray]:
    """Returns curves of at most ``most`` points: parts of equally many steps, each by its last step and the
    mean of its values. steps (n,), values (rows, n)."""
    if steps.size <= most:
        return steps, values
    parts = np.array_split(np.arange(steps.size), most)
    with np.errstate(invalid="ignore"):
        means = np.stack([values[:, part].mean(1) for part in parts], 1)
    return steps[[int(part[-1]) for part in parts]], means


def _band(values: HostArray) -> dict[str, Any]:
    """Returns the mean, the least and the largest over rows."""
    with np.errstate(invalid="ignore"):
        mean = _numbers(values.mean(0))
    if values.shape[0] == 1:
        return {"mean": mean}
    return {"mean": mean, "low": _numbers(values.min(0)), "high": _numbers(values.max(0))}


# --- heat maps ----------------------------------------------------------------------------------------------


def _maps(log: dict[Key, Series]) -> tuple[list[dict[str, Any]], int]:
    """Returns a map for each (tensor, statistic, GEMM), and the number of their cells."""
    places: dict[tuple[str, str, str], list[Key]] = defaultdict(list)
    for key in log:
        if kind_of(key.stat) is None:
            places[key.tensor, key.stat, key.gemm].append(key)
    lines = sum(map(len, places.values()))
    columns = max(2, min(COLUMNS, CELLS // max(1, lines)))
    order = sorted(places, key=lambda place: (TENSORS.index(place[0]), place[1:]))
    maps = [_map(place, places[place], log, columns) for place in order]
    return maps, sum(len(each["rows"]) * len(each["from"]) for each in maps)


def _map(place: tuple[str, str, str], keys: list[Key], log: dict[Key, Series], most: int) -> dict[str, Any]:
    tensor, stat, gemm = place
    keys = sorted(keys, key=lambda key: layer_order(key.layer))
    steps = np.unique(np.concatenate([log[key].steps for key in keys]))
    parts = np.array_split(steps, min(most, steps.size))
    starts, ends = ([int(part[end]) for part in parts] for end in (0, -1))
    rows = [columns_of(log[key], starts, least(stat)) for key in keys]
    return {
        "tensor": tensor,
        "stat": stat,
        "gemm": gemm,
        "layers": [key.layer for key in keys],
        "from": starts,
        "to": ends,
        "rows": [[None if value is None else number(value) for value in row] for row in rows],
    }


def least(stat: str) -> bool:
    """Whether the least of several values of a statistic is the worst one."""
    return operands.prefixes(stat)[1] in _LEAST


def columns_of(series: Series, starts: list[int], smallest: bool) -> list[float | None]:
    """Returns the worst value of each column, whose steps go from one of ``starts``, ascending, to the next;
    None where there is none, NaN where one is."""
    at = np.searchsorted(starts, series.steps, side="right") - 1
    found: list[float | None] = [None] * len(starts)
    pick = min if smallest else max
    for column, value in zip(at.tolist(), series.values.tolist(), strict=True):
        before = found[column]
        if before is None or math.isnan(value):
            found[column] = value
        elif not math.isnan(before):
            found[column] = pick(before, value)
    return found


# --- histograms ---------------------------------------------------------------------------------------------


def _histograms(log: dict[Key, Series], recipe: str | None) -> dict[str, Any]:
    """Returns the histograms, by layer and tensor, and which recipes' ranges they have."""
    keys = [key for key in log if kind_of(key.stat) is not None]
    keys.sort(key=lambda key: (layer_order(key.layer), TENSORS.index(key.tensor), key.stat))
    times = max(2, min(TIMES, HISTOGRAMS // max(1, len(keys))))
    what_ifs = {operands.prefixes(key.stat)[0] for key in log} - {None, recipe}
    ranges: list[tuple[str | None, bool]] = [(recipe, False)] if recipe in NAMED else []
    ranges += [(name, True) for name in sorted(filter(None, what_ifs))]
    return {
        "recipes": [name for name, _ in ranges],
        "entries": [_histogram(key, log, ranges, times) for key in keys],
    }


def _histogram(
    key: Key, log: dict[Key, Series], ranges: list[tuple[str | None, bool]], times: int
) -> dict[str, Any]:
    series, kind = log[key], kind_of(key.stat)
    count = series.steps.size
    chosen = np.unique(np.linspace(0, count - 1, min(times, count)).round().astype(np.int64))
    shown = []
    for at in chosen:
        counts, step = series.values[at], int(series.steps[at])
        total = int(counts.sum())
        filled = np.nonzero(counts[:_ZEROS])[0]
        first, last = (int(filled[0]), int(filled[-1])) if filled.size else (0, -1)
        entry: dict[str, Any] = {
            "step": step,
            "first": first,
            "shares": [float(f"{100 * int(n) / total:.3g}") for n in counts[first : last + 1]],
            "zeros": float(f"{100 * int(counts[_ZEROS]) / total:.3g}") if total else 0,
        }
        if kind == "exponents":
            found = {
                str(name): operands.range_of(name, what_if, key, step, counts, log)
                for name, what_if in ranges
            }
            entry["ranges"] = {
                name: [own.format, round(own.low, 3), round(own.high, 3), own.scale]
                for name, own in found.items()
                if own is not None
            }
        shown.append(entry)
    return {"layer": key.layer, "tensor": key.tensor, "stat": key.stat, "kind": kind, "times": shown}


def _verdict(each: ranking.Verdict) -> dict[str, Any]:
    values = each._asdict()
    for name in ("now", "limit", "left"):
        values[name] = number(values[name])
    return values
