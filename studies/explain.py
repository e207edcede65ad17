"""Why a recipe loses what it loses: the casts of a model that has learned a little, operand by operand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fp8kit as fk
from fp8kit.arrays import Device
from fp8kit.autograd import tensor
from fp8kit.models import text
from fp8kit.models.presets import Preset
from fp8kit.numerics import Dump, capture
from fp8kit.numerics.compare import RESULTS, Comparison, compare
from fp8kit.numerics.config import OPERAND_TENSORS
from fp8kit.recipe import Recipe
from studies import files
from studies.cases import CASES, Case
from studies.corpus import Text
from studies.training import Trainer, about, model_of

STEPS = 20  # of the training whose operands are looked at, in high precision
ROWS = 256
BLOCKS = 3  # the first, the last, and between
GEMM_OF = {"y": "fprop", "dx": "dgrad", "dw": "wgrad"}
_LEAST = 1e-3  # a share of elements that is worth a word
_PLAIN = {"activation": "inputs", "weight": "weights", "gradient": "output gradients"}


def explain(
    folder: Path, size: Preset, corpus: Text, device: Device, names: Sequence[str], end: float
) -> bool:
    """Train each arrangement in high precision for ``STEPS`` steps, capture the operands of a batch, and see
    what each case's recipe does to them; write ``explain.json`` after each. Those that are there are skipped.
    Returns whether all are there; nothing begins after ``end``.

    Delayed scaling is looked at in a second step on the same data: what a scale that is a step late costs is
    not in it. Nor is what recipes do to attention's own products, or what moments in FP8 cost."""
    path = folder / "explain.json"
    found = (
        files.read(path) if path.exists() else {**about(device), "steps": STEPS, "rows": ROWS, "cases": {}}
    )
    dumps: dict[str, Dump] = {}
    for name in [name for name in names if name not in found["cases"]]:
        case = CASES[name]
        recipe = case.recipe(size.layers)
        if recipe is None:
            continue
        if time.monotonic() > end:
            print(f"explain: no time for {name} and what follows; call again")
            return False
        if case.arrangement not in dumps:
            dumps[case.arrangement] = operands(case, size, corpus, device)
        alike = _alike(case, found["cases"], size.layers)
        own = found["cases"][alike] if alike else of_case(recipe, dumps[case.arrangement], device)
        found["cases"][name] = own
        files.write(path, found)
        print(f"{name}: {found['cases'][name]['sentence']}", flush=True)
    return True


def operands(case: Case, size: Preset, corpus: Text, device: Device) -> Dump:
    """The operands of ``BLOCKS`` of a case's blocks after ``STEPS`` steps in high precision from seed 0; not
    the head's, which no recipe reaches."""
    model = model_of(case, size, device, 0)
    with fk.deterministic():
        trainer = Trainer(model, size, None)
        for number in range(min(STEPS, size.steps)):
            trainer.step(corpus.train, 0, number)
        ids, targets = text.batch(corpus.train, size.sequences, size.context, 0, size.steps)
        aim = tensor(targets, device=device)
        dump = capture(model, tensor(ids, device=device), lambda y: fk.nn.cross_entropy(y, aim))
    last = size.layers - 1
    blocks = {str(round(i * last / (BLOCKS - 1))) for i in range(BLOCKS)}
    names = [layer for layer in dump.gemms if layer.startswith("layers.")]
    kept = {layer: dump.gemms[layer] for layer in names if layer.split(".")[1] in blocks}
    return Dump(kept)


def _alike(case: Case, known: Mapping[str, Any], layers: int) -> str | None:
    """A case that is there and casts the same operands alike."""
    for name in known:
        other = CASES[name]
        mine, its = case.recipe(layers), other.recipe(layers)
        if mine is None or its is None or mine.by_layer or its.by_layer:
            continue
        alike = mine.quantization == its.quantization and mine.history == its.history
        if alike and case.arrangement == other.arrangement:
            return name
    return None


def of_case(recipe: Recipe, dump: Dump, device: Device) -> dict[str, Any]:
    """What a recipe does to the operands: medians over the layers of each kind, and a sentence."""
    found = compare(dump, {"recipe": recipe}, device, ROWS)
    kinds: dict[tuple[str, str, str], list[Any]] = {}
    for own in found:
        for (gemm, matrix), errors in own.operands.items():
            if errors is not None:
                kinds.setdefault((part_of(own.layer), gemm, OPERAND_TENSORS[matrix]), []).append(errors)
    rows = [
        {
            "layers": part,
            "gemm": gemm,
            "tensor": operand,
            "sqnr": _median([each.sqnr_db for each in own]),
            "underflows%": 100 * statistics.median(each.flushed for each in own),
            "saturated%": 100 * statistics.median(each.clipped for each in own),
        }
        for (part, gemm, operand), own in kinds.items()
    ]
    results = {GEMM_OF[name]: _median([own.results[name].sqnr_db for own in found]) for name in RESULTS}
    high = sorted(set(dump.gemms) - {own.layer for own in found})
    return {
        "rows": rows,
        "sqnr": results,
        "high_precision": high,
        "sentence": sentence(rows, results, found, bool(high)),
    }


def part_of(layer: str) -> str:
    """The kind of a layer: its name without its block."""
    return layer.split(".", 2)[-1]


def _median(values: Sequence[float | None]) -> float | None:
    """Of ratios in dB, None being no error at all."""
    own = [value for value in values if value is not None]
    return statistics.median(own) if own else None


def worst_of(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The operand that loses most; None where none loses anything."""
    lossy = [row for row in rows if row["sqnr"] is not None]
    return min(lossy, key=lambda row: row["sqnr"]) if lossy else None


def rows(folder: Path) -> list[tuple[str, ...]]:
    """The table's rows: of each case the operand that loses most, and the products' errors."""
    path, found = folder / "explain.json", []
    known = files.read(path)["cases"] if path.exists() else {}
    for name in [name for name in CASES if name in known]:
        own, worst = known[name], worst_of(known[name]["rows"])
        said = ["no operand", "", "", "", ""]
        if worst is not None:
            numbers = (f"{worst[stat]:.1f}" for stat in ("sqnr", "underflows%", "saturated%"))
            said = [f"{_PLAIN[worst['tensor']]} of {worst['layers']}", worst["gemm"], *numbers]
        products = ("exact" if value is None else f"{value:.1f}" for value in own["sqnr"].values())
        found.append((f"`{name}`", *said, *products))
    return found


COLUMNS = (
    *("case", "what loses most", "in", "dB", "become 0, %", "clipped, %"),
    *(f"{GEMM_OF[name]}, dB" for name in RESULTS),
)


def sentence(
    rows: Sequence[Mapping[str, Any]],
    results: Mapping[str, float | None],
    found: Sequence[Comparison],
    high: bool,
) -> str:
    """Which operand of which layers loses most, in plain words."""
    worst = worst_of(rows)
    if worst is None:
        return "No operand loses anything."
    words = f"Most is lost of the {_PLAIN[worst['tensor']]} of {worst['layers']} in {worst['gemm']}: "
    words += f"{worst['sqnr']:.1f} dB"
    shares = []
    if worst["underflows%"] > 100 * _LEAST:
        shares.append(f"{worst['underflows%']:.1f} % of their elements become 0")
    if worst["saturated%"] > 100 * _LEAST:
        shares.append(f"{worst['saturated%']:.1f} % are clipped")
    words += f", {' and '.join(shares)}" if shares else ", by rounding alone"
    known = ", ".join(
        f"{gemm} {value:.1f}" if value is not None else f"{gemm} exact" for gemm, value in results.items()
    )
    words += f"; the products keep (dB, median of the layers) {known}"
    last = max(found, key=lambda own: own.error)
    words += f"; the worst single layer is {last.layer}"
    return words + ("; the last blocks, in high precision, lose nothing." if high else ".")
