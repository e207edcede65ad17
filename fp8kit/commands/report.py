"""``fp8kit report``: a run's losses and statistics as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fp8kit.commands import command, writable

_WORDS = (
    "RUN holds statistics.jsonl, a sink of fk.inspect, and run.json and losses.jsonl, which "
    "fk.numerics.run_folder.write makes. The page needs no network and no other file."
)


def add(commands: Any) -> None:
    """Register the subcommand; ``commands`` is what ``ArgumentParser.add_subparsers`` returned."""
    what = "a run's losses, statistics and settings as one HTML page"
    parser = command(commands, "report", what, _report, epilog=_WORDS)
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page's file (RUN/report.html)")
    parser.add_argument(
        "--reference",
        metavar="NAME",
        help="the losses that others are compared with, without the seed (run.json's settings.reference, "
        "else a high precision's)",
    )


def _report(options: argparse.Namespace) -> int:
    from fp8kit.errors import ArgumentError, meant
    from fp8kit.numerics import report
    from fp8kit.numerics.run_folder import read
    from fp8kit.recipes import NAMED

    if options.folder.is_dir() and not (options.folder / "run.json").exists():
        got = f"'{options.folder}', without run.json"
        wanted = "a folder that fk.numerics.run_folder.write made (docs/report.md); `fp8kit train` makes none"
        raise ArgumentError("report", "RUN", got, wanted)
    run = read(options.folder)
    out = options.output or options.folder / "report.html"
    text = report.page(report.digest(run, options.reference)).encode()
    writable("--output", out)
    out.write_bytes(text)
    layers = len({key.layer for key in run.statistics})
    print(
        f"{out}: {len(text) / 1e6:.2f} MB; {len(run.curves)} loss curves, "
        f"{len(run.statistics)} statistics of {layers} layers"
    )
    recipe = run.about["recipe"]
    if recipe is not None and recipe not in NAMED:
        print(
            f"no format's range, and no limits that follow from one: the recipe {recipe!r} is none of "
            f"`fp8kit recipes list`{meant(recipe, NAMED)}"
        )
    return 0
