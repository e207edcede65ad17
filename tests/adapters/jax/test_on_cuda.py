"""The frontend on a GPU: the reference engine's bits or values, XLA's stream, errors, compiled programs in
other processes. Needs no Flax."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax import calls

import fp8kit as fk
from fp8kit.recipe import DelayedScaling
from fp8kit.testing import assert_close, assert_same_bits
from tests.adapters.jax import programs
from tests.support.jax_calls import child

ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def on(kind, function, *args):
    """The function, jitted, on the first device of a kind; results as NumPy arrays."""
    device = jax.devices(kind)[0]
    with jax.default_device(device):
        out = jax.jit(function)(*jax.device_put(args, device))
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(out))
    return jax.tree.map(np.asarray, out)


KEY = np.array([0, 7], np.uint32)
CASTS = {
    "tensor": lambda x: fj.quantize(x),
    "row": lambda x: fj.quantize(x, fk.E5M2, scaling="row"),
    "blocks": lambda x: fj.quantize(x, scaling="block_1x128"),
    "mx": lambda x: fj.quantize(x, scaling="mx_1x32"),
    "stochastic": lambda x: fj.quantize(x, rounding="stochastic", key=jnp.asarray(KEY)),
    "there and back": lambda x: fj.dequantize(fj.quantize(x)),
    "dropped paths": lambda x: fj.drop_path(x, x, 0.5, jnp.asarray(KEY)),
    "dropout": lambda x: fj.dropout_add(x, x, rate=0.5, key=jnp.asarray(KEY)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASTS)
def test_the_reference_bits(name):
    x = draw(0, 3, 40, 200)
    got, want = on("gpu", CASTS[name], x), on("cpu", CASTS[name], x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same_bits(
            name,
            a.view(np.uint8) if a.dtype.itemsize == 1 else a,
            b.view(np.uint8) if b.dtype.itemsize == 1 else b,
        )


def attention(qkv):
    return fj.dot_product_attention(qkv.astype(jnp.bfloat16)).astype(jnp.float32)


# name -> (function of one array, its shape, units in the last place of its arithmetic at the largest value)
VALUES = {
    "activation": (lambda x: fj.activation(x, ("silu", "linear")), (40, 2, 64), 2.0**-20),
    "rmsnorm": (lambda x: fj.rmsnorm(x, jnp.ones(64)), (40, 64), 2.0**-20),
    "layernorm": (lambda x: fj.layernorm(x, jnp.ones(64), jnp.zeros(64)), (40, 64), 2.0**-20),
    "l2norm": (fj.l2norm, (40, 64), 2.0**-20),
    "cross entropy": (lambda x: fj.fused_cross_entropy(x, jnp.arange(40)), (40, 64), 2.0**-20),
    "rope": (lambda x: fj.rope(x, fj.rope_frequencies(16, 32)), (2, 32, 4, 16), 2.0**-18),
    # 16-bit probabilities and gradients: half a step of 2^-8 each, a few in a row
    "packed attention": (attention, (2, 64, 3, 4, 64), 2.0**-5),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", VALUES)
def test_the_reference_values_and_gradients(name):
    function, shape, bound = VALUES[name]

    def both(x):
        y, pull = jax.vjp(function, x)
        return y, pull(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    x = draw(1, *shape)
    for got, want in zip(
        jax.tree.leaves(on("gpu", both, x)), jax.tree.leaves(on("cpu", both, x)), strict=True
    ):
        assert_close("values", got, want, "float32", bound * max(1.0, np.abs(want).max()))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scalings", [("tensor",) * 2, ("row",) * 2, ("block_1x128", "block_128x128")], ids=str
)
def test_products_of_codes(scalings):
    a, b = draw(0, 64, 256), draw(1, 96, 256)

    def product(a, b):
        qa, qb = (fj.quantize(x, scaling=s) for x, s in zip((a, b), scalings, strict=True))
        return fj.gemm(qa, qb), qa.dequantize() @ qb.dequantize().T

    with jax.default_matmul_precision("highest"):
        got, want = on("gpu", product, a, b)
    # the tensor cores sum in 14 bits
    assert_close("values", got, want, "float32", 2.0 ** (-12) * np.abs(want).max() * 16)


@ON_BOTH
def test_calls_are_in_the_order_of_xlas_own_work(device):
    """XLA's kernels write what a call reads, and read what it wrote, many times over in one program: every
    run gives the same bits."""
    w = draw(0, 128, 128) / 11

    def chain(x, w):
        def body(h, _):
            return jnp.tanh(fj.rmsnorm(jnp.sin(h) @ w, jnp.ones(128))), None

        return jax.lax.scan(body, x, length=20)[0]

    def plain(x, w):
        for _ in range(20):
            h = jnp.sin(x) @ w
            x = jnp.tanh(h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6))
        return x

    with jax.default_matmul_precision("highest"):
        x = draw(1, 256, 128)
        first = on(device, chain, x, w)
        # 20 layers, each of 2^-20 and a gain of 2
        assert_close("values", first, on(device, plain, x, w), "float32", 2.0 ** (-10))
        for _ in range(10):
            assert_same_bits("again", on(device, chain, x, w), first)


@ON_BOTH
def test_an_error_in_a_handler(device):
    """A program that another version wrote is refused in the call itself; the process goes on."""
    place = jax.devices(device)[0]
    with jax.default_device(place):
        x = jax.device_put(jnp.ones(4), place)
        text, result = '{"form": 0}', jax.ShapeDtypeStruct((4,), jnp.float32)
        bad = jax.jit(
            lambda x: fj.call(calls.TARGET, result, calls.constant(text), x, **calls.attributes(text))
        )
        for _ in range(2):
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"fp8kit\.run: program: got form 0"):
                bad(x).block_until_ready()
            assert_close(
                "values", np.asarray(fj.rmsnorm(x, jnp.ones(4))), np.ones(x.shape), "float32", 2.0**-18
            )


@pytest.mark.gpu
def test_programs_of_other_processes_on_the_gpu(tmp_path):
    path, env = (
        str(tmp_path / "step"),
        {
            "JAX_PLATFORMS": "cuda",
            "XLA_FLAGS": "",
            "CUDA_VISIBLE_DEVICES": "0",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        },
    )
    assert child("save", path, **env) == child("load", path, **env)
    assert child("leave", **env) == "left"


@pytest.mark.gpu
def test_the_state_of_a_step_is_the_reference_state():
    """Scales and histories after a step in FP8: maxima, the same to the last bit on both devices."""
    step, (w, sets, x) = programs.example()
    assert isinstance(sets.recipe, DelayedScaling)
    (_, got), (_, want) = on("gpu", step, w, sets, x)[1], on("cpu", step, w, sets, x)[1]
    for slot in ("x", "kernel"):
        for field in ("scale", "amax_history"):
            assert_same_bits(
                f"{slot}.{field}", getattr(getattr(got, slot), field), getattr(getattr(want, slot), field)
            )
