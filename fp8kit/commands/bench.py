"""``fp8kit bench``: times of checked results, and where a layer's memory goes."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from fp8kit.commands import FAILED, device_of, folder, minutes, numbers, writable
from fp8kit.errors import ArgumentError, meant


def add(commands: Any) -> None:
    """Add the command to ``commands``, what ``add_subparsers`` gave."""
    what = "time the library and check its results; or say where memory goes"
    parser = commands.add_parser(
        "bench",
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=(
            "Parts: casts, training, layer, steps, modules, attention, kernels, gemm, host, start, memory, "
            "breakeven (all). Sizes are full on a GPU and small on the CPU. Each row says how its result was "
            "checked: an error, a share of the allowed one (of_bound), or in words; the part memory, "
            "which counts bytes, and the skeleton, which computes nothing, have no check."
        ),
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="some of the parts (all)")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the numbers, versions and clocks to FILE; its folder is made",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also draw the pictures into DIR")
    parser.add_argument(
        "--minutes",
        type=minutes,
        metavar="N",
        help="begin nothing new after N minutes; what runs then is finished",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (cuda where usable, else cpu)")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="only: every tensor that one layer keeps for backward, sums, the peak",
    )
    parser.add_argument(
        "--layer",
        metavar="HIDDEN,FFN,HEADS,SEQUENCE,BATCH",
        help="of --memory (4096,16384,32,2048,4; small on the CPU)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status is 1 where a part failed or a result is wrong."""
    if options.layer is not None and not options.memory:
        raise ArgumentError("bench", "--layer", repr(options.layer), "none without --memory")
    beside = {"part": " ".join(options.parts), "--minutes": options.minutes, "--out": options.out}
    for name, value in beside.items():
        if options.memory and value:
            raise ArgumentError("bench", name, value, "none beside --memory")
    from fp8kit.bench import report as reports
    from fp8kit.bench.parts import NATIVE
    from fp8kit.bench.sizes import Layer

    unknown = sorted(set(options.parts) - {part.name for part in NATIVE})
    if unknown:
        names = [part.name for part in NATIVE]
        raise ArgumentError(
            "bench", "part", ", ".join(unknown), f"some of {', '.join(names)}{meant(unknown[0], names)}"
        )
    device = device_of(options)
    if options.out is not None:
        folder(options.out)
    if options.json is not None:
        writable("--json", options.json)
    setting = reports.setting_for(device, out=options.out)
    if options.memory:
        from fp8kit.bench.memory import ledger

        layer = setting.sizes.large if options.layer is None else Layer(*numbers("layer", options.layer, 5))
        rows = [row for recipe in ("bf16", "FP8 delayed") for row in ledger(layer, device, recipe)]
        report = reports.Report(
            reports.about_of(setting), {"memory": {"status": "ok", "seconds": 0.0, "rows": rows}}
        )
        print(reports.head(report.about).partition("\n")[0], end="\n\n")
        print(reports.text("memory", report.parts["memory"]))
        if options.json is not None:
            report.write(options.json)
            print(options.json)
        return 0
    chosen = [part for part in NATIVE if part.name in options.parts or not options.parts]
    if options.minutes is not None:
        setting = reports.setting_for(
            device, out=options.out, deadline=time.monotonic() + 60 * options.minutes
        )
    report = reports.run(
        chosen,
        setting,
        (lambda made: made.write(options.json)) if options.json else lambda made: None,
        clocks=clocks_of(setting) if device.kind == "cuda" else None,
    )
    if options.out is not None:
        from fp8kit.bench.plots import draw

        for path in draw(report, options.out):
            print(path)
    failures = report.failures() or ([] if report.measured() else ["nothing was measured: there was no time"])
    if options.json is not None:
        print(options.json)
    for failure in failures:
        print(f"fp8kit bench: FAILED: {failure}", file=sys.stderr)
    return FAILED if failures else 0


def clocks_of(setting: Any) -> Any:
    """A function that gives the GPU's clocks and power under the load of FP8 products."""
    from fp8kit.backends import dispatch
    from fp8kit.bench import gemms
    from fp8kit.bench.timing import gpu_state

    def clocks() -> dict[str, str]:
        kernels = dispatch.kernels(setting.device)
        product = gemms.products(setting.sizes.large)[2]
        return gpu_state(
            setting.device, gemms.ours(gemms.operands(product, setting.device, kernels), kernels)
        )

    return clocks
