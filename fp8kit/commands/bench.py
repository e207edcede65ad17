"""``fp8kit bench``: times of checked results, and where a layer's memory goes."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8kit.commands import add_device, command, device_of, folder, minutes, numbers, writable
from fp8kit.errors import ArgumentError, meant


def add(commands: Any) -> None:
    """Add the command to ``commands``, what ``add_subparsers`` gave."""
    parser = command(
        commands,
        "bench",
        "time the library and check its results; or say where memory goes",
        run,
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
    add_device(parser)
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

    known = {part.name: part for part in NATIVE}
    names = ["memory"] if options.memory else options.parts or list(known)
    if unknown := sorted(set(names) - set(known)):
        wanted = f"some of {', '.join(known)}{meant(unknown[0], known)}"
        raise ArgumentError("bench", "part", ", ".join(unknown), wanted)
    device = device_of(options)
    if options.out is not None:
        folder(options.out)
    if options.json is not None:
        writable("--json", options.json)
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    setting = reports.setting_for(device, out=options.out, deadline=deadline)
    if options.layer is not None:
        layer = Layer(*numbers(options.layer, 5))
        if layer.hidden % layer.heads:
            raise ArgumentError("bench", "--layer", repr(options.layer), "HIDDEN a multiple of HEADS")
        sizes = replace(setting.sizes, layers={f"layer {layer.hidden}": layer})
        setting = replace(setting, sizes=sizes)
    report = reports.run(
        [part for name, part in known.items() if name in names],
        setting,
        (lambda made: made.write(options.json)) if options.json else lambda made: None,
        clocks=None if options.memory else clocks_of(setting),
    )
    if options.out is not None:
        from fp8kit.bench.plots import draw

        for path in draw(report, options.out):
            print(path)
    if options.json is not None:
        print(options.json)
    return report.conclude("fp8kit bench")


def clocks_of(setting: Any) -> Any:
    """Returns a function that gives the GPU's clocks and power under the load of FP8 products; None on the
    CPU."""
    if setting.device.kind != "cuda":
        return None
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
