"""``fp8kit warmup``: compile what a training needs before it starts, also for a GPU that is not here."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fp8kit.backends import dispatch
from fp8kit.commands import add_device, command, device_of, numbers
from fp8kit.errors import Fp8kitError
from fp8kit.models.presets import PRESETS

SIZES = ("hidden", "ffn", "heads", "sequence", "batch")
_ON_CPU = "demo-cpu"  # the preset whose sizes a CPU takes where none are given


def add(commands: Any) -> None:
    """Add the command to ``commands``, what ``add_subparsers`` gave."""
    what = "compile the kernels of a training into the cache, side by side, and make its plans"
    parser = command(commands, "warmup", what, run)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--preset", choices=PRESETS, help="sizes of one of fp8kit's models")
    sizes.add_argument(
        "--layer",
        type=_layer,
        metavar="HIDDEN,FFN,HEADS[,SEQUENCE,BATCH]",
        help=f"sizes of a layer (4096,16384,64,128,1; on a CPU those of --preset {_ON_CPU})",
    )
    named = "a name that `fp8kit recipes list` prints (%(default)s)"
    parser.add_argument("--recipe", default="delayed", metavar="NAME", help=named)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the parameters (%(default)s)",
    )
    parser.add_argument("--activation", default="gelu", metavar="NAME", help="(%(default)s)")
    parser.add_argument(
        "--arch",
        metavar="NAME",
        help="such as sm_90a: only compile, for a GPU of that architecture; needs no GPU",
    )
    add_device(parser)
    parser.add_argument(
        "--threads", type=int, metavar="N", help="that compile at once (as many as there are cores)"
    )


def _layer(text: str) -> dict[str, int]:
    """Returns a layer's sizes by name. ArgumentTypeError, which argparse prints, for another text."""
    try:
        sizes = numbers(text, 5 if text.count(",") > 2 else 3)
    except Fp8kitError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected 3 or 5 positive numbers: HIDDEN,FFN,HEADS[,SEQUENCE,BATCH]"
        ) from None
    hidden, _, heads, *_ = sizes
    if hidden % heads:
        wanted = f"HIDDEN a multiple of HEADS: {hidden} is none of {heads}"
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {wanted}")
    return dict(zip(SIZES, sizes, strict=False))


def run(options: argparse.Namespace) -> int:
    """Run the command, saying on standard error what it is at, and then what it did."""
    from fp8kit import recipes
    from fp8kit.warmup import warmup

    sizes: dict[str, Any] = options.layer or {}
    # --arch needs none
    device = None if options.device is None or options.arch is not None else device_of(options)
    chosen = options.preset
    if not (chosen or sizes or options.arch) and (device or dispatch.default_device()).kind == "cpu":
        chosen = _ON_CPU
    if chosen is not None:
        size = PRESETS[chosen]
        extents = size.hidden, 4 * size.hidden, size.heads, size.context, size.sequences
        sizes = dict(zip(SIZES, extents, strict=True))
    done = warmup(
        **sizes,
        dtype=options.dtype,
        recipe=recipes.named(options.recipe),
        activation=options.activation,
        arch=options.arch,
        device=device,
        threads=options.threads,
        say=lambda line: print(f"fp8kit warmup: {line}", file=sys.stderr, flush=True),
    )
    print(done)
    return 0
