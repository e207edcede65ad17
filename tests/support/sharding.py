"""What the tests of calls that are split over eight virtual devices share."""

from __future__ import annotations

import functools

import fp8kit_jax as fj
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from fp8kit.testing import assert_close, assert_same_bits

RECIPES = {
    "high": None,
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}


MOVES = ("all-gather", "all-to-all", "collective-permute")


BITS = 2.0**-19  # another order of float32 sums of at most 2^11 terms, relative to the largest value


# some codes of E5M2 (half a step: 2^-3) among the 2^10 terms of a sum of random signs, relative to the
# largest
CODES = 2.0**-9


def draw(seed, *shape):
    # jnp.asarray compiles a program for each shape
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def mesh():
    return Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("data", "tensor"))


def placed(args, specs, devices=mesh):
    # of the host's arrays: those of a device are cut by a program for each shape
    return [
        jax.tree.map(
            lambda leaf, own=own: jax.device_put(np.asarray(leaf), NamedSharding(devices(), P(*own))), a
        )
        for a, own in zip(args, specs, strict=True)
    ]


def near(got, want, bound=BITS):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert_close("parts", got, want, "float32", bound * np.abs(want).max())


def same_bits(got, want):
    """Of every leaf."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same_bits("leaves", np.asarray(a), np.asarray(b))


@functools.cache
def squares(function, count):
    """Value and gradients of the sum of squares, jitted: for whole arguments a function is compiled once,
    however it is split beside."""
    return jax.jit(jax.value_and_grad(lambda *a: (function(*a) ** 2).sum(), tuple(range(count))))


def check(function, args, specs, bound=BITS, gathers=False):
    """Value and gradients of the sum of squares, split and whole; the text of the split program."""
    step = squares(function, len(args))
    compiled = step.lower(*placed(args, specs)).compile()
    jax.tree.map(lambda a, b: near(a, b, bound), compiled(*placed(args, specs)), step(*args))
    found = moves(compiled)
    assert bool(found) == gathers, found
    return compiled


def moves(compiled):
    """What a compiled program moves between devices."""
    text = compiled.as_text()
    return [kind for kind in MOVES if f" {kind}(" in text or f" {kind}-start(" in text]


def two(recipe):
    return (fj.noop_quantizer_set,) * 2 if RECIPES[recipe] is None else fj.create_set(RECIPES[recipe], 2)


ROWS, COLUMNS, JOINED = ("data",), (None, "tensor"), (None, None, "tensor")


SIZES = {"block": (64, 256, 1024)}  # sequence, width, inner width: squares of 128 keep their scales in fours


def mlp(x, gamma, k1, k2, b1, b2, sets):
    return fj.layernorm_mlp(
        x, gamma, None, (k1, k2), (b1, b2), "rmsnorm", activation_type=("silu", "linear"), quantizer_sets=sets
    )


def explicit_mesh():
    return jax.make_mesh((4, 2), ("data", "tensor"), (AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:8])


def check_explicit(function, args, specs, bound=BITS):
    """Value and gradients of the sum of squares, split and whole. Gradients come split as what they are
    gradients of."""
    step = squares(function, len(args))
    want = step(*args)
    with jax.set_mesh(explicit_mesh()):
        given = placed(args, specs, explicit_mesh)
        compiled = step.lower(*given).compile()
        got = compiled(*given)
    jax.tree.map(lambda a, b: near(a, b, bound), got, want)
    for grad, own in zip(jax.tree.leaves(got[1]), jax.tree.leaves(given), strict=True):
        assert grad.sharding.is_equivalent_to(own.sharding, own.ndim)
    assert not moves(compiled)
    return got[1], want[1]


def gradients(function, args, wanted=None):
    if wanted is None:
        return squares(function, len(args))(*args)
    return jax.jit(jax.value_and_grad(lambda *a: (function(*a) ** 2).sum(), wanted))(*args)
