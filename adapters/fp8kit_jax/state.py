"""Delayed scaling's state as values: ``Slot``s in a pytree, and the rule that makes the next one.

A slot belongs to one quantised tensor of one layer. Its cotangent is its next value (see ``rules``). JAX sums
cotangents:

* over the devices of a shard_map, where the state is the same on all: amaxes are reduced by max over the
  manual axes, then every device but the first gives zeros, so that the sum is the value. A gradient that is
  taken inside, without ``check_vma``, JAX does not sum, and nothing tells that case: the caller does (psum);
* over the elements of a vmap that share the state: likewise, amaxes are reduced by max over the batch, and
  all elements but the first give zeros;
* over the steps of a scan that *share* a state, or two calls with one state, JAX adds next values up: give
  each layer its own slots (stacked, as the scanned inputs), as for its parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from fp8kit.arguments import shown
from fp8kit.errors import ArgumentError
from fp8kit.quantization import AmaxHistory, DelayedRule
from fp8kit.recipe import DELAYED_SCALES, UNFILLED
from fp8kit_jax import manual
from fp8kit_jax.division import divide

# Of Flax variables. Flax's own name for variables whose gradient is their next value: its TrainState puts
# that gradient in their place and keeps them from the optimiser.
FP8_COLLECTION_NAME = NVTE_FP8_COLLECTION_NAME = "_overwrite_with_gradient"
FORMER_COLLECTION_NAME = "fp8_metas"  # read where variables have it and not the other


class Slot(NamedTuple):
    """One quantised tensor's state: ``scale`` float32 (1,), ones at first; ``amax_history`` float32 (H,),
    zeros at first, row 0 free for the amax since the last update, row 1 the oldest (Transformer Engine's
    order)."""

    scale: Any
    amax_history: Any

    @classmethod
    def fresh(cls, history_len: int) -> Slot:
        """Returns a slot before its first use."""
        return cls(jnp.ones((1,), jnp.float32), jnp.zeros((history_len,), jnp.float32))


State = Mapping[str, Slot]


# jitted: a rule is traced and lowered once, and not for each of a layer's slots
@functools.partial(jax.jit, static_argnums=range(2, 8))
def updated(
    slot: Slot,
    amax: Any,
    fp8_max: float,
    margin: int,
    most_recent: bool,
    power_2: bool = False,
    growth: float | None = None,
    by_window: bool = False,
) -> Slot:
    """Returns the slot after a step whose largest absolute value was ``amax``, float32 (1,):
    ``update_delayed_``'s rule, in JAX.

    Unchanged where amax is 0. Else a = max(amax, history), NaN ignored, or amax alone; scale = fp8_max *
    2**-margin / a where a is finite and positive, brought into ``recipe.DELAYED_SCALES``, a power of two with
    ``power_2``; the history rolls by one and amax becomes its last row. With ``growth`` a is a bound of the
    next amax, and the last row is 0 where an older row holds the measure. With ``by_window`` the scale
    changes where the window is full, which begins anew, and in the first one. XLA's CPU code takes a
    subnormal amax for 0. Written in JAX, where XLA fuses it; the bits are the engine's
    (``tests/adapters/jax/test_same_as_native.py``).
    """
    before = slot.amax_history[1:]
    # concatenated: XLA makes a loop of a scatter, which takes long to compile
    history = jnp.concatenate([amax, before])
    known = jnp.where(jnp.isnan(history), 0.0, history)
    a = history[:1] if most_recent else jnp.max(known, keepdims=True)
    used, zero, kept = amax != 0, jnp.zeros_like(amax), amax
    if growth is not None:
        # constants: XLA may join a product and a sum to one that rounds once
        with np.errstate(over="ignore"):
            steps = np.float32(growth) * np.arange(before.shape[0] + 1, 1, -1, np.float32)
        bounds = jnp.where(before > 0, before + steps, 0.0)
        bound = jnp.max(bounds, keepdims=True, initial=0.0)
        a = jnp.where(bound > 0, bound, amax + np.float32(growth))
        kept = jnp.where((bound > 0) | ~jnp.isfinite(amax), zero, amax)
    usable = jnp.isfinite(a) & (a > 0)
    if by_window:
        oldest = before[:1] if before.shape[0] else amax
        full = used & (oldest > UNFILLED)
        usable &= full | (oldest == 0)
    # capped by divide
    new = jnp.maximum(divide(fp8_max * 2.0**-margin, jnp.where(usable, a, 1.0)), DELAYED_SCALES[0])
    if power_2:
        bits = jax.lax.bitcast_convert_type(new, jnp.uint32) & np.uint32(0xFF800000)
        new = jax.lax.bitcast_convert_type(bits, jnp.float32)
    rolled = jnp.concatenate([zero, before[1:], kept]) if before.shape[0] else zero
    if by_window and before.shape[0]:
        rolled = jnp.where(full, jnp.concatenate([zero, jnp.full_like(before, UNFILLED)]), rolled)
    return Slot(
        jnp.where(used & usable, new, slot.scale), jnp.where(used, rolled, jnp.concatenate([zero, before]))
    )


def next_state(
    history: AmaxHistory, state: State, amaxes: Mapping[str, Any], axes: tuple[str, ...]
) -> dict[str, Slot]:
    """Returns the next value of every slot; as a cotangent, see above. A slot without an amax keeps its
    value."""
    made = {}
    for key, slot in state.items():
        step = _summable(history.rules[not key.endswith("g")], axes)
        made[key] = step(slot, amaxes[key] if key in amaxes else slot.scale * 0)
    return made


@functools.lru_cache(maxsize=256)
def _summable(rule: DelayedRule, axes: tuple[str, ...]) -> Any:
    """(slot, amax) -> next slot, whose sum over devices and batch elements that share the slot is the next
    slot."""

    @custom_vmap
    def step(slot: Slot, amax: Any) -> Slot:
        if axes:
            amax = jax.lax.pmax(amax, axes)
        new = updated(slot, amax, *rule)
        if axes:
            own = manual.first(axes)
            new = jax.tree.map(lambda leaf: jnp.where(own, leaf, jnp.zeros_like(leaf)), new)
        return new

    @step.def_vmap
    def _(size: int, batched: Any, slot: Slot, amax: Any) -> tuple[Slot, Slot]:
        slots, amaxes = batched
        if any(slots):  # every element has a state of its own

            def spread(leaf: Any, own: bool) -> Any:
                return leaf if own else jnp.broadcast_to(leaf, (size, *leaf.shape))

            every = jax.tree.map(spread, (slot, amax), (slots, amaxes))
            return jax.lax.map(lambda pair: step(*pair), every), Slot(True, True)
        new = step(slot, jnp.nanmax(amax, 0) if amaxes else amax)
        alone = [jnp.zeros((size, *leaf.shape), leaf.dtype).at[0].set(leaf) for leaf in new]
        return Slot(*alone), Slot(True, True)

    return step


def update_collections(new: Any, original: Any) -> Any:
    """``original`` with the entries of ``new`` in their place: how FP8 state is carried from step to step.

    Both are (nested) mappings, such as the gradients of Flax variables and the variables: what ``new`` lacks
    stays. Nothing is changed in place; the kind of mapping is kept. ArgumentError if it is not a mapping.
    """
    for name, value in (("new", new), ("original", original)):
        if not isinstance(value, Mapping):
            raise ArgumentError(
                "update_collections", name, shown(value), "a mapping, such as a collection of Flax"
            )
    return _merged(new, original)


def _merged(new: Any, original: Any) -> Any:
    if not isinstance(original, Mapping) or not isinstance(new, Mapping):
        return new
    merged = {name: _merged(new[name], value) if name in new else value for name, value in original.items()}
    merged |= {name: value for name, value in new.items() if name not in original}
    return merged if type(original) is dict else type(original)(merged)  # type: ignore[call-arg]
