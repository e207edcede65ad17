"""``autocast`` and ``MeshResource``: where FP8 is on, by which recipe, and which mesh axes mean what."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Protocol

import jax

from fp8kit.arguments import named_well, shown
from fp8kit.attention_quantization import AttentionQuantization
from fp8kit.autocast import WANTED, current, want_no_checks
from fp8kit.autocast import autocast as scope
from fp8kit.errors import RecipeError
from fp8kit.quantization import AmaxHistory
from fp8kit.recipe import Recipe
from fp8kit.scoped import Scoped
from fp8kit_jax.arguments import is_key

log = logging.getLogger("fp8kit")


@dataclass(frozen=True)
class MeshResource:
    """Names of mesh axes by their use, None where there is none (Transformer Engine's MeshResource): data,
    tensor, tensor and sequence, fully sharded data, pipeline, context and expert parallelism. Amaxes are
    reduced over all of them but the pipeline's."""

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not isinstance(value, str):
                raise RecipeError("MeshResource", field.name, repr(value), "the name of a mesh axis or None")


class KeySource(Protocol):
    """Where the casts of operations take their random keys. ``also``: what an error names as another place
    for a key."""

    also: str

    def next(self) -> Any:
        """Returns the next one, None where there is none."""


class Keys:
    """The random keys of the casts within one autocast: its key, folded with the number of the cast."""

    also = ""

    def __init__(self, key: Any) -> None:
        self.key, self.drawn = key, 0

    def next(self) -> Any:
        """Returns the next one."""
        self.drawn += 1
        return jax.random.fold_in(self.key, self.drawn)


_RESOURCE: Scoped[MeshResource] = Scoped("fp8kit_jax_resource", MeshResource())
_KEYS: Scoped[KeySource | None] = Scoped("fp8kit_jax_keys", None)
_PLAIN_ATTENTION: Scoped[bool] = Scoped("fp8kit_jax_plain_attention", False)


def mesh_resource() -> MeshResource:
    """Returns the MeshResource of the innermost autocast that gave one."""
    return _RESOURCE.get()


def global_shard_guard(resource: MeshResource) -> AbstractContextManager[None]:
    """``resource`` says what the mesh axes mean within, as ``autocast(mesh_resource=...)`` does."""
    if not isinstance(resource, MeshResource):
        raise RecipeError("global_shard_guard", "resource", shown(resource), "a MeshResource")
    return _RESOURCE.within(resource)


def next_key(operation: str) -> Any:
    """Returns a key for the random bits of one operation's casts, from the innermost autocast that has some,
    or from the Flax module that calls the operation. RecipeError where none has."""
    keys = _KEYS.get()
    key = None if keys is None else keys.next()
    if key is None:
        also = "" if keys is None else keys.also
        wanted = f"a key: autocast(..., rng=key){also}, since this recipe draws random bits"
        raise RecipeError(operation, "rng", None, wanted)
    return key


@contextmanager
def keys_from(source: KeySource) -> Iterator[None]:
    """Casts within take their keys from ``source``, unless an autocast around has some."""
    # the innermost module's: those of one around a scan are the same in each of its steps
    with nullcontext() if isinstance(_KEYS.get(), Keys) else _KEYS.within(source):
        yield


def recipe_in_force(kind: str = "", name: str | None = None) -> Recipe | None:
    """Returns the recipe of the innermost autocast where it is enabled, else None; as it is for a layer of
    that class and name, None where it has none, where recipes differ from layer to layer."""
    state = current()
    want_no_checks(kind or "recipe", state)
    if state is None or not state.enabled:
        return None
    if state.recipe.by_name and name is None:
        wanted = (
            "a recipe that goes by no names: dense(name=...) has one, Flax's linen modules, and those that "
        )
        raise RecipeError(
            kind or "recipe",
            "recipe",
            state.recipe.short_name(),
            wanted + "name_layers of fp8kit_jax.nnx named",
        )
    return state.recipe.for_layer(kind, name or "")


def goes_by_names() -> bool:
    """Whether the autocast in force has a recipe that differs from layer to layer by their names."""
    state = current()
    return state is not None and state.enabled and state.recipe.by_name


def attention_in_force(kind: str, name: str) -> AttentionQuantization | None:
    """Returns how the autocast in force wants the attention of a layer of that class and name quantised; None
    for high precision. RecipeError for a recipe by names that has FP8 attention, where there is no name."""
    state = current()
    if state is None or not state.enabled or _PLAIN_ATTENTION.get():
        return None
    recipe = state.recipe
    if recipe.by_name and not name:
        if not recipe.any_attention:
            return None
        recipe_in_force(kind)
    return recipe.attention_for(name)


@contextmanager
def plain_attention(wanted: bool) -> Iterator[None]:
    """Attention within is in high precision, where ``wanted``."""
    with _PLAIN_ATTENTION.within(wanted or _PLAIN_ATTENTION.get()):
        yield


def history_of(recipe: Recipe | None) -> AmaxHistory | None:
    """Returns how the recipe's scales follow from earlier steps; None where they do not, and in high
    precision."""
    return None if recipe is None else recipe.history


def check_recipe(operation: str, recipe: Any) -> None:
    """RecipeError for anything but a recipe or None, and for a recipe that JAX cannot carry out: one with
    host callables, or with ``reduce_amax=False``."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise RecipeError(operation, "recipe", shown(recipe), WANTED)
    history = history_of(recipe)
    if history is not None:
        if history.on_host:
            raise RecipeError(
                operation,
                "recipe",
                "a recipe with callables",
                "amax_compute_algo 'max' or 'most_recent' in JAX",
            )
        if not history.reduce:
            raise RecipeError(operation, "recipe", "reduce_amax=False", "reduce_amax=True in JAX")


@named_well
def autocast(
    enabled: bool | None = None,
    recipe: Recipe | None = None,
    mesh_resource: MeshResource | None = None,
    *,
    rng: Any = None,
) -> AbstractContextManager[None]:
    """Functions and modules that are *traced* within compute in FP8, in this thread or asyncio task.

    * ``enabled``: False switches FP8 off, also inside another autocast; None, the default, too, and where
      there is a ``recipe``, a warning says so once. ``recipe``: None is ``DelayedScaling()``.
    * ``mesh_resource``: what the mesh axes mean; None is as the autocast around this one.
    * ``rng``: a JAX key, for recipes that round stochastically or rotate with random signs; None is as the
      autocast around this one, and where that has none, Flax's linen modules draw from their rng collection
      "sr_rng" (Transformer Engine's name): ``apply(..., rngs={"sr_rng": key})``. Each operation within takes
      the key folded with its number, in the order in which they are traced. The autocast belongs inside the
      function that is jitted, and the key among its arguments, another one for every step: a key from outside
      is a constant of the compiled program. What ``jax.lax.scan`` traces once draws the same bits in each of
      its steps, unless the key comes in with them.

    Raises RecipeError for wrong arguments, and for a recipe that JAX cannot carry out: one with host
    callables, or with ``reduce_amax=False``. Source: Transformer Engine's
    ``transformer_engine.jax.autocast``.
    """
    check_recipe("autocast", recipe)
    if mesh_resource is not None and not isinstance(mesh_resource, MeshResource):
        raise RecipeError("autocast", "mesh_resource", repr(mesh_resource), "a MeshResource or None")
    if rng is not None and not (is_key(rng) and rng.shape == ()) and not is_raw_key(rng):
        raise RecipeError("autocast", "rng", shown(rng), "one JAX key")
    if enabled is None:
        enabled = False
        if recipe is not None:
            _say_off()
    scope(enabled=enabled, recipe=recipe)  # refuses
    return _within(enabled, recipe, mesh_resource, rng)


@cache
def _say_off() -> None:
    """Warn, once in a process."""
    log.warning("autocast(recipe=...) without enabled=True leaves FP8 off: enabled is False by default")


def is_raw_key(value: Any) -> bool:
    """Whether it is a key of two words, of the kind before ``jax.random.key``."""
    return getattr(value, "shape", None) == (2,) and str(getattr(value, "dtype", "")) == "uint32"


@contextmanager
def _within(
    enabled: bool, recipe: Recipe | None, mesh_resource: MeshResource | None, rng: Any
) -> Iterator[None]:
    with (
        scope(enabled=enabled, recipe=recipe),
        nullcontext() if mesh_resource is None else _RESOURCE.within(mesh_resource),
        nullcontext() if rng is None else _KEYS.within(Keys(rng)),
    ):
        yield
