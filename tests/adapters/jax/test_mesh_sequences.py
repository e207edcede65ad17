"""Attention over sequences that are split along a mesh axis: one device's results and gradients, under jit
and in a shard_map.

Scores of a query are one device's; softmax over more keys than a chunk sees adds exp(-inf) = 0, in another
order of sums: of s terms each, (s + d) roundings.
"""

from __future__ import annotations

import functools

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax.sequences import (
    ReorderStrategy,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)
from fp8kit_jax.te_compat import attention as te
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.errors import Fp8kitError
from fp8kit.recipe import Float8CurrentScaling
from fp8kit.testing.compare import ROUNDOFF, relative_error
from tests.support.combinations import combinations

B, S, HEADS, GROUPS, D = 2, 32, 4, 2, 16
BOUND = (S + D) * ROUNDOFF
RESOURCE = fj.MeshResource(dp_resource="dp", tp_resource="tp", cp_resource="cp")
SPEC = P("dp", "cp", "tp", None)
CASES = {
    "no_mask": {"attn_mask_type": "no_mask"},
    "causal": {"attn_mask_type": "causal"},
    "balanced": {"attn_mask_type": "causal", "context_parallel_causal_load_balanced": True},
    "window": {"attn_mask_type": "causal", "window_size": (10, 0)},
    "padding": {"attn_mask_type": "padding"},
    "padding_causal": {"attn_mask_type": "padding_causal"},
    "padding_balanced": {"attn_mask_type": "padding_causal", "context_parallel_causal_load_balanced": True},
    "offset": {"attn_mask_type": "causal", "softmax_type": "learnable"},
}


def draw(seed, heads):
    return jax.device_put(np.random.default_rng(seed).standard_normal((B, S, heads, D)).astype(np.float32))


def mesh_of(kind, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def swap(a, back=False):
    function = inverse_reorder_causal_load_balancing if back else reorder_causal_load_balancing
    return function(a, ReorderStrategy.DualChunkSwap, 2, 1)


def value_and_gradients(attend, layers, weight):
    def loss(*layers):
        o = attend(*layers)
        return (o * weight).sum(), o

    (_, o), grads = jax.jit(jax.value_and_grad(loss, tuple(range(len(layers))), has_aux=True))(*layers)
    return [o, *grads]


@combinations(
    {"case": CASES.keys(), "way": ("auto", "explicit", "shard_map")},
    usual=[
        "balanced-auto",
        "balanced-shard_map",
        "no_mask-explicit",
        "causal-auto",
        "offset-auto",
        "padding-auto",
        "padding_balanced-auto",
    ],
)
def test_split_sequences(case, way):
    options = CASES[case]
    layers, weight = [draw(0, HEADS), draw(1, GROUPS), draw(2, GROUPS)], draw(3, HEADS)
    beside = [jnp.linspace(-1.0, 1.0, HEADS)] if case == "offset" else []
    lengths = [19, 19 if way == "shard_map" else 7]

    def attend(query, key, value, offset=None, **more):
        more = {name: options[name] for name in options if not name.startswith("context")} | more
        if "padding" in case:
            sums = jnp.cumsum(jnp.asarray([0, *lengths[: len(query)]], jnp.int32))
            more |= {"cu_seqlens_q": sums, "cu_seqlens_kv": sums}
        return fj.dot_product_attention(query, key, value, softmax_offset=offset, **more)

    wanted = value_and_gradients(attend, layers + beside, weight)
    balanced = case.endswith("balanced")
    split = functools.partial(attend, context_parallel_causal_load_balanced=balanced)
    mesh = mesh_of(AxisType.Explicit if way == "explicit" else AxisType.Auto, dp=2, cp=2, tp=2)
    if balanced:
        layers, weight = [swap(a) for a in layers], swap(weight)
    placed = [jax.device_put(a, NamedSharding(mesh, SPEC)) for a in layers]
    weight = jax.device_put(weight, NamedSharding(mesh, SPEC))
    beside = [jax.device_put(a, NamedSharding(mesh, P("tp"))) for a in beside]
    with jax.set_mesh(mesh), fj.global_shard_guard(RESOURCE):
        if way == "shard_map":
            specs = (SPEC,) * 3 + (P("tp"),) * len(beside)
            split = jax.shard_map(split, in_specs=specs, out_specs=SPEC)
        got = value_and_gradients(split, placed + beside, weight)
        assert got[0].sharding.spec == SPEC
    for own, want in zip(got, wanted, strict=True):
        own = swap(np.asarray(own), back=True) if balanced and own.ndim > 1 else own
        assert relative_error(np.asarray(own), np.asarray(want)) <= BOUND, (case, way)


def test_a_device_computes_its_queries_alone():
    """Of scores each of two devices makes half."""
    layers = [draw(i, HEADS) for i in range(3)]
    mesh = mesh_of(AxisType.Auto, cp=2)
    placed = [jax.device_put(a, NamedSharding(mesh, P(None, "cp"))) for a in layers]
    with jax.set_mesh(mesh):
        step = jax.jit(functools.partial(fj.dot_product_attention, context_parallel_axis="cp"))
        text = step.lower(*placed).compile().as_text()
    assert "all-gather" in text
    assert f"f32[{B},{S // 2},{HEADS},{D}]" in text


def test_transformer_engines_names():
    layers = [draw(i, HEADS) for i in range(3)]
    kinds = te.AttnBiasType.NO_BIAS, te.AttnMaskType.CAUSAL_MASK, te.QKVLayout.BSHD_BSHD_BSHD

    def attend(layers, **more):
        vanilla = te.AttnSoftmaxType.VANILLA_SOFTMAX
        return te.fused_attn(layers, None, None, None, *kinds, vanilla, 0.25, 0.0, True, **more)

    wanted = attend(layers)
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=2)):
        got = jax.jit(
            lambda *own: attend(
                own,
                context_parallel_axis="cp",
                context_parallel_causal_load_balanced=True,
                context_parallel_strategy=te.CPStrategy.ALL_GATHER,
            )
        )(*(swap(a) for a in layers))
    assert relative_error(np.asarray(swap(got, back=True)), np.asarray(wanted)) <= BOUND


REFUSED = {
    "mask": ({"attn_mask_type": "arbitrary"}, "attn_mask_type: got 'arbitrary'"),
    "dropout": ({"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}, "dropout_rate: got 0.5"),
    "bias": ({"bias": jnp.zeros((1, 1, S, S))}, "bias: got given"),
    "axis": ({"context_parallel_axis": "other"}, "context_parallel_axis: got 'other'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_split(name):
    options, text = REFUSED[name]
    layers = [draw(i, HEADS) for i in range(3)]
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=2)), pytest.raises(Fp8kitError, match=text):
        fj.dot_product_attention(*layers, **{"context_parallel_axis": "cp"} | options)


def test_quantised_operands_are_not_split():
    layers = [draw(i, HEADS) for i in range(3)]
    recipe = Float8CurrentScaling(fp8_dpa=True)
    with (
        jax.set_mesh(mesh_of(AxisType.Auto, cp=2)),
        fj.autocast(enabled=True, recipe=recipe),
        pytest.raises(Fp8kitError, match="a recipe without fp8_dpa"),
    ):
        fj.dot_product_attention(*layers, context_parallel_axis="cp")
