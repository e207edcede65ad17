"""Studies of training in low precision, which anybody can make again.

    python -m studies convergence --out DIR [--size tiny|small|full] [--only NAMES] [--jobs N]
    python -m studies stress --out DIR
    python -m studies accumulator --out DIR
    python -m studies table DIR

Every finished run is a file of DIR; a command that was killed goes on with those that are missing. With
--pack FILE all files of DIR are in one archive besides, from which a later command goes on elsewhere.
Returns 1 where a run failed or was not begun for want of time, 2 for arguments that are none.
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
from studies import cases, corpus, files, pack

STUDIES = {
    "convergence": "a GPT under every recipe, from several seeds",
    "stress": "SwiGLU's outliers: what they cost, and what cures it",
    "accumulator": "the sums of Hopper's tensor cores: where a loss shows them",
}
# part -> the studies that have it
PARTS = {
    "speed": ("convergence",),
    "linear": ("accumulator",),
    "layer": ("stress",),
    "train": tuple(STUDIES),
    "explain": ("convergence",),
}


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
    for study, what in STUDIES.items():
        own = command(commands, study, what, _study)
        _common(own)
        about = "cases, separated by commas or blanks"
        own.add_argument("--only", nargs="+", metavar="NAMES", help=about)
        parts = [part for part, of in PARTS.items() if study in of]
        own.add_argument("--part", action="append", choices=parts, help="some of the parts (all of them)")
        own.add_argument("--pack", type=Path, metavar="FILE", help="keep all of DIR in one .tar.gz, too")
        own.add_argument("--jobs", type=positive, default=1, metavar="N", help="runs at once (1)")
        own.add_argument(
            "--text", type=Path, metavar="FOLDER", help="whose .py files are read (the installed packages)"
        )
        own.add_argument("--megabytes", type=positive, default=32, metavar="N", help="of text at most (32)")
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
    parser.add_argument("--size", choices=tuple(cases.SIZES), help="of the model (by study and device)")
    parser.add_argument("--steps", type=positive, metavar="N", help="of a training (the size's own)")
    parser.add_argument("--budget", type=minutes, metavar="SECONDS", help="begin nothing that ends later")
    add_device(parser)


def _study(options: argparse.Namespace) -> int:
    """The parts of a study, in order."""
    end = time.monotonic() + (options.budget or math.inf)
    study = options.study
    asked = [name for text in options.only or () for name in text.split(",") if name]
    chosen = asked or cases.of_study(study)
    names = [cases.case(name, study).name for name in chosen]
    device = device_of(options)
    if options.size is None:
        options.size = _size(study, device.kind == "cpu")
    size = cases.size(options.size, options.steps)
    out = folder(options.out)
    with pack.packed(out, options.pack):
        return _parts_of(options, study, size, out, device, names, end)


def _parts_of(
    options: argparse.Namespace, study: str, size: Any, out: Path, device: Any, names: list[str], end: float
) -> int:
    """The parts that are asked for, and the tables."""
    text = corpus.sources(options.text, options.megabytes)
    print(f"text: {text.train.size:,} bytes to train on, {text.validation.size:,} to validate")
    complete = True
    for part, studies in PARTS.items():
        if study not in studies or part not in (options.part or PARTS):
            continue
        if part == "speed":
            from studies.speed import measure

            complete &= measure(out, size, text, device, names, end)
        elif part == "linear":
            from studies.linear import measure as compare_sums

            complete &= compare_sums(out, device, options.size == "tiny", end)
        elif part == "layer":
            from studies.layer import measure as teach

            complete &= teach(out, device, names, end)
        elif part == "train":
            complete &= _train(options, size, text, names, end)
        else:
            from studies.explain import explain

            complete &= explain(out, size, text, device, names, end)
    if files.runs(out) or any((out / part).exists() for part in ("layer", "linear")):
        from studies.table import write

        print(write(out))
    return int(not complete)


def _size(study: str, cpu: bool) -> str:
    """What a study trains unless it is told: sums of tensor cores are slow on a CPU."""
    if study == "convergence":
        return "tiny" if cpu else "full"
    return "tiny" if cpu and study == "accumulator" else "small"


def _train(options: Any, size: Any, text: corpus.Text, names: list[str], end: float) -> bool:
    from studies import schedule

    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "text.npz")
        text.save(path)
        return schedule.make(options.out, size, path, text.digest, names, options, end)


def _run(options: argparse.Namespace) -> int:
    from studies.training import run

    device = device_of(options)
    case = cases.case(options.case)
    size = cases.size(options.size or _size(case.study, device.kind == "cpu"), options.steps)
    found = run(case, size, corpus.Text.load(options.text), device, options.seed)
    files.write(files.run_path(options.out, case.name, options.seed), found)
    return 0


def _table(options: argparse.Namespace) -> int:
    from studies.table import write

    print(write(options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
