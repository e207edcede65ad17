"""FP8 training of Flax modules: Transformer Engine's names, one loop.

Shows: a Flax model whose layers are ``fp8kit_jax.flax.TransformerLayer``; FP8 is on where ``autocast`` is, the FP8 state lies in the
collection ``fp8_metas`` and is handed on by ``update_collections``; evaluation in the same precision; and, token by token, what the model
writes, its keys and values kept in the collection ``cache``. Needs: JAX, Flax and optax; a CPU (about 30 seconds), or a GPU that JAX sees.
"""

import sys

import flax
import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from fp8kit_jax.flax import LayerNorm, TransformerLayer

from fp8kit.models import text
from fp8kit.recipe import DelayedScaling

LENGTH, SEQUENCES = 64, 16


class GPT(nn.Module):
    """A byte-level language model. ids: int32 (b, s); returns logits (b, s, 256)."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4

    @nn.compact
    def __call__(self, ids, deterministic=False, decode=False):
        x = nn.Embed(256, self.hidden)(ids)
        for _ in range(self.layers):
            x = TransformerLayer(
                self.hidden, 4 * self.hidden, self.heads, hidden_dropout=0.05, attention_dropout=0.0, layernorm_type="rmsnorm",
                mlp_activations=("silu", "linear"), enable_relative_embedding=False, enable_rotary_pos_emb=True,
            )(x, deterministic=deterministic, decode=decode)  # fmt: skip
        return nn.Dense(256)(LayerNorm(layernorm_type="rmsnorm")(x))


def write(model, variables, start, count):
    """``start`` and ``count`` bytes more, each drawn by the model's probabilities after all before it."""
    cache = model.init(jax.random.key(0), jnp.zeros((1, len(start) + count), jnp.int32), deterministic=True, decode=True)["cache"]

    @jax.jit
    def step(cache, ids, key):
        logits, fresh = model.apply({**variables, "cache": cache}, ids, deterministic=True, decode=True, mutable=["cache"])
        return fresh["cache"], jax.random.categorical(key, logits[:, -1:])

    written, ids = list(start), jnp.array([list(start)])  # the whole start at once, then byte by byte
    for key in jax.random.split(jax.random.key(2), count):
        cache, ids = step(cache, ids, key)
        written.append(int(ids[0, 0]))
    return bytes(written)


def main(steps: int = 120) -> None:
    """Train for ``steps`` steps; print the training loss on the way and the validation loss at the end."""
    corpus, model = text.standard_library(), GPT()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps))

    def batch(part, step):
        return (jnp.asarray(a, jnp.int32) for a in text.batch(part, SEQUENCES, LENGTH, seed=0, step=step))

    def loss_of(params, metas, ids, targets, key=None):
        rngs = None if key is None else {"dropout": key}
        logits = model.apply({"params": params, **metas}, ids, deterministic=key is None, rngs=rngs)
        return fj.fused_cross_entropy(logits, targets)

    @jax.jit
    def step(params, metas, memory, ids, targets, key):
        loss, (grads, fresh) = jax.value_and_grad(loss_of, argnums=(0, 1))(params, metas, ids, targets, key)
        updates, memory = optimizer.update(grads, memory, params)
        return optax.apply_updates(params, updates), fj.update_collections(fresh, metas), memory, loss

    with fj.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=16)):
        metas, params = flax.core.pop(model.init(keys, next(batch(corpus.train, 0))), "params")
        memory = optimizer.init(params)
        for n in range(steps):
            params, metas, memory, loss = step(params, metas, memory, *batch(corpus.train, n), jax.random.key(n))
            if n % max(1, steps // 10) == 0 or n == steps - 1:
                print(f"step {n}: {loss:.3f} nats/byte")
        text_of_its_own = write(model, {"params": params, **metas}, b"    return ", 32)
        unseen = jnp.stack([jax.jit(loss_of)(params, metas, *batch(corpus.validation, n)) for n in range(4)])
    print(f"validation: {unseen.mean():.3f} nats/byte (bytes by frequency alone: {corpus.unigram_entropy():.3f})")
    print(f"it writes: {text_of_its_own.decode(errors='replace')!r}")
    print(f"quantised tensors: {len(jax.tree.leaves(metas)) // 2}")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
