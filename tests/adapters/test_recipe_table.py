"""The table of recipes in docs/recipes.md is what the code says."""

from __future__ import annotations

import importlib.util

from fp8kit.recipes import NAMED
from tests.support.source import ROOT


def test_the_table_is_what_the_code_says():
    spec = importlib.util.spec_from_file_location("recipe_table", ROOT / "docs/recipe_table.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    text = made.PAGE.read_text()
    assert text == made.page(text), "PYTHONPATH=.:adapters python docs/recipe_table.py writes it"
    rows = made.table().split("\n\n")[0].splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(NAMED)
    words = "".join(rows)
    assert all(word in words for word in ("native", "emulated", "attention is emulated", "`rng=key`"))
