"""Flax models and attention that two GPUs of a process divide: one GPU's losses, results and gradients."""

from __future__ import annotations

import functools

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.testing.compare import relative_error
from tests.support.meshes import PAIRS, train
from tests.support.split_sequences import BFLOAT16_BOUND, HEADS, PLACES, T, draw, striped, value_and_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.gpu2, pytest.mark.usefixtures("ends_when_stuck")]
STEPS, TOTAL = 100, 1e-3  # the bar of the total of a hundred losses
GROUPS, D, STRIPE = 2, 64, 4
FORMS = {
    "causal": {"attn_mask_type": "causal"},
    "balanced": {"attn_mask_type": "causal"},
    "packed": {"attn_mask_type": "padding_causal"} | PLACES,
    "stripes": {"attn_mask_type": "padding_causal"} | PLACES,
}


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("high", "cp"),
        ("delayed", "fsdp"),
        ("current", "tp"),
        ("block", "two by shard_map"),
        ("delayed", "tp"),
    ],
)
def test_a_hundred_steps(recipe, layout):
    assert jax.device_count() >= 2
    want, _ = train("TransformerLayer", recipe, STEPS)
    got, _ = train("TransformerLayer", recipe, STEPS, PAIRS[layout])
    assert want[-1] < 0.9 * want[0]
    assert abs(sum(got) - sum(want)) <= TOTAL * sum(want)


@pytest.mark.parametrize("strategy", ["ALL_GATHER", "RING"])
@pytest.mark.parametrize("form", FORMS)
def test_split_sequences(form, strategy):
    shape = (T,) if "qkv_format" in FORMS[form] else (1, T)
    sizes = (HEADS, D), (GROUPS, D), (GROUPS, D), (HEADS, D)
    *layers, weight = (draw(i, *shape, *size).astype(jnp.bfloat16) for i, size in enumerate(sizes))
    attend = functools.partial(fj.dot_product_attention, **FORMS[form])
    wanted = value_and_gradients(attend, layers, weight)
    at = len(shape) - 1

    def order(a, back=False):
        if form == "stripes":
            return striped(a, 2, STRIPE, at, back)
        if form == "balanced":
            swap = (
                fj.sequences.inverse_reorder_causal_load_balancing
                if back
                else (fj.sequences.reorder_causal_load_balancing)
            )
            return swap(a, fj.sequences.ReorderStrategy.DualChunkSwap, 2, at)
        return a

    how = {"context_parallel_axis": "cp", "context_parallel_strategy": strategy}
    how["context_parallel_causal_load_balanced"] = form in ("balanced", "stripes")
    if form == "stripes":
        how["stripe_size"] = STRIPE
    mesh = jax.make_mesh((2,), ("cp",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        tokens = NamedSharding(mesh, P(*[None] * at, "cp"))
        *parts, own_weight = (jax.device_put(order(a), tokens) for a in (*layers, weight))
        got = value_and_gradients(functools.partial(attend, **how), parts, own_weight)
    for own, want in zip(got, wanted, strict=True):
        assert relative_error(np.asarray(order(np.asarray(own), True)), np.asarray(want)) <= BFLOAT16_BOUND
