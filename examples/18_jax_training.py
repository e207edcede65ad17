"""FP8 training inside ``jax.jit``: a byte-level GPT of plain functions, with optax.

Shows: the FP8 state is a value like the parameters; its gradient *is* its next value, so one
``jax.value_and_grad`` gives a whole step, and the step gives its memory on (``donate_argnums``). Needs: JAX
and optax (extra flax); a CPU (about 20 seconds), or a GPU that JAX sees.
"""

import time

from fp8kit.errors import not_installed

if why := not_installed("18_jax_training.py", "flax", "optax"):
    raise SystemExit(why)

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import optax

from fp8kit.commands import positional, positive
from fp8kit.models import text
from fp8kit.recipe import DelayedScaling

LAYERS, HIDDEN, HEADS, LENGTH, SEQUENCES = 2, 64, 4, 64, 16
RECIPE = DelayedScaling(amax_history_len=16)


def start(key):
    """Parameters, kernels (in, out), and for each layer the FP8 state of its four products."""
    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))

    def draw(*shape):
        return 0.02 * jax.random.normal(next(keys), shape)

    layers = [
        {
            "qkv": draw(HIDDEN, 3, HIDDEN),
            "out": draw(HIDDEN, HIDDEN),
            "up": draw(HIDDEN, 1, 4 * HIDDEN),
            "down": draw(4 * HIDDEN, HIDDEN),
            "norm1": jnp.ones(HIDDEN),
            "norm2": jnp.ones(HIDDEN),
        }
        for _ in range(LAYERS)
    ]
    params = {
        "bytes": draw(256, HIDDEN),
        "positions": draw(LENGTH, HIDDEN),
        "layers": layers,
        "norm": jnp.ones(HIDDEN),
    }
    return params, [fj.create_set(RECIPE, 4) for _ in range(LAYERS)]


def layer(p, sets, x):
    """x + attention(norm(x)), then + mlp(norm(x)), the four products in FP8."""
    qkv = fj.layernorm_dense(x, p["qkv"], p["norm1"], None, norm_type="rmsnorm", quantizer_set=sets[0])
    o = fj.dot_product_attention(qkv.reshape(*x.shape[:2], 3, HEADS, HIDDEN // HEADS))
    x = x + fj.dense(o.reshape(x.shape), p["out"], quantizer_set=sets[1])
    return x + fj.layernorm_mlp(
        x, p["norm2"], None, (p["up"], p["down"]), norm_type="rmsnorm", quantizer_sets=sets[2:]
    )


def loss_of(params, states, ids, targets):
    """Cross entropy in nats/byte."""
    x = params["bytes"][ids] + params["positions"]
    for p, sets in zip(params["layers"], states, strict=True):
        x = layer(p, sets, x)
    return fj.fused_cross_entropy(fj.rmsnorm(x, params["norm"]) @ params["bytes"].T, targets)


def main(steps: int = 120) -> None:
    """Train for ``steps`` steps and print the loss and the speed."""
    corpus = text.standard_library()
    params, states = start(jax.random.key(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))

    def step(params, states, memory, ids, targets):
        loss, (grads, states) = jax.value_and_grad(loss_of, argnums=(0, 1))(params, states, ids, targets)
        updates, memory = optimizer.update(grads, memory, params)
        return optax.apply_updates(params, updates), states, memory, loss

    step = jax.jit(step, donate_argnums=(0, 1, 2))
    memory, began = optimizer.init(params), time.perf_counter()
    for n in range(steps):
        ids, targets = (
            jnp.asarray(a, jnp.int32) for a in text.batch(corpus.train, SEQUENCES, LENGTH, seed=0, step=n)
        )
        params, states, memory, loss = step(params, states, memory, ids, targets)
        if n % max(1, steps // 10) == 0 or n == steps - 1:
            speed = (n + 1) * SEQUENCES * LENGTH / (time.perf_counter() - began)
            print(
                f"step {n}: {loss:.3f} nats/byte (bytes by frequency alone: {corpus.unigram_entropy():.3f}), "
                f"{speed:.0f} bytes/s"
            )
    print(
        f"scales of the first product: input {float(states[0][0].x.scale[0]):g}, "
        f"gradient {float(states[0][0].grad.scale[0]):g}"
    )


if __name__ == "__main__":
    main(*positional(__doc__, steps=positive))
