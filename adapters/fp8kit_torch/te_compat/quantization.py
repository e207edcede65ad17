"""``transformer_engine.pytorch.quantization``: what its functions say about recipes."""

from __future__ import annotations

from typing import Any

import torch

from fp8kit.errors import RecipeError
from fp8kit.formats import E4M3, E5M2
from fp8kit.recipe import Format, Recipe
from fp8kit_torch.autocast import autocast, fp8_autocast
from fp8kit_torch.availability import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    get_default_fp8_recipe,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    missing_for,
)
from fp8kit_torch.quantized import fp8_model_init, quantized_model_init
from fp8kit_torch.te_compat.dtypes import DType, TE_DType, of_format
from fp8kit_torch.te_compat.global_state import FP8GlobalStateManager


def check_nvfp4_support() -> tuple[bool, str]:
    """``is_nvfp4_available(return_reason=True)``, by its older name."""
    return is_nvfp4_available(True)  # type: ignore[return-value]


def _want_recipe(operation: str, name: str, recipe: Any) -> Recipe:
    if not isinstance(recipe, Recipe):
        raise RecipeError(operation, name, repr(recipe)[:80], "a Recipe, such as recipe.DelayedScaling()")
    return recipe


def check_recipe_support(recipe: Recipe) -> None:
    """Nothing where the recipe runs on this device. RecipeError, a ValueError, for what is none,
    ``RuntimeError`` with the reason where it does not run."""
    why = missing_for(_want_recipe("check_recipe_support", "recipe", recipe))
    if why:
        raise RuntimeError(why)


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """The multiple to which Transformer Engine pads the rows of a group: 32 for MXFP8, 128 for NVFP4 and,
    unless it has a ``quantization_alignment``, for a custom recipe, else 16. ``Fp8Padding`` does not need
    it."""
    return int(_want_recipe("get_align_size_for_quantization", "recipe", recipe).quantization_alignment)


def _format(operation: str, recipe: Recipe, fprop_tensor: bool) -> Any:
    """The 8-bit format. RecipeError where operands have none, or layers recipes of their own."""
    own: Format | None = getattr(_want_recipe(operation, "fp8_recipe", recipe), "fp8_format", None)
    if own is not None:
        return own.forward if fprop_tensor else own.backward
    found = None
    if not recipe.by_layer:
        found = recipe.forward_format if fprop_tensor else recipe.backward_format
    if found not in (E4M3, E5M2):
        wanted = "a recipe of E4M3 or E5M2 for all layers, such as DelayedScaling()"
        raise RecipeError(operation, "fp8_recipe", repr(recipe), wanted)
    return found


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """The 8-bit format of a recipe's forward tensors, or of its gradients."""
    return of_format(_format("get_fp8_te_dtype", fp8_recipe, fprop_tensor))


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """``get_fp8_te_dtype`` as torch's dtype."""
    found = get_fp8_te_dtype(fp8_recipe, fprop_tensor)
    return next(dtype for dtype, member in TE_DType.items() if member == found)


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """The largest value of ``get_fp8_te_dtype``: 448 or 57344."""
    return float(_format("get_fp8_max", fp8_recipe, fprop_tensor).max)


def get_fp4_te_dtype(fp4_recipe: Recipe) -> DType:
    """The 4-bit format of a recipe of NVFP4. RecipeError for others."""
    if not _want_recipe("get_fp4_te_dtype", "fp4_recipe", fp4_recipe).nvfp4():
        raise RecipeError("get_fp4_te_dtype", "fp4_recipe", repr(fp4_recipe), "NVFP4BlockScaling")
    return DType.kFloat4E2M1


__all__ = [
    "FP8GlobalStateManager",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_recipe_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_fp4_te_dtype",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]
