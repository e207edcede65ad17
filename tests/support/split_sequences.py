"""Attention over sequences that devices divide in JAX: what tests of it, also in several processes, share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from fp8kit_jax.sequences import (
    ReorderStrategy,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)

from fp8kit.testing.compare import ROUNDOFF

T, HEADS, GROUPS, D = 64, 4, 2, 16
LONGEST = 27
# sequences of 1 to 27 tokens, one of none, gaps behind some and behind the last
SUMS = np.int32([0, 1, 12, 12, 39, 44, 55])
STARTS = np.int32([0, 1, 14, 14, 41, 46, 64])
PACKED_BOUND = (LONGEST + D) * ROUNDOFF  # as test_mesh_sequences has it
# scores' exponentials, outputs, and what each gradient is made of are rounded to bfloat16, 2^-9 each: eight
BFLOAT16_BOUND = 2.0**-6
PLACES = {"cu_seqlens_q": SUMS, "cu_seqlens_q_padded": STARTS}
PLACES |= {name.replace("_q", "_kv"): sums for name, sums in PLACES.items()}
PLACES |= {"max_seqlen_q": LONGEST, "max_seqlen_kv": LONGEST, "qkv_format": "thd"}


def mesh_of(kind, **axes):
    """A mesh of axes of a kind, by their sizes."""
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def value_and_gradients(attend, layers, weight):
    """o of the layers, and the gradients of the sum of weight o."""

    def loss(layers, weight):
        o = attend(*layers)
        return (o * weight).sum(), o

    (_, o), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(layers, weight)
    return [o, *grads]


def draw(seed, *shape):
    """Normal numbers, float32."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def striped(a, devices, stripe, at=0, back=False):
    """Tokens in stripes for devices, as they are for stripe None."""
    if stripe is None:
        return a
    function = inverse_reorder_causal_load_balancing if back else reorder_causal_load_balancing
    return function(a, ReorderStrategy.Striped, devices, at, stripe)
