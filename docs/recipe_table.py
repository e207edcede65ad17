"""Writes the table of recipes, frontends and devices in docs/recipes.md, from the code alone ::

    PYTHONPATH=.:adapters python docs/recipe_table.py

``tests/adapters/test_recipe_table.py`` fails where the page has another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8kit_jax.scopes import check_recipe

from fp8kit.errors import RecipeError
from fp8kit.recipe_info import REFUSED, support_of
from fp8kit.recipes import NAMED

PAGE = Path(__file__).with_name("recipes.md")
BEGIN, END = "<!-- recipes -->", "<!-- /recipes -->"
# a column's head -> compute capability, None for a CPU
DEVICES = {
    "CPU": None,
    "Ampere 8.0": (8, 0),
    "Ada 8.9": (8, 9),
    "Hopper 9.0": (9, 0),
    "Blackwell 10.0": (10, 0),
}


def jax_says(recipe: Any) -> str:
    """Whether JAX takes a recipe, and with what."""
    try:
        check_recipe("autocast", recipe)
    except RecipeError as error:
        return f"no: {error}"
    return "yes, `rng=key`" if recipe.quantization.needs_rng else "yes"


def table() -> str:
    """The table, and a line for each reason to refuse."""
    reasons: dict[str, int] = {}
    rows = []
    for name, (recipe, _) in NAMED.items():
        cells = []
        for capability in DEVICES.values():
            found = support_of(recipe, capability)
            note = f" ({reasons.setdefault(found.why, len(reasons) + 1)})" if found.status == REFUSED else ""
            cells.append(f"{found.status}{note}" if note or not found.why else f"{found.status}, {found.why}")
        # native layers and torch's take what a product carries out
        own = "no" if support_of(recipe, None).status == REFUSED else "yes"
        rows.append(f"| `{name}` | {own} | {own} | {jax_says(recipe)} | {' | '.join(cells)} |")
    head = f"| recipe | `fp8kit.nn` | `fp8kit_torch` | `fp8kit_jax` | {' | '.join(DEVICES)} |"
    lines = [head, "|" + "---|" * (4 + len(DEVICES)), *rows]
    notes = [f"({number}) {why}." for why, number in reasons.items()]
    return "\n".join([*lines, "", *notes] if notes else lines)


def page(text: str) -> str:
    """The page's text with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
