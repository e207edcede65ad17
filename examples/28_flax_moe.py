"""Flax: train a layer of experts, in high precision and in FP8.

Shows: the router with its auxiliary loss, tokens to rows by expert and back, the experts as one
``GroupedMLP`` with the probabilities inside, all in one jitted step in which nothing is read on the host. The
experts learn a function that differs from one region of its inputs to the next. Needs: JAX, Flax, optax
(extra flax); a CPU, or a GPU that JAX sees. Arguments: steps.
"""

from fp8kit.errors import not_installed

if why := not_installed("28_flax_moe.py", "flax", "flax", "optax"):
    raise SystemExit(why)

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from fp8kit_jax.flax import GroupedMLP

from fp8kit.commands import positional, positive
from fp8kit.recipe import Float8CurrentScaling

HIDDEN, FFN, EXPERTS, TOPK, ALIGN, BALANCE = 32, 64, 8, 2, 16, 0.01


class Experts(nn.Module):
    """x (tokens, hidden) to (the sum over a token's experts e of p_e MLP_e(x), the auxiliary loss, the tokens
    of each expert)."""

    @nn.compact
    def __call__(self, x):
        logits = nn.Dense(EXPERTS, use_bias=False, name="gate")(x)  # outside of FP8: it decides
        probs, chosen = fj.fused_topk_with_score_function(logits, TOPK)
        scores, _ = fj.fused_topk_with_score_function(logits, TOPK, compute_aux_scores=True)
        counts = chosen.sum(0, dtype=jnp.int32)
        loss = fj.fused_moe_aux_loss(scores, counts, TOPK, BALANCE)
        rows, weights, row_map, _, sizes = fj.token_dispatch(x, chosen, TOPK * len(x), probs, ALIGN)
        rows = GroupedMLP(EXPERTS, FFN, name="mlp")(rows, sizes, weights)
        return fj.token_combine(rows, row_map, num_tokens=len(x)), loss, counts


def batch(step: int):
    """(x, y): 512 points, and a turn of each that the signs of its first three numbers choose."""
    keys = jax.random.split(jax.random.key(0), 2)
    turns = jax.random.normal(keys[0], (8, HIDDEN, HIDDEN)) / HIDDEN**0.5
    x = jax.random.normal(jax.random.fold_in(keys[1], step), (512, HIDDEN))
    region = (x[:, :3] > 0) @ jnp.array([4, 2, 1])
    return x, jnp.einsum("th,thk->tk", x, turns[region])


def train(steps: int, recipe) -> tuple[float, float, jax.Array]:
    """(the first loss, the mean of the last ones, each expert's share of the tokens)."""
    model, optimizer = Experts(), optax.adam(1e-2)

    def loss_of(variables, x, y):
        found, balance, counts = model.apply(variables, x)
        error = jnp.mean((found - y) ** 2)
        return error + balance, (error, counts)

    @jax.jit
    def step(variables, state, x, y):
        (_, (error, counts)), gradients = jax.value_and_grad(loss_of, has_aux=True)(variables, x, y)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(variables, updates), state, error, counts

    losses = []
    with fj.autocast(enabled=recipe is not None, recipe=recipe):
        variables = model.init(jax.random.key(1), batch(0)[0])
        state = optimizer.init(variables)
        for n in range(steps):
            variables, state, error, counts = step(variables, state, *batch(n))
            losses.append(float(error))
    return losses[0], sum(losses[-10:]) / len(losses[-10:]), counts / counts.sum()


def main(steps: int = 120) -> None:
    """Train twice."""
    for name, recipe in (("high precision", None), ("FP8, current scaling", Float8CurrentScaling())):
        first, last, shares = train(steps, recipe)
        used = f"experts take from {shares.min():.3f} to {shares.max():.3f} of the tokens"
        print(f"{name}: error {first:.3f} to {last:.3f}; {used} ({1 / EXPERTS} is even)")


if __name__ == "__main__":
    main(*positional(__doc__, steps=positive))
