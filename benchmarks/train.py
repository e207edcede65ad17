"""Trains a preset in high precision and in FP8 from several seeds, and writes the curves and figures.

    python -m benchmarks train --out DIR

Every run is deterministic (``fk.deterministic``): the same machine and versions give the same losses again.
One seed says little, since two high-precision runs that differ in the seed alone end up to 1 % apart; so the
gap is that of the means over all seeds, with its standard error. gpt2-small from four seeds on a GPU, a
preset of seconds on the CPU.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import fp8kit as fk
from fp8kit.bench.report import Row, Setting, machine, versions
from fp8kit.models import plots, text
from fp8kit.models.gpt import parameter_count
from fp8kit.models.presets import Preset, preset
from fp8kit.models.resume import Run
from fp8kit.models.train import fp8_recipe, high_precision, train, write_losses

GAP = 2.0  # percent by which FP8's validation loss may be above high precision's, as the demo wants it


def summary(runs: Sequence[tuple[Run, Run]], size: Preset) -> dict[str, Any]:
    """Validation losses by seed, their means, the gap of the means in percent with its standard error, and
    tokens/s (median run)."""
    tokens = size.tokens * size.steps
    columns: dict[str, Any] = {}
    for i, name in enumerate(("high_precision", "fp8")):
        losses = [pair[i].validation_loss for pair in runs]
        columns[name] = {
            "validation_loss": losses,
            "mean": statistics.fmean(losses),
            "tokens_per_second": round(tokens / statistics.median(pair[i].seconds for pair in runs)),
        }
    gaps = [100 * (low.validation_loss / high.validation_loss - 1) for high, low in runs]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
    gap = 100 * (columns["fp8"]["mean"] / columns["high_precision"]["mean"] - 1)
    return columns | {
        "gap_percent_by_seed": gaps,
        "gap_percent_of_means": gap,
        "gap_percent_standard_error": error,
    }


def train_part(
    setting: Setting, preset_name: str = "gpt2-small", seeds: int = 4, steps: int | None = None
) -> list[Row]:
    """Train, and write ``result.json``, ``loss.csv`` and ``loss.png`` (seed 0) to the run's folder; rows of
    the figures."""
    size = preset(setting.sizes.preset if setting.device.kind == "cpu" else preset_name)
    size = size if steps is None else size.with_steps(steps)
    device, corpus = setting.device, text.standard_library()
    label = high_precision(device).name
    with fk.deterministic():
        # what is compiled at the first use is not part of a training's time
        for recipe in (None, fp8_recipe(size)):
            train(size.with_steps(min(3, size.steps)), corpus, recipe, "warm-up", device)
        runs = [
            (
                train(size, corpus, None, label, device, seed),
                train(size, corpus, fp8_recipe(size), "FP8", device, seed),
            )
            for seed in range(seeds)
        ]
    found = summary(runs, size)
    whole = {
        "preset": asdict(size),
        "parameters": parameter_count(runs[0][0].model),
        "high_precision_dtype": label,
        "device": str(device),
        "machine": machine(device),
        "unigram_entropy": corpus.unigram_entropy(),
        "python": platform.python_version(),
        "versions": versions(),
    } | found
    if setting.out is not None:
        (setting.out / "result.json").write_text(json.dumps(whole, indent=1) + "\n")
        curves = {run.label: run.losses for run in runs[0]}
        write_losses(setting.out / "loss.csv", curves)
        plots.plot_losses(setting.out / "loss.png", curves, corpus.unigram_entropy())
    title = f"{size.name}, {size.steps} steps, {seeds} seeds"
    rows: list[Row] = []
    for name, key in ((label, "high_precision"), ("FP8", "fp8")):
        figures = (
            ("validation loss", found[key]["mean"], "nats/byte"),
            ("speed", float(found[key]["tokens_per_second"]), "tokens/s"),
        )
        rows += [
            {"workload": title, "case": f"{name}: {what}", "status": "ok", "value": value, "unit": unit}
            for what, value, unit in figures
        ]
    gap = found["gap_percent_of_means"]
    status = "ok" if gap < GAP else f"WRONG: the loss is {gap:.2f} % higher, bound {GAP} %"
    return [*rows, {"workload": title, "case": "FP8's gap", "status": status, "value": gap, "unit": "%"}]
