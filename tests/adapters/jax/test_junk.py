"""Every argument of the JAX frontend's functions and modules, given what it cannot be: the call works all the
same, or is refused when it is traced by an error of the right kind."""

from __future__ import annotations

import re

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from fp8kit_jax import flax as ff
from fp8kit_jax import nnx as fn

import fp8kit as fk
from fp8kit.errors import Fp8kitError
from fp8kit.recipe import DelayedScaling, Float8CurrentScaling
from tests.support.combinations import combinations
from tests.support.effort import FACTOR, chosen

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(3, 8)
W, V = np.ones((8, 6), np.float32), np.ones(8, np.float32)
Q = np.linspace(-2, 2, 48, dtype=np.float32).reshape(2, 3, 2, 4)
T = np.linspace(-2, 2, 40, dtype=np.float32).reshape(5, 2, 4)
SUMS = np.array([0, 2, 5], np.int32)
KEY = jax.random.key(0)
FREQS = fj.rope_frequencies(4, 8)
S = np.linspace(-2, 2, 48, dtype=np.float32).reshape(3, 2, 8)
JUNK = {
    "None": None,
    "a word": "word",
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "2**70": 2**70,
    "True": True,
    "()": (),
    "[]": [],
    "{}": {},
    "object": object(),
    "np.float64": np.float64(0.5),
    "1j": 1j,
    "array": np.zeros((2, 3), np.float32),
    "[1, a]": [1, "a"],
    "(1, 2, 3)": (1, 2, 3),
    "{a: 1}": {"a": 1},
    "a dtype": jnp.float32,
    "strings": ["a", "b"],
    "jax": jnp.ones((3, 4)),
    "empty": jnp.zeros((0, 4)),
    "ints": jnp.ones((3, 4), jnp.int32),
    "bool": jnp.ones((3, 4), bool),
    "complex": jnp.ones((3, 4), jnp.complex64),
    "()-array": jnp.float32(1.5),
    "half": jnp.ones((3, 4), jnp.float16),
    "NaNs": jnp.full((3, 4), jnp.nan),
    "5-d": jnp.zeros((1,) * 5),
    "float8": jnp.ones((3, 4), jnp.float8_e4m3fn),
    "key": KEY,
}


def flax(kind, *inputs, call=None):
    """A Flax module's fields, made and called."""

    def run(**given):
        options = {name: given.pop(name) for name in call or () if name in given}
        return kind(**given).init_with_output({"params": KEY, "dropout": KEY}, *inputs, **options)[0]

    return run


def of_nnx(kind, *inputs):
    return lambda **given: kind(**given, rngs=nnx.Rngs(0))(*inputs)


def within(**given):
    with fj.autocast(**given):
        return fj.dense(jnp.ones((16, 16)), jnp.ones((16, 16)), quantizer_set=fj.noop_quantizer_set)


NORM = {"zero_centered_gamma": False, "epsilon": 1e-6}
ATTENTION = {
    "attn_mask_type": "padding",
    "mask": None,
    "bias": np.zeros((1, 2, 3, 3), np.float32),
    "attn_bias_type": "post_scale_bias",
    "scale_factor": 0.5,
    "dropout_rate": 0.1,
    "dropout_key": KEY,
    "qkv_format": "bshd",
    "window_size": (1, 1),
    "softmax_type": "vanilla",
    "softcap": 2.0,
    "softmax_offset": None,
    "alibi_slopes": None,
    "cu_seqlens_q": np.array([0, 2, 5], np.int32),
    "cu_seqlens_kv": np.array([0, 2, 5], np.int32),
    "cu_seqlens_q_padded": None,
    "cu_seqlens_kv_padded": None,
    "max_seqlen_q": 0,
    "max_seqlen_kv": 0,
    "bottom_right_diagonal": None,
}
LORA = {"enable_low_rank_adaptation": True, "low_rank_adaptation_dim": 2, "low_rank_adaptation_alpha": 0.5}
CALLS = {
    "dense": (
        fj.dense,
        {
            "x": X,
            "kernel": W,
            "bias": np.ones(6, np.float32),
            "contracting_dims": ((-1,), (0,)),
            "quantizer_set": None,
            "return_bias": False,
            "residual": None,
        },
    ),
    "dense, residual": (
        fj.dense,
        {"x": X, "kernel": W, "residual": np.ones((3, 6), np.float32), "return_bias": False},
    ),
    "layernorm_dense": (
        fj.layernorm_dense,
        {
            "x": X,
            "kernel": W,
            "gamma": V,
            "beta": V,
            "bias": np.ones(6, np.float32),
            "norm_type": "layernorm",
            "quantizer_set": None,
            "return_layernorm_output": False,
            "kernel_layout": "io",
            "return_residual": False,
            **NORM,
        },
    ),
    "layernorm_mlp": (
        fj.layernorm_mlp,
        {
            "x": X,
            "gamma": V,
            "beta": V,
            "kernels": (np.ones((8, 1, 6), np.float32), np.ones((6, 8), np.float32)),
            "biases": (None, None),
            "norm_type": "layernorm",
            "activation_type": ("gelu",),
            "quantizer_sets": (None, None),
            "return_layernorm_output": False,
            "kernel_layout": "io",
            "activation_params": None,
            "return_residual": False,
            "return_bias": False,
            "join_residual": False,
            **NORM,
        },
    ),
    "dot_product_attention": (fj.dot_product_attention, {"query": Q, "key": Q, "value": Q, **ATTENTION}),
    "dot_product_attention, thd": (
        fj.dot_product_attention,
        {
            "query": T,
            "key": T,
            "value": T,
            "qkv_format": "thd",
            "attn_mask_type": "padding",
            "cu_seqlens_q": SUMS,
            "cu_seqlens_kv": SUMS,
            "max_seqlen_q": 3,
            "max_seqlen_kv": 3,
        },
    ),
    "running_sums": (fj.running_sums, {"lengths": np.array([2, 3])}),
    "layernorm": (fj.layernorm, {"x": X, "gamma": V, "beta": V, "norm_type": "layernorm", **NORM}),
    "rmsnorm": (fj.rmsnorm, {"x": X, "gamma": V, **NORM}),
    "l2norm": (fj.l2norm, {"x": X, "epsilon": 1e-6}),
    "softmax": (fj.softmax, {"logits": X, "mask": X > 0, "scale_factor": 2.0}),
    "fused_cross_entropy": (
        fj.fused_cross_entropy,
        {
            "logits": X,
            "targets": np.array([0, 1, 7], np.int32),
            "label_smoothing": 0.1,
            "reduction": "mean",
            "ignore_index": -100,
        },
    ),
    "rope": (
        fj.rope,
        {
            "x": Q,
            "freqs": FREQS,
            "start_positions": np.array([0, 1], np.int32),
            "cu_seqlens": None,
            "qkv_format": "bshd",
            "interleaved": False,
            "cu_seqlens_padded": None,
        },
    ),
    "rope_frequencies": (fj.rope_frequencies, {"dim": 4, "positions": 8, "base": 1e4, "interleaved": False}),
    "dropout_add": (fj.dropout_add, {"x": X, "residual": X, "bias": V, "rate": 0.1, "key": KEY}),
    "dropout_seed": (fj.dropout_seed, {"key": KEY}),
    "drop_path": (
        fj.drop_path,
        {"x": S, "residual": S, "rate": 0.1, "key": KEY, "qkv_format": "bshd", "cu_seqlens": None},
    ),
    "activation": (fj.activation, {"x": X[:, None], "activation_type": ("gelu",), "act_params": None}),
    "quantize": (
        fj.quantize,
        {
            "x": X,
            "format": fk.E4M3,
            "scale": np.ones(1, np.float32),
            "scaling": "tensor",
            "rounding": "stochastic",
            "saturate": True,
            "key": KEY,
            "stochastic_bits": 8,
        },
    ),
    "dequantize": (fj.dequantize, {"q": fj.quantize(X), "dtype": jnp.float32}),
    "gemm": (
        fj.gemm,
        {"a": fj.quantize(X), "b": fj.quantize(X), "dtype": jnp.float32, "fast_accumulate": False},
    ),
    "create_set": (fj.create_set, {"recipe": DelayedScaling(), "n_quantizer_sets": 2}),
    "autocast": (within, {"enabled": True, "recipe": Float8CurrentScaling(), "mesh_resource": None}),
    "MeshResource": (fj.MeshResource, {"dp_resource": "a"}),
    "flax.LayerNorm": (flax(ff.LayerNorm, X), {"layernorm_type": "layernorm", "dtype": jnp.float32, **NORM}),
    "flax.DenseGeneral": (
        flax(ff.DenseGeneral, X),
        {"features": 6, "use_bias": True, "axis": -1, "dtype": jnp.float32, "return_bias": False, **LORA},
    ),
    "flax.LayerNormDenseGeneral": (
        flax(ff.LayerNormDenseGeneral, X),
        {
            "features": 6,
            "enable_layernorm": True,
            "layernorm_type": "layernorm",
            "use_bias": True,
            "return_layernorm_output": False,
            "axis": -1,
            "dtype": jnp.float32,
            "depth_scaling": 2.0,
            "return_residual": False,
            **NORM,
        },
    ),
    "flax.LayerNormMLP": (
        flax(ff.LayerNormMLP, S),
        {
            "intermediate_dim": 16,
            "activations": ("gelu",),
            "intermediate_dropout_rate": 0.0,
            "use_bias": True,
            "dtype": jnp.float32,
            "layernorm_type": "layernorm",
            "return_layernorm_output": False,
            "return_residual": False,
            "return_bias": False,
            "join_residual": False,
            **NORM,
        },
    ),
    "flax.DotProductAttention": (
        flax(ff.DotProductAttention, Q, Q, Q),
        {
            "head_dim": 4,
            "num_attention_heads": 2,
            "num_gqa_groups": 2,
            "attention_dropout": 0.0,
            "attn_mask_type": "causal",
            "scale_factor": 0.5,
            "window_size": None,
            "transpose_batch_sequence": False,
        },
    ),
    "flax.MultiHeadAttention": (
        flax(ff.MultiHeadAttention, S, S),
        {
            "head_dim": 4,
            "num_attention_heads": 2,
            "num_gqa_groups": 2,
            "attention_dropout": 0.0,
            "attn_mask_type": "causal",
            "input_layernorm": True,
            "use_bias": True,
            "dtype": jnp.float32,
            "enable_rotary_pos_emb": True,
            "return_residual": False,
            "return_bias": False,
            "join_residual": False,
            "join_layernorm_output": False,
        },
    ),
    "flax.TransformerLayer": (
        flax(ff.TransformerLayer, S),
        {
            "hidden_size": 8,
            "mlp_hidden_size": 16,
            "num_attention_heads": 2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "mlp_activations": ("gelu",),
            "layernorm_type": "layernorm",
            "self_attn_mask_type": "causal",
            "dtype": jnp.float32,
            "drop_path": 0.0,
            "layernorm_epsilon": 1e-6,
        },
    ),
    "nnx.LayerNorm": (
        lambda **given: fn.LayerNorm(**given)(X),
        {"num_features": 8, "layernorm_type": "layernorm", "dtype": jnp.float32, **NORM},
    ),
    "nnx.DenseGeneral": (
        of_nnx(fn.DenseGeneral, X),
        {"in_features": 8, "features": 6, "use_bias": True, "dtype": jnp.float32},
    ),
}


STEP = 1 if FACTOR else 5  # every how many of them in the default run, others for each argument


def complaint(name, argument, label, run, given):
    """What is wrong with this refusal; "" for a right one and for a call that works."""
    try:
        run(**given)
    except NotImplementedError:
        pass
    except Fp8kitError as error:
        if not re.match(r"[\w.]+: .+: (got .*|missing), expected ", str(error), re.DOTALL):
            return f"{name}: {argument}={label}: said {str(error)!r}"
    except Exception as error:
        return f"{name}: {argument}={label}: {type(error).__name__} {str(error)[:120]!r}"
    return ""


def ruined(name):
    run, good = CALLS[name]
    for place, argument in enumerate(good):
        for label, junk in chosen(JUNK, place, STEP):
            yield argument, label, run, good | {argument: junk}


# a whole layer's fields are those of its parts
@combinations({"name": CALLS.keys()}, usual=[n for n in list(CALLS)[::5] if n != "flax.TransformerLayer"])
def test_an_argument_that_does_not_fit_is_refused(name):
    run, good = CALLS[name]
    run(**good)
    wrong = [said for given in ruined(name) if (said := complaint(name, *given))]
    assert not wrong, "\n".join(wrong)
