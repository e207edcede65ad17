"""``fp8kit recipes``: the published recipes listed, shown, and checked on data."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fp8kit import recipe_info
from fp8kit.commands import add_device, command, device_of, positive, recipes_compare, seed, table
from fp8kit.errors import ArgumentError, Fp8kitError, meant
from fp8kit.recipes import NAMED, entry

_SHAPE = (256, 512, 512)
_WORDS = (
    "Distributions: normal; student_t, of 3 degrees of freedom; lognormal, with random signs; outliers, "
    "normal, and one in a thousand has a normal number of deviation 10 added. Of values v that stand for x, "
    "relative error: sqrt(sum (x - v)^2 / sum x^2); SQNR: 10 log10(sum x^2 / sum (x - v)^2); clipped: the "
    "share of elements beyond the largest value that their codes can have; flushed: the share that is not 0 "
    "and becomes 0; median of rows: the median of the rows' own relative errors. A recipe whose scales "
    "follow from earlier steps (delayed) is checked in its second step, on the data of the first. A .npy "
    "file of 2-byte void, as NumPy saves bfloat16 of ml_dtypes, is read as bfloat16."
)


def add(commands: Any) -> None:
    """Register the subcommand; ``commands`` is what ``ArgumentParser.add_subparsers`` returned."""
    what = "the published recipes: which there are, what they do, and what they cost on given data"
    actions = command(commands, "recipes", what).add_subparsers(dest="action", required=True)
    about = "every recipe: name, short name, how it runs on each device here, and where it is published"
    command(actions, "list", about, _list)
    about = "one recipe: how the operands of the three GEMMs are cast, its fields, and where it is published"
    command(actions, "show", about, _show)
    about = "the errors that a recipe makes on data: of each operand, and of y, dx and dW of a Linear"
    checking = command(actions, "check", about, _check, epilog=_WORDS)
    for word in ("show", "check"):
        actions.choices[word].add_argument("name", metavar="NAME", help="as `fp8kit recipes list` prints it")
    for option, matrix, default in (
        ("--data", "the input x, (rows, in)", "normal"),
        ("--weight", "the weight w, (out, in), which a drawn one is divided by sqrt(in)", None),
        ("--gradient", "the output gradient g, (rows, out)", None),
    ):
        usual = default or "--data's distribution, normal beside a file"
        checking.add_argument(
            option,
            metavar="DATA",
            default=default,
            help=f"{matrix}: a distribution, or a .npy file ({usual})",
        )
    rows, inputs, outputs = _SHAPE
    checking.add_argument(
        "--shape",
        type=positive,
        nargs=3,
        metavar=("ROWS", "IN", "OUT"),
        help=f"sizes of what is drawn ({rows} {inputs} {outputs}, or those of the files)",
    )
    checking.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of the Linear, to which the data are rounded first (%(default)s)",
    )
    checking.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of all that is drawn (%(default)s)"
    )
    add_device(checking)
    recipes_compare.add(actions)
    for action in actions.choices.values():
        action.add_argument("--json", action="store_true", help="print JSON")
        about = "a Python file, run first, that adds recipes of your own by fp8kit.recipes.add(NAME, RECIPE)"
        action.add_argument("--from", dest="own", metavar="FILE.py", help=about)
        action.set_defaults(run=_with_own(action.get_default("run")))


def _with_own(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """``run`` after the file that --from names."""

    def both(options: argparse.Namespace) -> int:
        if options.own is not None:
            _run_file(options.own)
        return run(options)

    return both


def _run_file(path: str) -> None:
    """Run a file that adds recipes. ArgumentError where there is none, or it fails."""
    if not Path(path).is_file():
        raise ArgumentError("recipes", "--from", repr(path), "a Python file: no such file")
    try:
        runpy.run_path(path)
    except Exception as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == path]
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        where = f", line {lines[-1]}" if lines else ""
        wanted = f"a Python file that runs ({what}{where})"
        raise ArgumentError("recipes", "--from", repr(path), wanted) from error


def _list(options: argparse.Namespace) -> int:
    found = [recipe_info.facts(name) for name in NAMED]
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    here = [str(device) for device in recipe_info.devices()]
    table(
        ("name", "recipe", *here, "source"),
        [
            (
                each["name"],
                each["short_name"],
                *(recipe_info.Support(**each["devices"][device]) for device in here),
                each["source"],
            )
            for each in found
        ],
        fit=True,
    )
    return 0


def _show(options: argparse.Namespace) -> int:
    recipe, source = entry(options.name, "recipes")
    found = recipe_info.facts(options.name)
    gemms, fields = recipe_info.gemm_facts(recipe), recipe_info.field_values(recipe)
    attention = recipe_info.attention_facts(recipe)
    if options.json:
        details = {"gemms": gemms, "attention": attention, "fields": fields}
        print(json.dumps({**found, **details}, indent=2))
        return 0
    print(f"{options.name}: {found['recipe']}, {found['short_name']}\nsource: {source}")
    for device, support in found["devices"].items():
        print(f"on {device}: {recipe_info.Support(**support)}")
    for least, support in found["capabilities"].items():
        print(f"from compute capability {least} on: {recipe_info.Support(**support)}")
    history = recipe.history
    print("state: none" if history is None else f"state: scales of earlier steps, {history}")
    print(f"random bits: {'yes, in JAX from autocast(rng=key)' if found['random'] else 'none'}\n")
    rows = []
    for gemm, own in gemms.items():
        for matrix, cast in own["operands"].items():
            how = (
                [cast[name] for name in ("format", "granularity", "scale")] if cast else ["as it is", "", ""]
            )
            more = [_rounding(cast), (cast.get("rotation") or "none") if cast else ""]
            rows.append((gemm, matrix, *how, *more, own["compute"], own["accumulation"]))
    head = ("GEMM", "operand", "format", "granularity", "scale", "rounding", "rotation", "compute")
    table((*head, "accumulation"), rows)
    print()
    if again := _cast_anew(gemms):
        print(f"{again}\n")
    _show_attention(attention)
    table(("field", "value"), fields.items())
    return 0


def _cast_anew(gemms: dict[str, Any]) -> str:
    """Returns which operands are cast from what fprop multiplied, "" where none is."""
    again = ", ".join(
        f"{matrix} of {name}"
        for name, own in gemms.items()
        for matrix in own["operands"]
        if own["recast"] and matrix != "g"
    )
    return again and f"cast anew, from the values of fprop's codes: {again}"


def _rounding(cast: dict[str, Any]) -> str:
    """Returns how codes are rounded, in a word; of an operand that is not cast none."""
    bits = cast.get("rounding_bits")
    return "" if not cast else f"{bits} bits" if bits else "nearest"


def _show_attention(found: dict[str, Any]) -> None:
    """The operands of attention's products, and what they have in common."""
    if not found:
        print("attention: high precision\n")
        return
    rows = [
        (name, *(cast[key] for key in ("format", "granularity", "scale")), _rounding(cast))
        for name, cast in found["operands"].items()
    ]
    table(("attention", "format", "granularity", "scale", "rounding"), rows)
    words = {
        "rows that share a scale": found["rows_per_block"] or "all",
        **{
            f"rotation of {of}": f"{found[name]}, signs {found['signs']}" if found[name] else "none"
            for of, name in (("q and k", "rotation"), ("v", "rotation_v"))
        },
        "scales of q, k, v": "one" if found["joint"] else "one each",
        "products": found["compute"],
        "emulated sums": "float32",
    }
    print("; ".join(f"{name}: {value}" for name, value in words.items()), end="\n\n")


# --- check --------------------------------------------------------------------------------------------------


def _file(option: str, text: str) -> np.ndarray[Any, Any]:
    """Returns the matrix of a .npy file, its leading dimensions flattened. ArgumentError where there is
    none."""
    try:
        found = np.load(text, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "it is no array that np.save wrote"
        raise ArgumentError(
            "recipes", option, repr(text), f"a .npy file that can be read ({reason})"
        ) from None
    if not isinstance(found, np.ndarray) or found.ndim < 2 or not found.size:
        got = f"{text!r} of shape {getattr(found, 'shape', 'none')}"
        raise ArgumentError("recipes", option, got, "an array of at least 2 dimensions, not empty")
    matrix: np.ndarray[Any, Any] = found.reshape(-1, found.shape[-1])
    if matrix.dtype == np.dtype("V2"):  # as NumPy saves bfloat16 of ml_dtypes
        matrix = matrix.view(ml_dtypes.bfloat16).astype(np.float32)
    if matrix.dtype.kind not in "fiu":
        wanted = "float16, bfloat16, float32, float64 or integers"
        raise ArgumentError("recipes", option, f"{text!r} of {matrix.dtype}", f"finite numbers: {wanted}")
    bad = [word for word, where in (("NaN", np.isnan), ("Inf", np.isinf)) if where(matrix).any()]
    if bad:
        raise ArgumentError(
            "recipes", option, f"{text!r} of {matrix.dtype}, with {' and '.join(bad)}", "finite numbers"
        )
    return matrix


def _matrices(options: argparse.Namespace) -> tuple[list[np.ndarray[Any, Any]], str]:
    """x, w and g, and a word on each. ArgumentError for data that do not fit together."""
    from fp8kit.recipe_check import DISTRIBUTIONS, drawn

    usual = options.data if options.data in DISTRIBUTIONS else "normal"
    kinds = {
        "--data": options.data,
        "--weight": options.weight or usual,
        "--gradient": options.gradient or usual,
    }
    files = {}
    for option, text in kinds.items():
        if text not in DISTRIBUTIONS:
            if Path(text).suffix != ".npy":
                wanted = f"a .npy file, or one of {', '.join(DISTRIBUTIONS)}{meant(text, DISTRIBUTIONS)}"
                raise ArgumentError("recipes", option, repr(text), wanted)
            files[option] = _file(option, text)
    sizes = {"rows": "", "in": "", "out": ""}
    known: dict[str, int] = dict(zip(sizes, options.shape, strict=True)) if options.shape else {}
    set_by = dict.fromkeys(known, "--shape")
    names = {"--data": ("rows", "in"), "--weight": ("out", "in"), "--gradient": ("rows", "out")}
    for option, found in files.items():
        for name, size in zip(names[option], found.shape, strict=True):
            if known.setdefault(name, size) != size:
                wanted = f"{name} = {known[name]}, as {set_by[name]} has it"
                raise ArgumentError("recipes", option, f"shape {found.shape}", wanted)
            set_by.setdefault(name, option)
    shape = {name: known.get(name, size) for name, size in zip(sizes, _SHAPE, strict=True)}
    matrices = []
    for which, (option, text) in enumerate(kinds.items()):
        extents = tuple(shape[name] for name in names[option])
        own = files.get(option)
        made = drawn(text, extents, options.seed, which) if own is None else own
        matrices.append(made / np.float32(shape["in"] ** 0.5) if own is None and which == 1 else made)
    words = ", ".join(f"{name} {text}" for name, text in zip("xwg", kinds.values(), strict=True))
    return matrices, f"{words}; {shape['rows']} x {shape['in']} to {shape['out']}"


def _check(options: argparse.Namespace) -> int:
    recipe, _ = entry(options.name, "recipes")
    device = device_of(options)
    (x, w, g), said = _matrices(options)
    support = recipe_info.support_on(recipe, device)
    if support.status == recipe_info.REFUSED:
        raise Fp8kitError(
            "recipes", "NAME", f"{options.name} on {device}", f"a device where it runs: {support.why}"
        )
    from fp8kit.recipe_check import check

    if sys.stderr.isatty() and device.kind == "cpu":
        print("fp8kit recipes: checking; the first time kernels are compiled, for seconds", file=sys.stderr)
    found = check(recipe, x, w, g, options.dtype, device, options.seed)
    operands = [
        {"gemm": gemm, "operand": matrix, **(errors._asdict() if errors else {})}
        for (gemm, matrix), errors in found.operands.items()
    ]
    if options.json:
        results = {
            name: {
                **_pair(errors),
                **({"row_median": found.row_errors[name]} if name in found.row_errors else {}),
                **{f"{key}_without": value for key, value in _pair(found.plain[name]).items()},
            }
            for name, errors in found.results.items()
        }
        about = {"name": options.name, "device": str(device), "data": said, "dtype": options.dtype}
        about |= {"step": found.step}
        more = {"status": support.status, "operands": operands, "results": results}
        print(json.dumps({**about, "seed": options.seed, **more}, indent=2))
        return 0
    print(f"{options.name}, {recipe.short_name()}, {support} on {device}")
    print(f"{said}; {options.dtype}, seed {options.seed}")
    if found.step == 2:
        print("the second step on the same data: its scales are those of the first step's amaxes")
    if recipe.attention is not None:
        print("the products of a layer; attention's, which this recipe quantises too, are not checked")
    print()
    casts = recipe_info.gemm_facts(recipe)
    rows = []
    for each in operands:
        cast = casts[each["gemm"]]["operands"][each["operand"]]
        how = f"{cast['format']} by {cast['granularity']}" if cast else "as it is"
        bits, rotation = cast.get("rounding_bits"), cast.get("rotation")
        how += f", {bits} random bits" * bool(bits) + f", {rotation}" * bool(rotation)
        shares = [_share(each[name]) if name in each else "" for name in ("clipped", "flushed")]
        rows.append((each["gemm"], each["operand"], how, *_errors(each), *shares))
    table(("GEMM", "operand", "cast", "relative error", "SQNR dB", "clipped", "flushed"), rows)
    print()
    if again := _cast_anew(casts):
        print(f"{again}; their errors are against these values\n")
    rows = []
    for name, errors in found.results.items():
        median = f"{found.row_errors[name]:.4g}" if name in found.row_errors else ""
        relative, decibel = _errors(errors._asdict())
        rows.append((name, relative, median, decibel, *_errors(found.plain[name]._asdict())))
    head = ("result", "relative error", "median of rows", "SQNR dB", f"without: {options.dtype}", "SQNR dB")
    table(head, rows)
    return 0


def _pair(errors: Any) -> dict[str, Any]:
    return {"relative_error": errors.relative_error, "sqnr_db": errors.sqnr_db}


def _errors(each: dict[str, Any]) -> tuple[str, str]:
    if "relative_error" not in each:
        return "", ""
    decibel = each["sqnr_db"]
    return f"{each['relative_error']:.4g}", "exact" if decibel is None else f"{decibel:.2f}"


def _share(value: float) -> str:
    return f"{100 * value:.4g} %"
