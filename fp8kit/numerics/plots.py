"""The report's pictures as functions on a log, drawn by matplotlib without a display (extra ``demo``).

``rows`` is a log: dicts with step, layer, tensor, stat and value, as the inspector's ``log.rows()`` gives
them, or the lines of a RUN folder's statistics.jsonl. ``losses`` likewise: dicts with step, loss and series.
Every function returns a matplotlib Figure: ``figure.savefig(path)`` writes it, and a notebook shows it after
``%matplotlib inline``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fp8kit.arguments import choice
from fp8kit.errors import ArgumentError
from fp8kit.models.plots import figure
from fp8kit.numerics import losses as loss_curves
from fp8kit.numerics import operands
from fp8kit.numerics.report import columns_of, least
from fp8kit.numerics.run_folder import (
    TENSORS,
    HostArray,
    Key,
    Series,
    check_loss,
    check_row,
    curves_of,
    kind_of,
    layer_order,
    plain,
    series_of,
)
from fp8kit.recipes import NAMED

Rows = Iterable[Mapping[str, Any]]
_ZEROS = 256  # place of the zeros in a histogram
_COLOURS = ("#d1602a", "#2f6fb7", "#2c8a57", "#8e4bb0", "#b23a5e", "#8f7400", "#007f8c")
_REFERENCE = "#5b6472"


def heat_map(rows: Rows, stat: str, tensor: str = "activation", gemm: str | None = None) -> Any:
    """Returns a statistic of every layer over the steps: a row is a layer, from the first at the top, a
    column a logged step. Scales and amaxes are coloured by their logarithm. ArgumentError for invalid rows,
    and for a tensor, statistic or GEMM that the log does not have."""
    log = _log(rows)
    choice("heat_map", "tensor", tensor, TENSORS)
    there = {key.stat for key in log if key.tensor == tensor and kind_of(key.stat) is None}
    _want("heat_map", "stat", stat, there, f"statistics of {tensor}")
    gemms = sorted({key.gemm for key in log if (key.tensor, key.stat) == (tensor, stat)})
    if gemm is None and len(gemms) > 1:
        raise ArgumentError("heat_map", "gemm", None, f"one of {', '.join(filter(None, gemms))}")
    if gemm is not None:
        _want("heat_map", "gemm", gemm, set(gemms), f"GEMMs of {stat}")
    own = gemms[0] if gemm is None else gemm
    keys = [key for key in log if (key.tensor, key.gemm, key.stat) == (tensor, own, stat)]
    keys.sort(key=lambda key: layer_order(key.layer))
    steps = np.unique(np.concatenate([log[key].steps for key in keys])).tolist()
    lines = [columns_of(log[key], steps, least(stat)) for key in keys]
    values = np.array([[np.nan if value is None else value for value in line] for line in lines])
    by_log = "scale_inv" in stat or stat.endswith("amax")
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log2(values) if by_log else values
    values[~np.isfinite(values)] = np.nan
    made = figure(figsize=(8, 1.2 + 0.22 * min(len(keys), 60)))
    axes = made.add_subplot()
    map_ = "viridis_r" if least(stat) and not by_log else "viridis"
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=map_)
    if len(keys) <= 60:
        axes.set_yticks(range(len(keys)), [key.layer for key in keys], fontsize=8)
    places = np.unique(np.linspace(0, len(steps) - 1, min(6, len(steps))).round().astype(int))
    axes.set_xticks(places, [str(steps[place]) for place in places])
    axes.set(xlabel="step", title=f"{tensor}{f', {own}' if own else ''}")
    made.colorbar(image, label=f"log2 {stat}" if by_log else stat)
    return made


def over_time(rows: Rows, stat: str, layer: str) -> Any:
    """Returns a statistic of one layer over the steps, a line a tensor. ArgumentError for invalid rows, and
    for a layer or statistic that the log does not have."""
    log = _log(rows)
    _want("over_time", "layer", layer, {key.layer for key in log}, "layers")
    keys = [key for key in log if key.layer == layer and key.stat == stat]
    there = {key.stat for key in log if key.layer == layer and kind_of(key.stat) is None}
    _want("over_time", "stat", stat, there, f"statistics of {layer}")
    made = figure(figsize=(8, 3.2))
    axes = made.add_subplot()
    for key, colour in zip(keys, _cycle(len(keys)), strict=True):
        axes.plot(*log[key], color=colour, linewidth=1.4, label=", ".join(filter(None, key[1:3])))
    if "scale_inv" in stat or stat.endswith("amax"):
        axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel=stat, title=layer)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return made


def exponents(
    rows: Rows, layer: str, tensor: str = "activation", step: int | None = None, recipe: str | None = None
) -> Any:
    """Returns the histogram of a tensor's exponents at the last logged step up to ``step``, None the last of
    all, in % of the elements. ``recipe``, a name of ``fp8kit.recipes.NAMED``: its format's smallest and
    largest magnitude as two lines (``fp8kit.numerics.operands.range_of`` says at which scale). ArgumentError
    for invalid rows, and for what the log does not have."""
    log = _log(rows)
    choice("exponents", "tensor", tensor, TENSORS)
    there = {key.layer for key in log if (key.tensor, key.stat) == (tensor, "exponents")}
    _want("exponents", "layer", layer, there, f"layers with a histogram of {tensor}")
    key = Key(layer, tensor, "", "exponents")
    series = next(own for own_key, own in log.items() if own_key._replace(gemm="") == key)
    at = series.steps.size if step is None else int(np.searchsorted(series.steps, step, side="right"))
    if at == 0:
        raise ArgumentError("exponents", "step", step, f"at least {series.steps[0]}, the first logged one")
    counts, when = series.values[at - 1], int(series.steps[at - 1])
    if recipe is not None:
        choice("exponents", "recipe", recipe, NAMED)
    shares = 100 * counts / max(1, int(counts.sum()))
    filled = np.nonzero(counts[:_ZEROS])[0]
    made = figure(figsize=(8, 3.6))
    axes = made.add_subplot()
    places = np.arange(filled[0], filled[-1] + 1) if filled.size else np.arange(0)
    axes.bar(places - 127, shares[places], width=0.92, align="edge", color=_COLOURS[1])
    title = f"{layer}, {tensor}, step {when}; {shares[_ZEROS]:.3g} % are 0"
    range_ = operands.range_of(recipe, False, key, when, counts, log) if recipe else None
    if range_ is not None:
        for place in (range_.low, range_.high):
            axes.axvline(place, color="#b3261e", linewidth=1.6)
        title += f"\nlines: smallest and largest magnitude of {range_.format} in {recipe}"
    axes.set(yscale="log", xlabel="exponent: log2 of the magnitude", ylabel="% of the elements", title=title)
    axes.grid(alpha=0.25, axis="y")
    return made


def losses(rows: Rows, reference: str | None = None) -> Any:
    """Training losses by kind of run, and below the gap to the ``reference``, both as running means with the
    band over seeds (``fp8kit.numerics.losses.RULE``). None: the first kind in a high precision, else the
    first. ArgumentError for a reference that is not there, and for no losses."""
    checked = list(rows)
    for row in checked:
        wanted = "a mapping"
        if isinstance(row, Mapping):
            wanted = check_loss({name: plain(value) for name, value in row.items()}) or ""
        if wanted:
            wanted = f"rows with step, loss and series: {wanted}"
            raise ArgumentError("losses", "rows", repr(row)[:120], wanted)
    curves = curves_of(checked)
    groups = loss_curves.grouped(curves)
    name = loss_curves.reference_of(groups, reference)
    if name is None:
        raise ArgumentError("losses", "rows", "no training loss", "rows with step, loss and series")
    made = figure(figsize=(8, 5.2))
    upper, lower = made.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    colours = iter(_cycle(len(groups)))
    for group in groups.values():
        colour = _REFERENCE if group.name == name else next(colours)
        _band(upper, group.steps, group.smooth, colour, group.name)
        _band(lower, *loss_curves.gap_of(group, groups[name]), colour, None)
    upper.set(ylabel="training loss")
    lower.set(xlabel="step", ylabel=f"gap to {name}, %")
    upper.legend(frameon=False)
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
    return made


def _band(axes: Any, steps: HostArray, values: HostArray, colour: str, label: str | None) -> None:
    axes.plot(steps, values.mean(0), color=colour, linewidth=1.5, label=label)
    if len(values) > 1:
        axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)


def _cycle(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _log(rows: Rows) -> dict[Key, Series]:
    checked = list(rows)
    for row in checked:
        wanted = check_row(row if isinstance(row, dict) else dict(row))
        if wanted is not None:
            raise ArgumentError("plots", "rows", repr(row)[:120], f"rows of a log: {wanted}")
    return series_of(checked)


def _want(operation: str, argument: str, got: str, there: set[str], what: str) -> None:
    if not there:
        raise ArgumentError(operation, argument, repr(got), f"{what}, of which the log has none")
    choice(operation, argument, got, sorted(there))
