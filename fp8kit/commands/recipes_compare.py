"""``fp8kit recipes compare``: which recipe suits the operands of a model, captured from it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fp8kit import recipe_info
from fp8kit.commands import add_device, command, device_of, positive, seed, table
from fp8kit.errors import ArgumentError, CheckpointError
from fp8kit.recipes import NAMED, entry

_WORDS = (
    "DUMP is a file of fk.numerics.capture(model, batch).save(DUMP), or of capture of fp8kit_torch or "
    "fp8kit_jax. Errors are relative, sqrt(sum (x - v)^2 / sum x^2), against float64 products of the "
    "operands as they are. Of each GEMM the recipes are sorted by the largest of the errors of y, dx and dW; "
    "worst operand: the cast with the largest error. A recipe whose scales follow from earlier steps is "
    "checked in its second step, on the same data."
)
_ROWS = 2048


def add(actions: Any) -> None:
    """Register the action."""
    about = "the errors that recipes make on the operands of a model's GEMMs"
    parser = command(actions, "compare", about, _compare, epilog=_WORDS)
    parser.add_argument("dump", metavar="DUMP", help="a file of captured operands")
    parser.add_argument(
        "--recipes",
        nargs="+",
        metavar="NAME",
        help="as `fp8kit recipes list` prints them, separated by blanks or commas (those that run)",
    )
    parser.add_argument("--layers", metavar="PATTERN", help="of a layer's name, as of a shell (all)")
    parser.add_argument(
        "--rows",
        type=positive,
        default=_ROWS,
        metavar="N",
        help="of activations and gradients at most, evenly spaced (%(default)s)",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of stochastic rounding (%(default)s)"
    )
    add_device(parser)


def _compare(options: argparse.Namespace) -> int:
    from fnmatch import fnmatchcase

    from fp8kit.numerics.capture import Dump
    from fp8kit.numerics.compare import RESULTS, TENSORS, compare, summaries

    device = device_of(options)
    if options.recipes:
        names = [name for text in options.recipes for name in text.split(",") if name]
        chosen = {name: entry(name, "recipes").recipe for name in names}
    else:
        # those that differ in attention alone have the same GEMMs
        chosen, known = {}, set()
        for name, (recipe, _) in NAMED.items():
            casts = recipe.quantization, recipe.history
            refused = recipe_info.support_on(recipe, device).status == recipe_info.REFUSED
            if not refused and casts not in known:
                chosen[name] = recipe
                known.add(casts)
    try:
        dump = Dump.load(options.dump)
    except CheckpointError as error:
        raise ArgumentError("recipes", "DUMP", repr(options.dump), f"captured operands ({error})") from None
    if options.layers:
        gemms = {name: gemm for name, gemm in dump.gemms.items() if fnmatchcase(name, options.layers)}
        if not gemms:
            wanted = f"a pattern of some of {', '.join(dump.gemms)}"
            raise ArgumentError("recipes", "--layers", repr(options.layers), wanted)
        dump = Dump(gemms)
    found = compare(dump, chosen, device, options.rows, options.seed)
    rows = {name: len(gemm.activation) for name, gemm in dump.gemms.items()}
    used = {name: min(count, options.rows) for name, count in rows.items()}
    if options.json:
        about = {"dump": options.dump, "device": str(device), "seed": options.seed, "against": "float64"}
        sizes = {
            name: {"rows": rows[name], "used": used[name], "weight": list(gemm.weight.shape)}
            for name, gemm in dump.gemms.items()
        }
        best = [own._asdict() for own in summaries(found)]
        whole = {**about, "gemms": sizes, "recipes": best, "rows": [own.as_dict() for own in found]}
        print(json.dumps(whole, indent=2))
        return 0
    count = "1 GEMM" if len(dump.gemms) == 1 else f"{len(dump.gemms)} GEMMs"
    print(f"{options.dump}: {count}, against float64, on {device}\n")
    lines = []
    last = ""
    for own in found:
        out, inner = dump.gemms[own.layer].weight.shape
        size = f"{used[own.layer]} of {rows[own.layer]} x {inner} to {out}"
        errors = [f"{own.results[name].relative_error:.4g}" for name in RESULTS]
        place = own.worst
        worst = "" if place is None else f"{TENSORS[place[1]]} in {place[0]}"
        layer = (own.layer, size) if own.layer != last else ("", "")
        lines.append((*layer, own.recipe, *errors, worst))
        last = own.layer
    table(("GEMM", "rows x in to out", "recipe", *RESULTS, "worst operand"), lines)
    print("\nmedians over the GEMMs, the best recipe first")
    table(
        ("recipe", *RESULTS, "largest error", "of"),
        [
            (
                own.recipe,
                *(f"{own.medians[name]:.4g}" for name in RESULTS),
                f"{own.worst_error:.4g}",
                own.worst_layer,
            )
            for own in summaries(found)
        ],
    )
    return 0
