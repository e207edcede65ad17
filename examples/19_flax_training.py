"""FP8 training of Flax modules: Transformer Engine's names, one loop.

Shows: a Flax model whose layers are ``fp8kit_jax.flax.TransformerLayer``; FP8 is on where ``autocast`` is,
the FP8 state lies in a collection of its own, whose gradient is its next value, which Flax's ``TrainState``
puts in its place; evaluation in the same precision. Needs: JAX, Flax, optax (extra flax); a CPU (about 20
seconds), or a GPU that JAX sees.
"""

from fp8kit.errors import not_installed

if why := not_installed("19_flax_training.py", "flax", "flax", "optax"):
    raise SystemExit(why)

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from fp8kit_jax.flax import LayerNorm, TransformerLayer

from fp8kit.commands import positional, positive
from fp8kit.models import text
from fp8kit.recipe import DelayedScaling

LENGTH, SEQUENCES = 64, 16


class GPT(nn.Module):
    """A byte-level language model. ids: int32 (b, s); returns logits (b, s, 256)."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4

    @nn.compact
    def __call__(self, ids, deterministic=False):
        x = nn.Embed(256, self.hidden)(ids)
        for _ in range(self.layers):
            x = TransformerLayer(
                self.hidden,
                4 * self.hidden,
                self.heads,
                hidden_dropout=0.05,
                attention_dropout=0.0,
                layernorm_type="rmsnorm",
                mlp_activations=("silu", "linear"),
                enable_relative_embedding=False,
                enable_rotary_pos_emb=True,
            )(x, deterministic=deterministic)
        return nn.Dense(256)(LayerNorm(layernorm_type="rmsnorm")(x))


def main(steps: int = 120) -> None:
    """Train for ``steps`` steps; print the training loss on the way and the validation loss at the end."""
    corpus, model = text.standard_library(), GPT()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps))

    def batch(part, step):
        return (jnp.asarray(a, jnp.int32) for a in text.batch(part, SEQUENCES, LENGTH, seed=0, step=step))

    def loss_of(variables, ids, targets, key=None):
        rngs = None if key is None else {"dropout": key}
        logits = model.apply(variables, ids, deterministic=key is None, rngs=rngs)
        return fj.fused_cross_entropy(logits, targets)

    @jax.jit
    def step(training, ids, targets, key):
        loss, gradients = jax.value_and_grad(loss_of)(training.params, ids, targets, key)
        return training.apply_gradients(grads=gradients), loss

    with fj.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=16)):
        variables = model.init(keys, next(batch(corpus.train, 0)))
        training = TrainState.create(apply_fn=model.apply, params=variables, tx=optimizer)
        for n in range(steps):
            training, loss = step(training, *batch(corpus.train, n), jax.random.key(n))
            if n % max(1, steps // 10) == 0 or n == steps - 1:
                print(f"step {n}: {loss:.3f} nats/byte")
        unseen = jnp.stack(
            [jax.jit(loss_of)(training.params, *batch(corpus.validation, n)) for n in range(4)]
        )
    print(
        f"validation: {unseen.mean():.3f} nats/byte (bytes by frequency alone: "
        f"{corpus.unigram_entropy():.3f})"
    )
    print(f"quantised tensors: {len(jax.tree.leaves(training.params[fj.FP8_COLLECTION_NAME])) // 2}")


if __name__ == "__main__":
    main(*positional(__doc__, steps=positive))
