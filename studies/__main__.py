"""Studies of training in low precision, which anybody can make again.

    python -m studies convergence --out DIR [--jobs N] [--only NAMES] [--size tiny|full] [--budget SECONDS]
    python -m studies table DIR

Every finished run is a file of DIR; a command that was killed goes on with those that are missing. Returns 1
where a run failed or was not begun for want of time, 2 for arguments that are none.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8kit.commands import (
    Parser,
    add_device,
    command,
    device_of,
    folder,
    minutes,
    positive,
    said,
    seed,
    status_of,
)
from fp8kit.errors import Fp8kitError
from studies import cases, corpus, files

PARTS = ("speed", "train", "explain")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = parse(arguments)
    options.command = "studies"
    try:
        return int(options.run(options))
    except Fp8kitError as error:
        print(said("studies", error).replace("fp8kit studies", "python -m studies"), file=sys.stderr)
        return status_of(error)
    except KeyboardInterrupt:
        print("stopped; what is finished stays, and the same command goes on", file=sys.stderr)
        return 130


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = Parser(
        prog="python -m studies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="study", required=True)
    training = command(commands, "convergence", "a GPT under every recipe, from several seeds", convergence)
    _common(training)
    training.add_argument("--only", metavar="NAMES", help="cases, separated by commas")
    training.add_argument("--part", action="append", choices=PARTS, help="some of the parts (all of them)")
    training.add_argument("--jobs", type=positive, default=1, metavar="N", help="runs at once (1)")
    training.add_argument(
        "--text", type=Path, metavar="FOLDER", help="whose .py files are the text (the installed packages)"
    )
    training.add_argument("--megabytes", type=positive, default=32, metavar="N", help="of text at most (32)")
    table = command(commands, "table", "the table and the curves of a folder of runs", _table)
    table.add_argument("folder", type=Path, metavar="DIR")
    one = command(commands, "run", "one run of convergence, for its processes", _run)
    one.add_argument("case")
    one.add_argument("--seed", type=seed, required=True)
    one.add_argument("--text", type=Path, required=True)
    _common(one)
    return parser.parse_args(arguments)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--size", choices=tuple(cases.SIZES), help="of the model (full; on a CPU tiny)")
    parser.add_argument("--steps", type=positive, metavar="N", help="of a training (the size's own)")
    parser.add_argument("--budget", type=minutes, metavar="SECONDS", help="begin nothing that ends later")
    add_device(parser)


def convergence(options: argparse.Namespace) -> int:
    """Speed, trainings and explanations."""
    end = time.monotonic() + (options.budget or math.inf)
    chosen = options.only.split(",") if options.only else cases.CASES
    names = [cases.case(name).name for name in chosen]
    device = device_of(options)
    options.size = options.size or ("tiny" if device.kind == "cpu" else "full")
    size = cases.size(options.size, options.steps)
    out = folder(options.out)
    text = corpus.sources(options.text, options.megabytes)
    print(f"text: {text.train.size:,} bytes to train on, {text.validation.size:,} to validate")
    complete = True
    for part in PARTS:
        if part not in (options.part or PARTS):
            continue
        if part == "speed":
            from studies.speed import measure

            complete &= measure(out, size, text, device, names, end)
        elif part == "train":
            complete &= _train(options, size, text, names, end)
        else:
            from studies.explain import explain

            complete &= explain(out, size, text, device, names, end)
    if files.runs(out):
        from studies.table import write

        print(write(out))
    return int(not complete)


def _train(options: Any, size: Any, text: corpus.Text, names: list[str], end: float) -> bool:
    from studies import schedule

    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "text.npz")
        text.save(path)
        return schedule.make(options.out, size, path, text.digest, names, options, end)


def _run(options: argparse.Namespace) -> int:
    from studies.training import run

    device = device_of(options)
    size = cases.size(options.size, options.steps)
    case = cases.case(options.case)
    found = run(case, size, corpus.Text.load(options.text), device, options.seed)
    files.write(files.run_path(options.out, case.name, options.seed), found)
    return 0


def _table(options: argparse.Namespace) -> int:
    from studies.table import write

    print(write(options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
