"""The pictures: a roofline of kernels and products, and where FP8 begins to pay. Drawn by matplotlib without
a display."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import NamedTuple

from fp8kit.bench.breakeven import cells, curve
from fp8kit.bench.gemms import BEST, OURS
from fp8kit.bench.report import Report, Row
from fp8kit.models.plots import figure

# case's beginning -> colour, marker
_COLOURS = ("#3b6ea8", "#d1662c", "#3c8d5a", "#8a5fa8", "#a8873b", "#555555")


def draw(report: Report, folder: Path) -> list[Path]:
    """Returns the pictures that the report has figures for, as PNG files in ``folder``. BackendError where
    matplotlib is missing."""
    made = []
    if bars := _bars(report):
        made.append(folder / "roofline.png")
        roofline(made[-1], bars, report.about.get("machine", ""))
    if any("ratio" in row for row in report.rows("breakeven")):
        made.append(folder / "breakeven.png")
        breakeven(made[-1], report.rows("breakeven"))
    return made


class Bars(NamedTuple):
    """A panel: the figures that cases ``got``, beside the ``ceiling`` of each."""

    unit: str
    title: str
    names: list[str]
    got: list[float]
    ceiling: list[float]


def _bars(report: Report) -> list[Bars]:
    """Bytes a second of each memory-bound kernel and of a copy of the same bytes, and each product's rate and
    the best one's; of these the measured."""
    kernels = [
        (row["case"], row["tbps"], row["ceiling_tbps"]) for row in report.rows("kernels") if "tbps" in row
    ]
    rates = {(row["case"], row["product"]): row["tflops"] for row in report.rows("gemm") if "tflops" in row}
    gemms = [
        (name, rate, rates.get((BEST, name), math.nan))
        for (case, name), rate in rates.items()
        if case == OURS
    ]
    about = {
        "10$^{12}$ bytes/s, read and written": ("memory-bound kernels and a copy of the same bytes", kernels),
        "TFLOP/s": ("FP8 products and cuBLASLt's best algorithm", gemms),
    }
    return [
        Bars(unit, title, *map(list, zip(*rows, strict=True)))
        for unit, (title, rows) in about.items()
        if rows
    ]


def roofline(path: Path, bars: list[Bars], machine: str) -> None:
    """A panel each."""
    picture = figure(figsize=(6.5 * len(bars), 6))
    for axes, (unit, title, names, got, ceiling) in zip(
        picture.subplots(1, len(bars), squeeze=False)[0], bars, strict=True
    ):
        places = range(len(names))
        axes.barh(places, got, color=_COLOURS[0], label="achieved")
        mark = {"linestyle": "", "marker": "|", "markersize": 12, "markeredgewidth": 2, "color": _COLOURS[1]}
        axes.plot(ceiling, places, label="ceiling", **mark)
        axes.set_yticks(places, names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(unit, loc="left")  # the legend is at the right
        axes.set_title(title, fontsize=10)
        axes.grid(axis="x", alpha=0.25)
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right", bbox_to_anchor=(1.0, -0.06))
    picture.suptitle(f"Achieved and ceiling, {machine}")
    picture.savefig(path, dpi=130)


def pays(rows: list[Row], case: str) -> str:
    """Returns in words, for each hidden size, the number of tokens from which FP8 is faster in a case."""
    return (
        ", ".join(f"{tokens} at {hidden}" for hidden, tokens in curve(rows, case).items() if tokens)
        or "nowhere"
    )


def breakeven(path: Path, rows: list[Row]) -> None:
    """A curve a hidden size: the ratio of FP8's time to plain bfloat16's over the tokens; a panel a
    contender. Below 1 FP8 pays."""
    cases = [case for case in dict.fromkeys(row["case"] for row in rows) if "FP8" in case]
    hidden = list(dict.fromkeys(row["hidden"] for row in rows))
    picture = figure(figsize=(4.2 * max(1, len(cases)), 4.5))
    panels = picture.subplots(1, max(1, len(cases)), sharey=True, squeeze=False)[0]
    for axes, case in zip(panels, cases, strict=False):
        for size, colour in zip(hidden, _COLOURS, strict=False):
            if found := cells(rows, case, size):
                style = {"marker": "o", "markersize": 3, "color": colour}
                axes.plot(*zip(*found, strict=True), label=f"hidden {size}", **style)
        axes.axhline(1.0, color="0.3", linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="tokens")
        where = textwrap.fill(f"pays from (tokens at hidden size): {pays(rows, case)}", 62)
        axes.set_title(f"{case}\n{where}", fontsize=7)
        axes.grid(alpha=0.25, which="both")
    panels[0].set_ylabel("time / plain bfloat16")
    panels[0].legend(frameon=False, fontsize=8)
    picture.savefig(path, dpi=130)
