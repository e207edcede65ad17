"""What ``fp8kit.nn`` gives on an engine, for comparison with the JAX frontend bit for bit: values, gradients,
FP8 state."""

from __future__ import annotations

import contextlib
from typing import Any

import fp8kit_jax as fj
import jax
import numpy as np

from fp8kit import arrays, autocast, formats, tensor
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from fp8kit.testing import assert_same_bits

Array = np.ndarray[Any, Any]
RECIPES = {
    "high": None,
    "delayed": DelayedScaling(amax_history_len=3, margin=1),
    "recent": DelayedScaling(fp8_format=Format.E4M3, amax_compute_algo="most_recent", amax_history_len=2),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
K, F = 40, 48  # features of the layers that ``steps`` goes through, and of an MLP's middle
SHAPE = (3, 5)
# slot of a QuantizerSet -> the native module's state, and how many entries it has for each product, this
# one's first
SLOTS = {"x": ("scaling_fwd", 3, 0), "kernel": ("scaling_fwd", 3, 1), "grad": ("scaling_bwd", 2, 0)}


def draw(seed, shape, dtype="float32", scale=1.0) -> Array:
    return (
        (np.random.default_rng(seed).standard_normal(shape) * scale)
        .astype(np.float32)
        .astype(formats.dtype(dtype).numpy)
    )


def host(array) -> Array:
    """A native array of any kind as NumPy's."""
    return arrays.as_view(array).numpy()


def random_parameters(module, dtype) -> dict[str, Array]:
    """New parameters of a module, which it then has."""
    state = {}
    for i, (name, parameter) in enumerate(module.named_parameters()):
        gain = name.endswith("norm_weight")
        state[name] = (draw(100 + i, parameter.shape, "float32", 0.1) + np.float32(gain)).astype(
            formats.dtype(dtype).numpy
        )
    module.load_state_dict(state)
    return state


def step(module, recipe, x, g, device) -> tuple[Array, dict[str, Array]]:
    """y and the gradients by name, "x" among them, of one step with the output's gradient ``g``."""
    x = tensor(x, requires_grad=True, device=device)
    with contextlib.nullcontext() if recipe is None else autocast(recipe=recipe):
        y = module(x)
    y.backward(tensor(g, device=device))
    grads = {name: p.grad.numpy() for name, p in module.named_parameters()} | {"x": x.grad.numpy()}
    module.zero_grad()
    return y.numpy(), grads


def slots(module, product) -> dict[str, tuple[Array, Array]]:
    """Scale (1,) and amax history (H,) of each operand of a module's ``product``-th product, by the name of
    its slot."""
    found = {}
    for slot, (state, each, at) in SLOTS.items():
        own, column = module.fp8_meta[state], each * product + at
        found[slot] = (
            host(own.scale)[column : column + 1],
            np.ascontiguousarray(host(own.amax_history)[:, column]),
        )
    return found


def same_function(name, function, native, values, device, rest=lambda put: {}) -> None:
    """``function(*values)``, jitted, and ``native(*values, **rest)``, values and gradients: the same bits,
    whatever the shape of y."""

    @jax.jit
    def both(values, g):
        y, pull = jax.vjp(function, *values)
        return y, pull(g)

    def put(value):
        return tensor(value, device=device)

    own = [tensor(value, requires_grad=True, device=device) for value in values]
    want = native(*own, **rest(put))
    shape = jax.eval_shape(function, *values)
    g = draw(77, shape.shape, shape.dtype.name)
    want.backward(put(g.reshape(want.shape)))
    y, grads = both(values, g)
    assert_same_bits(f"{name}: y", np.asarray(y).reshape(want.shape), want.numpy())
    for i, (grad, leaf) in enumerate(zip(grads, own, strict=True)):
        assert_same_bits(f"{name}: gradient {i}", np.asarray(grad), leaf.grad.numpy())


def steps(module, function, params, recipe, dtype, gemms, device):
    """Three steps through both frontends; ``function(params, sets, x)``; params in the module's layout and
    names."""
    sets = fj.create_set(recipe, gemms) if recipe is not None else (fj.noop_quantizer_set,) * gemms
    sets = sets if isinstance(sets, tuple) else (sets,)

    @jax.jit
    def both(params, sets, x, g):
        y, pull = jax.vjp(function, params, sets, x)
        return y, pull(g)

    for seed in range(3):
        x, g = (
            draw(seed, (*SHAPE, K), dtype, 2.0**seed),
            draw(seed + 9, (*SHAPE, getattr(module, "out_features", K)), dtype, 2.0**-6),
        )
        want_y, want = step(module, recipe, x, g, device)
        y, (grads, sets, dx) = both(params, sets, x, g)
        assert_same_bits(f"step {seed}: y", np.asarray(y), want_y)
        assert_same_bits(f"step {seed}: dx", np.asarray(dx), want["x"])
        for name, value in grads.items():
            assert_same_bits(f"step {seed}: {name}", np.asarray(value), want[name])
        if recipe is not None and recipe.delayed():
            for product, own in enumerate(sets):
                for slot, (scale, history) in slots(module, product).items():
                    found = getattr(own, slot)
                    assert_same_bits(f"step {seed}: {slot}.scale", np.asarray(found.scale), scale)
                    assert_same_bits(
                        f"step {seed}: {slot}.amax_history", np.asarray(found.amax_history), history
                    )
