"""Adam with encoded states as a gradient transformation: the native optimiser's bits, and a training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax.optimizers import adamw, scale_by_adam

import fp8kit as fk
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.optim import PRESETS, AdamW, MomentFormat, StateFormats
from fp8kit.testing import assert_close, assert_same_bits
from tests.support.combinations import combinations

MIXED = StateFormats(MomentFormat("bfloat16"), MomentFormat("E5M2", 256))
SHAPES = {"a": (37, 11), "b": {"c": (300,), "d": (1,), "none": (0, 3)}}
DTYPES = {"a": jnp.float32, "b": {"c": jnp.bfloat16, "d": jnp.float16, "none": jnp.float32}}


def draw(seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape, dtype: jax.device_put(random.standard_normal(shape).astype(dtype)),
        SHAPES,
        DTYPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def leaves_of(tree):
    """Leaves of a tree, or its moments."""
    return jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "codes"))


@combinations(
    {"states": [*PRESETS, MIXED], "jit": {"eager": False, "jitted": True}},
    usual=["fp32-eager", "ms_amp-jitted", "coat-eager", "block_128-jitted"],
)
def test_bits_of_the_native_optimizer(states, jit):
    """The states are those of ``fk.optim.AdamW`` for float32 parameters, which the gradients widened to
    float32 are given to."""
    params = draw(0)
    made = scale_by_adam(0.9, 0.95, states=states)
    state, update = made.init(params), jax.jit(made.update) if jit else made.update
    natives = [fk.tensor(np.zeros(p.shape, np.float32), requires_grad=True) for p in jax.tree.leaves(params)]
    optimizer = AdamW(natives, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, states=states)
    for step in range(1, 4):
        before = [t.numpy().copy() for t in natives]
        grads = draw(step)
        directions, state = update(grads, state)
        for t, g in zip(natives, jax.tree.leaves(grads), strict=True):
            t.grad = np.asarray(g).astype(np.float32)
        optimizer.step()
        kept = optimizer.state_dict()
        rows = zip(*(leaves_of(t) for t in (directions, state.mu, state.nu)), strict=True)
        for i, (direction, mu, nu) in enumerate(rows):
            moved = before[i] - natives[i].numpy()
            # the native update is the difference of two float32 weights
            slack = 2.0**-23 * np.abs(before[i]).max(initial=4)
            assert_close("direction", np.asarray(direction), moved.astype(np.float64), "float32", slack)
            for name, moment in (("exp_avg", mu), ("exp_avg_sq", nu)):
                right = {"codes": kept[f"{name}.{i}"].numpy()}
                if moment.scale is not None:
                    right["scale"] = kept[f"{name}_scale.{i}"].numpy()
                for part, value in right.items():
                    found = np.asarray(getattr(moment, part))
                    assert found.dtype == value.dtype
                    np.testing.assert_array_equal(found.view(np.uint8), value.view(np.uint8))
    assert int(state.count) == 3


@combinations({"states": PRESETS.keys()}, usual=["coat"])
def test_training_follows_float32(states):
    """A regression's loss under jit, with a schedule: at its end as low as float32's, within a hundredth of
    where it began."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((256, 32)), jnp.float32)
    wanted = x @ jnp.asarray(random.standard_normal((32, 8)), jnp.float32)

    def loss(w):
        return jnp.mean((x @ w - wanted) ** 2)

    def train(how):
        made = adamw(lambda count: 3e-2 * 0.99**count, weight_decay=0.0, states=how)

        @jax.jit
        def step(w, state):
            value, grad = jax.value_and_grad(loss)(w)
            updates, state = made.update(grad, state, w)
            return w + updates, state, value

        w = jnp.zeros((32, 8))
        state, values = made.init(w), []
        for _ in range(200):
            w, state, value = step(w, state)
            values.append(float(value))
        return values

    right, found = train("fp32"), train(states)
    assert right[-1] < 0.02 * right[0]
    assert found[-1] < right[-1] + 0.01 * right[0]


def test_adamw_is_decoupled():
    """One step of float64's formula."""
    w, g = jnp.linspace(-2, 2, 50), jnp.linspace(1, -3, 50)
    made = adamw(1e-2, weight_decay=0.3, states="block_128")
    updates, _ = made.update({"w": g}, made.init({"w": w}), {"w": w})
    right = -1e-2 * (np.sign(g) + 0.3 * np.asarray(w, np.float64))
    assert_close("updates", np.asarray(updates["w"]), right, "float32", 1e-8)  # epsilon, beside |g| > 0.01
    assert updates["w"].dtype == w.dtype


MASTERS = [
    *(
        StateFormats(MomentFormat("E4M3", 128), MomentFormat("bfloat16"), master)
        for master in ("float32", "remainder")
    ),
    *(PRESETS[name] for name in ("fp32", "ms_amp", "fishman", "coat")),
]


@jax.jit
def moved(params, updates):
    return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)


@combinations({"states": MASTERS, "jit": {"eager": False, "jitted": True}})
def test_masters_are_those_of_the_native_optimizer(states, jit):
    """16-bit parameters with masters: parameters, moments and masters after some steps, bit for bit."""
    kinds = {"a": jnp.bfloat16, "b": {"c": jnp.bfloat16, "d": jnp.float16, "none": jnp.bfloat16}}
    kinds["b"]["d"] = jnp.bfloat16 if states.master == "remainder" else jnp.float16

    def drawn(seed):
        return jax.tree.map(lambda x, kind: np.asarray(x).astype(kind), draw(seed), kinds)

    params = drawn(0)
    natives = [
        fk.tensor(np.array(p), requires_grad=True, dtype=p.dtype.name) for p in jax.tree.leaves(params)
    ]
    optimizer = AdamW(natives, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, states=states)
    made = adamw(lambda count: 1e-2, 0.9, 0.95, weight_decay=0.1, states=states, master_weights=True)
    state, update = made.init(params), jax.jit(made.update) if jit else made.update
    for step in range(1, 6):
        grads = drawn(step)
        updates, state = update(grads, state, params)
        params = moved(params, updates)
        for t, g in zip(natives, jax.tree.leaves(grads), strict=True):
            t.grad = np.asarray(g)
        optimizer.step()
        kept = optimizer.state_dict()
        for i, (param, master) in enumerate(
            zip(jax.tree.leaves(params), leaves_of(state.master), strict=True)
        ):
            assert_same_bits(f"parameter {i}", np.asarray(param), natives[i].numpy())
            if not param.size:
                continue
            assert_same_bits(f"master {i}", np.asarray(master.codes), kept[f"master.{i}"].numpy())
            if master.scale is not None:
                assert_same_bits(f"scale {i}", np.asarray(master.scale), kept[f"master_scale.{i}"].numpy())
        for name, moments in (("exp_avg", state.mu), ("exp_avg_sq", state.nu)):
            for i, moment in enumerate(leaves_of(moments)):
                assert_same_bits(name, np.asarray(moment.codes), kept[f"{name}.{i}"].numpy())


def test_masters_keep_what_bfloat16_loses():
    """A hundred updates, each far below half a unit of the parameter's last place."""
    found = {}
    for master in (False, True):
        made = adamw(1e-4, weight_decay=0.0, states="fp32", master_weights=master)
        params = {"w": jnp.ones((64,), jnp.bfloat16), "v": jnp.ones((3,), jnp.float32)}
        state = made.init(params)
        assert state.master is None or state.master["v"] is None

        @jax.jit
        def step(params, state, made=made):
            updates, state = made.update(jax.tree.map(jnp.ones_like, params), state, params)
            return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates), state

        for _ in range(100):
            params, state = step(params, state)
        found[master] = float(params["w"][0])
        assert abs(float(params["v"][0]) - 0.99) < 1e-5
    assert found[False] == 1.0
    assert abs(found[True] - 0.99) < 2.0**-9


def test_refusals():
    with pytest.raises(ArgumentError, match="states: got 'fp4'"):
        scale_by_adam(states="fp4")
    with pytest.raises(ArgumentError, match="b1"):
        adamw(1e-3, b1=1.0)
    made = adamw(1e-3)
    with pytest.raises(FormatError, match="params: got int32, expected floating-point"):
        made.init({"w": jnp.zeros(3), "count": jnp.zeros(3, jnp.int32)})
    state = made.init(jnp.zeros(3))
    with pytest.raises(ShapeError, match="params"):
        made.update(jnp.zeros(3), state)
    with pytest.raises(FormatError, match="updates"):
        made.update(jnp.zeros(3, jnp.int32), state, jnp.zeros(3))
    with pytest.raises(ShapeError, match="state"):
        made.update(jnp.zeros(4), state, jnp.zeros(4))
    remainder = adamw(1e-3, states=StateFormats(master="remainder"), master_weights=True)
    with pytest.raises(FormatError, match='"remainder" for float16'):
        remainder.init(jnp.zeros(3, jnp.float16))
    with pytest.raises(ArgumentError, match="master_weights"):
        adamw(1e-3, master_weights="yes")
    with pytest.raises(ShapeError, match="params"):
        remainder.update(jnp.zeros(3), remainder.init(jnp.zeros(3)))
