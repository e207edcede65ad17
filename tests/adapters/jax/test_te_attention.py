"""Flax's attention and Transformer Engine's functions for it, with its packed layouts, masks and words."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax import flax as modules
from fp8kit_jax.te_compat import attention

from fp8kit.errors import ArgumentError, Fp8kitError, ShapeError
from fp8kit.testing import assert_close
from tests.support.combinations import combinations
from tests.support.sharding import draw, same_bits

IDS = jnp.array([[1, 1, 1, 2, 2, 2, 2, 3, 3, 0], [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]])
Q, K, V = draw(0, 2, 10, 4, 8), draw(1, 2, 10, 2, 8), draw(2, 2, 10, 2, 8)
OFFSETS = jnp.array([[0, 3, 7, -1], [0, -1, -1, -1]])
PACKED = {
    "ids": fj.SequenceDescriptor.from_segment_ids_and_pos(IDS, None, is_thd=True),
    "lengths": fj.SequenceDescriptor.from_seqlens_and_offsets(jnp.array([[3, 4, 2], [6, -1, -1]]), OFFSETS),
}


def segments(q, k, v, causal, ids=IDS):
    """The same by a mask array."""
    hidden = (ids[:, None, :, None] != ids[:, None, None, :]) | (ids == 0)[:, None, None, :]
    hidden |= ~jnp.tri(10, dtype=bool) & causal
    o = fj.dot_product_attention(q, k, v, attn_mask_type="arbitrary", mask=hidden)
    return jnp.where((ids != 0)[:, :, None, None], o, 0.0)


@combinations({"given": PACKED.keys(), "causal": [False, True]})
def test_rows_of_several_sequences(given, causal):
    """Their tokens see their own sequence alone; values and gradients of a mask array's."""
    kind = attention.AttnMaskType.PADDING_CAUSAL_MASK if causal else attention.AttnMaskType.PADDING_MASK
    module = modules.DotProductAttention(
        8, 4, 2, attn_mask_type=kind.value, qkv_layout="thd_thd_thd", max_segments_per_seq=5
    )

    def by(function):
        def pulled(g, *layers):
            y, back = jax.vjp(function, *layers)
            return y, back(g)

        return jax.jit(pulled)(draw(5, 2, 10, 4, 8), Q, K, V)

    got = by(lambda q, k, v: module.apply({}, q, k, v, PACKED[given]))
    want = by(lambda q, k, v: segments(q, k, v, causal))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # sums of at most ten products of magnitude below 8, in another order
        assert_close("packed", np.asarray(a), np.asarray(b, np.float64), "float32", 64 * 2.0**-22)
    plain = jax.jit(
        attention.fused_attn, static_argnums=(*range(4, 11),), static_argnames="max_segments_per_seq"
    )(
        (Q, K, V),
        None,
        PACKED[given],
        None,
        attention.AttnBiasType.NO_BIAS,
        kind,
        attention.QKVLayout.THD_THD_THD,
        attention.AttnSoftmaxType.VANILLA_SOFTMAX,
        8**-0.5,
        0.0,
        True,
        max_segments_per_seq=5,
    )
    same_bits(plain, got[0])


def test_one_sequence_a_row():
    lengths = jnp.array([9, 6])
    module = modules.DotProductAttention(8, 4, 2, attn_mask_type="padding_causal")
    plain = jax.jit(lambda *layers: module.apply({}, *layers, lengths))
    want = plain(Q, K, V)
    for made in (
        fj.SequenceDescriptor.from_seqlens((lengths, lengths)),
        fj.SequenceDescriptor.from_segment_ids_and_pos((IDS != 0).astype(jnp.int32)),
    ):
        same_bits(jax.jit(lambda *layers, made=made: module.apply({}, *layers, made))(Q, K, V), want)
    hidden = np.broadcast_to(np.asarray(IDS == 0)[:, None, None, :], (2, 1, 10, 10))
    run = jax.jit(module.apply)
    same_bits(run({}, Q, K, V, hidden), run({}, Q, K, V, mask=hidden))
    same_bits(run({}, Q, K, V, hidden[:, :, None]), run({}, Q, K, V, hidden))
    own = jnp.tri(10, dtype=bool) ^ (jnp.arange(4)[:, None, None] == 2)
    same_bits(run({}, Q, K, V, own.reshape(1, 2, 2, 10, 10)), run({}, Q, K, V, own[None]))
    qkv = np.asarray(draw(3, 2, 10, 3, 4, 8))
    own = {"attn_mask_type": "padding", "max_segments_per_seq": 3}
    packed = modules.DotProductAttention(8, 4, qkv_layout="t3hd", **own)
    apart = modules.DotProductAttention(8, 4, qkv_layout="thd_thd_thd", **own)
    got = jax.jit(lambda qkv: packed.apply({}, qkv, None, None, PACKED["ids"]))(qkv)
    want = jax.jit(lambda *layers: apart.apply({}, *layers, PACKED["ids"]))(*(qkv[:, :, i] for i in range(3)))
    same_bits(got, want)


def test_what_a_mask_type_hides_anyway(caplog):
    """A window right of the diagonal, and lengths that only padding masks read."""
    with caplog.at_level("WARNING", "fp8kit"):
        for window in ((2, 0), (-1, 0)):
            plain = modules.DotProductAttention(8, 4, 2, window_size=window)
            wide = modules.DotProductAttention(8, 4, 2, window_size=(window[0], 3))
            want = jax.jit(plain.apply)({}, Q, K, V)
            same_bits(jax.jit(wide.apply)({}, Q, K, V), want)
            lengths = fj.SequenceDescriptor.from_seqlens(jnp.array([10, 10]))
            same_bits(jax.jit(plain.apply)({}, Q, K, V, lengths), want)
    assert [record.args for record in caplog.records if "not read" in record.message] == [("causal",)]


@pytest.mark.parametrize("kind", ["no_mask", "padding"])
@pytest.mark.parametrize("by_mask", [False, True])
def test_a_window_begins_with_the_first_key(kind, by_mask):
    """Where there are more keys than queries, too: the window's own mask array gives the same."""
    q = Q[:, :6]
    at = [jnp.broadcast_to(jnp.arange(n), (2, n)) for n in (6, 10)]
    window = attention.make_swa_mask(*at, (1, 2), bool)
    assert window.shape == (2, 1, 6, 10)
    np.testing.assert_array_equal(window[0, 0, 3], np.isin(np.arange(10), [2, 3, 4, 5]))
    mask = {"mask": jnp.zeros((2, 1, 6, 10), bool)} if by_mask else {}
    given = () if by_mask or kind == "no_mask" else ((jnp.array([6, 6]), jnp.array([10, 10])),)
    module = modules.DotProductAttention(8, 4, 2, attn_mask_type=kind, window_size=(1, 2))
    got = jax.jit(lambda *layers: module.apply({}, *layers, *given, **mask))(q, K, V)
    own = jax.jit(lambda *layers: fj.dot_product_attention(*layers, attn_mask_type="arbitrary", mask=~window))
    # sums of at most four products of magnitude below 8, in another order
    assert_close("window", np.asarray(got), np.asarray(own(q, K, V), np.float64), "float32", 32 * 2.0**-22)


def test_lengths_of_more_columns_than_sequences():
    """Empty places, -1, count for none; ids may be floats, as ``jnp.ones`` makes them."""
    module = modules.DotProductAttention(
        8, 4, 2, attn_mask_type="padding", qkv_layout="thd_thd_thd", max_segments_per_seq=3
    )
    run = jax.jit(module.apply)
    want = run({}, Q, K, V, PACKED["lengths"])
    lengths = jnp.array([[3, -1, 4, -1, 2, -1], [-1, -1, -1, 6, -1, -1]])
    starts = jnp.array([[0, -1, 3, -1, 7, -1, -1], [-1, -1, -1, 0, -1, -1, -1]])
    same_bits(run({}, Q, K, V, fj.SequenceDescriptor.from_seqlens_and_offsets(lengths, starts)), want)
    fewer = module.clone(max_segments_per_seq=1)  # no sequence is dropped, in jit either
    same_bits(jax.jit(fewer.apply)({}, Q, K, V, PACKED["lengths"]), want)
    floats = fj.SequenceDescriptor.from_segment_ids_and_pos(IDS.astype(jnp.float32))
    same_bits(run({}, Q, K, V, floats), run({}, Q, K, V, PACKED["ids"]))


def test_places_of_queries_and_keys_stay_pairs():
    """An empty place on one side is a sequence without partners, however few there may be."""
    lengths = jnp.array([[3, 3, 0]] * 2), jnp.array([[3, 0, 7]] * 2)
    starts = jnp.array([[0, 3, -1, -1]] * 2), jnp.array([[0, -1, 3, -1]] * 2)
    descriptor = fj.SequenceDescriptor.from_seqlens_and_offsets(lengths, starts)
    kind = {"attn_mask_type": "padding", "qkv_layout": "thd_thd_thd"}
    for most in (2, 3):
        module = modules.DotProductAttention(8, 4, 2, max_segments_per_seq=most, **kind)
        got = jax.jit(module.apply)({}, Q, K, V, descriptor)
        assert not np.asarray(got[:, 3:]).any()
        assert np.asarray(got[:, :3]).all()


def test_a_mask_whose_heads_are_groups():
    """Of five dimensions, in either place, also before the projections."""
    module = modules.DotProductAttention(8, 4, 2, attn_mask_type="no_mask")
    mask = np.random.default_rng(3).random((2, 2, 1, 10, 10)) < 0.3
    mask[..., 0] = False
    want = jax.jit(module.apply)({}, Q, K, V, mask=jnp.repeat(mask[:, :, 0], 2, 1))
    same_bits(jax.jit(module.apply)({}, Q, K, V, jnp.asarray(mask)), want)
    same_bits(jax.jit(module.apply)({}, Q, K, V, mask=jnp.asarray(mask)), want)
    with pytest.raises(ShapeError, match="mask: got"):
        module.apply({}, Q, K, V, jnp.zeros((2, 4, 1, 10, 10), bool))
    whole = modules.MultiHeadAttention(8, 4, transpose_batch_sequence=False, attn_mask_type="no_mask")
    x, hidden = draw(1, 2, 10, 16), jnp.asarray(mask[:, :1])

    def run(*args, **named):
        return whole.init_with_output(jax.random.key(0), x, x, *args, **named)[0][0]

    same_bits(run(sequence_descriptor=hidden), run(hidden[:, 0]))
    with pytest.raises(Fp8kitError, match="lengths: got 'abc'"):
        run(sequence_descriptor="abc")


def test_values_of_other_features_than_keys():
    module = modules.DotProductAttention(8, 4, 2)
    got = jax.jit(module.apply)({}, Q, K, V[..., :6])
    same_bits(got, jax.jit(fj.dot_product_attention)(Q, K, V[..., :6]))
    with pytest.raises(ShapeError, match="value: got"):
        module.apply({}, Q, K, V[:, :, :1])


def test_the_softmax_offset_of_a_function():
    offset, kind = draw(12, 1, 4, 1, 1), attention.AttnSoftmaxType.LEARNABLE_SOFTMAX
    fixed = (attention.AttnBiasType.NO_BIAS, attention.AttnMaskType.CAUSAL_MASK)
    fixed = (*fixed, attention.QKVLayout.BSHD_BSHD_BSHD, kind, 8**-0.5, 0.0, True)
    got = jax.jit(lambda o: attention.fused_attn((Q, K, V), None, None, None, *fixed, softmax_offset=o))(
        offset
    )
    module = modules.DotProductAttention(8, 4, 2, softmax_type="learnable")
    same_bits(got, jax.jit(module.apply)({"params": {"softmax_offset": offset.reshape(-1)}}, Q, K, V))


@pytest.mark.parametrize("kind", [attention.AttnMaskType.NO_MASK, attention.AttnMaskType.CAUSAL_MASK])
def test_lengths_are_not_looked_at_without_a_padding_mask(kind):
    """And values may have a head_dim of their own."""
    whole = fj.SequenceDescriptor.from_seqlens((jnp.array([10, 10]), jnp.array([10, 10])))

    def attend(descriptor):
        return attention.fused_attn(
            (Q, K, V[..., :4]),
            None,
            descriptor,
            None,
            attention.AttnBiasType.NO_BIAS,
            kind,
            attention.QKVLayout.BSHD_BSHD_BSHD,
            attention.AttnSoftmaxType.VANILLA_SOFTMAX,
            8**-0.5,
            0.0,
            True,
        )

    got = jax.jit(attend)(whole)
    same_bits(got, jax.jit(attend)(None))
    want = jax.jit(modules.DotProductAttention(8, 4, 2, attn_mask_type=kind.value).apply)({}, Q, K, V)
    # the same sums over keys
    assert_close("o", np.asarray(got), np.asarray(want[..., :4], np.float64), "float32", 64 * 2.0**-22)


def test_words_of_either_case():
    """Of layouts, biases and strategies, as the fields of attention and of the layers around it."""
    one = modules.DotProductAttention(
        8, 4, 2, attn_bias_type="NO_BIAS", qkv_layout="BSHD_BSHD_BSHD", context_parallel_strategy="ring"
    )
    same_bits(
        jax.jit(one.apply)({}, Q, K, V), jax.jit(modules.DotProductAttention(8, 4, 2).apply)({}, Q, K, V)
    )
    assert one.clone(context_parallel_strategy="AllGather").context_parallel_strategy == "ALL_GATHER"
    assert (
        modules.MultiHeadAttention(8, 4, attn_bias_type="Post_Scale_Bias").attn_bias_type == "post_scale_bias"
    )
    with pytest.raises(ArgumentError, match="context_parallel_strategy: got 'P2P'"):
        one.clone(context_parallel_strategy="p2p").apply({}, Q, K, V)


def test_what_does_not_fit_is_said():
    thd = modules.DotProductAttention(8, 4, 2, attn_mask_type="padding", qkv_layout="thd_thd_thd")
    with pytest.raises(ArgumentError, match=r"sequence_descriptor: .*a SequenceDescriptor with qkv_layout"):
        thd.apply({}, Q, K, V, jnp.array([9, 6]))
    with pytest.raises(ArgumentError, match="several with offsets, or segment_ids"):
        thd.apply({}, Q, K, V, fj.SequenceDescriptor.from_seqlens(jnp.array([9, 6])))
    with pytest.raises(ArgumentError, match="a packed qkv_layout"):
        modules.DotProductAttention(8, 4, 2, attn_mask_type="padding").apply({}, Q, K, V, PACKED["lengths"])
    with pytest.raises(ShapeError, match="segment_ids: got"):
        fj.SequenceDescriptor.from_segment_ids_and_pos(draw(0, 2, 10, 1))


@pytest.mark.parametrize("strategy", attention.ReorderStrategy)
def test_the_order_of_tokens(strategy):
    x, options = jnp.arange(2 * 12 * 3).reshape(2, 12, 3), {}
    order = [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]
    if strategy is attention.ReorderStrategy.Striped:
        options, order = {"stripe_size": 3}, [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]
    got = attention.reorder_causal_load_balancing(x, strategy, 2, 1, **options)
    same_bits(got, x[:, np.array(order)])
    same_bits(attention.inverse_reorder_causal_load_balancing(got, strategy, 2, 1, **options), x)
    with pytest.raises(ShapeError, match="12 tokens"):
        attention.reorder_causal_load_balancing(x, strategy, 5, 1)
