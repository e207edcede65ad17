"""Fields of the Flax modules beside the arithmetic: their names and defaults, low-rank adaptation, dropout
dimensions, scanned layers."""

from __future__ import annotations

import dataclasses

import flax
import fp8kit_jax as fj
import jax
import numpy as np
import pytest
from flax import linen as nn
from fp8kit_jax import flax as modules
from fp8kit_jax.flax.lora import SCOPES
from jax.sharding import Mesh

from fp8kit.recipe import DelayedScaling
from fp8kit.testing import assert_close, assert_same_bits
from tests.adapters.jax.filled import filled

X = jax.random.normal(jax.random.key(1), (2, 16, 32))
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

# Transformer Engine's fields in its order, with the defaults that are values
_LORA = "enable_low_rank_adaptation=False low_rank_adaptation_dim=32 low_rank_adaptation_alpha=None"
_NORM = (
    "layernorm_type='layernorm' epsilon=1e-06 zero_centered_gamma=False scale_init=None scale_axes=('embed',)"
)
_ROPE = (
    "enable_rotary_pos_emb=False rotary_pos_emb_windows=(1,10000) rotary_pos_emb_group_method='consecutive'"
)
_SCOPE = "low_rank_adaptation_scope='none' low_rank_adaptation_dim=32 low_rank_adaptation_alpha=None"
FIELDS = {
    "LayerNorm": (
        "epsilon=1e-06 layernorm_type='layernorm' zero_centered_gamma=False scale_init=None "
        "scale_axes=('embed',) bias_init bias_axes=('embed',) dtype"
    ),
    "DenseGeneral": (
        f"features kernel_init=None kernel_axes=() use_bias=True bias_init bias_axes=() {_LORA} axis=-1 "
        "dtype input_axes=() transpose_batch_sequence=False quantization_checkpoint_name=None"
    ),
    "LayerNormDenseGeneral": (
        f"features enable_layernorm=True {_NORM} ln_bias_init ln_bias_axes=('embed',) kernel_init=None "
        f"kernel_axes=() use_bias=False bias_init bias_axes=() return_layernorm_output=False {_LORA} axis=-1 "
        "dtype layernorm_input_axes=None dot_input_axes=None depth_scaling=None "
        "transpose_batch_sequence=False quantization_checkpoint_name=None"
    ),
    "LayerNormMLP": (
        f"intermediate_dim=2048 enable_layernorm=True {_NORM} ln_bias_init ln_bias_axes=('embed',) "
        "kernel_init=None kernel_axes_1=('embed','act','mlp') kernel_axes_2=('mlp','embed') use_bias=False "
        "bias_init bias_axes_1=('act','mlp') bias_axes_2=('embed',) return_layernorm_output=False "
        "activations=('gelu',) activation_params=None intermediate_dropout_rng_name='dropout' "
        f"intermediate_dropout_rate=0.0 intermediate_hidden_dropout_dims=() {_LORA} axis=-1 dtype "
        "layernorm_input_axes=None dot_1_input_axes=None dot_2_input_axes=None ffn1_ckpt_name='ffn1' "
        "ffn2_ckpt_name='ffn2' transpose_batch_sequence=False quantization_checkpoint_name=None"
    ),
    "DotProductAttention": (
        "head_dim num_attention_heads num_gqa_groups=None attention_dropout=0.0 attn_mask_type='causal' "
        "attn_bias_type=None dtype=None dropout_rng_name='dropout' float32_logits=False "
        "qkv_layout='bshd_bshd_bshd' scale_factor=None transpose_batch_sequence=None window_size=None "
        "max_segments_per_seq=1 context_parallel_causal_load_balanced=False context_parallel_axis='' "
        "context_parallel_strategy='DEFAULT' context_checkpoint_name='context' softmax_type='vanilla' "
        "score_mod=None score_mod_bprop=None"
    ),
    "MultiHeadAttention": (
        "head_dim num_attention_heads num_gqa_groups=None attention_dropout=0.0 dropout_rng_name='dropout' "
        "input_layernorm=True layernorm_type='layernorm' layernorm_epsilon=1e-06 "
        "return_layernorm_output=False zero_centered_gamma=False kernel_init=None use_bias=False bias_init "
        f"attn_mask_type='causal' attn_bias_type=None {_ROPE} {_SCOPE} dtype fuse_qkv_params=True "
        "transpose_batch_sequence=None enable_sequence_parallel=False scale_attn_logits=False "
        "scaled_query_init=True float32_logits=False window_size=None softmax_type='vanilla' score_mod=None "
        "score_mod_bprop=None num_heads=None dropout_rate=None output_layernorm=None "
        "apply_residual_connection_post_layernorm=None fuse_qkv=None"
    ),
    "RelativePositionBiases": (
        "num_buckets max_distance num_attention_heads embedding_init "
        "embedding_axes=('heads','relpos_buckets') dtype"
    ),
    "TransformerLayer": (
        "hidden_size=512 mlp_hidden_size=2048 num_attention_heads=8 num_gqa_groups=None "
        "layernorm_type='layernorm' layernorm_epsilon=1e-06 zero_centered_gamma=False hidden_dropout=0.1 "
        "hidden_dropout_dims=() attention_dropout=0.1 intermediate_dropout=0.0 intermediate_dropout_dims=() "
        "dropout_rng_name='dropout' mha_kernel_init=None mlp_kernel_init=None mlp_activations=('gelu',) "
        "mlp_activation_params=None use_bias=False bias_init apply_residual_connection_post_layernorm=False "
        "output_layernorm=False float32_attention_logits=False layer_type self_attn_mask_type='causal' "
        f"self_attn_bias_type=None enable_relative_embedding=True relative_embedding=None {_ROPE} {_SCOPE} "
        "dtype drop_path=0.0 fuse_qkv_params=True transpose_batch_sequence=False "
        "enable_sequence_parallel=False scale_attn_logits=False scaled_query_init=True window_size=None "
        "softmax_type='vanilla' score_mod=None score_mod_bprop=None"
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_and_defaults_are_transformer_engines(name):
    wanted = [text.partition("=") for text in FIELDS[name].split()]
    fields = [
        field for field in dataclasses.fields(getattr(modules, name)) if field.name not in ("parent", "name")
    ]
    assert [field.name for field in fields[: len(wanted)]] == [field for field, *_ in wanted]
    for field, (_, given, default) in zip(fields, wanted, strict=False):
        if given:
            assert repr(field.default).replace(" ", "") == default, field.name


LORA = {
    "enable_low_rank_adaptation": True,
    "low_rank_adaptation_dim": 3,
    "low_rank_adaptation_alpha": 6.0,
    "use_bias": True,
}


def started(module, *args):
    """Parameters whose second small kernels are not the zeros that they start as."""
    return nn.unbox(filled(module.init, jax.random.key(0), *args))["params"]


def alike(got, want, bound):
    want = np.asarray(want)
    assert_close("values", np.asarray(got), want, "float32", bound * float(np.abs(want).max()))


def adapted(kernel, a, b):
    return kernel + 2.0 * np.einsum("inr,nrz->inz", a, b)


def test_low_rank_adaptation_of_products():
    """alpha / rank = 2 times the product of the small kernels, added to the kernel, gives the same."""
    module, x = modules.DenseGeneral((4, 6), axis=(-2, -1), **LORA), X.reshape(2, 16, 4, 8)
    start = nn.unbox(jax.jit(module.init)(jax.random.key(0), x))["params"]
    assert start["lora_a_kernel"].shape == (4, 8, 4, 3)
    assert start["lora_b_kernel"].shape == (4, 3, 6)
    assert not start["lora_b_kernel"].any()
    p = started(module, x)
    whole = p["kernel"] + 2.0 * np.einsum("ijnr,nrz->ijnz", p["lora_a_kernel"], p["lora_b_kernel"])
    got = jax.jit(module.apply)({"params": p}, x)
    alike(got, fj.dense(x, whole, p["bias"], ((-2, -1), (0, 1))), 2.0**-18)

    module = modules.LayerNormDenseGeneral((2, 24), layernorm_type="rmsnorm", **LORA)
    p = started(module, X)
    whole = adapted(p["kernel"], p["lora_a_kernel"], p["lora_b_kernel"])
    y, normed = jax.jit(module.apply)({"params": p}, X)
    assert normed is None
    alike(y, fj.layernorm_dense(X, whole, p["scale"], None, p["bias"], "rmsnorm"), 2.0**-18)

    module = modules.LayerNormMLP(48, activations=("silu", "linear"), layernorm_type="rmsnorm", **LORA)
    p = started(module, X)
    kernels = (
        adapted(p["wi_kernel"], p["wi_lora_a_kernel"], p["wi_lora_b_kernel"]),
        (p["wo_kernel"] + 2.0 * np.asarray(p["wo_lora_a_kernel"]) @ p["wo_lora_b_kernel"]),
    )
    want = fj.layernorm_mlp(
        X,
        p["scale"],
        None,
        kernels,
        (p["wi_bias"], p["wo_bias"]),
        "rmsnorm",
        activation_type=("silu", "linear"),
    )
    alike(jax.jit(module.apply)({"params": p}, X)[0], want, 2.0**-17)


@pytest.mark.parametrize("scope", SCOPES)
def test_scopes_of_low_rank_adaptation(scope):
    layer = modules.TransformerLayer(
        32, 48, 4, low_rank_adaptation_scope=scope, low_rank_adaptation_dim=4, num_gqa_groups=2
    )
    params = jax.eval_shape(layer.init, KEYS, X)["params"]
    found = {
        "/".join(path[:-1])
        for path in flax.traverse_util.flatten_dict(nn.unbox(params))
        if "lora_a" in path[-1]
    }
    parts = {
        "qkv_proj": {"attention/query", "attention/kv"},
        "output_proj": {"attention/out"},
        "mlp": {"mlp"},
    }
    assert found == {name for part in SCOPES[scope] for name in parts[part]}


def test_one_draw_of_dropout_for_several_tokens():
    options = {
        "intermediate_dropout_rate": 0.5,
        "intermediate_hidden_dropout_dims": (-2,),
        "layernorm_type": "rmsnorm",
    }
    mlp = modules.LayerNormMLP(32, **options)
    p = nn.unbox(filled(mlp.init, KEYS, X))["params"] | {"wo_kernel": np.eye(32, dtype=np.float32)}
    act = fj.activation(fj.layernorm_dense(X, p["wi_kernel"], p["scale"], None, None, "rmsnorm"), ("gelu",))
    y = jax.jit(mlp.apply)({"params": p}, X, rngs={"dropout": jax.random.key(3)})[0]
    ratio = np.round(np.asarray(y) / np.asarray(act), 4)
    assert set(np.unique(ratio)) == {0.0, 2.0}
    assert (ratio == ratio[:, :1]).all()
    layer = modules.TransformerLayer(
        32, 48, 4, hidden_dropout=0.5, hidden_dropout_dims=(0, 1), attention_dropout=0.0
    )
    params = nn.unbox(filled(layer.init, KEYS, X))["params"]
    params |= {"mlp": jax.tree.map(np.zeros_like, params["mlp"])}
    y = jax.jit(layer.apply)({"params": params}, X, rngs={"dropout": jax.random.key(3)})
    same = np.asarray(y) == np.asarray(X)
    lost = same.all((0, 1))  # features that the attention's branch lost everywhere
    assert 0 < lost.sum() < 32
    np.testing.assert_array_equal(lost, same.any((0, 1)))


def test_axes_between_norm_and_product():
    """Rules that put norm(x) on the mesh separate norm and product; the numbers are those of the one
    operation."""
    mesh, x = (
        Mesh(np.array(jax.devices("cpu")[:8]), ("data",)),
        jax.random.normal(jax.random.key(2), (8, 16, 32)),
    )
    rows = ("nvte_batch", None, None)
    pairs = [
        (
            modules.LayerNormMLP(48),
            modules.LayerNormMLP(48, layernorm_input_axes=rows, dot_1_input_axes=rows, dot_2_input_axes=rows),
        ),
        (modules.LayerNormDenseGeneral(24), modules.LayerNormDenseGeneral(24, dot_input_axes=rows)),
    ]
    for plain, split in pairs:
        variables = nn.unbox(filled(plain.init, jax.random.key(0), x))
        want = plain.apply(variables, x)[0]
        assert_same_bits("no mesh", np.asarray(split.apply(variables, x)[0]), np.asarray(want))
        with jax.set_mesh(mesh), fj.autocast(mesh_resource=fj.MeshResource(dp_resource="data")):
            y = jax.jit(split.apply)(variables, x)[0]
        assert y.sharding.spec[0] == "data"
        alike(y, want, 2.0**-19)


@pytest.mark.programs
def test_layers_scanned_by_flax_are_layers_one_by_one():
    """``flax.linen.scan`` stacks parameters and FP8 state, the boxes' axes get the stack's name; a step's
    state comes back stacked."""
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "enable_relative_embedding": False}

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return modules.TransformerLayer(32, 48, 4, name="layer", **options)(x, deterministic=True), None

    stack = nn.scan(
        Body,
        variable_axes={"params": 0, fj.FP8_COLLECTION_NAME: 0},
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )()
    one = modules.TransformerLayer(32, 48, 4, **options)

    def scanned(variables):
        return (stack.apply(variables, X, None)[0] ** 2).mean()

    def unrolled(variables):
        x = X
        for i in range(3):
            x = one.apply(
                jax.tree.map(lambda leaf, i=i: leaf[i], {c: v["layer"] for c, v in variables.items()}),
                x,
                deterministic=True,
            )
        return (x**2).mean()

    with fj.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=3)):
        boxed = stack.init(jax.random.key(0), X, None)
        assert boxed["params"]["layer"]["mlp"]["wo_kernel"].names == ("layers", "nvte_w_tp", "nvte_w_fsdp")
        got, want = (jax.jit(jax.value_and_grad(f))(nn.unbox(boxed)) for f in (scanned, unrolled))
    for path, leaf in jax.tree_util.tree_leaves_with_path(want):
        assert_same_bits(
            jax.tree_util.keystr(path),
            np.asarray(dict(jax.tree_util.tree_leaves_with_path(got))[path]),
            np.asarray(leaf),
        )
