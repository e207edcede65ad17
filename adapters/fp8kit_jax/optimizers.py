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
from fp8kit.arguments import number
from fp8kit.arrays import ArrayView
from fp8kit.backends.dispatch import kernels
from fp8kit.errors import FormatError, ShapeError
from fp8kit.formats import int64
from fp8kit.moments import KEPT, MASTERS, MomentFormat, StateFormats, state_formats
from fp8kit_jax import calls
from fp8kit_jax.arguments import as_array

_TARGET = "fp8kit.encoded_adam"
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
    """``count``: int32, steps taken; ``mu``, ``nu``: a ``Moment`` for each leaf of the parameters."""

    count: Any
    mu: Any
    nu: Any


def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, states: str | StateFormats = "coat"
) -> GradientTransformation:
    """Gradients become m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), float32, with m and v kept as
    ``states`` says: a preset's name ("fp32", "ms_amp", "fishman", "coat", "block_128", "block_256") or
    StateFormats, whose master is not used.

    Gradients: float32, bfloat16 or float16 of any shapes. Raises Fp8kitError for wrong arguments, ShapeError
    and FormatError in ``update``.
    """
    name = "scale_by_adam"
    formats = state_formats(name, states, master="float32")
    betas = number(name, "b1", b1, 1), number(name, "b2", b2, 1)
    eps = number(name, "eps", eps)

    def init(params: Any) -> AdamState:
        def zeros(kept: MomentFormat) -> Any:
            return jax.tree.map(lambda x: _zeros(kept, jnp.shape(x)), params)

        return AdamState(jnp.zeros((), jnp.int32), zeros(formats.exp_avg), zeros(formats.exp_avg_sq))

    def update(updates: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        leaves, tree = jax.tree.flatten(updates)
        moments = [tree.flatten_up_to(moment) for moment in (state.mu, state.nu)]
        leaves = [as_array(name, "updates", leaf) for leaf in leaves]
        for leaf, *own in zip(leaves, *moments, strict=True):
            if leaf.dtype not in _HIGH:
                raise FormatError(name, "updates", leaf.dtype, "float32, bfloat16 or float16")
            for kept, moment in zip((formats.exp_avg, formats.exp_avg_sq), own, strict=True):
                want = _shapes(kept, leaf.shape)
                got = [x.shape for x in jax.tree.leaves(moment)]
                if got != want:
                    raise ShapeError(name, "state", got, f"{want}, as init made it")
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
) -> GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019): updates of the parameters' dtypes, to be added to them,
    -learning_rate (scale_by_adam + weight_decay w).

    ``learning_rate``: a number, or a function of the number of steps taken before, as optax's schedules. The
    others: see ``scale_by_adam``. ``update`` needs ``params``; ShapeError without.
    """
    decay = number("adamw", "weight_decay", weight_decay)
    rate = learning_rate if callable(learning_rate) else number("adamw", "learning_rate", learning_rate)
    inner = scale_by_adam(b1, b2, eps, states)

    def update(updates: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        if params is None:
            raise ShapeError("adamw", "params", "None", "the parameters, for weight decay and dtypes")
        lr = rate(state.count) if callable(rate) else rate
        directions, after = inner.update(updates, state)

        def step(direction: Any, w: Any) -> Any:
            return (-lr * (direction + decay * w.astype(jnp.float32))).astype(w.dtype)

        return jax.tree.map(step, directions, params), after

    return GradientTransformation(inner.init, update)


# --- the call ----------------------------------------------------------------------------------------------


def _zeros(kept: MomentFormat, shape: tuple[int, ...]) -> Moment:
    scales = kept.scales(math.prod(shape))
    return Moment(
        jnp.zeros(shape, kept.dtype.numpy), None if scales is None else jnp.zeros(scales, jnp.float32)
    )


def _shapes(kept: MomentFormat, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Of a moment's arrays."""
    scales = kept.scales(math.prod(shape))
    return [tuple(shape)] if scales is None else [tuple(shape), scales]


def _step(
    formats: StateFormats, numbers: tuple[float, ...], count: Any, rows: list[tuple[Any, Moment, Moment]]
) -> list[tuple[Any, Moment, Moment]]:
    """(direction, moments) of every leaf. The call takes the count, then what each leaf has; it gives what
    each has after, and the workspace."""
    calls._mark_used()
    words = jnp.stack([count.astype(jnp.uint32), jnp.zeros((), jnp.uint32)])  # an int64
    given = [jax.tree.leaves(row) for row in rows]
    results = []
    for leaf, *moments in rows:
        results.append(jax.ShapeDtypeStruct(leaf.shape, jnp.float32))
        results += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(moments)]
    # the CUDA engine's, the only one that has any: 12 bytes a leaf and a piece of 8192, at least
    space = 12 * sum(2 + leaf.size // 8192 for leaf, *_ in rows) if formats.by_tensor else 1
    results.append(jax.ShapeDtypeStruct((space,), jnp.uint8))
    bits = np.array(numbers, np.float64).view(np.int64)
    how = np.array([*formats.numbers, *bits], np.int64)
    found = list(jax.ffi.ffi_call(_TARGET, results)(words, *(x for row in given for x in row), how=how))
    out = []
    for row in rows:
        direction = found.pop(0)
        tree = jax.tree.structure(row[1:])
        own = [found.pop(0) for _ in range(tree.num_leaves)]
        out.append((direction, *jax.tree.unflatten(tree, own)))
    return out


def _formats(numbers: list[int]) -> StateFormats:
    """Of ``StateFormats.numbers``."""
    kept = [
        MomentFormat(list(KEPT)[place], block or None, bool(power_2), bool(expansion))
        for place, block, power_2, expansion in (numbers[:4], numbers[4:8])
    ]
    return StateFormats(kept[0], kept[1], MASTERS[numbers[8]])


def _run(views: list[ArrayView], how: list[int], stream: int) -> None:
    """The handler's work: ``_step``'s arguments, then its results, as views."""
    formats = _formats(how[:9])
    b1, b2, eps = np.array(how[9:], np.int64).view(np.float64).tolist()
    moments = formats.exp_avg, formats.exp_avg_sq
    each = 1 + sum(1 + kept.scaled for kept in moments)
    leaves = (len(views) - 2) // (2 * each)
    words, given, taken = views[0], views[1 : 1 + each * leaves], views[1 + each * leaves : -1]
    device = words.device
    engine, provider = kernels(device), arrays.provider(device)
    lists: dict[str, list[Any]] = {name: [] for name in ("w", "g", "m", "ms", "v", "vs")}
    for i in range(0, len(given), each):
        own = [name for name, kept in zip("mv", moments, strict=True) for name in _names(name, kept)]
        lists["g"].append(given[i])
        provider.fill_zero(taken[i], stream)
        lists["w"].append(taken[i])
        for name in ("m", "ms", "v", "vs"):
            if name not in own:
                lists[name].append(None)
                continue
            source, target = (part[i + 1 + own.index(name)] for part in (given, taken))
            engine.copy(source, target, stream)
            lists[name].append(target)
    nothing = [None] * leaves
    step = ArrayView(words.ptr, (1,), int64, device, None)
    engine.encoded_adam_(
        *(lists["w"], lists["g"], lists["m"], lists["ms"], lists["v"], lists["vs"], nothing, nothing),
        *(formats, True, -1.0, b1, b2, eps, [0.0] * leaves, step, None, None),
        views[-1] if formats.by_tensor else None,
        stream,
    )


def _names(name: str, kept: MomentFormat) -> list[str]:
    return [name, f"{name}s"] if kept.scaled else [name]


def _receiver(platform: str) -> Callable[..., None]:
    arithmetic = calls._arithmetic(calls.PLATFORMS[platform])

    def receive(*values: Any) -> None:
        *tensors, how = values
        calls._mark_used()
        with arithmetic():
            stream = 0 if platform == "cpu" else tvm_ffi.get_raw_stream(tensors[0].device)
            views = [calls._view(tensor, platform) for tensor in tensors]
            values, tensors = (), []  # XLA takes the memory back
            _run(views, [int(number) for number in how], stream)

    return receive


for _platform in calls.PLATFORMS:
    calls._register(_TARGET, _receiver(_platform), ["how"], _platform)
