"""Errors of the JAX frontend: what is no array or no number is refused by the function's and the argument's
name."""

from __future__ import annotations

import dataclasses

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fp8kit_jax import flax as ff
from fp8kit_jax import nnx as fn

import fp8kit as fk
from fp8kit.errors import ArgumentError, Fp8kitError, ShapeError, UnsupportedError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling

X, W = jnp.ones((3, 4)), jnp.ones((4, 4))
Q, SUMS = np.ones((5, 2, 4), np.float32), jnp.array([0, 5], jnp.int32)
KEYS = jax.random.split(jax.random.key(0), 2)


def slots(**changed):
    """A set with fresh slots, some fields replaced."""
    return dataclasses.replace(fj.create_set(DelayedScaling(amax_history_len=2)), **changed)


REFUSED = {
    "dense: kernel: got None": lambda: fj.dense(X, None),
    "dense: x: got 'a'": lambda: fj.dense("a", W),
    "dense: bias: got 'b'": lambda: fj.dense(X, W, "b"),
    "dense: contracting_dims: got 3": lambda: fj.dense(X, W, contracting_dims=3),
    "layernorm_dense: kernel: got shape": lambda: fj.layernorm_dense(X, jnp.ones(4), jnp.ones(4), None),
    "layernorm_dense: epsilon: got 'x'": lambda: fj.layernorm_dense(
        X, W, jnp.ones(4), jnp.ones(4), epsilon="x"
    ),
    "layernorm_mlp: kernels: got None": lambda: fj.layernorm_mlp(X, jnp.ones(4), None, None),
    "layernorm: norm_type: got 3": lambda: fj.layernorm(X, jnp.ones(4), norm_type=3),
    "layernorm: gamma: got 'w'": lambda: fj.layernorm(X, "w"),
    "rmsnorm: gamma: got shape (5,)": lambda: fj.rmsnorm(X, jnp.ones(5)),
    "fused_cross_entropy: targets: got shape (5,)": lambda: fj.fused_cross_entropy(
        X, jnp.zeros(5, jnp.int32)
    ),
    "activation: activation_type: got 3": lambda: fj.activation(X, 3),
    "l2norm: x: got None": lambda: fj.l2norm(None),
    "softmax: mask: got 'm'": lambda: fj.softmax(X, "m"),
    "dropout_add: rate: got 2": lambda: fj.dropout_add(X, rate=2),
    "dropout_add: key: got 3, expected one JAX key": lambda: fj.dropout_add(X, rate=0.5, key=3),
    "dropout_add: key: got a tensor of key<fry>, shape (2,)": lambda: fj.dropout_add(X, rate=0.5, key=KEYS),
    "dropout_add: key: got a tensor of uint32, shape (2, 2)": lambda: fj.dropout_add(
        X, rate=0.5, key=jax.random.key_data(KEYS)
    ),
    "dot_product_attention: dropout_key: got a tensor": lambda: fj.dot_product_attention(
        Q[None], Q[None], Q[None], dropout_rate=0.5, dropout_key=KEYS
    ),
    "dot_product_attention: key: missing": lambda: fj.dot_product_attention(Q[None], None, None),
    "dot_product_attention: value: missing": lambda: fj.dot_product_attention(Q[None], Q[None]),
    "dot_product_attention: max_seqlen_q: missing": lambda: fj.dot_product_attention(
        Q, Q, Q, qkv_format="thd", attn_mask_type="padding", cu_seqlens_q=SUMS, cu_seqlens_kv=SUMS
    ),
    "drop_path: rate: got 'r'": lambda: fj.drop_path(X, X, "r", jax.random.key(0)),
    "rope_frequencies: dim: got 3, expected an even": lambda: fj.rope_frequencies(3, 2),
    "dot_product_attention: qkv_format: got 'x'": lambda: fj.dot_product_attention(Q, Q, Q, qkv_format="x"),
    "dot_product_attention: key: got 'k'": lambda: fj.dot_product_attention(Q, "k", Q, qkv_format="thd"),
    "quantize: x: got None": lambda: fj.quantize(None),
    "dequantize: q: got 3": lambda: fj.dequantize(3),
    "gemm: b: got None": lambda: fj.gemm(fj.quantize(X), None),
    "create_set: recipe: got 3": lambda: fj.create_set(3),
    "create_set: recipe: got a recipe with callables": lambda: fj.create_set(
        DelayedScaling(amax_compute_algo=lambda history: history[0])
    ),
    "dense: recipe: got reduce_amax=False": lambda: fj.dense(
        X, W, quantizer_set=slots(recipe=DelayedScaling(reduce_amax=False))
    ),
    "dense: recipe: got 3": lambda: fj.dense(X, W, quantizer_set=fj.QuantizerSet(recipe=3)),
    "dense: quantizer_set.x: got (": lambda: fj.dense(X, W, quantizer_set=slots(x=(1, 2))),
    "dense: quantizer_set.grad.amax_history: got float32 (0,)": lambda: fj.dense(
        X, W, quantizer_set=slots(grad=fj.Slot(jnp.ones(1), jnp.zeros(0)))
    ),
    "dense: quantizer_set.kernel.scale: got bfloat16 (1,)": lambda: fj.dense(
        X, W, quantizer_set=slots(kernel=fj.Slot(jnp.ones(1, jnp.bfloat16), jnp.zeros(2)))
    ),
    "linear: quantizer_set: got slots": lambda: jax.grad(lambda s: fj.dense(X, W, quantizer_set=s).sum())(
        slots(recipe=Float8CurrentScaling())
    ),
    "rmsnorm: x: got shape (b, 4), expected sizes that are known": lambda: jax.export.export(
        jax.jit(lambda x: fj.rmsnorm(x, jnp.ones(4)))
    )(jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 4), jnp.float32)),
    "gemm: dtype: got int32": lambda: fj.gemm(fj.quantize(X), fj.quantize(X), jnp.int32),
    "update_collections: new: got 3, expected a mapping": lambda: fj.update_collections(3, {}),
    "update_collections: original: got [], expected a mapping": lambda: fj.update_collections({}, []),
    "fused_cross_entropy: targets: got 7 among": lambda: fj.fused_cross_entropy(X, jnp.array([0, 7, 1])),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused(said):
    with pytest.raises(Fp8kitError) as caught:
        REFUSED[said]()
    assert str(caught.value).startswith(said)
    assert isinstance(caught.value, ValueError)


def apply(module, *args):
    """A Flax module, started and called."""
    return module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, *args)


H3 = jnp.ones((2, 3, 8))
LAYER = {"rngs": nnx.Rngs(0)}
IN_FLAX = {
    "LayerNorm: x: got 'x', expected an array": lambda: apply(ff.LayerNorm(), "x"),
    "DenseGeneral: inputs: got 'x', expected an array": lambda: apply(ff.DenseGeneral(8), "x"),
    "LayerNormDenseGeneral: inputs: got 'x', expected an array": lambda: apply(
        ff.LayerNormDenseGeneral(8), "x"
    ),
    "LayerNormMLP: inputs: got 'x', expected an array": lambda: apply(ff.LayerNormMLP(8), "x"),
    "DotProductAttention: query: got 'x', expected an array": lambda: apply(
        ff.DotProductAttention(4, 2), "x", "x", "x"
    ),
    "TransformerLayer: inputs: got 'x', expected an array": lambda: apply(ff.TransformerLayer(8, 8, 2), "x"),
    "TransformerLayer: encoded: got 'e', expected an array": lambda: apply(
        ff.TransformerLayer(8, 8, 2, layer_type=ff.TransformerLayerType.DECODER), H3, "e"
    ),
    "TransformerLayer: encoded: got an array, expected None": lambda: apply(
        ff.TransformerLayer(8, 8, 2), H3, H3
    ),
    "TransformerLayer: encoder_decoder_mask: got an array, expected None": lambda: apply(
        ff.TransformerLayer(8, 8, 2), H3, None, None, jnp.zeros((2, 1, 3, 3), bool)
    ),
    "TransformerLayer: attention_mask: missing": lambda: apply(
        ff.TransformerLayer(8, 8, 2, self_attn_mask_type="padding"), H3
    ),
    "MultiHeadAttention: mask: missing": lambda: apply(
        ff.MultiHeadAttention(4, 2, attn_mask_type="padding_causal"), H3, H3
    ),
    "DotProductAttention: mask: missing": lambda: apply(
        ff.DotProductAttention(4, 2, attn_mask_type="padding"), *(H3.reshape(2, 3, 2, 4),) * 3
    ),
    "DenseGeneral: x: got 'x', expected an array": lambda: fn.DenseGeneral(8, 8, **LAYER)("x"),
    "LayerNormDenseGeneral: x: got 'x', expected an array": lambda: fn.LayerNormDenseGeneral(8, 8, **LAYER)(
        "x"
    ),
    "LayerNormMLP: x: got 'x', expected an array": lambda: fn.LayerNormMLP(8, 8, **LAYER)("x"),
    # at construction
    "DenseGeneral: rngs: got 0, expected nnx.Rngs": lambda: fn.DenseGeneral(8, 8, rngs=0),
    "LayerNormMLP: rngs: got None, expected nnx.Rngs": lambda: fn.LayerNormMLP(8, 8, rngs=None),
    "MultiHeadAttention: rngs: got 0, expected nnx.Rngs": lambda: fn.MultiHeadAttention(8, 2, rngs=0),
    "TransformerLayer: rngs: got 0, expected nnx.Rngs": lambda: fn.TransformerLayer(8, 8, 2, rngs=0),
    "TransformerLayer: rngs: got one of dropout, expected nnx.Rngs with a stream 'params'": lambda: (
        fn.TransformerLayer(8, 8, 2, rngs=nnx.Rngs(dropout=0))
    ),
    "Dropout: rngs: got one of params, expected nnx.Rngs with a stream 'dropout'": lambda: (
        fn.TransformerLayer(8, 8, 2, rngs=nnx.Rngs(params=0), hidden_dropout=0.5)
    ),
    "TransformerLayer: mlp_activations: got ('foo',), expected one of": lambda: fn.TransformerLayer(
        8, 8, 2, mlp_activations=("foo",), **LAYER
    ),
    "LayerNormMLP: activations: got ('lineal',), expected one of": lambda: fn.LayerNormMLP(
        8, 8, activations=("lineal",), **LAYER
    ),
    "TransformerLayer: mlp_activation_params: got": lambda: fn.TransformerLayer(
        8, 8, 2, mlp_activation_params={"limit": 1.0}, **LAYER
    ),
    "TransformerLayer: attn_mask_type: got 'foo'": lambda: fn.TransformerLayer(
        8, 8, 2, attn_mask_type="foo", **LAYER
    ),
    "TransformerLayer: window_size: got 3": lambda: fn.TransformerLayer(8, 8, 2, window_size=3, **LAYER),
    "TransformerLayer: qkv_format: got 'hdsb'": lambda: fn.TransformerLayer(
        8, 8, 2, qkv_format="hdsb", **LAYER
    ),
    "MultiHeadAttention: num_gqa_groups: got 3": lambda: fn.TransformerLayer(
        8, 8, 2, num_gqa_groups=3, **LAYER
    ),
}


@pytest.mark.parametrize("said", IN_FLAX)
def test_what_modules_refuse(said):
    with pytest.raises(Fp8kitError) as caught:
        IN_FLAX[said]()
    assert str(caught.value).startswith(said)


def test_options_that_there_are_not():
    """A TypeError by the name of the class, when a module is made and when it is called; a layer's own
    children set what it sets."""
    makes = {
        "TransformerLayer": lambda **o: fn.TransformerLayer(8, 8, 2, **LAYER, **o),
        "MultiHeadAttention": lambda **o: fn.MultiHeadAttention(8, 2, **LAYER, **o),
        "DotProductAttention": lambda **o: fn.DotProductAttention(2, **o),
    }
    for name, make in makes.items():
        for option in ("nope", "dropout_rate", "self_attn_mask_type"):
            with pytest.raises(TypeError, match=f"^{name}: unexpected argument '{option}'"):
                make(**{option: 0})
        inputs = (jnp.ones((2, 3, 2, 4)),) * 3 if name == "DotProductAttention" else (H3,)
        with pytest.raises(TypeError, match=f"^{name}: unexpected argument 'nope'"):
            make()(*inputs, nope=1)
    with pytest.raises(TypeError, match=r"'windowsize'; did you mean window_size\?$"):
        makes["TransformerLayer"](windowsize=(1, 0))
    with pytest.raises(TypeError, match=r"^TransformerLayer: unexpected argument 'cross'"):
        makes["TransformerLayer"](cross=True)
    assert (
        makes["TransformerLayer"](num_gqa_groups=1, rotary=True, qk_norm_type="RMSNorm", window_size=(1, 0))(
            H3
        ).shape
        == H3.shape
    )


@pytest.mark.parametrize("values", [[0, 9], [1, 5], [0, 4, 2], [0, -1]])
def test_running_sums(values):
    """At once where they have values, and when the program runs where they are traced."""
    sums = np.array(values, np.int32)

    def attend(sums):
        return fj.dot_product_attention(
            Q,
            Q,
            Q,
            qkv_format="thd",
            attn_mask_type="padding",
            cu_seqlens_q=sums,
            cu_seqlens_kv=sums,
            max_seqlen_q=9,
            max_seqlen_kv=9,
        )

    with pytest.raises(ArgumentError, match=r"^dot_product_attention: cu_seqlens_q: got "):
        attend(sums)
    with pytest.raises(ArgumentError, match=r"^rope: cu_seqlens: got "):
        fj.rope(Q, fj.rope_frequencies(4, 9), cu_seqlens=sums, qkv_format="thd")
    with pytest.raises(jax.errors.JaxRuntimeError, match="cu_seqlens_q: got "):
        jax.block_until_ready(jax.jit(attend)(jnp.asarray(sums)))


def test_flax_modules_refuse_unknown_arguments_of_a_call():
    calls = {
        "DotProductAttention": (ff.DotProductAttention(4, 2), (jnp.ones((2, 3, 2, 4)),) * 3),
        "MultiHeadAttention": (ff.MultiHeadAttention(4, 2), (jnp.ones((2, 3, 8)),) * 2),
        "TransformerLayer": (ff.TransformerLayer(8, 16, 2), (jnp.ones((2, 3, 8)),)),
    }
    for name, (module, inputs) in calls.items():
        with pytest.raises(TypeError, match=f"^{name}: unexpected argument 'determinstic'"):
            module.init(jax.random.key(0), *inputs, determinstic=True)


def test_flax_packages_are_imported_when_asked_for():
    from fp8kit_jax.flax import LayerNorm
    from fp8kit_jax.nnx import DenseGeneral

    assert fj.flax.LayerNorm is LayerNorm
    assert fj.nnx.DenseGeneral is DenseGeneral
    with pytest.raises(
        AttributeError, match=r"'fp8kit_jax' has no attribute 'recipe': fp8kit\.recipe has the recipes$"
    ):
        fj.recipe  # noqa: B018
    with pytest.raises(AttributeError, match=r"'fp8kit_jax' has no attribute 'dence'; did you mean dense\?$"):
        fj.dence  # noqa: B018


def test_an_unknown_keyword_of_autocast_is_told_with_the_one_that_was_meant():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'recip'; did you mean recipe\?$"):
        fj.autocast(recip=None)


MEANT = {
    "kernel": lambda: fj.dense(X, kernal=W),
    "gamma": lambda: fj.layernorm_dense(X, W, gama=X[0], beta=None),
    "biases": lambda: fj.layernorm_mlp(X, None, None, (W, W), bias=(None, None)),
    "scaling": lambda: fj.quantize(X, scalling="row"),
    "attn_mask_type": lambda: fj.dot_product_attention(X, attn_masktype="causal"),
    "intermediate_dim": lambda: ff.LayerNormMLP(intermediate_dims=8),
    "use_bias": lambda: fn.DenseGeneral(4, 4, use_bais=True, rngs=nnx.Rngs(0)),
    "hidden_dropout": lambda: fn.TransformerLayer(4, 4, 1, hiden_dropout=0.1, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", MEANT)
def test_an_unknown_keyword_is_told_with_the_one_that_was_meant(name):
    with pytest.raises(TypeError, match=rf"unexpected (keyword )?argument '\w+'; did you mean {name}\?$"):
        MEANT[name]()


def test_an_input_that_fits_neither_norm_nor_kernel_is_what_is_wrong():
    module = fn.LayerNormMLP(4, 8, rngs=nnx.Rngs(0))
    said = r"layernorm_mlp: x: got shape \(3, 2\), expected a last dimension of 4, as gamma and kernels\[0\]"
    with pytest.raises(ShapeError, match=said):
        module(X[:, :2])
    with pytest.raises(ShapeError, match=r"layernorm_dense: x: got shape \(3, 2\), .* gamma and kernel have"):
        fj.layernorm_dense(X[:, :2], W, X[0], X[0])
    with pytest.raises(ShapeError, match=r"layernorm_dense: gamma: got shape \(3,\)"):
        fj.layernorm_dense(X, W, X[:, 0], X[0])


def test_a_missing_key_is_a_wrong_argument():
    with pytest.raises(ArgumentError, match=r"^dot_product_attention: dropout_key: missing"):
        fj.dot_product_attention(Q[None], Q[None], Q[None], dropout_rate=0.5)


def test_layers_that_do_not_look_for_nan_refuse_to():
    said = r"^dense: check_finite of autocast: got True, expected False"
    for call in (fj.dense, jax.jit(lambda x, w: fj.dense(x, w))):
        with fk.autocast(enabled=False, check_finite=True), pytest.raises(UnsupportedError, match=said):
            call(X, W)
        with fk.autocast(check_finite=True), fj.autocast(False), pytest.raises(UnsupportedError, match=said):
            call(X, W)
