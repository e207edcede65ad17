"""``make_dot_general_cls``: FP8 in Flax's own layers, which take the class of their product."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from fp8kit.autocast import WANTED
from fp8kit.errors import ArgumentError, RecipeError
from fp8kit.recipe import Recipe
from fp8kit_jax import layers as functions
from fp8kit_jax.flax.common import draws_keys, quantizer_set, want_array


class DotGeneral(nn.Module):
    """What ``jax.lax.dot_general`` computes, as ``dense`` computes it. ``recipe``: None is as the autocast in
    force says. With delayed scaling its state is in the collection of ``DenseGeneral``."""

    recipe: Recipe | None = None

    @nn.compact
    @draws_keys
    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        **kwargs: Any,
    ) -> Any:
        """``lhs``, ``rhs``: h of any shapes; of two dtypes the wider one counts. ``dimension_numbers``: which
        dimensions are summed over; none is a batch's. ``precision`` and further arguments say how a product
        in high precision is computed, which is the device's own way here. Returns h, or
        ``preferred_element_type``. ArgumentError for batch dimensions."""
        summed, batch = dimension_numbers
        if any(map(tuple, batch)):
            wanted = "no batch dimensions: a kernel that all rows share"
            raise ArgumentError("DotGeneral", "dimension_numbers", dimension_numbers, wanted)
        lhs, rhs = want_array(self, "lhs", lhs), want_array(self, "rhs", rhs)
        dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        dims = tuple(summed[0]), tuple(summed[1])
        own = quantizer_set(self, recipe=None if self.recipe is None else self.recipe.fixed)
        y = functions.dense(lhs.astype(dtype), rhs.astype(dtype), None, dims, own)
        return y if preferred_element_type is None else y.astype(preferred_element_type)


def make_dot_general_cls(recipe: Recipe | None = None) -> Any:
    """Returns a class for ``flax.linen.Dense(dot_general_cls=...)`` and other layers with that field, whose
    product with a kernel is computed by ``recipe``; None is as the autocast in force says. RecipeError if it
    is not a recipe."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise RecipeError("make_dot_general_cls", "recipe", repr(recipe), WANTED)

    return partial(DotGeneral, recipe)
