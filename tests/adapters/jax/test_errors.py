"""Errors of the JAX door: what is no array or no number is refused by the function's and the argument's name."""

from __future__ import annotations

import dataclasses

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8kit.errors import ArgumentError, Fp8kitError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling

X, W = jnp.ones((3, 4)), jnp.ones((4, 4))
Q = np.ones((5, 2, 4), np.float32)


def slots(**changed):
    """A set with fresh slots, some fields replaced."""
    return dataclasses.replace(fj.create_set(DelayedScaling(amax_history_len=2)), **changed)


REFUSED = {
    "dense: kernel: got None": lambda: fj.dense(X, None),
    "dense: x: got 'a'": lambda: fj.dense("a", W),
    "dense: bias: got 'b'": lambda: fj.dense(X, W, "b"),
    "dense: contracting_dims: got 3": lambda: fj.dense(X, W, contracting_dims=3),
    "layernorm_dense: kernel: got shape": lambda: fj.layernorm_dense(X, jnp.ones(4), jnp.ones(4), None),
    "layernorm_dense: epsilon: got 'x'": lambda: fj.layernorm_dense(X, W, jnp.ones(4), jnp.ones(4), epsilon="x"),
    "layernorm_mlp: kernels: got None": lambda: fj.layernorm_mlp(X, jnp.ones(4), None, None),
    "layernorm: norm_type: got 3": lambda: fj.layernorm(X, jnp.ones(4), norm_type=3),
    "norm: norm_weight: got 'w'": lambda: fj.layernorm(X, "w"),
    "activation: activation_type: got 3": lambda: fj.activation(X, 3),
    "l2norm: x: got None": lambda: fj.l2norm(None),
    "softmax: mask: got 'm'": lambda: fj.softmax(X, "m"),
    "dropout_add: rate: got 2": lambda: fj.dropout_add(X, rate=2),
    "drop_path: rate: got 'r'": lambda: fj.drop_path(X, X, "r", jax.random.key(0)),
    "rope_frequencies: dim: got 3, expected an even": lambda: fj.rope_frequencies(3, 2),
    "dot_product_attention: qkv_format: got 'x'": lambda: fj.dot_product_attention(Q, Q, Q, qkv_format="x"),
    "dot_product_attention: key: got 'k'": lambda: fj.dot_product_attention(Q, "k", Q, qkv_format="thd"),
    "quantize: x: got None": lambda: fj.quantize(None),
    "dequantize: q: got 3": lambda: fj.dequantize(3),
    "gemm: b: got None": lambda: fj.gemm(fj.quantize(X), None),
    "create_set: recipe: got 3": lambda: fj.create_set(3),
    "create_set: recipe: got a recipe with callables": lambda: fj.create_set(DelayedScaling(amax_compute_algo=lambda history: history[0])),
    "dense: recipe: got reduce_amax=False": lambda: fj.dense(X, W, quantizer_set=slots(recipe=DelayedScaling(reduce_amax=False))),
    "dense: recipe: got 3": lambda: fj.dense(X, W, quantizer_set=fj.QuantizerSet(recipe=3)),
    "dense: quantizer_set.x: got (": lambda: fj.dense(X, W, quantizer_set=slots(x=(1, 2))),
    "dense: quantizer_set.grad.amax_history: got float32 (0,)": lambda: fj.dense(
        X, W, quantizer_set=slots(grad=fj.Slot(jnp.ones(1), jnp.zeros(0)))),
    "dense: quantizer_set.kernel.scale: got bfloat16 (1,)": lambda: fj.dense(
        X, W, quantizer_set=slots(kernel=fj.Slot(jnp.ones(1, jnp.bfloat16), jnp.zeros(2)))),
    "linear: quantizer_set: got slots": lambda: jax.grad(
        lambda s: fj.dense(X, W, quantizer_set=s).sum())(slots(recipe=Float8CurrentScaling())),
    "norm: x: got shape (b, 4), expected sizes that are known": lambda: jax.export.export(
        jax.jit(lambda x: fj.rmsnorm(x, jnp.ones(4))))(jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 4), jnp.float32)),
    "gemm: dtype: got int32": lambda: fj.gemm(fj.quantize(X), fj.quantize(X), jnp.int32),
    "fused_cross_entropy: targets: got 7 among": lambda: fj.fused_cross_entropy(X, jnp.array([0, 7, 1])),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused(said):
    with pytest.raises(Fp8kitError) as caught:
        REFUSED[said]()
    assert str(caught.value).startswith(said)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("values", [[0, 9], [1, 5], [0, 4, 2], [0, -1]])
def test_running_sums(values):
    """At once where they have values, and when the program runs where they are traced."""
    sums = np.array(values, np.int32)

    def attend(sums):
        return fj.dot_product_attention(Q, Q, Q, qkv_format="thd", attn_mask_type="padding", cu_seqlens_q=sums, cu_seqlens_kv=sums,
                                        max_seqlen_q=9, max_seqlen_kv=9)

    with pytest.raises(ArgumentError, match=r"^dot_product_attention: cu_seqlens_q: got "):
        attend(sums)
    with pytest.raises(ArgumentError, match=r"^rope: cu_seqlens: got "):
        fj.rope(Q, fj.rope_frequencies(4, 9), cu_seqlens=sums, qkv_format="thd")
    with pytest.raises(jax.errors.JaxRuntimeError, match="cu_seqlens_q: got "):
        jax.block_until_ready(jax.jit(attend)(jnp.asarray(sums)))


def test_rooms_of_flax_come_when_they_are_asked_for():
    from fp8kit_jax.flax import LayerNorm
    from fp8kit_jax.nnx import DenseGeneral

    assert fj.flax.LayerNorm is LayerNorm
    assert fj.nnx.DenseGeneral is DenseGeneral
    with pytest.raises(AttributeError, match=r"'fp8kit_jax' has no attribute 'dence'; did you mean dense\?$"):
        fj.dence  # noqa: B018
