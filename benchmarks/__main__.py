"""Every benchmark with its peers, the verdicts on the targets, and the documents' tables.

    python -m benchmarks [PART ...] --out DIR [--minutes N] [--only LAYER]
    python -m benchmarks --table [--update]

Writes ``benchmarks.json`` after each part, and pictures, to DIR. Without a PART the usual ones run; --list
says which they are, and how long each takes. Sizes are full on a GPU and small on the CPU. With --isolate
each part has a process of its own: one that crashes or hangs costs the others nothing. Returns 1 where a part
failed or a result of fp8kit is wrong, 2 for arguments that are none; a missed target is printed and changes
nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import table
from fp8kit.bench import report as reports
from fp8kit.bench.report import Report, Row, Setting
from fp8kit.commands import Parser, device_of, folder, minutes, positive, said, status_of
from fp8kit.errors import Fp8kitError, meant

FILE = "benchmarks.json"
FOLDER = table.FOLDER.relative_to(table.ROOT)
SIZED = {"layer", "attention"}  # the parts that go through the sizes of layers
PART_SECONDS = 600.0  # that an isolated part may take


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = Parser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="some of the parts; --list names them")
    parser.add_argument("--list", action="store_true", help="say what there is to run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results")
    parser.add_argument("--minutes", type=minutes, metavar="N", help="begin nothing new after N minutes")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (cuda where usable, else cpu)")
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help="turns of each contender (6; on the CPU 2)"
    )
    parser.add_argument("--only", metavar="LAYER", help='of the layers\' sizes one, such as "layer 4096"')
    parser.add_argument("--isolate", action="store_true", help="a process for each part")
    parser.add_argument(
        "--table",
        action="store_true",
        help=f"print the documents' tables, of {', '.join(table.RESULTS)} in {FOLDER}",
    )
    parser.add_argument("--update", action="store_true", help="with --table: write them, and their picture")
    options = parser.parse_args(arguments)
    if options.update and not options.table:
        parser.error("argument --update: not allowed without argument --table")
    beside = {
        "PART": options.parts,
        "--list": options.list,
        "--out": options.out,
        "--minutes": options.minutes,
        "--device": options.device,
        "--rounds": options.rounds,
        "--only": options.only,
        "--isolate": options.isolate,
    }
    for name, given in beside.items():
        if options.table and given:
            parser.error(f"argument {name}: not allowed with argument --table")
    options.refuse = parser.error
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    # on a CPU torch's threads, not imported yet, would spin while the engine's work
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = parse(arguments)
    if options.table:
        return show_table(options.update)
    try:
        return measure(options)
    except (Fp8kitError, ImportError) as error:  # what is missing, or an argument that is none, is one line
        print(said("benchmarks", error).replace("fp8kit benchmarks", "python -m benchmarks"), file=sys.stderr)
        return status_of(error)


def measure(options: argparse.Namespace) -> int:
    """List or run the parts."""
    from benchmarks.parts import PARTS

    if options.list:
        print(*PARTS, sep="\n")
        return 0
    names = [part.name for part in PARTS]
    unknown = sorted(set(options.parts) - set(names))
    if unknown:
        options.refuse(
            f"argument PART: no such part: {', '.join(unknown)}; --list names "
            f"them{meant(unknown[0], names).rstrip('?')}"
        )
    if options.only is not None and (others := sorted(set(options.parts) - SIZED)):
        options.refuse(f"argument --only: not for {', '.join(others)}, which have sizes of their own")
    if options.out is None:
        options.refuse("the following arguments are required: --out")
    usual = {part.name for part in PARTS if part.usual and (options.only is None or part.name in SIZED)}
    chosen = [part for part in PARTS if part.name in (options.parts or usual)]
    folder(options.out)
    setting = setting_of(options)
    report = (
        isolated(chosen, setting, options)
        if options.isolate
        else together(chosen, setting, options.out / FILE)
    )
    return finish(report, options.out)


def setting_of(options: argparse.Namespace) -> Setting:
    """How the run is made."""
    given: dict[str, Any] = {"out": options.out, "only": options.only}
    if options.rounds is not None:
        given["rounds"] = options.rounds
    if options.minutes is not None:
        given["deadline"] = time.monotonic() + 60 * options.minutes
    setting = reports.setting_for(
        device_of(argparse.Namespace(command="benchmarks", device=options.device)), **given
    )
    if not setting.layers:
        known = list(setting.sizes.layers)
        expected = f"expected one of {', '.join(known)}{meant(options.only, known)}"
        options.refuse(f"argument --only: got {options.only!r}, {expected}")
    return setting


def peers() -> dict[str, str]:
    """Versions of the libraries beside."""
    from benchmarks.torch_cases import PEERS, version_of

    return {name: version_of(name) for name in PEERS}


def together(parts: Sequence[reports.Part], setting: Setting, path: Path) -> Report:
    """All parts in this process."""
    from fp8kit.commands.bench import clocks_of

    def write(report: Report) -> None:
        report.about["versions"] |= peers()
        report.write(path)

    return reports.run(parts, setting, write, say, clocks_of(setting))


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def isolated(parts: Sequence[reports.Part], setting: Setting, options: argparse.Namespace) -> Report:
    """Each part by a process of its own, whose report is taken over; what a process does not report has
    failed."""

    def child(part: reports.Part) -> tuple[dict[str, Any], dict[str, Any]]:
        folder = options.out / "parts" / part.name
        order = [
            sys.executable,
            "-m",
            "benchmarks",
            part.name,
            "--out",
            str(folder),
            "--device",
            str(setting.device),
        ]
        order += ["--rounds", str(setting.rounds)]
        order += [] if setting.only is None else ["--only", setting.only]
        start, said = time.perf_counter(), "it cannot be started"
        limit = min(PART_SECONDS, setting.left())
        try:
            order += ["--minutes", f"{max(limit / 60, 0.001):.3f}"]
            done = subprocess.run(order, capture_output=True, text=True, timeout=limit + 30)
            said = f"{done.returncode}: {' '.join(done.stderr.split())[-300:]}"
            found = reports.read(folder / FILE)
            return found.parts[part.name], found.about
        except subprocess.TimeoutExpired:
            status = f"failed: no end after {limit:.0f} s"
        except (OSError, ValueError, KeyError):
            status = f"failed: the process ended with {said}"
        return {"status": status, "seconds": time.perf_counter() - start, "rows": []}, {}

    about = reports.about_of(setting)
    whole = Report(about | {"parts apart": True, "versions": about["versions"] | peers()})
    say(reports.head(whole.about))
    clocks: list[Any] = []
    for part in parts:
        if setting.left() <= 0:
            whole.parts[part.name] = {"status": "left out: no time", "seconds": 0.0, "rows": []}
        else:
            whole.parts[part.name], about = child(part)
            clocks += about.get("clocks", [])
            whole.about |= {name: about[name] for name in ("device", "python", "settings") if name in about}
        say(reports.text(part.name, whole.parts[part.name]))
        whole.about["clocks"] = clocks
        whole.write(options.out / FILE)
    return whole


def finish(report: Report, out: Path) -> int:
    """Verdicts, pictures, the last word."""
    from benchmarks import targets
    from fp8kit.bench.plots import draw

    report.targets = targets.evaluate(report)
    report.write(out / FILE)
    print(targets.text(report.targets, report.parts))
    for path in draw(report, out):
        print(path)
    return report.conclude("python -m benchmarks", ours)


def ours(row: Row) -> bool:
    """Whether a row is one of fp8kit: another library's failure is reported, and is none of this run. Parts
    without contenders are ours."""
    return not row["case"].startswith(("torch", "plain JAX", "Transformer Engine"))


def show_table(update: bool) -> int:
    """Print the tables of the committed results; with ``update`` write them, and the picture, into the
    documents."""
    report = table.committed()
    print(table.short(report), table.long(report), sep="\n", end="")
    for path in table.update(report) if update else ():
        print(path.relative_to(table.ROOT), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
