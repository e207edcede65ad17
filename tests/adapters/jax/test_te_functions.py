"""The functions, quantisers and attention of Transformer Engine's JAX package beside this frontend's own."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax import flax as modules
from fp8kit_jax.te_compat import attention, experts, functions, policies, quantize, sharding
from fp8kit_jax.te_compat import modules as te_modules

from fp8kit.errors import ArgumentError, Fp8kitError, RecipeError, ShapeError, UnsupportedError
from fp8kit.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from fp8kit.testing import assert_close
from tests.support.combinations import combinations
from tests.support.sharding import BITS, mesh, near, same_bits


def draw(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


X, W, B = draw(0, 4, 8, 32), draw(1, 32, 48), draw(2, 48)
G, S = draw(3, 32), draw(4, 32)
K1, K2, B1, B2 = draw(5, 32, 2, 16), draw(6, 16, 32), draw(7, 2, 16), draw(8, 32)
DIMS = ((2,), (0,))


def test_without_a_set_products_are_in_high_precision():
    with fj.autocast(True, Float8CurrentScaling()):
        got = functions.dense(X, W, B, DIMS), functions.layernorm_dense(X, W, G, S, B)
        got = (
            *got,
            functions.layernorm_mlp(X, G, None, (K1, K2), (B1, B2), "rmsnorm", activation_type=GATED),
        )
    mlp = fj.layernorm_mlp(X, G, None, (K1, K2), (B1, B2), "rmsnorm", activation_type=GATED)
    same_bits(got, (fj.dense(X, W, B, DIMS), fj.layernorm_dense(X, W, G, S, B), mlp))


GATED = ("silu", "linear")
SETS = {
    "recipe": lambda n: quantize.QuantizerFactory.create_set(n, fp8_recipe=Float8CurrentScaling()),
    "mode": lambda n: quantize.QuantizerFactory.create_set(
        n, quantize.ScalingMode.CURRENT_TENSOR_SCALING, jnp.float8_e4m3fn, jnp.float8_e5m2, is_2x2x=True
    ),
}


@pytest.mark.parametrize("made", SETS)
def test_with_sets(made):
    one, two = SETS[made](1), SETS[made](2)
    got = (
        functions.dense(X, W, B, DIMS, quantizer_set=one),
        functions.layernorm_dense(X, W, G, S, B, "layer_norm", quantizer_set=one),
        functions.layernorm_mlp(
            X, G, None, (K1, K2), (B1, B2), "RMSNorm", activation_type=GATED, quantizer_sets=two
        ),
    )
    with fj.autocast(True, Float8CurrentScaling()):
        mlp = fj.layernorm_mlp(X, G, None, (K1, K2), (B1, B2), "rmsnorm", activation_type=GATED)
        want = fj.dense(X, W, B, DIMS), fj.layernorm_dense(X, W, G, S, B), mlp
    same_bits(got, want)


def test_logical_axes_constrain():
    """Between the parts of an MLP, too: then they are operations of their own, with the same values."""
    rows = (sharding.BATCH_AXES, None, None)
    with (
        jax.set_mesh(mesh()),
        fj.global_shard_guard(fj.MeshResource(dp_resource="data", tp_resource="tensor")),
    ):
        assert sharding.get_sharding_map_logic_axis_to_mesh_axis()[sharding.W_TP_AXES] == "tensor"
        assert sharding.get_active_resource_axis("tp_resource") == "tensor"
        assert (sharding.get_mesh_axis_size("data"), sharding.get_num_devices_in_mesh()) == (4, 8)
        step = jax.jit(
            lambda x, w: functions.dense(
                x, w, None, DIMS, input_axes=rows, output_axes=(*rows[:2], "nvte_w_tp")
            )
        )
        y = step(X, W)
        assert y.sharding.spec == jax.sharding.PartitionSpec("data", None, "tensor")
        options = {"dot_1_input_axes": rows, "dot_2_input_axes": (*rows[:2], sharding.HIDDEN_TP_AXES)}
        mlp = jax.jit(
            lambda x: functions.layernorm_mlp(
                x, G, None, (K1, K2), (B1, B2), "rmsnorm", activation_type=GATED, **options
            )
        )(X)
    near(y, fj.dense(X, W, None, DIMS), BITS)
    want = fj.layernorm_mlp(X, G, None, (K1, K2), (B1, B2), "rmsnorm", activation_type=GATED)
    near(mlp, want, BITS)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # JAX's of ``with mesh:``
def test_a_mesh_by_either_way():
    assert not sharding.is_mesh_available()
    assert sharding.get_num_devices_in_mesh() == 1
    for way in (mesh(), jax.set_mesh(mesh())):
        with way:
            assert sharding.get_all_mesh_axes() == ("data", "tensor")
            assert sharding.get_mesh_axis_size("tensor") == 2
            with pytest.raises(ArgumentError, match="one of"):
                sharding.get_mesh_axis_size("model")


def test_small_functions():
    kinds = functions.SoftmaxFusionType
    mask = np.asarray(draw(11, 2, 1, 6, 6)) > 0.5

    def theirs(halves, scores):
        return (
            functions.layernorm(X, G, S, "layernorm"),
            functions.activation(halves, GATED),
            functions.softmax(scores, mask, 0.5),
            functions.softmax(scores, mask, 0.5, kinds.SCALED_MASKED),
            functions.softmax(scores, None, 2.0, kinds.SCALED_UPPER_TRIANG_MASKED),
        )

    def ours(halves, scores):
        return (
            fj.layernorm(X, G, S),
            fj.activation(halves, GATED),
            fj.softmax(scores, None, 0.5),
            fj.softmax(scores, mask, 0.5),
            fj.softmax(scores, ~np.tri(6, dtype=bool), 2.0),
        )

    given = draw(9, 4, 2, 8), draw(10, 2, 4, 6, 6)
    same_bits(jax.jit(theirs)(*given), jax.jit(ours)(*given))
    with pytest.raises(UnsupportedError, match="layernorm: quantizer: got object, expected None"):
        functions.layernorm(X, G, S, "layernorm", quantizer=object())


def test_the_softmax_module():
    """With a sink in the sum, of 1 or learned; beside NumPy in float64."""
    scores, mask, offset = draw(10, 2, 4, 6, 6), np.asarray(draw(11, 2, 1, 6, 6)) > 0.5, draw(12, 4)
    kind = attention.AttnSoftmaxType
    for softmax_type, own in ((kind.OFF_BY_ONE_SOFTMAX, None), (kind.LEARNABLE_SOFTMAX, offset)):
        module = te_modules.Softmax(0.5, functions.SoftmaxFusionType.SCALED_MASKED, softmax_type)
        got = jax.jit(module.apply)({}, scores, mask, softmax_offset=own)
        e = np.where(mask, 0.0, np.exp(np.float64(scores) * 0.5))
        sink = np.exp(np.float64(0.0 if own is None else own)).reshape(1, -1, 1, 1)
        want = e / (e.sum(-1, keepdims=True) + sink)
        assert_close("softmax", np.asarray(got), want, "float32", 32 * 2.0**-24)  # below 1
    plain = te_modules.Softmax(0.5).apply({}, scores, bias=jnp.ones_like(scores))
    same_bits(plain, fj.softmax(scores + 1, None, 0.5))


def test_sets_of_a_state():
    recipe = DelayedScaling(amax_history_len=3, fp8_format=Format.E4M3)
    metas = {
        name: quantize.QuantizeMeta(jnp.full(1, i + 2.0), jnp.zeros(3))
        for i, name in enumerate(("x", "kernel", "grad"))
    }
    made = quantize.QuantizerFactory.create_set(
        fp8_recipe=recipe, quantize_meta_set=quantize.QuantizeMetaSet(**metas), checkpoint_name="codes"
    )
    assert [float(slot.scale[0]) for slot in (made.x, made.kernel, made.grad)] == [2, 3, 4]
    assert (made.recipe, made.kept_as) == (recipe, "codes")
    with fj.autocast(True, recipe):
        assert quantize.QuantizerFactory.create_set().recipe == recipe
        config = quantize.get_quantize_config()
        assert (config.is_fp8_enabled(), config.AMAX_HISTORY_LEN) == (True, 3)
        assert quantize.get_delayed_scaling() == recipe == quantize.get_global_quantize_recipe()
    assert quantize.QuantizerFactory.create_set() == fj.noop_quantizer_set
    assert not quantize.get_quantize_config().is_fp8_enabled()
    source, modes = quantize.TensorSource, quantize.ScalingMode
    for how, x, kernel in (
        (None, modes.NO_SCALING, modes.NO_SCALING),
        (recipe, modes.DELAYED_TENSOR_SCALING, modes.DELAYED_TENSOR_SCALING),
        (Float8CurrentScaling(), modes.CURRENT_TENSOR_SCALING, modes.CURRENT_TENSOR_SCALING),
        (MXFP8BlockScaling(), modes.MXFP8_1D_SCALING, modes.MXFP8_1D_SCALING),
        (NVFP4BlockScaling(), modes.NVFP4_1D_SCALING, modes.NVFP4_2D_SCALING),
        (NVFP4BlockScaling(disable_2d_quantization=True), modes.NVFP4_1D_SCALING, modes.NVFP4_1D_SCALING),
    ):
        config = quantize.get_quantize_config_with_recipe(how)
        assert config.is_supported() == (True, "")
        found = [config.get_scaling_mode(each) for each in (source.X, source.KERNEL, source.DGRAD)]
        assert found == [x, kernel, x]
    with pytest.raises(UnsupportedError, match="get_scaling_mode: recipe: got block"):
        quantize.get_quantize_config_with_recipe(Float8BlockScaling()).get_scaling_mode(source.X)
    for mode in quantize.get_supported_scaling_modes():
        assert quantize.is_scaling_mode_supported(mode) == (True, "")
        assert quantize.QuantizerFactory.create_set(scaling_mode=mode).recipe is not None
    with pytest.raises(UnsupportedError, match="q_layout"):
        quantize.QuantizerFactory.create_set(q_layout=1)
    mode = quantize.ScalingMode.CURRENT_TENSOR_SCALING
    with pytest.raises(RecipeError, match="fwd_dtype, bwd_dtype"):
        quantize.QuantizerFactory.create_set(1, mode, jnp.float8_e5m2, jnp.float8_e4m3fn)


E4M3, E5M2, E2M1 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn
MODE = quantize.ScalingMode
CONFIGS = {
    "delayed": (DelayedScaling(margin=3.0), E4M3, E5M2, (MODE.DELAYED_TENSOR_SCALING,) * 2),
    "current": (Float8CurrentScaling(fp8_format=Format.E4M3), E4M3, E4M3, (MODE.CURRENT_TENSOR_SCALING,) * 2),
    "mx": (MXFP8BlockScaling(), E4M3, E4M3, (MODE.MXFP8_1D_SCALING,) * 2),
    "nv": (NVFP4BlockScaling(), E2M1, E2M1, (MODE.NVFP4_1D_SCALING, MODE.NVFP4_2D_SCALING)),
    "nv plain": (
        NVFP4BlockScaling(True, True, True),
        E2M1,
        E2M1,
        (MODE.NVFP4_1D_SCALING, MODE.NVFP4_1D_SCALING),
    ),
    "none": (None, None, None, (MODE.NO_SCALING,) * 2),
}


@pytest.mark.parametrize("given", CONFIGS)
def test_what_a_config_says(given):
    recipe, forward, backward, (flat, kernel) = CONFIGS[given]
    config = quantize.get_quantize_config_with_recipe(recipe)
    assert (forward, backward) == (config.FWD_DTYPE, config.BWD_DTYPE)
    source = quantize.TensorSource
    assert [config.get_scaling_mode(each) for each in source] == [flat, kernel, flat]
    assert (config.MARGIN, config.AMAX_COMPUTE_ALGO.value) == (3.0 if given == "delayed" else 0.0, "max")
    disabled = config.DISABLE_RHT, config.DISABLE_STOCHASTIC_ROUNDING, config.DISABLE_2D_QUANTIZATION
    assert disabled == (given == "nv plain",) * 3


def test_a_config_of_no_mode():
    config = quantize.get_quantize_config_with_recipe(Float8BlockScaling())
    with pytest.raises(UnsupportedError, match=r"get_scaling_mode: recipe: .* one of DelayedScaling, "):
        config.get_scaling_mode(quantize.TensorSource.X)


def test_states_of_nothing_are_fresh():
    empty = quantize.QuantizeMetaSet(*(quantize.QuantizeMeta() for _ in range(3)))
    recipe = DelayedScaling(amax_history_len=3)
    made = quantize.QuantizerFactory.create_set(fp8_recipe=recipe, quantize_meta_set=empty)
    same_bits(made, fj.create_set(recipe))


def test_what_the_devices_can():
    here = quantize.get_device_compute_capability(0)
    assert here == 0 if jax.default_backend() == "cpu" else here >= 80
    assert quantize.is_fp8_gemm_with_all_layouts_supported() == (100 <= here < 120)
    assert functions.is_softmax_kernel_available(functions.SoftmaxFusionType.SCALED, 2, 4, 6, 6, jnp.float16)


def test_tokens_of_experts():
    """With what token_dispatch gave, also through jit; without probabilities each row counts as it is."""
    tokens, chosen = draw(0, 12, 16), np.asarray(draw(1, 12, 4)) > 0
    rows = int(chosen.sum())
    dispatch = jax.jit(experts.token_dispatch, static_argnums=2, static_argnames="align_size")
    for align in (None, 8):
        y, weights, row_map, offsets, sizes = dispatch(tokens, chosen, rows, align_size=align)
        assert weights is None
        assert int(sizes.sum()) >= rows
        got = jax.jit(experts.token_combine)(y, row_map, None, offsets)
        want = tokens * chosen.sum(1, keepdims=True)
        # sums of at most four equal numbers
        assert_close("combine", np.asarray(got), np.asarray(want, np.float64), "float32", 2.0**-20)
        shares = chosen / np.maximum(chosen.sum(1, keepdims=True), 1).astype(np.float32)
        got = experts.token_combine(y, row_map, merging_probs=shares, pad_offsets=offsets)
        same_bits(got, fj.token_combine(y, row_map.rows, shares))
    with pytest.raises(ArgumentError, match=r"pad_offsets: .*as token_dispatch gave them"):
        experts.token_combine(y, row_map, pad_offsets=sizes)
    with pytest.raises(ArgumentError, match=r"row_id_map: .*the one that token_dispatch gave"):
        experts.token_combine(y, row_map.rows)


def test_norms_come_along_unless_they_are_not_wanted():
    """As there; ``fp8kit_jax.flax`` gives them where they are asked for."""
    x, key = draw(0, 4, 16), jax.random.key(0)
    kinds = ("LayerNormDenseGeneral", {"features": 8}), ("LayerNormMLP", {"intermediate_dim": 32})
    for name, sizes in kinds:
        module = getattr(te_modules, name)(**sizes)
        variables = module.init(key, x)
        y, normed = jax.jit(module.apply)(variables, x)
        own = getattr(modules, name)(**sizes, return_layernorm_output=True)
        same_bits((y, normed), jax.jit(own.apply)(variables, x)[:2])
        assert module.clone(return_layernorm_output=False).apply(variables, x)[1] is None
        assert module.init_with_output(key, x)[1].keys() == own.init(key, x).keys()


def test_functions_as_modules():
    """An einsum whose product is in FP8, each call with a state of its own; products of experts."""

    def einsum(generate_quantizer_set, s, x, kernel):
        def dot_general(x, kernel, dims, *args, **kwargs):
            return functions.dense(x, kernel, None, dims[0], quantizer_set=generate_quantizer_set("_own"))

        return jnp.einsum(s, x, kernel, _dot_general=dot_general)

    recipe = DelayedScaling(amax_history_len=4)
    kind = te_modules.wrap_function_in_te_state_module(einsum, recipe, "einsum")
    assert kind.__name__ == "TEWrapper_einsum"
    module = kind()
    variables = module.init(jax.random.key(0), "bsk,kn->bsn", X, W)
    assert "x_own_scale" in variables[fj.FP8_COLLECTION_NAME]
    state = fj.create_set(recipe)
    y = module.apply(variables, "bsk,kn->bsn", X, W)
    same_bits(y, fj.dense(X, W, None, DIMS, state))
    grouped = te_modules.make_grouped_dense_cls(Float8CurrentScaling(), "codes")
    rows, kernels, sizes = draw(1, 1, 16, 32), draw(2, 2, 32, 48), jnp.array([4, 12])
    got = grouped.apply({}, rows, kernels, sizes)
    with fj.autocast(True, Float8CurrentScaling()):
        same_bits(got, fj.grouped_dense(rows[0], kernels, sizes)[None])


def test_policies_know_products():
    def step(x):
        return jnp.sin(fj.rmsnorm(fj.dense(jnp.sin(x), W), jnp.ones(48))).sum()

    asked = []

    def policy(prim, *args, **params):
        asked.append((prim.name, policies.te_gemms_saveable(prim, *args, **params)))
        return asked[-1][1]

    jax.make_jaxpr(jax.grad(jax.checkpoint(step, policy=policy)))(X)
    calls = [saved for name, saved in asked if name == "fp8kit_call"]
    assert set(calls) == {True, False}
    assert not any(saved for name, saved in asked if name != "fp8kit_call")


# --- attention ----------------------------------------------------------------------------------------------

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


def test_routers_words_and_formats():
    """Enumerations, texts and numbers name one thing; bits of the map lie as its format says; the way back
    takes what the way there gives."""
    logits, x = draw(0, 6, 12), draw(1, 6, 16)
    want = fj.fused_topk_with_score_function(logits, 3, score_function="sigmoid")
    for name in (experts.ScoreFunction.SIGMOID, "sigmoid", "SIGMOID"):
        got = experts.fused_topk_with_score_function(logits, 3, score_function=name)
        same_bits(got, want)
    same_bits(experts.fused_topk_with_score_function(logits, 3), fj.fused_topk_with_score_function(logits, 3))
    for form in (experts.RoutingMapFormat.BITMAP_U8, "BITMAP_U8", "bitmap_u8", 1):
        bits = experts.fused_topk_with_score_function(logits, 3, routing_map_format=form)[1]
        chosen = fj.fused_topk_with_score_function(logits, 3)[1]
        assert bits.dtype == jnp.uint8
        assert (np.unpackbits(bits, -1, 12, "little") == chosen).all()
    for refused in ({"score_function": "tanh"}, {"score_function": 1}, {"routing_map_format": "bits"}):
        with pytest.raises(Fp8kitError, match=next(iter(refused))):
            experts.fused_topk_with_score_function(logits, 3, **refused)
    probs, chosen = want
    rows, _, row_map, offsets, _ = experts.token_dispatch(x, chosen, 18, probs, 4)
    back = experts.token_combine(rows, row_map, probs, pad_offsets=offsets)
    same_bits(back, fj.token_combine(rows, row_map.rows, probs))
    with pytest.raises(ArgumentError, match="pad_offsets"):
        experts.token_combine(rows, row_map, probs, jnp.zeros(12, jnp.int32))


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
