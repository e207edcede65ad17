"""jit with NamedSharding over eight virtual devices: one device's results, nothing gathered that need not be.

``check`` splits arguments, and searches the compiled program for collectives that move whole arrays. Results
are sums in another order; gradients of products see y by its FP8 codes, so that a rounding of y moves some of
them by a code: half a step of E5M2 each.
"""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax import flax as modules
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8kit.errors import ShapeError
from fp8kit.testing import assert_same_bits
from tests.support.combinations import combinations
from tests.support.sharding import (
    BITS,
    CODES,
    COLUMNS,
    JOINED,
    MOVES,
    RECIPES,
    ROWS,
    SIZES,
    check,
    draw,
    mesh,
    mlp,
    near,
    placed,
    same_bits,
    two,
)


@combinations({"recipe": RECIPES.keys(), "axes": ["rows", "tensor", "both"]}, usual=["delayed-tensor"])
def test_an_mlp(recipe, axes):
    """Rows by the data axis; by the tensor axis the first kernel's columns and the second one's rows, y a sum
    over devices."""
    s, h, f = SIZES.get(recipe, (16, 64, 128))
    args = (
        draw(0, 8, s, h),
        jnp.ones(h),
        draw(1, h, 2, f) / 8,
        draw(2, f, h) / 16,
        draw(3, 2, f),
        draw(4, h),
        two(recipe),
    )
    rows, tensor = axes != "tensor", axes != "rows"
    specs = [
        ROWS if rows else (),
        (),
        JOINED if tensor else (),
        ("tensor",) if tensor else (),
        COLUMNS if tensor else (),
        (),
        (),
    ]

    check(mlp, args, specs, CODES if recipe == "block" else BITS)


@combinations({"recipe": RECIPES.keys()}, usual=["high"])
def test_a_norm_and_three_projections_at_once(recipe):
    """The kernel (H, 3, H) is split along its last dimension: of queries, keys and values each device has
    some."""
    s, h, n = {"block": (64, 256, 1024)}.get(recipe, (16, 64, 64))
    sets = two(recipe)[0]
    compiled = check(
        lambda x, w, g, b, sets: fj.layernorm_dense(x, w, g, b, quantizer_set=sets),
        (draw(0, 8, s, h), draw(1, h, 3, n), jnp.ones(h), jnp.zeros(h), sets),
        (ROWS, JOINED, (), (), ()),
    )
    assert compiled.output_shardings[1][1].spec == P(None, None, "tensor")


@combinations({"recipe": RECIPES.keys()}, usual=["current"])
def test_a_contraction_is_summed_over_devices(recipe):
    s, k = (64, 512) if recipe == "block" else (16, 64)
    args = draw(0, 8, s, k), draw(1, k, 48), draw(2, 48), two(recipe)[0]
    check(
        lambda x, w, b, sets: fj.dense(x, w, b, quantizer_set=sets),
        args,
        (("data", None, "tensor"), ("tensor",), (), ()),
        CODES,
    )


@combinations({"recipe": RECIPES.keys()}, usual=["block"])
def test_columns_of_blocks_and_of_transposed_kernels(recipe):
    s, k, n = (64, 256, 1024) if recipe == "block" else (16, 64, 128)
    args = draw(0, 8, s, k), draw(1, n, k), two(recipe)[0]
    check(lambda x, w, sets: fj.dense(x, w, None, ((-1,), (1,)), sets), args, (ROWS, ("tensor",), ()), CODES)


HEADS = ("data", None, "tensor")
Q, K, V = (draw(i, 8, 16, heads, d) for i, (heads, d) in enumerate([(4, 8), (2, 8), (2, 12)]))
LENGTHS = fj.running_sums(jnp.array([16, 9, 1, 3, 16, 12, 5, 16]))
ATTENTIONS = {
    "groups": {},
    "mask": {"attn_mask_type": "arbitrary", "mask": draw(5, 8, 1, 16, 16) > 1.0},
    "mask of heads": {"attn_mask_type": "arbitrary", "mask": draw(5, 1, 4, 1, 16) > 1.0},
    "padding": {"attn_mask_type": "padding_causal", "cu_seqlens_q": LENGTHS, "cu_seqlens_kv": LENGTHS},
    "alibi": {"attn_bias_type": "alibi"},
    "window": {"window_size": (3, 0)},
    "sink": {"softmax_type": "off-by-one"},
    "cap": {"softcap": 0.5},
}


@combinations({"case": ATTENTIONS.keys()}, usual=["groups", "mask of heads"])
def test_attention_by_batches_and_heads(case):
    check(lambda q, k, v: fj.dot_product_attention(q, k, v, **ATTENTIONS[case]), (Q, K, V), (HEADS,) * 3)


def test_attention_of_packed_arrays_biases_and_sinks():
    check(fj.dot_product_attention, (draw(0, 8, 16, 3, 4, 8),), (("data", None, None, "tensor"),))
    check(
        lambda q, k, v, b: fj.dot_product_attention(q, k, v, bias=b),
        (Q, K, V, draw(3, 1, 4, 16, 16)),
        (*(HEADS,) * 3, COLUMNS),
    )
    check(
        lambda q, k, v, s: fj.dot_product_attention(q, k, v, softmax_type="learnable", softmax_offset=s),
        (Q, K, V, draw(3, 4)),
        (*(HEADS,) * 3, ("tensor",)),
    )
    swapped = [a.swapaxes(0, 1) for a in (Q, K, V)]
    check(
        lambda q, k, v: fj.dot_product_attention(q, k, v, qkv_format="sbhd"),
        swapped,
        ((None, "data", "tensor"),) * 3,
    )


KEY = jax.random.key(1)
SPLITS = {
    "data": ROWS,
    "tensor": JOINED,
    "both": HEADS,
    "batches by both": (("data", "tensor"),),
    "whole": (),
}
DIRECTIONS = ["data", "tensor", "both", "whole"]


def pulled(function, args, g):
    """Output and gradients of the arguments for the output's gradient ``g``."""
    out, back = jax.vjp(function, *args)
    return out, back(g)


@combinations({"split": [name for name in SPLITS if name != "whole"]}, usual=["batches by both"])
def test_dropped_attention_weights_are_those_of_one_device(split):
    """Every device draws the numbers of its batches and heads in the whole: bit for bit, forward and
    backward, and nothing is gathered."""

    def dropped(q, k, v):
        return fj.dot_product_attention(q, k, v, dropout_rate=0.5, dropout_key=KEY)

    check(dropped, (Q, K, V), (SPLITS[split],) * 3)
    step, g = jax.jit(lambda args, g: pulled(dropped, args, g)), draw(6, 8, 16, 4, 12)
    own = placed((Q, K, V, g), (SPLITS[split],) * 4)
    same_bits(step(own[:3], own[3]), step((Q, K, V), g))
    assert (np.asarray(dropped(Q, K, V)) != np.asarray(fj.dot_product_attention(Q, K, V))).any()


@combinations(
    {"case": ATTENTIONS.keys(), "wide": {"32 bits": False, "64 bits": True}}, usual=["padding-64 bits"]
)
def test_dropped_weights_beside_every_rule(case, wide):
    """``wide``: where JAX has 64 bits."""
    with jax.enable_x64(wide):
        options = {"dropout_rate": 0.3, "dropout_key": KEY} | ATTENTIONS[case]
        check(lambda q, k, v: fj.dot_product_attention(q, k, v, **options), (Q, K, V), (HEADS,) * 3)


@pytest.mark.combinations
def test_dropped_weights_of_packed_arrays_biases_and_sinks():
    dropped = {"dropout_rate": 0.3, "dropout_key": KEY}
    check(
        lambda x: fj.dot_product_attention(x, **dropped),
        (draw(0, 8, 16, 3, 4, 8),),
        (("data", None, None, "tensor"),),
    )
    check(
        lambda q, k, v, b: fj.dot_product_attention(q, k, v, bias=b, **dropped),
        (Q, K, V, draw(3, 1, 4, 16, 16)),
        (*(HEADS,) * 3, COLUMNS),
    )
    check(
        lambda q, k, v, s: fj.dot_product_attention(
            q, k, v, softmax_type="learnable", softmax_offset=s, **dropped
        ),
        (Q, K, V, draw(3, 4)),
        (*(HEADS,) * 3, ("tensor",)),
    )
    swapped = [a.swapaxes(0, 1) for a in (Q, K, V)]
    check(
        lambda q, k, v: fj.dot_product_attention(q, k, v, qkv_format="sbhd", **dropped),
        swapped,
        ((None, "data", "tensor"),) * 3,
    )


@combinations({"first": DIRECTIONS, "second": DIRECTIONS}, usual=["data-tensor"])
def test_directions_that_are_split_differently_drop_the_same_weights(first, second):
    """Forward by batches, backward by heads, each compiled by itself; and one of them whole."""

    @jax.jit
    def forward(q, k, v):
        return jax.vjp(lambda *a: fj.dot_product_attention(*a, dropout_rate=0.5, dropout_key=KEY), q, k, v)[1]

    g, back = draw(6, 8, 16, 4, 12), jax.jit(lambda kept, g: kept(g))
    want = back(forward(Q, K, V), g)
    kept = forward(*placed((Q, K, V), (SPLITS[first],) * 3))
    moved = jax.tree.map(lambda a: placed([a], [SPLITS[second] if a.ndim == 4 else ()])[0], kept)
    same_bits(back(moved, placed([g], [SPLITS[second]])[0]), want)


@pytest.fixture
def gspmd():
    """JAX's former partitioner, which programs choose for Transformer Engine."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


def test_gspmd_splits_alike(gspmd):
    """A product, an MLP and attention, whose programs Shardy may have had before."""
    args = draw(0, 8, 16, 64), jnp.ones(64), draw(1, 64, 2, 128) / 8, draw(2, 128, 64) / 16
    check(
        mlp,
        (*args, draw(3, 2, 128), draw(4, 64), two("delayed")),
        (ROWS, (), JOINED, ("tensor",), COLUMNS, (), ()),
    )
    check(fj.dense, (draw(0, 8, 16, 64), draw(1, 64, 48)), (("data", None, "tensor"), ("tensor",)))
    check(fj.dot_product_attention, (Q, K, V), (HEADS,) * 3)
    x, w = placed((draw(0, 8, 16, 64), draw(1, 64, 48)), (ROWS, COLUMNS))
    assert jax.jit(fj.dense)(x, w).sharding.spec == P("data", None, "tensor")


@pytest.mark.parametrize("groups", [4, 2])
def test_under_shard_map_a_module_of_all_heads_takes_a_device_s(groups):
    """As programs call Transformer Engine's module; three of four heads are nobody's part."""
    module = modules.DotProductAttention(8, 4, groups, attn_mask_type="no_mask", scale_factor=0.25)
    layers, heads = (
        [draw(i, 8, 6, n, 8) for i, n in enumerate((4, groups, groups))],
        P("data", None, "tensor"),
    )
    split = jax.shard_map(
        lambda *layers: module.apply({}, *layers), mesh=mesh(), in_specs=(heads,) * 3, out_specs=heads
    )
    near(jax.jit(split)(*layers), module.apply({}, *layers))
    odd = jax.shard_map(
        lambda q, k, v: module.apply({}, q[:, :, :3], k, v),
        mesh=mesh(),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    with pytest.raises(ShapeError, match=r"query: got shape \(2, 6, 3, 8\), expected \(..., 4, 8\)"):
        jax.eval_shape(odd, *layers)


def test_under_shard_map_a_device_draws_for_its_own_part():
    """The call is the device's own, its key what it is given: what one device draws for the part with that
    key."""

    def dropped(q, k, v, key):
        return fj.dot_product_attention(q, k, v, dropout_rate=0.5, dropout_key=key)

    def local(q, k, v):
        return dropped(q, k, v, jax.random.fold_in(KEY, jax.lax.axis_index("data")))

    rows, g = P("data"), draw(6, 8, 16, 4, 12)
    split = jax.shard_map(local, mesh=mesh(), in_specs=(rows,) * 3, out_specs=rows)
    got = jax.jit(lambda args, g: pulled(split, args, g))(placed((Q, K, V), (ROWS,) * 3), g)
    alone = jax.jit(lambda args, g, key: pulled(lambda q, k, v: dropped(q, k, v, key), args, g))
    got, whole = jax.tree.map(np.asarray, (got, (Q, K, V, g)))
    for device in range(4):
        part = slice(2 * device, 2 * device + 2)
        *args, own_g = (a[part] for a in whole)
        own = alone(args, own_g, jax.random.fold_in(KEY, device))
        same_bits(jax.tree.map(lambda a, part=part: a[part], got), own)


X, RESIDUAL, BIAS = draw(0, 8, 5, 12), draw(1, 8, 5, 12), draw(2, 12)
LOGITS = draw(0, 8, 5, 30)
TARGETS = jnp.asarray(np.random.default_rng(0).integers(0, 30, (8, 5)), jnp.int32).at[0, 1].set(-100)
SMALL = {
    "rope": (lambda q: fj.rope(q, fj.rope_frequencies(8, 16)), (Q,), (HEADS,)),
    "residual": (lambda x, r, b: fj.dropout_add(x, r, b), (X, RESIDUAL, BIAS), (ROWS, ROWS, ())),
    "dropout": (
        lambda x, r, b: fj.dropout_add(x, r, b, 0.3, jax.random.key(3)),
        (X, RESIDUAL, BIAS),
        (ROWS, ROWS, ()),
    ),
    "drop path": (lambda x, r: fj.drop_path(x, r, 0.4, jax.random.key(3)), (X, RESIDUAL), (ROWS, ROWS)),
    "mean loss": (lambda x: fj.fused_cross_entropy(x, TARGETS, 0.1), (LOGITS,), (ROWS,)),
    "losses": (lambda x: fj.fused_cross_entropy(x, TARGETS, 0.1, "none"), (LOGITS,), (ROWS,)),
    "l2norm": (fj.l2norm, (X,), (ROWS,)),
    "gated activation": (
        lambda x: fj.activation(x, ("silu", "linear")),
        (draw(0, 8, 5, 2, 24),),
        (("data", None, None, "tensor"),),
    ),
}


@combinations({"case": SMALL.keys()}, usual=[name for name in SMALL if name not in ("residual", "mean loss")])
def test_small_functions(case):
    check(*SMALL[case])


@combinations(
    {"case": ["dropout", "drop path"], "split": ["data", "batches by both", "tensor"]},
    usual=["dropout-tensor", "drop path-data"],
)
def test_split_dropout_is_that_of_one_device(case, split):
    """Bit for bit, values and gradients of what has rows; also where rows are not split."""
    function, args, _ = SMALL[case]
    step = jax.jit(lambda args, g: pulled(lambda x, r: function(x, r, *args[2:]), args[:2], g))
    specs = [SPLITS[split]] * 2 if split != "tensor" else [(None, None, "tensor")] * 2
    own = placed(args[:2], specs)
    same_bits(step([*own, *args[2:]], own[1]), step(list(args), args[1]))


@combinations(
    {"axes": [("data", None), (None, "tensor"), ("data", "tensor")], "recipe": RECIPES.keys()},
    usual=["('data', 'tensor')-delayed", "(None, 'tensor')-current", "('data', None)-block"],
)
def test_a_product_and_its_state(recipe, axes):
    """Rows and columns of one product; the state that comes back is that of one device, bit for bit."""
    rows, columns = axes
    x, w, b, sets = (
        draw(0, 4, 16, 32) * jnp.exp2(jnp.arange(4.0))[:, None, None],
        draw(1, 32, 48),
        draw(2, 48),
        two(recipe)[0],
    )

    def loss(x, w, b, sets):
        return (fj.dense(x, w, b, quantizer_set=sets) ** 2).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    want, (dx, dw, db, state) = step(x, w, b, sets)
    got, grads = step(*placed((x, w, b, sets), ((rows,), (None, columns), (columns,), ())))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        other = dict(jax.tree_util.tree_leaves_with_path(grads[3]))[path]
        assert_same_bits(jax.tree_util.keystr(path), np.asarray(other), np.asarray(leaf))
    for a, c in ((got, want), (grads[0], dx), (grads[1], dw), (grads[2], db)):
        near(a, c, BITS)


@combinations(
    {
        "scaling": ["tensor", "row", "block_1x128", "mx_1x32"],
        "kind": {str(kind): kind for kind in (AxisType.Auto, AxisType.Explicit)},
    },
    usual=["tensor-AxisType.Auto", "mx_1x32-AxisType.Explicit"],
)
def test_casts(scaling, kind):
    """Rows over devices: the codes and scales of one device, one scale for all from the amax of all."""
    devices = jax.make_mesh((8,), ("data",), (kind,), devices=jax.devices("cpu")[:8])
    x = draw(0, 16, 3, 256) * jnp.exp2(jnp.arange(16.0))[:, None, None]

    def there_and_back(x):
        q = fj.quantize(x, scaling=scaling)
        return q.data.view(jnp.uint8), q.scale_inv, q.dequantize()

    split = jax.device_put(x, NamedSharding(devices, P("data")))
    compiled = jax.jit(there_and_back).lower(split).compile()
    assert not [move for move in MOVES if f" {move}(" in compiled.as_text()]
    for got, want in zip(compiled(split), there_and_back(x), strict=True):
        assert_same_bits(scaling, np.asarray(got), np.asarray(want))
    if scaling in ("tensor", "row"):  # a device has a single row: one scale for all, or one each
        x = x[:8, 0]
        local = jax.shard_map(
            lambda x: fj.quantize(x, scaling=scaling).scale_inv,
            mesh=devices,
            in_specs=P("data"),
            out_specs=P("data"),
        )
        want = fj.quantize(x, scaling=scaling).scale_inv
        got = jax.jit(local)(jax.device_put(x, NamedSharding(devices, P("data"))))
        assert_same_bits(
            "shard_map",
            np.asarray(got),
            np.tile(np.asarray(want), 8) if scaling == "tensor" else np.asarray(want),
        )
