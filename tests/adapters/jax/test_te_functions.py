"""The functions, quantisers and attention of Transformer Engine's JAX package beside this frontend's own."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from fp8kit_jax import flax as modules
from fp8kit_jax.te_compat import attention, experts, functions, policies, quantize, sharding
from fp8kit_jax.te_compat import modules as te_modules

from fp8kit.errors import ArgumentError, Fp8kitError, RecipeError, UnsupportedError
from fp8kit.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from fp8kit.testing import assert_close
from tests.support.sharding import BITS, draw, mesh, near, same_bits

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


def test_parts_of_layers_are_instances():
    """Of Transformer Engine's classes, by which programs choose them."""
    seen = []

    def look(call, args, options, context):
        seen.extend(kind for kind in kinds if isinstance(context.module, kind))
        return call(*args, **options)

    kinds = te_modules.LayerNormDenseGeneral, te_modules.LayerNormMLP
    layer = modules.TransformerLayer(16, 32, 2, enable_relative_embedding=False)
    with nn.intercept_methods(look):
        layer.init(jax.random.key(0), draw(0, 1, 4, 16), deterministic=True)
    assert seen == list(kinds)

    class Mine(te_modules.LayerNormMLP):
        pass

    assert isinstance(Mine(), te_modules.LayerNormMLP)
    assert not isinstance(te_modules.LayerNormMLP(), Mine)
    assert not isinstance(modules.LayerNormMLP(), Mine)


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
