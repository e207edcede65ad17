"""Fields of the Flax modules: norms of queries and keys, dropped paths, parameters of activations, logical
axes, refusals; checkpoints."""

from __future__ import annotations

import flax
import fp8kit_jax as fj
import fp8kit_jax.flax as modules
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fp8kit.errors import Fp8kitError
from fp8kit.recipe import DelayedScaling
from fp8kit.testing import assert_close, assert_same_bits
from tests.adapters.jax.filled import filled

X = jax.random.normal(jax.random.key(1), (2, 16, 32))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", ["L2Normalization", "RMSNorm", "LayerNorm"])
def test_norms_of_queries_and_keys(kind, first):
    layer = modules.MultiHeadAttention(
        8, 4, qk_norm_type=kind, qk_norm_before_rope=first, enable_rotary_pos_emb=True, use_bias=True
    )
    variables = layer.init(jax.random.key(0), X, X)
    p = nn.unbox(variables["params"])
    assert ({"q_norm", "k_norm"} <= p.keys()) == (kind != "L2Normalization")
    y = fj.layernorm_dense(X, p["qkv"]["kernel"], p["qkv"]["scale"], p["qkv"]["ln_bias"], p["qkv"]["bias"])
    q, k, v = (y[:, :, i].reshape(2, 16, 4, 8) for i in range(3))

    def norm(a):
        beta = jnp.zeros(8) if kind == "LayerNorm" else None
        return fj.l2norm(a) if kind == "L2Normalization" else fj.layernorm(a, jnp.ones(8), beta, kind.lower())

    def rotate(a):
        return fj.rope(a, fj.rope_frequencies(8, 16))

    q, k = (rotate(norm(a)) if first else norm(rotate(a)) for a in (q, k))
    o = fj.dot_product_attention(q, k, v, scale_factor=1.0).reshape(2, 16, 32)
    want = fj.dense(o, p["out"]["kernel"], p["out"]["bias"])
    assert_same_bits("y", np.asarray(layer.apply(variables, X, X)[0]), np.asarray(want))


def test_a_cap_of_a_layer_is_its_attentions():
    """Of TransformerLayer in both of a decoder's attentions."""
    layer = modules.MultiHeadAttention(8, 4, softcap=0.5)
    variables = layer.init(jax.random.key(0), X, X)
    p = nn.unbox(variables["params"])
    y = fj.layernorm_dense(X, p["qkv"]["kernel"], p["qkv"]["scale"], p["qkv"]["ln_bias"])
    q, k, v = (y[:, :, i].reshape(2, 16, 4, 8) for i in range(3))
    want = modules.DotProductAttention(8, 4, softcap=0.5, scale_factor=1.0).apply({}, q, k, v)
    plain = fj.dot_product_attention(q, k, v, scale_factor=1.0)
    assert not np.array_equal(np.asarray(want), np.asarray(plain))
    want = fj.dense(want.reshape(2, 16, 32), p["out"]["kernel"])
    assert_same_bits("y", np.asarray(layer.apply(variables, X, X)[0]), np.asarray(want))
    sizes = {"hidden_size": 32, "mlp_hidden_size": 64, "num_attention_heads": 4, "dtype": jnp.float32}
    decoder = {**sizes, "layer_type": modules.TransformerLayerType.DECODER, "hidden_dropout": 0.0}
    one, other = (modules.TransformerLayer(**decoder, softcap=cap) for cap in (0.5, 0.0))
    inputs = {"encoded": X[:, :5], "deterministic": True}
    variables = one.init(jax.random.key(0), X[:, :1], **inputs)  # where the layer's own has one score a row
    apart = [np.asarray(each.apply(variables, X[:, :1], **inputs)) for each in (one, other)]
    assert not np.array_equal(*apart)


def test_packed_layouts_of_attention():
    qkv = jax.random.normal(jax.random.key(2), (2, 16, 3, 4, 8))
    want = modules.DotProductAttention(8, 4).apply({}, *(qkv[:, :, i] for i in range(3)))
    packed = modules.DotProductAttention(8, 4, qkv_layout="bs3hd").apply({}, qkv)
    half = modules.DotProductAttention(8, 4, qkv_layout="bshd_bs2hd").apply({}, qkv[:, :, 0], qkv[:, :, 1:])
    assert_same_bits("bs3hd", np.asarray(packed), np.asarray(want))
    assert_same_bits("bshd_bs2hd", np.asarray(half), np.asarray(want))
    with pytest.raises(Fp8kitError, match=r"DotProductAttention: qkv_layout: got 'sb3hd'"):
        modules.DotProductAttention(8, 4, qkv_layout="sb3hd").apply({}, qkv)


@pytest.mark.parametrize("transposed", [False, True])
def test_dropped_paths_are_whole_samples(transposed):
    layer = modules.TransformerLayer(
        32,
        48,
        4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        drop_path=0.5,
        enable_relative_embedding=False,
        transpose_batch_sequence=transposed,
    )
    x = np.tile(np.asarray(X)[:1], (32, 1, 1))
    x = x.swapaxes(0, 1) if transposed else x
    variables = filled(layer.init, jax.random.key(0), x, deterministic=True)
    y = jax.jit(layer.apply)(variables, x, rngs={"dropout": jax.random.key(3)})
    y, x = (np.asarray(a).swapaxes(0, 1) if transposed else np.asarray(a) for a in (y, x))
    kinds = []
    for row in np.asarray(y):
        if all(np.abs(row - kind).max() > 2.0**-10 for kind in kinds):
            kinds.append(row)
    assert len(kinds) == 4  # each branch there or not
    untouched = sum(np.array_equal(a, b) for a, b in zip(y, x, strict=True))
    assert 0 < untouched < 32


def test_activation_parameters_reach_the_mlp():
    params = {"limit": 1.5, "glu_linear_offset": 0.25}
    types = ("clamped_silu", "clamped_linear")
    fused = modules.LayerNormMLP(48, activations=types, activation_params=params)
    variables = filled(fused.init, jax.random.key(0), X)
    p = nn.unbox(variables["params"])
    h = fj.layernorm_dense(X, p["wi_kernel"], p["scale"], p["ln_bias"])
    want = fj.dense(fj.activation(h, types, params), p["wo_kernel"])
    got = fused.apply(variables, X)[0]
    assert_close("values", np.asarray(got), np.asarray(want), "float32", 48 * 2.0 ** (-22))
    usual = modules.LayerNormMLP(48, activations=types).apply(variables, X)[0]
    assert np.abs(np.asarray(got) - usual).max() > 2.0**-7
    layer = modules.TransformerLayer(
        32, 48, 4, mlp_activations=types, mlp_activation_params=params, hidden_dropout=0.0
    )
    variables = filled(layer.init, jax.random.key(0), X, deterministic=True)
    assert np.isfinite(jax.jit(lambda own: layer.apply(own, X, deterministic=True))(variables)).all()


def test_activations_of_flax():
    """By their names, as many as one likes, times each other; a TransformerLayer's too."""
    module = modules.LayerNormMLP(48, activations=("linear", "Tanh", "swish"), use_bias=True)
    variables = filled(module.init, jax.random.key(0), X)
    p = nn.unbox(variables["params"])
    assert p["wi_kernel"].shape == (32, 3, 48)
    h = fj.layernorm_dense(X, p["wi_kernel"], p["scale"], p["ln_bias"], p["wi_bias"])
    act = nn.swish(h[..., 0, :]) * nn.tanh(h[..., 1, :]) * h[..., 2, :]
    want = np.asarray(fj.dense(act, p["wo_kernel"], p["wo_bias"]))
    # the same in another order of roundings of three factors
    assert_close("y", np.asarray(module.apply(variables, X)[0]), want, "float32", 48 * 2.0**-22)
    for name in ("tanhh", "shift", 3):
        with pytest.raises(Fp8kitError, match="LayerNormMLP: activations: got"):
            module.clone(activations=("linear", name)).init(jax.random.key(0), X)
    with pytest.raises(Fp8kitError, match="GroupedMLP: activations: got"):
        modules.GroupedMLP(2, 48, ("tanh",)).init(jax.random.key(0), X[0], jnp.array([8, 8]))
    layer = modules.TransformerLayer(
        32, 48, 4, mlp_activations=("silu", "tanh"), hidden_dropout=0.0, attention_dropout=0.0
    )
    variables = filled(layer.init, jax.random.key(0), X, deterministic=True)
    mlp, own = modules.LayerNormMLP(48, activations=("silu", "tanh")), variables["params"]
    without = own | {"mlp": own["mlp"] | {"wo_kernel": jax.tree.map(jnp.zeros_like, own["mlp"]["wo_kernel"])}}
    y, stream = (layer.apply({"params": each}, X, deterministic=True) for each in (own, without))
    want = stream + mlp.apply({"params": own["mlp"]}, stream)[0]
    # one sum, rounded once more or less
    assert_close("layer", np.asarray(y), np.asarray(want), "float32", 48 * 2.0**-22)


def test_inputs_may_have_another_width_than_hidden_size():
    """Which says how wide heads are."""
    layer = modules.TransformerLayer(
        16, 48, 4, hidden_dropout=0.0, attention_dropout=0.0, enable_relative_embedding=False
    )
    variables = filled(layer.init, jax.random.key(0), X, deterministic=True)
    p = nn.unbox(variables["params"])
    assert (p["attention"]["qkv"]["kernel"].shape, p["mlp"]["wo_kernel"].shape) == ((32, 3, 16), (48, 32))
    same = layer.clone(hidden_size=32, head_dim=4)
    got, want = (np.asarray(each.apply(variables, X, deterministic=True)) for each in (layer, same))
    assert_same_bits("y", got, want)


def test_logical_axes_place_the_parameters():
    """Rules from the MeshResource put every kernel of a layer on the mesh; the layer computes what it
    computes on one device."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("data", "tensor"))
    resource = fj.MeshResource(dp_resource="data", tp_resource="tensor")
    layer = modules.TransformerLayer(
        32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, enable_relative_embedding=False
    )
    boxed = filled(layer.init, jax.random.key(0), X, deterministic=True)
    plain = nn.meta.unbox(boxed)
    with fj.autocast(mesh_resource=resource):
        rules = modules.extend_logical_axis_rules((("mine", "data"),))
        assert dict(rules)["mine"] == "data"
        assert dict(rules)["nvte_batch"] == "data"
        with pytest.raises(Fp8kitError, match=r"extend_logical_axis_rules: nvte_w_tp: got 'data'"):
            modules.extend_logical_axis_rules((("nvte_w_tp", "data"),))
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
    assert shardings["params"]["attention"]["qkv"]["kernel"].spec == P(None, None, "tensor")
    assert shardings["params"]["mlp"]["wo_kernel"].spec == P("tensor", None)
    placed = jax.device_put(plain, shardings)
    x = jax.random.normal(jax.random.key(4), (8, 16, 32))
    want = jax.jit(lambda v: layer.apply(v, x, deterministic=True))(plain)
    got = jax.jit(lambda v: layer.apply(v, x, deterministic=True))(placed)
    assert_close(
        "values", np.asarray(got), np.asarray(want), "float32", 64 * 2.0 ** (-22) * float(jnp.abs(want).max())
    )


def test_input_axes_constrain():
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    module = modules.DenseGeneral(24, input_axes=("rows", None, None), kernel_axes=("in", "out"))
    x = jax.random.normal(jax.random.key(2), (8, 16, 32))
    variables = module.init(jax.random.key(0), x)
    assert variables["params"]["kernel"].names == ("in", "out")
    with jax.set_mesh(mesh), nn.logical_axis_rules((("rows", "data"), ("in", None), ("out", None))):
        y = jax.jit(module.apply)(variables, x)
    assert y.sharding.spec[0] == "data"
    assert_close(
        "values", np.asarray(y), np.asarray(module.apply(variables, x)), "float32", 32 * 2.0 ** (-21)
    )


REFUSED = {
    "axis": lambda: modules.LayerNormDenseGeneral(8, axis=(0, 1)),
    "ffn1_ckpt_name": lambda: modules.LayerNormMLP(8, ffn1_ckpt_name="mine"),
    "low_rank_adaptation_scope": lambda: modules.TransformerLayer(
        32, 48, 4, low_rank_adaptation_scope="some"
    ),
    "rotary_pos_emb_group_method": lambda: modules.TransformerLayer(
        32, 48, 4, enable_rotary_pos_emb=True, rotary_pos_emb_group_method="pairs"
    ),
    "enable_sequence_parallel": lambda: modules.TransformerLayer(32, 48, 4, enable_sequence_parallel=True),
    "score_mod": lambda: modules.TransformerLayer(32, 48, 4, score_mod=max),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_there_is_refused_by_name(field):
    with pytest.raises(Fp8kitError, match=rf": {field}: got "):
        REFUSED[field]().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    with pytest.raises(
        Fp8kitError,
        match=r"MultiHeadAttention: num_heads: got 4, expected None: renamed: num_attention_heads",
    ):
        modules.MultiHeadAttention(8, 4, num_heads=4).init(jax.random.key(0), X, X)


def test_a_checkpoint_by_orbax_goes_on_with_the_same_bits(tmp_path):
    """Parameters and FP8 state, saved after two steps and restored into a fresh tree."""
    with fj.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=4)):
        layer = modules.LayerNormMLP(48)
        variables = filled(layer.init, jax.random.key(0), X)

        @jax.jit
        def step(variables):
            other, params = flax.core.pop(variables, "params")

            def loss(params, other):
                return (layer.apply({"params": params, **other}, X)[0] ** 2).mean()

            grads, fresh = jax.grad(loss, (0, 1))(params, other)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return {"params": params, **fj.update_collections(fresh, other)}

        saved = step(step(variables))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", saved)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(
                tmp_path / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, variables)
            )
        want, got = step(saved), step(restored)
    for path, leaf in jax.tree_util.tree_leaves_with_path(want):
        other = dict(jax.tree_util.tree_leaves_with_path(got))[path]
        assert_same_bits(jax.tree_util.keystr(path), np.asarray(other), np.asarray(leaf))
