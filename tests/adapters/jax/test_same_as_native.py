"""The same bits as ``fp8kit.nn``: outputs, gradients and FP8 state, for the same weights, inputs and recipe, over several steps."""

from __future__ import annotations

import contextlib

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, autocast, formats, nn, tensor
from fp8kit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from fp8kit.testing import assert_same_bits

RECIPES = {
    "high": None,
    "delayed": DelayedScaling(amax_history_len=3, margin=1),
    "recent": DelayedScaling(fp8_format=Format.E4M3, amax_compute_algo="most_recent", amax_history_len=2),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
K, N, F = 40, 56, 48
SHAPE = (3, 5)
SLOTS = ("x", "kernel", "grad")


def draw(seed, shape, dtype, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32).astype(formats.dtype(dtype).numpy)


def native(module, recipe, x, g):
    x = tensor(x, requires_grad=True, device=next(module.parameters()).device)
    with contextlib.nullcontext() if recipe is None else autocast(recipe=recipe):
        y = module(x)
    y.backward(g if y.device.kind == "cpu" else tensor(g, device=y.device))
    grads = {name: p.grad.numpy() for name, p in module.named_parameters()} | {"x": x.grad.numpy()}
    module.zero_grad()
    return y.numpy(), grads


def steps(module, function, params, recipe, x_width, dtype, gemms):
    """Three steps through both doors; ``function(params, sets, x)``; params in the module's layout and names."""
    sets = fj.create_set(recipe, gemms) if recipe is not None else (fj.noop_quantizer_set,) * gemms
    sets = sets if isinstance(sets, tuple) else (sets,)

    @jax.jit
    def step(params, sets, x, g):
        y, pull = jax.vjp(function, params, sets, x)
        return y, pull(g)

    for seed in range(3):
        x, g = draw(seed, (*SHAPE, x_width), dtype, 2.0**seed), draw(seed + 9, native_shape(module, x_width), dtype, 2.0**-6)
        want_y, want = native(module, recipe, x, g)
        y, (grads, sets, dx) = step(params, sets, x, g)
        assert_same_bits(f"step {seed}: y", np.asarray(y), want_y)
        assert_same_bits(f"step {seed}: dx", np.asarray(dx), want["x"])
        for name, value in grads.items():
            assert_same_bits(f"step {seed}: {name}", np.asarray(value), want[name])
        if recipe is not None and recipe.delayed():
            forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
            for i, own in enumerate(sets):
                for slot, state, at in zip(SLOTS, (forward, forward, backward), (3 * i, 3 * i + 1, 2 * i), strict=True):
                    found = getattr(own, slot)
                    assert_same_bits(f"step {seed}: {slot}.scale", np.asarray(found.scale), host(state.scale)[at : at + 1])
                    history = np.ascontiguousarray(host(state.amax_history)[:, at])
                    assert_same_bits(f"step {seed}: {slot}.amax_history", np.asarray(found.amax_history), history)


def host(array):
    return arrays.as_view(array).numpy()


def native_shape(module, width):
    return (*SHAPE, getattr(module, "out_features", width))


def random_parameters(module, dtype):
    state = {}
    for i, (name, parameter) in enumerate(module.named_parameters()):
        noise = draw(100 + i, parameter.shape, "float32", 0.1) + np.float32(1.0 if name.endswith("norm_weight") else 0.0)
        state[name] = noise.astype(formats.dtype(dtype).numpy)
    module.load_state_dict(state)
    return state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_dense(recipe, dtype):
    module = nn.Linear(K, N, params_dtype=dtype, device="cpu")
    params = random_parameters(module, dtype)

    def function(p, sets, x):
        return fj.dense(x, p["weight"], p["bias"], ((-1,), (1,)), sets[0])

    steps(module, function, params, RECIPES[recipe], K, dtype, 1)


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layernorm_dense(recipe, norm):
    module = nn.LayerNormLinear(K, N, normalization=norm, eps=1e-5, zero_centered_gamma=norm == "RMSNorm", device="cpu")
    params = random_parameters(module, "float32")

    def function(p, sets, x):
        return fj.layernorm_dense(x, p["weight"], p["layer_norm_weight"], p.get("layer_norm_bias"), p["bias"], norm.lower(),
                                  norm == "RMSNorm", 1e-5, sets[0], kernel_layout="oi")

    steps(module, function, params, RECIPES[recipe], K, "float32", 1)


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layernorm_mlp(recipe, kind):
    module = nn.LayerNormMLP(K, F, eps=1e-5, activation=kind, device="cpu")
    params = random_parameters(module, "float32")
    types = ("gelu",) if kind == "gelu" else ("silu", "linear")

    def function(p, sets, x):
        kernels = p["fc1_weight"].reshape(len(types), F, K), p["fc2_weight"]
        biases = p["fc1_bias"].reshape(len(types), F), p["fc2_bias"]
        return fj.layernorm_mlp(x, p["layer_norm_weight"], p["layer_norm_bias"], kernels, biases, "layernorm", False, 1e-5, types, sets,
                                kernel_layout="oi")

    steps(module, function, params, RECIPES[recipe], K, "float32", 2)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_attention_and_its_seed(rate):
    """A key's words are the seed, low word first, and, of a key of four words, the offset: what the native door draws first is offset 0."""
    seed, layers = (3 << 32) | 7, [draw(i, (2, 16, 4, 8), "float32") for i in range(3)]
    module, g = nn.DotProductAttention(4, 8, attention_dropout=rate, qkv_format="bshd", device="cpu"), draw(3, (2, 16, 4, 8), "float32")
    fk.manual_seed(seed)
    for offset in range(2):
        own = [tensor(a, requires_grad=True) for a in layers]
        y = module(*own)
        y.backward(g.reshape(y.shape))
        key = jnp.array([seed % 2**32, seed >> 32, *([offset, 0] if offset else [])], jnp.uint32)
        found, pull = jax.vjp(lambda *a, key=key: fj.dot_product_attention(*a, dropout_rate=rate, dropout_key=key), *layers)
        assert_same_bits(f"offset {offset}: y", np.asarray(found).reshape(y.shape), y.numpy())
        for name, a, b in zip("qkv", pull(jnp.asarray(g)), own, strict=True):
            assert_same_bits(f"offset {offset}: d{name}", np.asarray(a), b.grad.numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_dense_on_cuda(recipe, dtype):
    """Under the deterministic policy, which is captured when the function is traced."""
    with fk.deterministic():
        module = nn.Linear(K, N, params_dtype=dtype, device="cuda")
        params = random_parameters(module, dtype)

        def function(p, sets, x):
            return fj.dense(x, p["weight"], p["bias"], ((-1,), (1,)), sets[0])

        steps(module, function, params, RECIPES[recipe], K, dtype, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_layernorm_mlp_on_cuda(recipe):
    with fk.deterministic():
        module = nn.LayerNormMLP(K, F, eps=1e-5, device="cuda")
        params = random_parameters(module, "float32")

        def function(p, sets, x):
            kernels, biases = (p["fc1_weight"][None], p["fc2_weight"]), (p["fc1_bias"][None], p["fc2_bias"])
            options = ("layernorm", False, 1e-5, ("gelu",), sets)
            return fj.layernorm_mlp(x, p["layer_norm_weight"], p["layer_norm_bias"], kernels, biases, *options, kernel_layout="oi")

        steps(module, function, params, RECIPES[recipe], K, "float32", 2)
