"""``fp8kit recipes compare``: which recipe suits the operands of a model, captured from it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fp8kit import recipe_info
from fp8kit.arrays import Device
from fp8kit.commands import add_device, command, device_of, positive, seed, table
from fp8kit.errors import ArgumentError, CheckpointError
from fp8kit.recipe import Recipe
from fp8kit.recipes import NAMED, entry

if TYPE_CHECKING:
    from fp8kit.numerics.capture import Dump

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


def _chosen(asked: Sequence[str] | None, device: Device) -> dict[str, Recipe]:
    """Returns the recipes that were asked for; all that run on ``device`` where none was."""
    if asked:
        names = [name for text in asked for name in text.split(",") if name]
        return {name: entry(name, "recipes").recipe for name in names}
    # those that differ in attention alone have the same GEMMs
    chosen: dict[Any, tuple[str, Recipe]] = {}
    for name, (recipe, _) in NAMED.items():
        if recipe_info.support_on(recipe, device).status != recipe_info.REFUSED:
            chosen.setdefault((recipe.quantization, recipe.history), (name, recipe))
    return dict(chosen.values())


def _dump(path: str, layers: str | None) -> Dump:
    """Returns the captured operands of a file, of the layers whose name fits the pattern."""
    from fnmatch import fnmatchcase

    from fp8kit.numerics.capture import Dump

    try:
        dump = Dump.load(path)
    except CheckpointError as error:
        raise ArgumentError("recipes", "DUMP", repr(path), f"captured operands ({error})") from None
    if not layers:
        return dump
    gemms = {name: gemm for name, gemm in dump.gemms.items() if fnmatchcase(name, layers)}
    if not gemms:
        wanted = f"a pattern of some of {', '.join(dump.gemms)}"
        raise ArgumentError("recipes", "--layers", repr(layers), wanted)
    return Dump(gemms)


def _compare(options: argparse.Namespace) -> int:
    from fp8kit.numerics.compare import RESULTS, compare, summaries
    from fp8kit.numerics.config import OPERAND_TENSORS

    device = device_of(options)
    chosen, dump = _chosen(options.recipes, device), _dump(options.dump, options.layers)
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
        worst = "" if place is None else f"{OPERAND_TENSORS[place[1]]} in {place[0]}"
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
