"""Which recipe suits captured operands: the errors that each makes in every GEMM of a dump.

The errors are those of ``recipe_check.check``: of y, dx and dW against float64 products of the operands as
they are, and of each operand's cast.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8kit import recipe_check
from fp8kit.arrays import Device
from fp8kit.backends import dispatch
from fp8kit.errors import BackendError, UnsupportedError
from fp8kit.numerics.capture import Dump, GemmOperands
from fp8kit.numerics.config import OPERAND_TENSORS
from fp8kit.recipe import Recipe
from fp8kit.recipe_check import Errors

RESULTS = ("y", "dx", "dw")


class Comparison(NamedTuple):
    """What a recipe does to one GEMM of a layer. ``results``: "y", "dx", "dw" -> errors; ``operands``: (GEMM,
    "x", "w" or "g") -> errors, None of one that is not cast."""

    layer: str
    recipe: str
    results: Mapping[str, Errors]
    operands: Mapping[tuple[str, str], Errors | None]

    @property
    def error(self) -> float:
        """The largest of the relative errors of y, dx and dW."""
        return max(self.results[name].relative_error for name in RESULTS)

    @property
    def worst(self) -> tuple[str, str] | None:
        """(GEMM, operand) of the cast with the largest relative error; None where nothing is cast."""
        own = {place: errors for place, errors in self.operands.items() if errors is not None}
        return max(own, key=lambda place: own[place].relative_error) if own else None

    def as_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain values for JSON."""
        worst = self.worst
        return {
            "layer": self.layer,
            "recipe": self.recipe,
            "error": self.error,
            "results": {
                name: {"relative_error": own.relative_error, "sqnr_db": own.sqnr_db}
                for name, own in self.results.items()
            },
            "operands": [
                {"gemm": gemm, "operand": OPERAND_TENSORS[matrix], **(own._asdict() if own else {})}
                for (gemm, matrix), own in self.operands.items()
            ],
            "worst": None if worst is None else {"gemm": worst[0], "operand": OPERAND_TENSORS[worst[1]]},
        }


def sampled(operands: GemmOperands, rows: int) -> GemmOperands:
    """Returns the operands with at most ``rows`` rows of x and g, evenly spaced."""
    count = len(operands.activation)
    if count <= rows:
        return operands
    at = np.linspace(0, count - 1, rows).round().astype(np.int64)
    return operands._replace(activation=operands.activation[at], gradient=operands.gradient[at])


def compare(
    dump: Dump,
    recipes: Mapping[str, Recipe],
    device: Device | None = None,
    rows: int = 2048,
    seed: int = 0,
    each: Callable[[Comparison], None] | None = None,
) -> list[Comparison]:
    """Returns the errors of every GEMM under every recipe, sorted: GEMMs in the order of the forward pass,
    for each the recipes from the smallest ``Comparison.error`` to the largest.

    ``recipes`` by name. ``device``: where the layers run, None the default device. ``rows``: of x and g at
    most, evenly spaced; a tensor's scale is then that of these rows. ``seed``: of stochastic rounding.
    ``each`` is called with every comparison when it is made. All is in the operands' dtype; the errors are
    against float64. BackendError or UnsupportedError, which names the recipe, where one does not run.
    """
    where = device or dispatch.default_device()
    found = []
    for layer, whole in dump.gemms.items():
        operands = sampled(whole, rows)
        own = []
        for name, recipe in recipes.items():
            dtype = operands.activation.dtype.name
            recipe_of_layer = recipe.for_layer("Linear", layer) if recipe.by_layer else recipe
            if recipe_of_layer is None:
                continue
            try:
                checked = recipe_check.check(recipe_of_layer, *operands, dtype, where, seed)
            except (BackendError, UnsupportedError) as error:
                raise type(error)(f"recipe {name}, {layer}: {error}") from None
            made = Comparison(layer, name, checked.results, checked.operands)
            own.append(made)
            if each is not None:
                each(made)
        found += sorted(own, key=lambda comparison: comparison.error)
    return found


class Summary(NamedTuple):
    """A recipe's errors over all GEMMs: the median of the relative errors of y, dx and dW, the layer with the
    largest of them, and its error."""

    recipe: str
    medians: dict[str, float]
    worst_layer: str
    worst_error: float


def summaries(found: Sequence[Comparison]) -> list[Summary]:
    """Returns a summary for each recipe, from the smallest median of ``Comparison.error`` to the largest."""
    names = dict.fromkeys(own.recipe for own in found)
    rows = []
    for name in names:
        own = [one for one in found if one.recipe == name]
        medians = {key: statistics.median(one.results[key].relative_error for one in own) for key in RESULTS}
        worst = max(own, key=lambda one: one.error)
        middle = statistics.median(one.error for one in own)
        rows.append((middle, Summary(name, medians, worst.layer, worst.error)))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]
