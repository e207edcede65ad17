"""The demo's pictures, drawn by matplotlib without a display. Nothing else in fp8kit needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp8kit.errors import BackendError, install
from fp8kit.models.resume import Statistic
from fp8kit.numerics.losses import running_mean

TENSORS = ("input", "weight", "grad_output")
STYLES = (("#3b6ea8", "-"), ("#d1662c", "--"))  # high precision, FP8


def figure(**options: Any) -> Any:
    """Returns a matplotlib Figure on the Agg canvas; BackendError that says what to install where matplotlib
    is missing."""
    try:
        made = importlib.import_module("matplotlib.figure").Figure(layout="constrained", **options)
        importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(made)
    except ImportError as error:
        raise BackendError(f"plots: matplotlib cannot be imported ({error}); {install('demo')}") from error
    return made


def plot_losses(path: Path, curves: Mapping[str, Sequence[float]], unigram: float) -> None:
    """Both training curves (faint) with their running means, and the unigram entropy as a yardstick, all in
    nats/byte, as PNG."""
    picture = figure(figsize=(8, 4.5))
    axes = picture.add_subplot()
    span = max(1, max(map(len, curves.values())) // 30)
    for (colour, style), (label, losses) in zip(STYLES, curves.items(), strict=True):
        steps = np.arange(1, len(losses) + 1)
        axes.plot(steps, losses, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(
            steps,
            running_mean(np.asarray(losses, np.float64), span),
            color=colour,
            linestyle=style,
            linewidth=1.6,
            label=f"{label}, mean of {span} steps",
        )
    axes.axhline(unigram, color="0.4", linestyle=":", label="unigram entropy")
    axes.set(
        xlabel="step", ylabel="training loss, nats/byte", title="A byte-level GPT: high precision and FP8"
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    picture.savefig(path, dpi=150)


def plot_statistics(path: Path, statistics: Sequence[Statistic]) -> None:
    """amax (upper row) and scale (lower row) over the steps: a column a kind of tensor, a line a GEMM,
    coloured by depth, as PNG."""
    layers = list(dict.fromkeys(row.layer for row in statistics))
    colours = importlib.import_module("matplotlib").colormaps["viridis"]
    picture = figure(figsize=(11, 6))
    grid = picture.subplots(2, len(TENSORS), sharex=True, squeeze=False)
    for column, kind in enumerate(TENSORS):
        for axes, name in zip(grid[:, column], ("amax", "scale"), strict=True):
            for i, layer in enumerate(layers):
                rows = [row for row in statistics if row.layer == layer and row.tensor == kind]
                values = [getattr(row, name) or np.nan for row in rows]
                colour = colours(i / max(1, len(layers) - 1))
                axes.plot([row.step for row in rows], values, color=colour, linewidth=0.9)
            axes.set(yscale="log", ylabel="" if column else name)
            axes.grid(alpha=0.25)
        grid[0, column].set(title=kind.replace("_", " "))
        grid[1, column].set(xlabel="step")
    picture.suptitle(f"Delayed scaling of {len(layers)} GEMMs, from the first (dark) to the last (light)")
    picture.savefig(path, dpi=150)
