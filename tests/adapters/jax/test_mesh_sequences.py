"""Attention over sequences that are split along a mesh axis: one device's results and gradients, under jit
and in a shard_map, with gathered keys and by a ring.

Scores of a query are one device's; softmax over more keys than a chunk sees adds exp(-inf) = 0, in another
order of sums: of s terms each, (s + d) roundings. A ring sums some keys' terms first, and rounds each merged
sum a few times more: fewer than the roundings of the sums that it spares.
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
from tests.support.split_sequences import mesh_of, value_and_gradients

B, S, HEADS, GROUPS, D = 2, 32, 4, 2, 16
BOUND = (S + D) * ROUNDOFF
RESOURCE = fj.MeshResource(dp_resource="dp", tp_resource="tp", cp_resource="cp")
SPEC = P("dp", "cp", "tp", None)
FORMS = ("bshd", "sbhd")
RING = {"context_parallel_strategy": "RING"}
CASES = {
    "no_mask": {"attn_mask_type": "no_mask"},
    "causal": {"attn_mask_type": "causal"},
    "balanced": {"attn_mask_type": "causal", "context_parallel_causal_load_balanced": True},
    "window": {"attn_mask_type": "causal", "window_size": (10, 0)},
    "padding": {"attn_mask_type": "padding"},
    "padding_causal": {"attn_mask_type": "padding_causal"},
    "padding_balanced": {"attn_mask_type": "padding_causal", "context_parallel_causal_load_balanced": True},
    "offset": {"attn_mask_type": "causal", "softmax_type": "learnable"},
    "off_by_one": {"attn_mask_type": "causal", "softmax_type": "off_by_one"},
    "cap": {"attn_mask_type": "causal", "softcap": 0.5},
}


def draw(seed, heads):
    return jax.device_put(np.random.default_rng(seed).standard_normal((B, S, heads, D)).astype(np.float32))


def swap(a, back=False, devices=2, at=1):
    function = inverse_reorder_causal_load_balancing if back else reorder_causal_load_balancing
    return function(a, ReorderStrategy.DualChunkSwap, devices, at)


@combinations(
    {"case": [*CASES], "way": ("auto", "explicit", "shard_map"), "strategy": ("ALL_GATHER", "RING")},
    usual=[
        "balanced-shard_map-ALL_GATHER",
        "no_mask-explicit-ALL_GATHER",
        "offset-auto-ALL_GATHER",
        "padding_balanced-auto-ALL_GATHER",
        "causal-explicit-RING",
        "offset-auto-RING",
    ],
)
def test_split_sequences(case, way, strategy):
    """Windows are gathered keys' alone: the ring's case is one of a window that a causal mask has anyway."""
    options = CASES[case]
    if case == "window" and strategy == "RING":
        options = options | {"window_size": (-1, 0)}
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
    how = {"context_parallel_causal_load_balanced": balanced, "context_parallel_strategy": strategy}
    split = functools.partial(attend, **how)
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


@combinations(
    {"devices": (2, 3, 4, 8), "case": ("no_mask", "causal", "balanced", "padding_balanced"), "form": FORMS},
    usual=["3-causal-sbhd"],
)
def test_rings_of_more_devices(devices, case, form):
    """In either format, of features of values that are not those of keys; 48 tokens."""
    at, rng = form.index("s"), np.random.default_rng(0)
    shape = (48, B) if at == 0 else (B, 48)
    sizes = (HEADS, D), (GROUPS, D), (GROUPS, 8), (HEADS, 8)
    *layers, weight = (jnp.asarray(rng.standard_normal((*shape, *size)), jnp.float32) for size in sizes)
    options = {n: a for n, a in CASES[case].items() if not n.startswith("context")} | {"qkv_format": form}
    if "padding" in case:
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), jnp.asarray([0, 29, 34], jnp.int32))
    attend = functools.partial(fj.dot_product_attention, **options)
    wanted = value_and_gradients(attend, layers, weight)
    balanced = case.endswith("balanced")
    if balanced:
        layers, weight = [swap(a, False, devices, at) for a in layers], swap(weight, False, devices, at)
    split = {"context_parallel_axis": "cp", "context_parallel_causal_load_balanced": balanced}
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=devices)):
        ring = functools.partial(attend, context_parallel_strategy="RING", **split)
        got = value_and_gradients(ring, layers, weight)
    for own, want in zip(got, wanted, strict=True):
        own = swap(np.asarray(own), True, devices, at) if balanced else own
        assert relative_error(np.asarray(own), np.asarray(want)) <= (48 + D) * ROUNDOFF


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


@combinations({"strategy": ("ALL_GATHER", "RING")}, usual=["RING"])
def test_other_numbers_of_keys(strategy):
    """Of padded sequences, two chunks of them on each device."""
    rng = np.random.default_rng(0)
    sizes = (S, HEADS), (48, GROUPS), (48, GROUPS), (S, HEADS)
    *layers, weight = (jnp.asarray(rng.standard_normal((B, *size, D)), jnp.float32) for size in sizes)
    sums = {"cu_seqlens_q": jnp.array([0, 32, 51], jnp.int32)}
    sums["cu_seqlens_kv"] = jnp.array([0, 21, 62], jnp.int32)
    attend = functools.partial(fj.dot_product_attention, attn_mask_type="padding", **sums)
    wanted = value_and_gradients(attend, layers, weight)
    split = {"context_parallel_axis": "cp", "context_parallel_causal_load_balanced": True}
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=2)):
        own = functools.partial(attend, context_parallel_strategy=strategy, **split)
        got = value_and_gradients(own, [swap(a) for a in layers], swap(weight))
    for a, want in zip(got, wanted, strict=True):
        assert relative_error(np.asarray(swap(a, back=True)), np.asarray(want)) <= (48 + D) * ROUNDOFF


def test_a_ring_of_bfloat16():
    """Each device's part of an output is rounded, and their weighted sum: half a unit each, of what is no
    larger than the values. Gradients are sums of four devices' parts, rounded like their sum: five halves of
    a unit, and as much again for the rowsum(do * o) of rounded outputs."""
    arrays = [draw(i, HEADS).astype(jnp.bfloat16) for i in range(4)]
    wide = [a.astype(jnp.float32) for a in arrays]
    wanted = value_and_gradients(fj.dot_product_attention, wide[:3], wide[3])
    how = {"context_parallel_axis": "cp", "context_parallel_causal_load_balanced": True}
    how["context_parallel_strategy"] = "RING"
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=4)):
        moved = [swap(a, devices=4) for a in arrays]
        got = value_and_gradients(functools.partial(fj.dot_product_attention, **how), moved[:3], moved[3])
    assert all(a.dtype == jnp.bfloat16 for a in got)
    got = [np.asarray(swap(a, True, 4), np.float32) for a in got]
    unit = 2.0**-8
    assert np.abs(got[0] - wanted[0]).max() <= unit * np.abs(wide[2]).max()
    for own, want in zip(got[1:], wanted[1:], strict=True):
        assert np.abs(own - want).max() <= 5 * unit * np.abs(want).max()


@pytest.mark.programs
def test_losses_of_a_hundred_steps():
    """Of gradient descent on projections round an attention, within 1e-3 in total, as other ways have it
    (docs/scale.md), at a rate at which roundings do not grow; tokens change places once."""
    width, rng = HEADS * D, np.random.default_rng(0)
    x, goal = (jnp.asarray(rng.standard_normal((B, S, width)), jnp.float32) for _ in range(2))
    start = [jnp.asarray(rng.standard_normal((width, width)) / 8, jnp.float32) for _ in range(4)]

    def losses(x, goal, **how):
        def loss(weights):
            layers = [(x @ w).reshape(B, S, HEADS, D) for w in weights[:3]]
            o = fj.dot_product_attention(*layers, **how).reshape(B, S, width) @ weights[3]
            return ((o - goal) ** 2).mean()

        def step(weights, _):
            found, grads = jax.value_and_grad(loss)(weights)
            return jax.tree.map(lambda w, g: w - 0.5 * g, weights, grads), found

        return np.asarray(jax.jit(lambda w: jax.lax.scan(step, w, None, 100)[1])(start), np.float64)

    wanted = losses(x, goal)
    assert wanted[-1] < 0.9 * wanted[0]
    how = {"context_parallel_axis": "cp", "context_parallel_causal_load_balanced": True}
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=4)):
        got = losses(swap(x, devices=4), swap(goal, devices=4), **how, **RING)
    assert not np.array_equal(got, wanted)
    assert np.abs(got - wanted).sum() <= 1e-3 * wanted.sum()


@pytest.mark.filterwarnings("ignore:.*jax.set_mesh:DeprecationWarning")
@pytest.mark.parametrize("strategy", ["ALL_GATHER", "RING"])
def test_the_mesh_of_a_block(strategy):
    """``with mesh:``, which JAX is giving up and programs still have, of arrays that are not placed."""
    layers = [draw(i, HEADS) for i in range(3)]
    how = {"context_parallel_axis": "cp", "context_parallel_strategy": strategy}
    with mesh_of(AxisType.Auto, cp=2):
        got = jax.jit(functools.partial(fj.dot_product_attention, **how))(*layers)
    assert relative_error(np.asarray(got), np.asarray(fj.dot_product_attention(*layers))) <= BOUND


def test_a_ring_keeps_no_more_than_its_own():
    """Backward reads what a device has of queries, keys, values and outputs; nothing is gathered."""
    layers = [draw(i, HEADS) for i in range(3)]
    how = {"context_parallel_axis": "cp", "context_parallel_strategy": "RING", "attn_mask_type": "no_mask"}
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=4)):
        step = functools.partial(fj.dot_product_attention, **how)
        text = jax.jit(jax.grad(lambda *own: step(*own).sum(), (0, 1, 2))).lower(*layers).as_text()
        _, back = jax.eval_shape(lambda *own: jax.vjp(step, *own), *layers)
    assert "all_gather" not in text
    # of keys and values thrice in each direction, of their gradients four times
    assert text.count("collective_permute") == 2 * (3 + 3 + 4)
    kept = sum(leaf.size for leaf in jax.tree.leaves(back))
    assert kept == 4 * B * S * HEADS * D + B * S * HEADS  # q, k, v, o and the rows' log-sum-exp


@pytest.mark.parametrize("strategy", te.CPStrategy)
def test_transformer_engines_names(strategy):
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
                context_parallel_strategy=strategy,
            )
        )(*(swap(a) for a in layers))
    assert relative_error(np.asarray(swap(got, back=True)), np.asarray(wanted)) <= BOUND


REFUSED = {
    "mask": ({"attn_mask_type": "arbitrary"}, "attn_mask_type: got 'arbitrary'"),
    "dropout": ({"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}, "dropout_rate: got 0.5"),
    "bias": ({"bias": jnp.zeros((1, 1, S, S))}, "bias: got given"),
    "axis": ({"context_parallel_axis": "other"}, "context_parallel_axis: got 'other'"),
    "window": ({"window_size": (4, 0)} | RING, "window_size: got .4, 0."),
    "offset": ({"softmax_type": "learnable"} | RING, "softmax_offset: missing"),
    "offset_dtype": (
        {"softmax_type": "learnable", "softmax_offset": jnp.zeros(HEADS, jnp.bfloat16)} | RING,
        "softmax_offset: got bfloat16",
    ),
    "offset_unused": ({"softmax_offset": jnp.zeros(HEADS)} | RING, "softmax_offset: got"),
    "groups": ({"key": jnp.zeros((B, S, 3, D))} | RING, "key: got"),
    "strategy": ({"context_parallel_strategy": "P2P"}, "context_parallel_strategy: got 'P2P'"),
    "stripes": ({"stripe_size": 2}, "stripe_size: got 2, expected None without 'thd'"),
    "format": ({"qkv_format": "bhsd"}, "qkv_format: got 'bhsd', expected one of sbhd, bshd, thd"),
    "tokens": (
        {"query": jnp.zeros((B, 31, HEADS, D))},
        "query: got shape .*, expected a sequence of 2 equal",
    ),
    "lengths": ({"key": jnp.zeros((B, 64, HEADS, D))}, "key: got 32 queries and 64 keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_split(name):
    options, text = REFUSED[name]
    layers = {name: draw(i, HEADS) for i, name in enumerate(("query", "key", "value"))}
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=2)), pytest.raises(Fp8kitError, match=text):
        fj.dot_product_attention(**layers | {"context_parallel_axis": "cp"} | options)


ODD = jnp.array([0, 9, 12, 31], jnp.int32)
WHOLE = {
    "tokens": ((31, 31), {}),
    "keys": ((16, 32), {"attn_mask_type": "causal"}),
    "packed": (
        (31, 31),
        {"qkv_format": "thd", "attn_mask_type": "padding_causal", "max_seqlen_q": 19, "max_seqlen_kv": 19}
        | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ODD),
    ),
    "fp8": ((32, 32), {}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_runs_whole_where_only_cp_resource_asks(name):
    """As on one device, to the bit; in a shard_map, where nobody has the whole, it is refused."""
    lengths, options = WHOLE[name]
    layers = [draw(i, HEADS)[:, :length] for i, length in enumerate((lengths[0], lengths[1], lengths[1]))]
    layers = [a[0] for a in layers] if name == "packed" else layers
    attend = functools.partial(fj.dot_product_attention, **options)
    recipe = Float8CurrentScaling(fp8_dpa=True)
    with fj.autocast(enabled=name == "fp8", recipe=recipe):
        wanted = jax.jit(attend)(*layers)
        with jax.set_mesh(mesh_of(AxisType.Auto, cp=2)), fj.global_shard_guard(RESOURCE):
            np.testing.assert_array_equal(jax.jit(attend)(*layers), wanted)
            with pytest.raises(Fp8kitError, match=r"2 equal chunks|as many as queries|without fp8_dpa"):
                attend(*layers, context_parallel_axis="cp")


def test_keys_that_are_not_seen_leave_no_trace():
    """Later devices' keys and values that are no numbers: in outputs, and in gradients of earlier queries."""
    layers, seen = [draw(i, HEADS) for i in range(3)], slice(S // 2)
    hidden = (np.arange(S) >= S // 2)[:, None, None]
    late = [layers[0], *(np.where(hidden, np.float32(np.nan), a) for a in layers[1:])]
    how = {"context_parallel_axis": "cp"} | RING

    def loss(*layers, **how):
        o = fj.dot_product_attention(*layers, **how)[:, seen]
        return (o**2).sum(), o

    whole = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, wanted), dq = whole(*(np.asarray(a)[:, seen] for a in layers))
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=2)):
        split = jax.value_and_grad(functools.partial(loss, **how), has_aux=True)
        (_, got), own = jax.jit(split)(*late)
    for a, want in ((got, wanted), (own[:, seen], dq)):
        assert relative_error(np.asarray(a), np.asarray(want)) <= BOUND


@functools.cache
def one_by_one():
    """Two elements of a batch, and their outputs and gradients."""
    layers = [np.stack([draw(i, HEADS), draw(i + 3, HEADS)]) for i in range(3)]
    weight = np.stack([draw(6, HEADS), draw(7, HEADS)])
    pulled = jax.jit(
        lambda layers, g: (lambda o, back: [o, *back(g)])(*jax.vjp(fj.dot_product_attention, *layers))
    )
    return layers, weight, [pulled([a[i] for a in layers], weight[i]) for i in range(2)]


@pytest.mark.parametrize("strategy", ["ALL_GATHER", "RING"])
def test_split_sequences_under_vmap(strategy):
    layers, weight, each = one_by_one()
    how = {"context_parallel_axis": "cp", "context_parallel_strategy": strategy}
    with jax.set_mesh(mesh_of(AxisType.Auto, cp=2)):
        split = jax.vmap(functools.partial(fj.dot_product_attention, **how))
        got = value_and_gradients(split, layers, weight)
    for own, *wanted in zip(got, *each, strict=True):
        assert relative_error(np.asarray(own), np.stack(wanted)) <= BOUND


def test_quantised_operands_are_not_split():
    layers = [draw(i, HEADS) for i in range(3)]
    recipe = Float8CurrentScaling(fp8_dpa=True)
    with (
        jax.set_mesh(mesh_of(AxisType.Auto, cp=2)),
        fj.autocast(enabled=True, recipe=recipe),
        pytest.raises(Fp8kitError, match="a recipe without fp8_dpa"),
    ):
        fj.dot_product_attention(*layers, context_parallel_axis="cp")


@combinations({"strategy": ("ALL_GATHER", "RING")}, usual=["RING"])
def test_outside_of_jit_a_call_is_compiled_once(strategy, caplog):
    """Other masks and scales are other programs; values, of lengths too, are not."""
    q, k, v = draw(0, HEADS), draw(1, GROUPS), draw(2, GROUPS)

    def gradient(sums, **options):
        def loss(q):
            how = {"context_parallel_axis": "cp", "context_parallel_strategy": strategy}
            sides = {"cu_seqlens_q": sums, "cu_seqlens_kv": sums}
            options.setdefault("attn_mask_type", "padding")
            return fj.dot_product_attention(q, k, v, qkv_format="bshd", **sides, **how, **options).sum()

        return jax.grad(loss)(q)

    def programs(*given, **options):
        caplog.clear()
        with jax.log_compiles():
            found = gradient(*given, **options)
        names = [record.getMessage() for record in caplog.records]
        return found, [name for name in names if name.startswith("Compiling jit(local)")]

    with jax.set_mesh(mesh_of(AxisType.Auto, cp=2)):
        sums = jnp.asarray([0, S, 2 * S], jnp.int32)
        whole, first = programs(sums)
        again, second = programs(sums)
        shorter, third = programs(jnp.asarray([0, S // 2, S], jnp.int32))
        scaled, fourth = programs(sums, scale_factor=0.5)
    assert len(first) == len(fourth) == 2  # forward and backward
    assert not second
    assert not third
    assert jnp.array_equal(whole, again)
    assert not jnp.array_equal(whole, shorter)
    assert not jnp.array_equal(whole, scaled)
