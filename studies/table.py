"""The runs of a folder as a Markdown table, as CSV and as a picture."""

from __future__ import annotations

import csv
import itertools
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp8kit.errors import ArgumentError
from fp8kit.models.plots import figure
from fp8kit.numerics import run_folder
from fp8kit.numerics.losses import running_mean
from studies import explain, files, gaps, layer, linear
from studies.cases import CASES

Curves = Mapping[tuple[str, int], Sequence[float]]  # (case, seed) -> the loss of each step

COLUMNS = ("case", "what", "seeds", "validation loss", "spread", "gap %", "gap / spread", "tokens/s")


def rows(folder: Path) -> list[tuple[str, ...]]:
    """The table's rows, a case each, in the order of ``cases.CASES``."""
    runs = files.runs(folder)
    earlier = gaps.earlier(folder, runs).results
    path = folder / "speed.json"
    speeds = files.read(path)["cases"] if path.exists() else {}
    found = []
    for name, case in CASES.items():
        own = earlier.get(name) or gaps.result(runs, name)
        if not own.seeds and not own.diverged:
            continue
        losses = "diverged" if own.mean is None else f"{own.mean:.4f}"
        if own.mean is not None and own.diverged:
            losses += f", {len(own.diverged)} diverged"
        speed = f"{speeds[name]['tokens_per_second']:,.0f}" if name in speeds else "not measured"
        found.append(
            (
                f"`{name}`" + (" *" if name in earlier else ""),
                case.about + (f", against `{case.against}`" if case.against not in ("", "bf16") else ""),
                str(len(own.seeds) + len(own.diverged)),
                losses,
                "" if own.deviation is None else f"{own.deviation:.4f}",
                "" if own.percent is None else f"{own.percent:+.2f}",
                _units(own),
                speed,
            )
        )
    return found


def _units(own: gaps.Result) -> str:
    if own.units is None:
        return ""
    return f"{own.units:+.1f}" if abs(own.units) > 1 else f"0 ({own.units:+.1f})"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def write(folder: Path) -> str:
    """Write ``table.md``, ``curves.csv`` and ``curves.png`` from the folder's runs, and the three files of
    which ``fp8kit report`` makes a page; returns the table. ArgumentError where there is no run."""
    runs = files.runs(folder)
    if not runs and not any((folder / part.__name__.rpartition(".")[2]).exists() for part in (layer, linear)):
        raise ArgumentError("studies", "DIR", str(folder), "a folder with finished runs")
    text = page(folder, runs)
    (folder / "table.md").write_text(text)
    if runs:
        _curves(folder, runs)
        _run_folder(folder, runs)
    return text


def page(folder: Path, runs: gaps.Runs) -> str:
    """What ``table.md`` says of a folder."""
    text = markdown(COLUMNS, rows(folder)) + "\n\n" + _words(folder, runs) if runs else ""
    for part in (layer, linear, explain):
        if lines := part.rows(folder):
            text += "\n" + markdown(part.COLUMNS, lines) + "\n"
    return text


def _words(folder: Path, runs: gaps.Runs) -> str:
    """What the runs are, and where they were made; which are of an earlier call."""
    one = next(iter(runs.values()))
    size, machines = one["settings"]["size"], sorted({own["machine"] for own in runs.values()})
    words = (
        f"{one['parameters'] / 1e6:.1f} M parameters, {size['steps']} steps of {size['sequences']} x "
        f"{size['context']} bytes on {', '.join(machines)}; losses of the validation text in nats a byte; "
        "docs/studies.md says what the columns are."
    )
    earlier = gaps.earlier(folder, runs)
    parts = [words, f"*: {earlier.about}"] if earlier.results else [words]
    return "".join(textwrap.fill(part, 110) + "\n" for part in parts)


def _curves(folder: Path, runs: gaps.Runs) -> None:
    own = {key: run["losses"] for key, run in runs.items()} | dict(gaps.earlier(folder, runs).losses)
    curves = dict(sorted(own.items()))
    names = [f"{name}.{seed}" for name, seed in curves]
    with (folder / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *names])
        columns = itertools.zip_longest(*curves.values())
        for step, row in enumerate(columns, 1):
            writer.writerow([step, *("" if loss is None else f"{loss:.5f}" for loss in row)])
    picture = figure(figsize=(11, 9))
    upper, lower = picture.subplots(2, 1)
    cases = [name for name in CASES if any(case == name for case, _ in curves)]
    for i, name in enumerate(cases):
        losses = np.asarray(_mean(curves, name, _seeds(curves, name)))
        style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3], "linewidth": 1.1}
        steps = np.arange(1, len(losses) + 1)
        upper.plot(steps, running_mean(losses, 20), label=name, **style)
        against = CASES[name].against
        # of one seed the weights and batches are the same
        seeds = _seeds(curves, name) & _seeds(curves, against)
        if seeds and name != against:
            own, base = (np.asarray(_mean(curves, case, seeds)) for case in (name, against))
            both = min(len(own), len(base))
            share = 100 * running_mean(own[:both] / base[:both] - 1, 50)
            lower.plot(steps[:both], share, label=name, **style)
    upper.set(ylabel="training loss, nats a byte (mean of 20 steps)")
    lower.set(xlabel="step", ylabel="gap to the yardstick, % (mean of 50 steps)")
    lower.set_yscale("symlog", linthresh=2, linscale=2)
    lower.yaxis.set_major_formatter("{x:g}")
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=7, ncol=2, loc="upper left", bbox_to_anchor=(1, 1))
    picture.savefig(folder / "curves.png", dpi=120)


def _seeds(curves: Curves, case: str) -> set[int]:
    return {seed for name, seed in curves if name == case}


def _mean(curves: Curves, case: str, seeds: set[int]) -> list[float]:
    """The mean over a case's seeds at each step that any of them has."""
    own = [losses for (name, seed), losses in curves.items() if name == case and seed in seeds]
    return [statistics.fmean(loss for loss in row if loss is not None) for row in itertools.zip_longest(*own)]


def _run_folder(folder: Path, runs: gaps.Runs) -> None:
    """What ``fp8kit report`` reads: the losses, without statistics of layers."""
    one: Any = next(iter(runs.values()))
    own = {f"{name} seed {seed}": run for (name, seed), run in runs.items()}
    run_folder.write(
        folder,
        recipe=None,
        losses={series: dict(enumerate(run["losses"], 1)) for series, run in own.items()},
        validation={
            series: {len(run["losses"]): run["validation_loss"]}
            for series, run in own.items()
            if run["validation_loss"] is not None
        },
        model=one["settings"]["size"],
        settings={"parameters": one["parameters"]},
        versions=one["versions"],
        device=one["device"],
    )
