"""Attention over packed sequences whose tokens are split along a mesh axis: one device's results and
gradients, for gathered keys and a ring, in natural order and in stripes."""

from __future__ import annotations

import functools

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax import flax as modules
from fp8kit_jax.sequences import (
    ReorderStrategy,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)
from fp8kit_jax.te_compat import attention as te
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.errors import Fp8kitError
from fp8kit.testing.compare import ROUNDOFF, relative_error
from tests.support.combinations import combinations
from tests.support.split_sequences import (
    GROUPS,
    HEADS,
    PACKED_BOUND,
    PLACES,
    SUMS,
    D,
    T,
    draw,
    mesh_of,
    striped,
    value_and_gradients,
)

# stripe: None is the natural order
ORDERS = {"natural": None, "striped": 1, "stripes": 4}
CASES = {
    "padding": {"attn_mask_type": "padding"},
    "causal": {"attn_mask_type": "padding_causal"},
    "window": {"attn_mask_type": "padding_causal", "window_size": (5, 0)},
    "offset": {"attn_mask_type": "padding_causal", "softmax_type": "learnable"},
    "cap": {"attn_mask_type": "padding_causal", "softcap": 0.5},
}


def attend(case, query, key, value, offset=None, **more):
    own = CASES[case] | PLACES | more
    return fj.dot_product_attention(query, key, value, softmax_offset=offset, **own)


@functools.cache
def on_one_device(case):
    """Arguments, and one device's outputs and gradients."""
    layers = [draw(0, T, HEADS, D), draw(1, T, GROUPS, D), draw(2, T, GROUPS, D)]
    weight, beside = draw(3, T, HEADS, D), [jnp.linspace(-1.0, 1.0, HEADS)] if case == "offset" else []
    wanted = value_and_gradients(functools.partial(attend, case), layers + beside, weight)
    return layers, weight, beside, wanted


def compare(case, order, strategy, devices, mesh=None, manual=False):
    """One device's outputs and gradients, and those of devices along "cp"."""
    stripe, mesh = ORDERS[order], mesh or mesh_of(AxisType.Auto, cp=devices)
    layers, weight, beside, wanted = on_one_device(case)
    split = functools.partial(
        attend,
        case,
        context_parallel_axis="cp",
        context_parallel_strategy=strategy,
        context_parallel_causal_load_balanced=stripe is not None,
        stripe_size=None if stripe == 1 else stripe,
    )
    rows = NamedSharding(mesh, P("cp"))
    *layers, weight = (jax.device_put(striped(a, devices, stripe), rows) for a in (*layers, weight))
    beside = [jax.device_put(a, NamedSharding(mesh, P())) for a in beside]
    with jax.set_mesh(mesh):
        if manual:
            specs = (P("cp"),) * 3 + (P(),) * len(beside)
            split = jax.shard_map(split, in_specs=specs, out_specs=P("cp"))
        got = value_and_gradients(split, layers + beside, weight)
    for own, want in zip(got, wanted, strict=True):
        own = np.asarray(own)
        own = striped(own, devices, stripe, back=True) if own.ndim > 1 else own
        assert relative_error(np.asarray(own), np.asarray(want)) <= PACKED_BOUND, (case, order, strategy)


@combinations(
    {"case": [*CASES], "order": [*ORDERS], "strategy": ("ALL_GATHER", "RING"), "devices": (2, 4)},
    usual=["window-natural-ALL_GATHER-4", "padding-natural-RING-2", "causal-striped-ALL_GATHER-2"],
)
def test_packed_sequences(case, order, strategy, devices):
    if case == "window" and (order, strategy) != ("natural", "ALL_GATHER"):
        with pytest.raises(Fp8kitError, match="a block of a ring, or of stripes, has no part of a window"):
            compare(case, order, strategy, devices)
        return
    compare(case, order, strategy, devices)


@combinations(
    {"way": ("explicit", "shard_map"), "order": ("natural", "stripes"), "strategy": ("ALL_GATHER", "RING")}
)
def test_packed_sequences_on_axes_of_other_kinds(way, order, strategy):
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    compare("offset", order, strategy, 2, mesh_of(kind, cp=2), way == "shard_map")


@pytest.mark.parametrize(
    ("order", "strategy"),
    [
        pytest.param("natural", "RING", marks=pytest.mark.combinations),
        ("stripes", "RING"),
        ("natural", "DEFAULT"),
    ],
)
def test_other_sequences_of_keys(order, strategy):
    """With a padding mask those of keys are of other lengths, and begin elsewhere, among more tokens."""
    keys = np.int32([0, 9, 12, 20, 20, 50, 90])
    places = PLACES | {"cu_seqlens_kv": keys, "cu_seqlens_kv_padded": keys, "max_seqlen_kv": 40}
    layers = [draw(0, T, HEADS, D), draw(1, 96, GROUPS, D), draw(2, 96, GROUPS, D)]
    weight, stripe = draw(3, T, HEADS, D), ORDERS[order]
    attend = functools.partial(fj.dot_product_attention, attn_mask_type="padding", **places)
    wanted = value_and_gradients(attend, layers, weight)
    split = {"context_parallel_axis": "cp", "context_parallel_strategy": strategy}
    split |= {"context_parallel_causal_load_balanced": stripe is not None, "stripe_size": stripe}
    moved = [striped(a, 2, stripe) for a in (*layers, weight)]
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=2)):
        got = value_and_gradients(functools.partial(attend, **split), moved[:3], moved[3])
    for own, want in zip(got, wanted, strict=True):
        own = striped(np.asarray(own), 2, stripe, back=True)
        assert relative_error(np.asarray(own), np.asarray(want)) <= (40 + D) * ROUNDOFF


# --- rows of several sequences ------------------------------------------------------------------------------

B, S = 4, 32
RESOURCE = fj.MeshResource(dp_resource="dp", tp_resource="tp", cp_resource="cp")
SPEC = P("dp", "cp", "tp", None)


def segment_ids():
    """Up to three sequences a row, of 32 tokens, some of none."""
    ids = np.zeros((B, S), np.int32)
    for row, lengths in zip(ids, ([9, 14, 9], [32], [5, 20], [1, 2, 13]), strict=True):
        ends = np.cumsum(lengths)
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True), 1):
            row[end - length : end] = number
    return jnp.asarray(ids)


@functools.cache
def rows_on_one_device():
    """Arguments, and one device's outputs and gradients."""
    layers = [draw(0, B, S, HEADS, D), draw(1, B, S, GROUPS, D), draw(2, B, S, GROUPS, D)]
    weight, plain = draw(3, B, S, HEADS, D), fj.SequenceDescriptor.from_segment_ids_and_pos(segment_ids())
    return layers, weight, value_and_gradients(lambda *own: fused(own, plain), layers, weight)


def fused(layers, descriptor, kind=te.AttnMaskType.PADDING_CAUSAL_MASK, **more):
    """``fused_attn`` of packed rows, without a bias."""
    return te.fused_attn(
        layers,
        None,
        descriptor,
        None,
        te.AttnBiasType.NO_BIAS,
        kind,
        te.QKVLayout.THD_THD_THD,
        te.AttnSoftmaxType.VANILLA_SOFTMAX,
        0.25,
        0.0,
        True,
        max_segments_per_seq=4,
        **more,
    )


@combinations(
    {"strategy": te.CPStrategy, "stripe": (1, 4), "ids": ("given", "argument", "natural", "offsets")},
    usual=["CPStrategy.DEFAULT-4-offsets"],
)
def test_rows_as_transformer_engine_has_them(strategy, stripe, ids):
    """Stripes of each row on "cp", rows on "dp", heads on "tp". The sequences are those of ids, in the order
    of the tokens or in the natural one, perhaps an argument of jit, or of lengths and offsets."""
    whole = segment_ids()
    layers, weight, wanted = rows_on_one_device()
    own = whole if ids == "natural" else striped(whole, 2, stripe, 1)
    found = fj.SequenceDescriptor.from_segment_ids_and_pos(
        (own, own), is_segment_ids_reordered={"natural": False, "given": True}.get(ids)
    )
    if ids == "offsets":
        lengths = jnp.array([[9, 14, 9], [32, -1, -1], [5, 20, -1], [1, 2, 13]])
        starts = jnp.array([[0, 9, 23], [0, -1, -1], [0, 5, -1], [0, 1, 3]])
        found = fj.SequenceDescriptor.from_seqlens_and_offsets(lengths, starts)
    mesh = mesh_of(AxisType.Auto, dp=2, cp=2, tp=2)
    split = {"context_parallel_strategy": strategy, "context_parallel_axis": "cp", "stripe_size": stripe}
    split["context_parallel_causal_load_balanced"] = True
    placed = NamedSharding(mesh, SPEC)
    *layers, weight = (jax.device_put(striped(a, 2, stripe, 1), placed) for a in (*layers, weight))

    def step(layers, weight, descriptor):
        return value_and_gradients(lambda *own: fused(own, descriptor, **split), layers, weight)

    with jax.set_mesh(mesh), fj.global_shard_guard(RESOURCE):
        if ids == "argument":
            got = jax.jit(step)(layers, weight, found)
        else:
            got = step(layers, weight, found)
        assert got[0].sharding.spec == SPEC
    for own, want in zip(got, wanted, strict=True):
        own = striped(np.asarray(own), 2, stripe, 1, back=True)
        assert relative_error(np.asarray(own), np.asarray(want)) <= (S + D) * ROUNDOFF


@combinations({"layout": ["thd_thd_thd", "bshd_bshd_bshd"]}, usual=["thd_thd_thd"])
def test_rows_in_a_shard_map(layout):
    """A device has its part of the ids too."""
    layers, thd = [draw(i, B, S, HEADS, D) for i in range(3)], layout.startswith("t")
    ids = segment_ids() if thd else jnp.int32(jnp.arange(S) < jnp.array([[32], [19], [7], [0]]))
    module = modules.DotProductAttention(
        D,
        HEADS,
        attn_mask_type="padding_causal",
        qkv_layout=layout,
        max_segments_per_seq=4 if thd else 1,
        context_parallel_strategy="RING",
    )

    def attend(ids, *layers, **more):
        made = module.clone(**more)
        return made.apply({}, *layers, fj.SequenceDescriptor.from_segment_ids_and_pos(ids))

    def moved(a, function=reorder_causal_load_balancing):
        return function(a, ReorderStrategy.Striped if thd else ReorderStrategy.DualChunkSwap, 2, 1)

    wanted = jax.jit(attend)(ids, *layers)
    split = functools.partial(attend, context_parallel_axis="cp", context_parallel_causal_load_balanced=True)
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=2)):
        rows = P(None, "cp")
        run = jax.jit(jax.shard_map(split, in_specs=(rows,) * 4, out_specs=rows))
        got = run(*map(moved, (ids, *layers)))
    got = moved(np.asarray(got), inverse_reorder_causal_load_balancing)
    assert relative_error(np.asarray(got), np.asarray(wanted)) <= (S + D) * ROUNDOFF


REFUSED = {
    "stripes": ({"stripe_size": 3}, "stripe_size: got 3, expected 1 or a multiple of the 2 devices"),
    "tokens": ({"stripe_size": 64}, "query: got shape .*, expected a sequence of 128 equal chunks"),
    "dropout": ({"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}, "dropout_rate: got 0.5"),
    "sums": ({"cu_seqlens_q": SUMS[::-1].copy()}, "cu_seqlens_q: got"),
    "dtype": ({"cu_seqlens_q": SUMS.astype(np.float32)}, "cu_seqlens_q: got float32"),
    "others": (
        {"cu_seqlens_kv": SUMS.copy(), "context_parallel_causal_load_balanced": False},
        "cu_seqlens_kv: got another array, expected cu_seqlens_q itself",
    ),
    "mask": ({"attn_mask_type": "causal"}, "attn_mask_type: got 'causal', expected one of padding"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_split(name):
    options, text = REFUSED[name]
    split = {"context_parallel_axis": "cp", "context_parallel_causal_load_balanced": True}
    layers = [draw(i, T, HEADS, D) for i in range(3)]
    own = PLACES | {"attn_mask_type": "padding_causal"} | split | options
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=2)), pytest.raises(Fp8kitError, match=text):
        fj.dot_product_attention(*layers, **own)
