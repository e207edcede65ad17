"""``QuantizerSet``: how one matrix product of a layer is quantised, and the state of its three operands where
they have some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from fp8kit.arguments import integer, shown
from fp8kit.errors import ArgumentError, RecipeError
from fp8kit.quantization import AmaxHistory, Quantization
from fp8kit.recipe import Recipe
from fp8kit_jax.arguments import as_array
from fp8kit_jax.scopes import check_recipe, history_of, recipe_in_force
from fp8kit_jax.state import Slot


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizerSet:
    """A pytree. ``x``, ``kernel``, ``grad``: slots of the input, the weight and the output gradient with
    delayed scaling, else None; ``recipe``: static, None for high precision; ``layer``: static, the product's
    name for the inspector, "" for none; ``kept_as``: static, the name of what the product keeps for backward
    (operands' codes, say), for the policies of ``jax.checkpoint``, "" for none. The cotangent of a set is the
    set after the step."""

    x: Slot | None = None
    kernel: Slot | None = None
    grad: Slot | None = None
    recipe: Recipe | None = field(default=None, metadata={"static": True})
    layer: str = field(default="", metadata={"static": True})
    kept_as: str = field(default="", metadata={"static": True})

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Returns the slots by their name in an operation."""
        found = {f"{prefix}x": self.x, f"{prefix}w": self.kernel, f"{prefix}g": self.grad}
        return {name: slot for name, slot in found.items() if slot is not None}


def state_names(postfix: str) -> list[str]:
    """Returns the names of a set's arrays as a module's variables (Transformer Engine's): ``x_scale``,
    ``x_amax_history``, and those of ``kernel`` and ``grad``, in the order that ``from_variables`` takes."""
    return [f"{own}{postfix}_{part}" for own in ("x", "kernel", "grad") for part in Slot._fields]


def state_variables(history: AmaxHistory, postfix: str = "") -> dict[str, Any]:
    """Returns the arrays of a fresh set by ``state_names``."""
    # arrays of its own for each slot: a step may donate them
    arrays = [array for _ in range(3) for array in Slot.fresh(history.length)]
    return dict(zip(state_names(postfix), arrays, strict=True))


def from_variables(
    recipe: Recipe | None, values: Sequence[Any], layer: str = "", kept_as: str = ""
) -> QuantizerSet:
    """Returns a set of ``state_variables``'s arrays."""
    return QuantizerSet(*(Slot(*values[i : i + 2]) for i in (0, 2, 4)), recipe, layer, kept_as)


noop_quantizer_set = QuantizerSet()


def create_set(recipe: Recipe | None = None, n_quantizer_sets: int = 1) -> Any:
    """Returns a fresh QuantizerSet, or a tuple of them for ``n_quantizer_sets`` > 1 (a layer with several
    products).

    ``recipe``: None is that of the autocast in force, high precision outside of any. Slots have the recipe's
    history length. Raises RecipeError for anything but a recipe, and for one that JAX cannot carry out
    (``autocast``).

    With delayed scaling a set is for one call in a step. JAX sums cotangents, which are the next states: a
    set that two calls share, or the steps of a ``jax.lax.scan``, comes back with the sum of their scales.
    Give each call its own, scanned ones stacked like the parameters.
    """
    recipe = recipe_in_force() if recipe is None else recipe
    check_recipe("create_set", recipe)
    recipe = None if recipe is None else recipe.fixed
    integer("create_set", "n_quantizer_sets", n_quantizer_sets, 1, 2**16)

    history = history_of(recipe)

    def one() -> QuantizerSet:
        if history is None:
            return QuantizerSet(recipe=recipe)
        return from_variables(recipe, list(state_variables(history).values()))

    return one() if n_quantizer_sets == 1 else tuple(one() for _ in range(n_quantizer_sets))


def _is_set(node: Any) -> bool:
    return isinstance(node, QuantizerSet)


def split_states(tree: Any) -> tuple[Any, Any]:
    """Returns the tree with None in the place of each QuantizerSet, and with None in the place of all else.
    Of a model that holds its states: what an optimiser may change, and its states; of its gradients: those
    of the parameters, and the next states."""

    def part(wanted: bool) -> Any:
        return jax.tree.map(lambda node: node if _is_set(node) is wanted else None, tree, is_leaf=_is_set)

    return part(False), part(True)


def join_states(rest: Any, states: Any) -> Any:
    """Returns the tree of which ``split_states`` made these."""

    def one(node: Any, state: Any) -> Any:
        return state if node is None else node

    return jax.tree.map(one, rest, states, is_leaf=lambda node: node is None or _is_set(node))


def resolve(
    operation: str, quantizer_set: QuantizerSet | None, name: str | None = None, ending: str = ""
) -> QuantizerSet:
    """Returns the set to use: ``quantizer_set``, or by the autocast in force; as its recipe is for a layer of
    this ``name``, whose product's name has the ``ending`` besides. RecipeError for a recipe that JAX cannot
    carry out, and where delayed scaling lacks its state or has one of another shape; ArgumentError for a name
    that is no text."""
    if not (name is None or isinstance(name, str)):
        raise ArgumentError(operation, "name", shown(name), "a text or None")
    if quantizer_set is None:
        found = QuantizerSet(recipe=recipe_in_force(operation, name))
    elif isinstance(quantizer_set, QuantizerSet):
        found = quantizer_set
    else:
        raise RecipeError(operation, "quantizer_set", type(quantizer_set).__name__, "a QuantizerSet or None")
    check_recipe(operation, found.recipe)
    if name is not None:
        found = _of_layer(found, operation, name, ending)
    if history_of(found.recipe) is not None and None in (found.x, found.kernel, found.grad):
        got = None if quantizer_set is None else "one without slots"
        own = found.recipe.short_name()
        wanted = f"quantizer_set=fj.create_set(recipe): {own} needs its state, scales of earlier steps"
        raise RecipeError(operation, "quantizer_set", got, wanted)
    for name in ("x", "kernel", "grad"):
        _check_slot(operation, f"quantizer_set.{name}", getattr(found, name))
    return found


def _of_layer(found: QuantizerSet, operation: str, name: str, ending: str) -> QuantizerSet:
    """Returns the set as its recipe is for a layer of this name. RecipeError where it has slots and the layer
    would leave them."""
    own = found.recipe
    if own is not None and own.by_layer:
        own = own.for_layer(operation, name)
        if history_of(own) is None and found.slots(""):
            got = f"slots, and {name!r} without state by its recipe"
            raise RecipeError(operation, "quantizer_set", got, "one without slots for this layer")
    return replace(found, recipe=own, layer=f"{name}{ending}")


def _check_slot(operation: str, argument: str, slot: Any) -> None:
    if slot is None:
        return
    if not isinstance(slot, Slot):
        raise RecipeError(operation, argument, shown(slot), "a Slot")
    for part, value in slot._asdict().items():
        array = as_array(operation, f"{argument}.{part}", value)
        fits = (
            array.ndim == 1
            and array.dtype == jnp.float32
            and (array.size == 1 if part == "scale" else array.size > 0)
        )
        if not fits:
            wanted = "float32 (1,)" if part == "scale" else "float32 (steps,), at least one"
            raise RecipeError(operation, f"{argument}.{part}", f"{array.dtype} {array.shape}", wanted)


def fp8_of(found: QuantizerSet) -> Quantization | None:
    """Returns what the set means for a product, None for high precision."""
    return None if found.recipe is None else found.recipe.quantization
