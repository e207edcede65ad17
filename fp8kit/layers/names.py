"""``name_layers``: the layers of a model get the names that they are found by."""

from __future__ import annotations

from typing import Any

from fp8kit.errors import ArgumentError
from fp8kit.layers.dot_product_attention import DotProductAttention
from fp8kit.layers.fp8_layer import FP8Layer


def name_layers(model: Any) -> Any:
    """Give every layer of fp8kit within ``model``, a module of this frontend, the name under which
    ``model.named_modules()`` has it, as its ``name``: what ``recipe.PerLayer`` and ``recipe.CustomRecipe`` go
    by. Returns the model. ArgumentError if ``model`` has no such method."""
    if not callable(getattr(model, "named_modules", None)):
        raise ArgumentError("name_layers", "model", f"a {type(model).__name__}", "a module")
    for name, module in model.named_modules():
        # takes_name: a frontend's own layers of products that are no FP8Layer
        if isinstance(module, FP8Layer | DotProductAttention) or getattr(module, "takes_name", False):
            module.name = name
    return model
