"""A transformer layer inside ``jax.jit``, forward and backward: this library's JAX frontend beside plain JAX
and beside the native frontend.

    python -m benchmarks jax --out DIR

One GPT layer: norms before the branches, biases, tanh GELU, causal, no dropout; bfloat16 parameters and
input, a fixed gradient of the output, gradients of the input and of all parameters. Plain JAX is jnp's norm,
products and GELU with ``jax.nn.dot_product_attention``, on a GPU by cuDNN. All contenders have the same
numbers and are timed in turn, round after round, since a GPU's speed depends on what ran before; times are
medians over the rounds, of calls queued back to back. What the branches give, y - x and dx - g, is compared
with plain JAX's in float32. The default sizes want a GPU. Needs no Flax.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the native layer allocates on the same GPU

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np

import fp8kit as fk
from fp8kit import arrays, formats
from fp8kit.bench import random
from fp8kit.bench.layers import LAYER_CALLS
from fp8kit.bench.report import Row, Setting
from fp8kit.bench.sizes import Layer
from fp8kit.bench.timing import WallClock, interleaved, medians
from fp8kit.recipe import DelayedScaling, Recipe
from fp8kit.testing import relative_error

Parameters = dict[str, Any]
PLAIN = "plain JAX bfloat16"
EPSILON = 1e-5
# E4M3 keeps 3 mantissa bits: a product of two rounded operands has an error of about 2**-4, a layer some of
# them
LAYER_ERROR = 2 * 2.0**-4
# of y - x and dx - g: FP8, where gradients are E5M2, whose steps are twice E4M3's; bfloat16's rounding of
# what goes through the layer
BOUNDS = {True: (LAYER_ERROR, 2 * LAYER_ERROR), False: (LAYER_ERROR / 4, LAYER_ERROR / 4)}
WEIGHT = 1.5  # spread of a weight, times the square root of its columns: 0.023 at hidden 4096
# the layer's parameters: fp8kit.nn.TransformerLayer's name -> (shape in hidden H and feed-forward F, spread
# of a normal draw, mean)
PARAMETERS: dict[str, tuple[str, float, float]] = {
    "self_attention.layernorm_qkv.layer_norm_weight": ("H", 0.1, 1.0),
    "self_attention.layernorm_qkv.layer_norm_bias": ("H", 0.1, 0.0),
    "self_attention.layernorm_qkv.weight": ("3H H", WEIGHT, 0.0),
    "self_attention.layernorm_qkv.bias": ("3H", 0.1, 0.0),
    "self_attention.proj.weight": ("H H", WEIGHT, 0.0),
    "self_attention.proj.bias": ("H", 0.1, 0.0),
    "layernorm_mlp.layer_norm_weight": ("H", 0.1, 1.0),
    "layernorm_mlp.layer_norm_bias": ("H", 0.1, 0.0),
    "layernorm_mlp.fc1_weight": ("F H", WEIGHT, 0.0),
    "layernorm_mlp.fc1_bias": ("F", 0.1, 0.0),
    "layernorm_mlp.fc2_weight": ("H F", WEIGHT, 0.0),
    "layernorm_mlp.fc2_bias": ("H", 0.1, 0.0),
}


def parameters(hidden: int, ffn: int, dtype: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The same random parameters for every contender, (out, in) as PyTorch has them."""
    extents = {"H": hidden, "3H": 3 * hidden, "F": ffn}
    found = {}
    for seed, (name, (shape, spread, mean)) in enumerate(PARAMETERS.items()):
        rows, *columns = (extents[n] for n in shape.split())
        found[name] = random.normal(
            (rows, *columns), seed, dtype, spread / columns[0] ** 0.5 if columns else spread, mean
        )
    return found


# --- the layer, twice ---------------------------------------------------------------------------------------


def ours(heads: int, p: Parameters, sets: Any, x: Any) -> Any:
    """The layer from this library's functions. x: h (b, s, H)."""
    first, mlp = (
        {name.rpartition(".")[2]: value for name, value in p.items() if part in name}
        for part in ("layernorm_qkv", "mlp")
    )
    *leading, hidden = x.shape
    weight = first["weight"].reshape(3, hidden, hidden)
    qkv, x = fj.layernorm_dense(
        x,
        weight,
        first["layer_norm_weight"],
        first["layer_norm_bias"],
        first["bias"],
        epsilon=EPSILON,
        quantizer_set=sets[0],
        kernel_layout="oi",
        return_residual=True,
    )
    o = fj.dot_product_attention(qkv.reshape(*leading, 3, heads, hidden // heads), attn_mask_type="causal")
    a = fj.dense(
        o.reshape(*leading, hidden),
        p["self_attention.proj.weight"],
        p["self_attention.proj.bias"],
        ((-1,), (1,)),
        sets[1],
        residual=x,
    )
    kernels, biases = (mlp["fc1_weight"][None], mlp["fc2_weight"]), (mlp["fc1_bias"][None], mlp["fc2_bias"])
    norm = (mlp["layer_norm_weight"], mlp["layer_norm_bias"])
    return fj.layernorm_mlp(
        a,
        *norm,
        kernels,
        biases,
        epsilon=EPSILON,
        quantizer_sets=sets[2:],
        kernel_layout="oi",
        join_residual=True,
    )


def plain(heads: int, attention: str, p: Parameters, x: Any) -> Any:
    """The layer in JAX's own functions."""
    *leading, hidden = x.shape

    def norm(x: Any, gamma: Any, beta: Any) -> Any:
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + EPSILON)
        return (wide * gamma.astype(jnp.float32) + beta.astype(jnp.float32)).astype(x.dtype)

    def linear(x: Any, name: str) -> Any:
        return x @ p[f"{name}weight"].T + p[f"{name}bias"]

    qkv = "self_attention.layernorm_qkv."
    packed = linear(norm(x, p[f"{qkv}layer_norm_weight"], p[f"{qkv}layer_norm_bias"]), qkv)
    q, k, v = (packed.reshape(*leading, 3, heads, hidden // heads)[:, :, i] for i in range(3))
    o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
    a = x + linear(o.reshape(*leading, hidden), "self_attention.proj.")
    h = linear(
        norm(a, p["layernorm_mlp.layer_norm_weight"], p["layernorm_mlp.layer_norm_bias"]),
        "layernorm_mlp.fc1_",
    )
    return a + linear(jax.nn.gelu(h, approximate=True), "layernorm_mlp.fc2_")


# --- contenders: a call that starts forward and backward, and (y, dx) of the last one -----------------------

Contender = tuple[Callable[[], Any], Callable[[], tuple[Any, Any]]]


class Jitted:
    """``function(parameters, sets, x)`` and its gradients, one jitted call. The FP8 state goes from call to
    call, donated."""

    def __init__(self, function: Callable[..., Any], p: Parameters, sets: Any, x: Any, g: Any) -> None:
        def step(p: Parameters, sets: Any, x: Any, g: Any) -> Any:
            y, pull = jax.vjp(function, p, sets, x)
            return y, pull(g)

        self.step, self.given, self.sets = jax.jit(step, donate_argnums=1), (p, x, g), sets
        self.results: Any = None

    def __call__(self) -> Any:
        p, x, g = self.given
        self.results = None  # what the last call returned is free for this one
        y, (grads, self.sets, dx) = self.step(p, self.sets, x, g)
        self.results = y, dx, grads
        return self.results

    def values(self) -> tuple[Any, Any]:
        """y and dx in float32."""
        found = self.results[:2]
        return tuple(np.asarray(a.astype(jnp.float32)) for a in found)  # type: ignore[return-value]


class Native:
    """The native frontend's layer with the same parameters."""

    def __init__(
        self, sizes: Layer, recipe: Recipe, p: dict[str, Any], x: Any, g: Any, device: arrays.Device
    ) -> None:
        self.layer = fk.nn.TransformerLayer(
            sizes.hidden,
            sizes.ffn,
            sizes.heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=formats.dtype(x.dtype),
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            attn_input_format="bshd",
            layernorm_epsilon=EPSILON,
            device=device,
        )
        state = self.layer.state_dict()
        self.layer.load_state_dict(state | p)
        self.recipe, self.device = recipe, device
        self.x, self.g = fk.tensor(x, requires_grad=True, device=device), fk.tensor(g, device=device)
        self.y: Any = None

    def __call__(self) -> None:
        self.layer.zero_grad()
        self.x.grad = None
        with fk.autocast(recipe=self.recipe):
            self.y = self.layer(self.x)
        self.y.backward(self.g)

    def values(self) -> tuple[Any, Any]:
        """y and dx in float32."""
        arrays.synchronize(self.device)
        return self.y.numpy().astype(np.float32), self.x.grad.numpy().astype(np.float32)


def jax_part(setting: Setting) -> list[Row]:
    """A row a contender; ``ratio``: to plain JAX. The host's clock, calls queued back to back: XLA has a
    stream of its own."""
    size, how = setting.sizes.large, setting.warmed(LAYER_CALLS)
    place = jax.config.jax_default_device or jax.devices()[0]
    gpu = place.platform == "gpu"
    device = arrays.Device("cuda", place.local_hardware_id) if gpu else arrays.CPU
    half, recipe = formats.bfloat16.numpy, DelayedScaling(amax_history_len=16)
    p = parameters(size.hidden, size.ffn, half)
    shape = (size.batch, size.sequence, size.hidden)
    x, g = (random.normal(shape, 100 + i, half) for i in range(2))
    own = jax.tree.map(jnp.asarray, p)
    inputs = jnp.asarray(x), jnp.asarray(g)

    def by_ours(p: Parameters, sets: Any, x: Any) -> Any:
        return ours(size.heads, p, sets, x)

    def by_jax(p: Parameters, sets: Any, x: Any) -> Any:
        return plain(size.heads, "cudnn" if gpu else "xla", p, x)

    contenders: dict[str, Any] = {
        PLAIN: Jitted(by_jax, own, (), *inputs),
        "fp8kit_jax FP8": Jitted(by_ours, own, fj.create_set(recipe, 4), *inputs),
        "fp8kit_jax bfloat16": Jitted(by_ours, own, (fj.noop_quantizer_set,) * 4, *inputs),
        "fp8kit native FP8": Native(size, recipe, p, x, g, device),
    }

    def ready(result: Any) -> None:
        jax.block_until_ready(result)
        arrays.synchronize(device)

    for contender in contenders.values():
        for _ in range(3):
            ready(contender())
    times = medians(interleaved(contenders, WallClock(device, ready), how.rounds, how.calls, how.warmups))
    wide = Jitted(
        lambda p, sets, x: plain(size.heads, "xla", p, x),
        *jax.tree.map(lambda a: a.astype(jnp.float32), (own, (), *inputs)),
    )
    wide()
    # what the residual stream carries past the branches, either way
    streams = x.astype(np.float32), g.astype(np.float32)
    exact = wide.values()
    rows: list[Row] = []
    for name, contender in contenders.items():
        results = zip(contender.values(), exact, streams, strict=True)
        errors = [relative_error(got - stream, want - stream) for got, want, stream in results]
        right = all(error < bound for error, bound in zip(errors, BOUNDS["FP8" in name], strict=True))
        status = "ok" if right else f"WRONG: errors {errors}"
        rows.append(
            {
                "workload": "layer inside jax.jit",
                "case": name,
                "status": status,
                "gpu_ms": times[name] * 1e3,
                "ratio": times[name] / times[PLAIN],
                "error_y": errors[0],
                "error_dx": errors[1],
            }
        )
    return rows
