"""Adam with states in fewer bits, as gradient transformations: pairs of ``init`` and ``update`` that optax's
functions take. optax is not needed.

One XLA custom call runs the kernel ``encoded_adam_`` of the contract over all leaves: the states have the
bits of ``fk.optim.AdamW``. Under shardings the call is not split: leaves are gathered for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tvm_ffi

from fp8kit import arrays
from fp8kit.arguments import flag, number
from fp8kit.arrays import ArrayView, Shape
from fp8kit.backends.dispatch import kernels
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import dtype as dtype_of
from fp8kit.formats import int64
from fp8kit.moments import KEPT, MASTERS, MomentFormat, StateFormats, state_formats
from fp8kit_jax import calls
from fp8kit_jax.arguments import as_array

_TARGET = "fp8kit.encoded_adam"
_MASTER_TARGET = "fp8kit.encoded_adam_master"
_HIGH = (jnp.float32, jnp.bfloat16, jnp.float16)


class GradientTransformation(NamedTuple):
    """``init(params)`` gives a state; ``update(updates, state, params=None)`` the updates and the next
    state."""

    init: Callable[..., Any]
    update: Callable[..., Any]


class Moment(NamedTuple):
    """A moment of one leaf: ``codes`` of its shape, uint8 for FP8, and ``scale``, float32 as
    ``MomentFormat.scales`` says, or None."""

    codes: Any
    scale: Any


class AdamState(NamedTuple):
    """``count``: int32, steps taken; ``mu``, ``nu``: a ``Moment`` for each leaf of the parameters;
    ``master``: of ``adamw`` with masters a ``Moment`` for each 16-bit leaf, None for others."""

    count: Any
    mu: Any
    nu: Any
    master: Any = None


def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, states: str | StateFormats = "coat"
) -> GradientTransformation:
    """Gradients become m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), float32, with m and v kept as
    ``states`` says: a preset's name ("fp32", "ms_amp", "fishman", "coat", "block_128", "block_256") or
    StateFormats, whose master is not used.

    Gradients: float32, bfloat16 or float16 of any shapes. Raises Fp8kitError for wrong arguments, ShapeError
    and FormatError in ``update``, FormatError in ``init`` for parameters of integers.
    """
    name = "scale_by_adam"
    formats = state_formats(name, states, master="float32")
    betas = number(name, "b1", b1, 1), number(name, "b2", b2, 1)
    eps = number(name, "eps", eps)

    def init(params: Any) -> AdamState:
        for leaf in jax.tree.leaves(params):
            if not jnp.issubdtype(kind := jnp.result_type(leaf), jnp.floating):
                raise FormatError(name, "params", kind, "floating-point parameters alone")

        def zeros(kept: MomentFormat) -> Any:
            return jax.tree.map(lambda x: _zeros(kept, jnp.shape(x)), params)

        return AdamState(jnp.zeros((), jnp.int32), zeros(formats.exp_avg), zeros(formats.exp_avg_sq))

    def update(updates: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        leaves, tree = jax.tree.flatten(updates)
        moments = [tree.flatten_up_to(moment) for moment in (state.mu, state.nu)]
        leaves = _checked(name, formats, leaves, moments)
        count = state.count + 1
        some = [i for i, leaf in enumerate(leaves) if leaf.size]
        rows = [(leaves[i], moments[0][i], moments[1][i]) for i in some]
        found = _step(formats, (*betas, eps), count, rows) if rows else []
        made: list[Any] = [
            (jnp.zeros(leaf.shape, jnp.float32), *own) for leaf, *own in zip(leaves, *moments, strict=True)
        ]
        for i, row in zip(some, found, strict=True):
            made[i] = row
        trees = [jax.tree.unflatten(tree, [row[k] for row in made]) for k in range(3)]
        return trees[0], AdamState(count, trees[1], trees[2])

    return GradientTransformation(init, update)


def adamw(
    learning_rate: Any,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    states: str | StateFormats = "coat",
    master_weights: bool = False,
) -> GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019): updates of the parameters' dtypes, to be added to them,
    -learning_rate (scale_by_adam + weight_decay w).

    ``learning_rate``: a number, or a function of the number of steps taken before, as optax's schedules. The
    others: see ``scale_by_adam``. ``update`` needs ``params``; ShapeError without.

    ``master_weights``: bfloat16 and float16 parameters have masters as ``states`` says: float32, 16 more bits
    of bfloat16, or scaled float16. They take the step, as those of ``fk.optim.AdamW``, to the bit. An update
    is then the float32 difference to the rounded master; parameter + update is that, once it is rounded to
    the parameter's dtype, to within 2^-24 of the update where a weight crosses 0. FormatError for remainders
    of float16.
    """
    decay = number("adamw", "weight_decay", weight_decay)
    rate = learning_rate if callable(learning_rate) else number("adamw", "learning_rate", learning_rate)
    inner, formats = scale_by_adam(b1, b2, eps, states), state_formats("adamw", states)
    flag("adamw", "master_weights", master_weights)

    def init(params: Any) -> AdamState:
        state = inner.init(params)
        if not master_weights:
            return state
        return state._replace(master=jax.tree.map(lambda w: _master(formats, jnp.asarray(w)), params))

    def update(updates: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        if params is None:
            raise ShapeError("adamw", "params", "None", "the parameters, for weight decay and dtypes")
        leaves, tree = jax.tree.flatten(updates)
        mu, nu, weights = (tree.flatten_up_to(part) for part in (state.mu, state.nu, params))
        masters = tree.flatten_up_to(state.master) if master_weights else [None] * len(leaves)
        leaves = _checked("adamw", formats, leaves, [mu, nu])
        count = state.count + 1
        lr = rate(state.count) if callable(rate) else rate
        if master_weights:
            lr = jnp.asarray(lr, jnp.float32)
        made: list[Any] = [None] * len(leaves)
        own = [i for i, master in enumerate(masters) if master is not None and leaves[i].size]
        rest = [i for i in range(len(leaves)) if i not in own]
        rows = [(leaves[i], mu[i], nu[i], masters[i], weights[i]) for i in own]
        found = _step(formats, (b1, b2, eps, decay), count, rows, lr) if rows else []
        for i, (*moments, master, after) in zip(own, found, strict=True):
            difference = after.astype(jnp.float32) - weights[i].astype(jnp.float32)
            made[i] = (difference, *moments, master)
        part = AdamState(state.count, [mu[i] for i in rest], [nu[i] for i in rest])
        directions, after = inner.update([leaves[i] for i in rest], part)
        for i, direction, *moments in zip(rest, directions, after.mu, after.nu, strict=True):
            w = weights[i]
            step = (-lr * (direction + decay * w.astype(jnp.float32))).astype(w.dtype)
            made[i] = (step, *moments, masters[i])
        trees = [jax.tree.unflatten(tree, [row[k] for row in made]) for k in range(4)]
        return trees[0], AdamState(count, trees[1], trees[2], trees[3] if master_weights else None)

    return GradientTransformation(init, update)


def _checked(name: str, formats: StateFormats, leaves: list[Any], moments: list[Any]) -> list[Any]:
    """Returns the gradients as arrays, of dtypes that there are and shapes that fit their moments."""
    leaves = [as_array(name, "updates", leaf) for leaf in leaves]
    for leaf, *own in zip(leaves, *moments, strict=True):
        if leaf.dtype not in _HIGH:
            raise FormatError(name, "updates", leaf.dtype, "float32, bfloat16 or float16")
        for kept, moment in zip((formats.exp_avg, formats.exp_avg_sq), own, strict=True):
            want = _shapes(kept, leaf.shape)
            got = [x.shape for x in jax.tree.leaves(moment)]
            if got != want:
                raise ShapeError(name, "state", got, f"{want}, as init made it")
    return leaves


# --- the call ----------------------------------------------------------------------------------------------


def _zeros(kept: MomentFormat, shape: Shape) -> Moment:
    scales = kept.scales(math.prod(shape))
    return Moment(
        jnp.zeros(shape, kept.dtype.numpy), None if scales is None else jnp.zeros(scales, jnp.float32)
    )


def _master(formats: StateFormats, w: Any) -> Moment | None:
    """Returns a parameter's master before the first step: its value, or zeros, which stand for it."""
    kind = formats.master_dtype(dtype_of(w.dtype, "adamw", "params"))
    if kind is None:
        return None
    if formats.master == "float32":
        return Moment(w.astype(jnp.float32), None)
    scale = jnp.zeros((1,), jnp.float32) if formats.master == "float16" else None
    return Moment(jnp.zeros(w.shape, kind.numpy), scale)


def _shapes(kept: MomentFormat, shape: Shape) -> list[tuple[int, ...]]:
    """Returns the shapes of a moment's arrays."""
    scales = kept.scales(math.prod(shape))
    return [tuple(shape)] if scales is None else [tuple(shape), scales]


def _step(
    formats: StateFormats, numbers: tuple[float, ...], count: Any, rows: list[Any], lr: Any = None
) -> list[Any]:
    """(direction, moments) of every leaf; with ``lr``, of rows that end with a master and the parameter,
    (moments, master, parameter) after the step. The call takes the count and ``lr``, then what each leaf
    has; it gives what each has after, and the workspace."""
    calls.used.set()
    words = jnp.stack([count.astype(jnp.uint32), jnp.zeros((), jnp.uint32)])  # an int64
    given = [jax.tree.leaves(row) for row in rows]
    results = []
    for leaf, *own in rows:
        results += [jax.ShapeDtypeStruct(leaf.shape, jnp.float32)] * (lr is None)
        results += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(own)]
    # the CUDA engine's, the only one that has any: 12 bytes a leaf and a piece of 8192, at least
    space = 12 * sum(2 + leaf.size // 8192 for leaf, *_ in rows) if formats.by_tensor else 1
    results.append(jax.ShapeDtypeStruct((space,), jnp.uint8))
    bits = np.array(numbers, np.float64).view(np.int64)
    how = np.array([*formats.numbers, *bits], np.int64)
    first = [words] if lr is None else [words, lr.reshape(1)]
    target = _TARGET if lr is None else _MASTER_TARGET
    found = list(jax.ffi.ffi_call(target, results)(*first, *(x for row in given for x in row), how=how))
    out = []
    for row in rows:
        direction = [found.pop(0)] if lr is None else []
        tree = jax.tree.structure(row[1:])
        own = [found.pop(0) for _ in range(tree.num_leaves)]
        out.append((*direction, *jax.tree.unflatten(tree, own)))
    return out


def _formats(numbers: list[int]) -> StateFormats:
    """Returns the formats that ``StateFormats.numbers`` says."""
    kept = [
        MomentFormat(list(KEPT)[place], block or None, bool(power_2), bool(expansion))
        for place, block, power_2, expansion in (numbers[:4], numbers[4:8])
    ]
    return StateFormats(kept[0], kept[1], MASTERS[numbers[8]])


def _run(views: list[ArrayView], how: list[int], stream: int, masters: bool) -> None:
    """The handler's work: ``_step``'s arguments, then its results, as views."""
    formats = _formats(how[:9])
    b1, b2, eps, *decay = np.array(how[9:], np.int64).view(np.float64).tolist()
    names = [
        n
        for n, kept in zip("mv", (formats.exp_avg, formats.exp_avg_sq), strict=True)
        for n in _names(n, kept)
    ]
    if masters:
        names += ["p", "ps", "w"] if formats.master == "float16" else ["p", "w"]
    each, first = 1 + len(names), 2 if masters else 1
    made = len(names) if masters else each  # no direction
    leaves = (len(views) - first - 1) // (each + made)
    words, given, taken = views[0], views[first : first + each * leaves], views[first + each * leaves : -1]
    device = words.device
    engine, provider = kernels(device), arrays.provider(device)
    order = ("w", "g", "m", "ms", "v", "vs", "p", "ps")
    lists: dict[str, list[Any]] = {name: [None] * leaves for name in order}
    for i in range(leaves):
        lists["g"][i], *sources = given[each * i : each * (i + 1)]
        targets = taken[made * i : made * (i + 1)]
        if not masters:
            provider.fill_zero(targets[0], stream)
            lists["w"][i], *targets = targets
        for name, source, target in zip(names, sources, targets, strict=True):
            engine.copy(source, target, stream)
            lists[name][i] = target
    step = ArrayView(words.ptr, (1,), int64, device, None)
    engine.encoded_adam_(
        *(lists[name] for name in order),
        *(formats, True, views[1] if masters else -1.0, b1, b2, eps),
        *([decay[0] if decay else 0.0] * leaves, step, None, None),
        views[-1] if formats.by_tensor else None,
        stream,
    )


def _names(name: str, kept: MomentFormat) -> list[str]:
    return [name, f"{name}s"] if kept.scaled else [name]


def _receiver(platform: str, masters: bool) -> Callable[..., None]:
    arithmetic = calls._arithmetic(calls.PLATFORMS[platform])

    def receive(*values: Any) -> None:
        *tensors, how = values
        calls.used.set()
        with arithmetic():
            stream = 0 if platform == "cpu" else tvm_ffi.get_raw_stream(tensors[0].device)
            views = [calls._view(tensor, platform) for tensor in tensors]
            values, tensors = (), []  # XLA takes the memory back
            _run(views, [int(number) for number in how], stream, masters)

    return receive


for _platform in calls.PLATFORMS:
    for _target, _masters in ((_TARGET, False), (_MASTER_TARGET, True)):
        calls._register_own(_target, _receiver(_platform, _masters), ["how"], _platform)
