"""Text byte by byte in Flax: keys and values kept between the calls.

Shows: ``decode=True`` keeps the keys and values of all bytes so far in the collection ``cache``, so that each
call computes one byte alone; the logits are those of the whole text at once, here in FP8 too: blocks of 128
features of one byte have a scale of their own. Needs: JAX and Flax (extra flax); a CPU (a few seconds), or a
GPU that JAX sees.
"""

from fp8kit.errors import not_installed

if why := not_installed("21_flax_decode.py", "flax", "flax"):
    raise SystemExit(why)

import time

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
from flax import linen as nn
from fp8kit_jax.flax import LayerNorm, TransformerLayer

from fp8kit.commands import positional, positive
from fp8kit.recipe import Float8BlockScaling


class GPT(nn.Module):
    """A byte-level language model. ids: int32 (b, s); returns logits (b, s, 256)."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4

    @nn.compact
    def __call__(self, ids, decode=False):
        x = nn.Embed(256, self.hidden)(ids)
        for _ in range(self.layers):
            x = TransformerLayer(
                self.hidden,
                4 * self.hidden,
                self.heads,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                layernorm_type="rmsnorm",
                enable_relative_embedding=False,
                enable_rotary_pos_emb=True,
                self_attn_mask_type="causal",
            )(x, deterministic=True, decode=decode)
        return nn.Dense(256)(LayerNorm(layernorm_type="rmsnorm")(x))


def main(count: int = 32) -> None:
    """Write ``count`` bytes after a start; compare the logits on the way with those of the whole text."""
    model, start = GPT(), jnp.array([list(b"def forward(")], jnp.int32)
    length = start.shape[1] + count

    @jax.jit
    def step(params, cache, ids):
        logits, fresh = model.apply({"params": params, "cache": cache}, ids, decode=True, mutable=["cache"])
        return logits[:, -1], fresh["cache"]

    with fj.autocast(enabled=True, recipe=Float8BlockScaling()):
        # the cache's length is the text's
        variables = model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32), decode=True)
        params, cache = nn.unbox(variables["params"]), variables["cache"]
        written, seen = start, []
        logits, cache = step(params, cache, start)  # the whole start in one call
        begin = time.perf_counter()
        for key in jax.random.split(jax.random.key(1), count):
            seen.append(logits)
            ids = jax.random.categorical(key, logits)[:, None].astype(jnp.int32)
            written = jnp.concatenate([written, ids], axis=1)
            logits, cache = step(params, cache, ids)
        seconds = time.perf_counter() - begin
        whole = jax.jit(model.apply)({"params": params}, written)[:, start.shape[1] - 1 : -1]
    apart = jnp.abs(jnp.stack(seen, 1) - whole).max() / jnp.abs(whole).max()
    print(
        f"bytes written: {count}, {seconds / count * 1e3:.1f} ms each (the first call of one byte compiles)"
    )
    print(f"logits byte by byte and at once: {apart:.4%} of the largest apart")
    print(
        "cache: "
        f"{', '.join(sorted({path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(cache)}))}"
    )


if __name__ == "__main__":
    main(*positional(__doc__, count=positive))
