"""Trains a preset in high precision and in FP8 from several seeds, and writes the curves and figures.

    python -m benchmarks.gpt2_small --seeds 5 --out benchmarks/results/gpt2_small

Every run is deterministic (``fk.deterministic``): the same machine and versions give the same losses again. One seed says little, since
two high-precision runs that differ in the seed alone end up to 1 % apart; so the gap is that of the means over all seeds, with its
standard error. Needs a CUDA GPU for the figures that are committed (one H200); runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fp8kit as fk
from fp8kit import arrays
from fp8kit.backends import dispatch
from fp8kit.bench import versions
from fp8kit.models import plots, text
from fp8kit.models.gpt import parameter_count
from fp8kit.models.presets import Preset, preset
from fp8kit.models.resume import Run
from fp8kit.models.train import fp8_recipe, high_precision, train, write_losses


def summary(runs: Sequence[tuple[Run, Run]], size: Preset) -> dict[str, Any]:
    """Validation losses by seed, their means, the gap of the means in percent with its standard error, and tokens/s (median run)."""
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
    return columns | {"gap_percent_by_seed": gaps, "gap_percent_of_means": gap, "gap_percent_standard_error": error}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the figures, write ``result.json``, ``loss.csv`` and ``loss.png`` (seed 0) under ``--out``. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2-small", help="size (%(default)s)")
    parser.add_argument("--steps", type=int, help="optimiser steps (the preset's)")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    options = parser.parse_args(arguments)
    size = preset(options.preset)
    size = size if options.steps is None else size.with_steps(options.steps)
    device, corpus = dispatch.default_device(), text.standard_library()
    label = high_precision(device).name
    with fk.deterministic():
        # what is compiled at the first use is not part of a training's time
        for recipe in (None, fp8_recipe(size)):
            train(size.with_steps(3), corpus, recipe, "warm-up", device)
        runs = [
            (train(size, corpus, None, label, device, seed), train(size, corpus, fp8_recipe(size), "FP8", device, seed))
            for seed in range(options.seeds)
        ]
    found = summary(runs, size)
    whole = {
        "preset": asdict(size), "parameters": parameter_count(runs[0][0].model), "high_precision_dtype": label, "device": str(device),
        "machine": _device_name(device), "unigram_entropy": corpus.unigram_entropy(), "python": platform.python_version(),
        "versions": versions(),
    } | found  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "result.json").write_text(json.dumps(whole, indent=1) + "\n")
    curves = {run.label: run.losses for run in runs[0]}
    write_losses(options.out / "loss.csv", curves)
    plots.plot_losses(options.out / "loss.png", curves, corpus.unigram_entropy())
    print(json.dumps(found, indent=1))
    return 0


def _device_name(device: arrays.Device) -> str:
    if device.kind == "cpu":
        return platform.processor() or platform.machine()
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(device.index)["name"].decode())


if __name__ == "__main__":
    sys.exit(main())
