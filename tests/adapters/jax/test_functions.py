"""Every function of the frontend against JAX's own arithmetic in float32 or the native frontend's bits, with
its gradients."""

from __future__ import annotations

import fp8kit_jax as fj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8kit_jax import scopes
from fp8kit_jax.scopes import recipe_in_force

import fp8kit as fk
from fp8kit.errors import AutogradError, Fp8kitError, RecipeError
from fp8kit.recipe import Float8CurrentScaling
from fp8kit.testing import assert_close, assert_same_bits
from tests.support.combinations import combinations


def draw(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def close(got, want, terms):
    """Both are float32 sums of ``terms`` terms: an error of 2^-23 each, relative to the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert_close("values", got, want, "float32", terms * 2.0 ** (-22) * max(np.abs(want).max(), 1))


def check(function, reference, args, terms=64):
    """Values and gradients of a sum of random multiples, jitted."""
    shape = jax.eval_shape(function, *args)
    weight = draw(99, *shape.shape)
    which = tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))

    def of(f, *a):
        return f(*a), jax.grad(lambda *a: (f(*a).astype(jnp.float32) * weight).sum(), which)(*a)

    both = jax.jit(lambda *a: (of(function, *a), of(reference, *a)))(*args)
    jax.tree.map(lambda a, b: close(a, b, terms), *both)


def norm(x, gamma, beta, epsilon=1e-6):
    mean = x.mean(-1, keepdims=True) if beta is not None else 0.0
    x = x - mean
    y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + epsilon) * gamma
    return y if beta is None else y + beta


def test_norms():
    x, gamma, beta = draw(0, 3, 5, 40), draw(1, 40), draw(2, 40)
    check(fj.layernorm, norm, (x, gamma, beta))
    check(fj.rmsnorm, lambda x, g: norm(x, g, None), (x, gamma))
    check(
        lambda x, g: fj.rmsnorm(x, g, zero_centered_gamma=True), lambda x, g: norm(x, 1 + g, None), (x, gamma)
    )


ACTIVATIONS = {
    ("gelu",): lambda x: jax.nn.gelu(x[..., 0, :], approximate=True),
    ("relu",): lambda x: jax.nn.relu(x[..., 0, :]),
    ("silu",): lambda x: jax.nn.silu(x[..., 0, :]),
    ("silu", "linear"): lambda x: jax.nn.silu(x[..., 0, :]) * x[..., 1, :],
    ("gelu", "linear"): lambda x: jax.nn.gelu(x[..., 0, :], approximate=True) * x[..., 1, :],
    ("quick_gelu",): lambda x: x[..., 0, :] * jax.nn.sigmoid(1.702 * x[..., 0, :]),
    ("squared_relu", "linear"): lambda x: jax.nn.relu(x[..., 0, :]) ** 2 * x[..., 1, :],
    ("sigmoid", "linear"): lambda x: jax.nn.sigmoid(x[..., 0, :]) * x[..., 1, :],
    ("linear", "SiLU"): lambda x: jax.nn.silu(x[..., 0, :]) * x[..., 1, :],
    ("swish",): lambda x: jax.nn.silu(x[..., 0, :]),
    ("Tanh",): lambda x: jnp.tanh(x[..., 0, :]),
    ("softplus", "tanh", "linear"): lambda x: (
        jax.nn.softplus(x[..., 0, :]) * jnp.tanh(x[..., 1, :]) * x[..., 2, :]
    ),
}


# the others have the native frontend's bits: test_same_functions
@combinations({"types": {"-".join(types): types for types in ACTIVATIONS}}, usual=["gelu", "silu-linear"])
def test_activation(types):
    check(lambda x: fj.activation(x, types), ACTIVATIONS[types], (draw(0, 3, 5, len(types), 24),))


def test_activation_with_parameters():
    params = {"limit": 1.25, "alpha": 2.0, "glu_linear_offset": 0.5}

    def reference(x):
        u, v = jnp.minimum(x[..., 0, :], 1.25), jnp.clip(x[..., 1, :], -1.25, 1.25)
        return u * jax.nn.sigmoid(2.0 * u) * (v + 0.5)

    types = ("clamped_silu", "clamped_linear")
    check(lambda x: fj.activation(x, types, params), reference, (draw(0, 3, 5, 2, 24),))
    gamma, k1, k2 = draw(1, 16), draw(2, 16, 2, 24), draw(3, 24, 16)

    def mlp(x):
        return fj.layernorm_mlp(
            x, gamma, None, (k1, k2), norm_type="rmsnorm", activation_type=types, activation_params=params
        )

    check(
        mlp,
        lambda x: reference(jnp.einsum("...h,haf->...af", norm(x, gamma, None), k1)) @ k2,
        (draw(4, 3, 5, 16),),
        256,
    )
    with pytest.raises(
        Fp8kitError, match=r"activation: act_params: got 'slope'|activation: activation_params: got 'slope'"
    ):
        fj.activation(draw(0, 2, 1, 4), ("gelu",), {"slope": 1.0})


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("layout", ["io", "oi"])
def test_an_mlp_with_an_activation_that_no_kernel_has(layout, normed):
    """Values, gradients and what comes back beside y, of three operations; also in FP8."""
    types, x, k1, k2 = ("silu", "tanh"), draw(0, 3, 5, 16), draw(1, 16, 2, 24), draw(2, 24, 16)
    gamma = draw(3, 16) if normed else None
    biases = draw(4, 2, 24), draw(5, 16)

    def mlp(x, k1, k2, *biases, **asked):
        if layout == "oi":
            k1, k2 = k1.transpose(1, 2, 0), k2.T
        how = {"norm_type": "rmsnorm", "activation_type": types, "kernel_layout": layout}
        return fj.layernorm_mlp(x, gamma, None, (k1, k2), biases, **how, **asked)

    def reference(x, k1, k2, *biases):
        y = x if gamma is None else norm(x, gamma, None)
        h = jnp.einsum("...h,haf->...af", y, k1) + biases[0]
        return (jax.nn.silu(h[..., 0, :]) * jnp.tanh(h[..., 1, :])) @ k2 + biases[1]

    check(mlp, reference, (x, k1, k2, *biases), 256)
    check(lambda *a: mlp(*a, join_residual=True), lambda *a: reference(*a) + a[0], (x, k1, k2, *biases), 256)
    args = x, k1, k2, *biases
    beside = {"return_layernorm_output": True, "return_residual": True, "return_bias": True}
    y, ln, residual, bias = mlp(*args, **beside)
    close(y + bias, mlp(*args), 2)
    close(ln, x if gamma is None else norm(x, gamma, None), 16)
    assert_same_bits("residual", np.asarray(residual), np.asarray(x))
    with fj.autocast(True, Float8CurrentScaling()):
        h = (
            fj.layernorm_dense(x, k1, gamma, None, biases[0], "rmsnorm")
            if normed
            else fj.dense(x, k1, biases[0])
        )
        want = fj.dense(fj.activation(h, types), k2, biases[1])
        assert_same_bits("FP8", np.asarray(mlp(*args)), np.asarray(want))
    for given in (
        {"activation_params": {"alpha": 1.0}},
        {"alphas": (x[0, 0, :1],)},
        {"smooth_swiglu": "token"},
    ):
        with pytest.raises(Fp8kitError, match=next(iter(given))):
            mlp(*args, **given)


def test_l2norm_and_drop_path():
    x, residual, key = draw(0, 16, 5, 12), draw(1, 16, 5, 12), jax.random.key(5)
    check(fj.l2norm, lambda x: x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6), (x,))
    kept = fj.drop_path(jnp.ones_like(x), jnp.zeros_like(x), 0.25, key)
    factor = np.float32(1 / 0.75)
    assert set(np.unique(kept)) == {np.float32(0), factor}
    assert (np.asarray(kept) == np.asarray(kept)[:, :1, :1]).all()
    check(lambda x, r: fj.drop_path(x, r, 0.25, key), lambda x, r: r + kept * x, (x, residual))
    other = fj.drop_path(x.swapaxes(0, 1), residual.swapaxes(0, 1), 0.25, key, "sbhd")
    assert_same_bits(
        "sbhd", np.asarray(other.swapaxes(0, 1)), np.asarray(fj.drop_path(x, residual, 0.25, key))
    )


def test_softmax():
    x, mask = draw(0, 3, 5, 24), draw(1, 3, 1, 24) > 0.5
    mask = mask.at[0].set(True)

    def reference(x):
        e = jnp.where(mask, 0.0, jnp.exp(2.0 * x))
        total = e.sum(-1, keepdims=True)
        return e / jnp.where(total == 0, 1.0, total)

    check(lambda x: fj.softmax(x, mask, 2.0), reference, (x,))
    check(fj.softmax, jax.nn.softmax, (x,))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cross_entropy(reduction):
    logits, targets = draw(0, 6, 30), jnp.array([3, 0, 29, -100, 7, 7])

    def reference(x):
        loss = (
            jax.nn.logsumexp(x, -1)
            - 0.9 * jnp.take_along_axis(x, jnp.maximum(targets, 0)[:, None], 1)[:, 0]
            - 0.1 * x.mean(-1)
        )
        loss = jnp.where(targets < 0, 0.0, loss)
        return loss.sum() / 5 if reduction == "mean" else loss

    check(lambda x: fj.fused_cross_entropy(x, targets, 0.1, reduction), reference, (logits,))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved):
    freqs = fj.rope_frequencies(8, 16, interleaved=interleaved)

    def reference(x):
        a = freqs[: x.shape[1], None, :]
        half = x[..., :8]
        partner = jnp.concatenate([-half[..., 4:], half[..., :4]], -1)
        if interleaved:
            partner = jnp.stack([-half[..., 1::2], half[..., ::2]], -1).reshape(half.shape)
        return jnp.concatenate([half * jnp.cos(a) + partner * jnp.sin(a), x[..., 8:]], -1)

    check(lambda x: fj.rope(x, freqs, interleaved=interleaved), reference, (draw(0, 2, 16, 3, 12),))


def test_rope_of_sequences_with_gaps():
    """Tokens of no sequence may hold NaN and lie farther on than there are angles: they and their gradients
    are 0."""
    lengths, starts, at = (
        jnp.array([0, 2, 5], jnp.int32),
        jnp.array([1, 6, 9], jnp.int32),
        jnp.array([1, 2, 6, 7, 8]),
    )
    freqs, x = fj.rope_frequencies(8, 3), draw(0, 5, 3, 8)
    wide = jnp.full((12, 3, 8), jnp.nan).at[at].set(x)
    y, back = jax.vjp(lambda a: fj.rope(a, freqs, None, lengths, "thd", cu_seqlens_padded=starts), wide)
    want, back_alone = jax.vjp(lambda a: fj.rope(a, freqs, None, lengths, "thd"), x)
    np.testing.assert_array_equal(y, jnp.zeros_like(wide).at[at].set(want))
    np.testing.assert_array_equal(back(wide)[0], jnp.zeros_like(wide).at[at].set(back_alone(x)[0]))


@combinations(
    {"mask": ["no_mask", "causal", "padding_causal", "arbitrary"], "cap": [0.0, 0.5]},
    usual=["arbitrary-0.0", "causal-0.5"],
)
def test_attention(mask, cap):
    q, k, v = draw(0, 2, 16, 4, 8), draw(1, 2, 16, 2, 8), draw(2, 2, 16, 2, 12)
    lengths = jnp.array([16, 9])
    given = (
        {"cu_seqlens_q": fj.running_sums(lengths), "cu_seqlens_kv": fj.running_sums(lengths)}
        if mask == "padding_causal"
        else {}
    )
    hidden = draw(5, 2, 1, 16, 16) > 1.0
    given |= {"mask": hidden} if mask == "arbitrary" else {}

    def reference(q, k, v):
        k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8)
        s = cap * jnp.tanh(s / cap) if cap else s
        i, j = jnp.arange(16)[:, None], jnp.arange(16)
        seen = {"no_mask": jnp.ones((16, 16), bool), "arbitrary": ~hidden}.get(mask, j <= i)
        if mask == "padding_causal":
            inside = jnp.arange(16) < lengths[:, None]
            seen = (seen & inside[:, None, :] & inside[:, :, None])[:, None]
        p = fj.softmax(s, ~jnp.broadcast_to(seen, s.shape))
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    given |= {"attn_mask_type": mask, "softcap": cap}
    check(lambda q, k, v: fj.dot_product_attention(q, k, v, **given), reference, (q, k, v))


def test_packed_attention_is_the_separate_one():
    qkv = draw(0, 2, 16, 3, 4, 8)
    separate = [qkv[:, :, i] for i in range(3)]

    def grads(f, *a):
        return jax.jit(jax.value_and_grad(lambda *a: (f(*a) ** 2).sum(), tuple(range(len(a)))))(*a)

    value, want = grads(fj.dot_product_attention, *separate)
    for packed in ((qkv,), (separate[0], qkv[:, :, 1:])):
        got, found = grads(fj.dot_product_attention, *packed)
        assert float(got) == float(value)
        joined = found[0] if len(packed) == 1 else jnp.concatenate([found[0][:, :, None], found[1]], 2)
        assert_same_bits("gradient", np.asarray(joined), np.asarray(jnp.stack(want, 2)))
    with pytest.raises(Fp8kitError, match=r"dot_product_attention: shapes"):
        fj.dot_product_attention(qkv[:, :, :2])


def test_attention_bias_and_dropout():
    q, k, v = (draw(i, 2, 16, 4, 8) for i in range(3))
    bias = draw(3, 1, 4, 16, 16)

    def reference(q, k, v, bias):
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8) + bias, -1)
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    check(
        lambda q, k, v, b: fj.dot_product_attention(q, k, v, bias=b, attn_mask_type="no_mask"),
        reference,
        (q, k, v, bias),
    )

    def dropped(key, v):
        return fj.dot_product_attention(q, k, v, attn_mask_type="no_mask", dropout_rate=0.5, dropout_key=key)

    first, again, other = (jax.jit(dropped)(jax.random.key(seed), v) for seed in (1, 1, 2))
    assert_same_bits("one key", np.asarray(first), np.asarray(again))
    assert not np.array_equal(first, other)
    # o is linear in v: the gradient of one draw is that draw's own weights
    ones = jax.grad(lambda v: dropped(jax.random.key(1), v).sum())(v)
    close((ones * v).sum(), first.sum(), 2048)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_dropout_add(rate):
    x, residual, bias = draw(0, 6, 40), draw(1, 6, 40), draw(2, 40)
    key = jax.random.key(3)
    kept = fj.dropout_add(jnp.ones_like(x), rate=rate, key=key)
    assert set(np.unique(kept)) == ({1.0} if rate == 0 else {0.0, 2.0})
    check(
        lambda x, r, b: fj.dropout_add(x, r, b, rate, key),
        lambda x, r, b: r + (x + b) * kept,
        (x, residual, bias),
    )


@combinations(
    {"format": [fk.E4M3, fk.E5M2], "scaling": ["tensor", "row", "block_1x128", "block_128x128", "mx_1x32"]}
)
def test_quantize_is_the_native_one(format, scaling):
    x = draw(0, 3, 50, 200)
    q = jax.jit(lambda x: fj.quantize(x, format, scaling=scaling))(x)
    want = fk.quantize(np.asarray(x), format, scaling=scaling)
    assert q.data.dtype == {"E4M3": jnp.float8_e4m3fn, "E5M2": jnp.float8_e5m2}[format.name]
    assert_same_bits("codes", np.asarray(q.data).view(np.uint8), want.data)
    assert_same_bits("scale_inv", np.asarray(q.scale_inv), want.scale_inv.reshape(q.scale_inv.shape))
    assert_same_bits("values", np.asarray(jax.jit(fj.dequantize)(q)), want.dequantize())


def test_quantize_with_scales_and_stochastic_rounding():
    x = draw(0, 40, 40)
    given = jax.jit(lambda x: fj.quantize(x, fk.E4M3, scale=3.0))(x)
    assert_same_bits(
        "codes",
        np.asarray(given.data).view(np.uint8),
        fk.quantize(np.asarray(x), fk.E4M3, scale=np.float32(3)).data,
    )
    key = jax.random.key(0)
    seed = np.asarray(jax.random.key_data(key)).view(np.int64)
    q = fj.quantize(x, fk.E4M3, rounding="stochastic", key=key)
    want = fk.quantize(np.asarray(x), fk.E4M3, rounding="stochastic", rng=np.array([seed[0], 0]))
    assert_same_bits("codes", np.asarray(q.data).view(np.uint8), want.data)
    few = jax.jit(lambda x: fj.quantize(x, rounding="stochastic", key=key, stochastic_bits=8))(x)
    want = fk.quantize(np.asarray(x), rounding="stochastic", rng=np.array([seed[0], 0]), stochastic_bits=8)
    assert_same_bits("codes of 8 bits", np.asarray(few.data).view(np.uint8), want.data)


@combinations(
    {
        "scalings": {
            "tensor": ("tensor",) * 2,
            "row": ("row",) * 2,
            "squares": ("block_1x128", "block_128x128"),
            "blocks": ("block_1x128",) * 2,
        }
    },
    usual=["tensor", "squares"],
)
def test_gemm(scalings):
    a, b = draw(0, 2, 21, 200), draw(1, 37, 200)
    qa, qb = (fj.quantize(x, scaling=s) for x, s in zip((a, b), scalings, strict=True))
    got = jax.jit(fj.gemm)(qa, qb)
    close(got, np.asarray(qa.dequantize()) @ np.asarray(qb.dequantize()).T, 200)


def test_refusals_name_operation_and_argument():
    x = draw(0, 4, 40)
    with pytest.raises(Fp8kitError, match=r"quantize: scaling: got 'rows'"):
        fj.quantize(x, scaling="rows")
    with pytest.raises(Fp8kitError, match=r"quantize: scale_rule: got 'power_2'"):
        fj.quantize(x, scaling="nvfp4_1x16", scale_rule="power_2")
    with pytest.raises(Fp8kitError, match=r"quantize: stochastic_bits: got 0"):
        fj.quantize(x, rounding="stochastic", key=jax.random.key(0), stochastic_bits=0)
    with pytest.raises(Fp8kitError, match=r"quantize: stochastic_bits: got 8 with"):
        fj.quantize(x, stochastic_bits=8)
    small = fj.quantize(x, scaling="block_1x32")
    with pytest.raises(Fp8kitError, match=r"gemm: fast_accumulate: .*values are multiplied"):
        fj.gemm(small, small, fast_accumulate=True)
    with pytest.raises(Fp8kitError, match=r"^fused_cross_entropy: targets"):
        jax.jit(fj.fused_cross_entropy)(x, jnp.zeros((5,), jnp.int32))
    with pytest.raises(Fp8kitError, match=r"attention: .*k"):
        fj.dot_product_attention(draw(0, 2, 4, 4, 8), draw(1, 2, 4, 4, 9), draw(2, 2, 4, 4, 8))
    with pytest.raises(Fp8kitError, match=r"^layernorm: beta: missing"):
        fj.layernorm(x, draw(1, 40))
    with pytest.raises(Fp8kitError, match=r"dense: kernel: got 41 along .* of shape \(4, 40\)(?!;)"):
        jax.jit(fj.dense)(x, draw(1, 41, 8))
    with pytest.raises(Fp8kitError, match=r"dense: kernel: .*; a kernel is \(in, out\), contracting_dims"):
        jax.jit(fj.dense)(x, draw(1, 8, 40))
    with pytest.raises(Fp8kitError, match=r"dense: kernel: got int32, expected float32"):
        jax.jit(fj.dense)(x, draw(1, 40, 8).astype(jnp.int32))
    with pytest.raises(RecipeError, match=r"autocast: recipe: got 'delayed', expected a Recipe"):
        fj.autocast(enabled=True, recipe="delayed")
    with pytest.raises(Fp8kitError, match="did you mean silu"):
        fj.activation(x[..., None, :], ("sillu",))
    with pytest.raises(Fp8kitError, match=r"got 'gelu', .*did you mean \('gelu',\)"):
        fj.activation(x[..., None, :], "gelu")
    with (
        pytest.raises(Fp8kitError, match=r"dense: quantizer_set: missing, expected .*create_set"),
        fj.autocast(enabled=True),
    ):
        fj.dense(x, draw(1, 40, 8))
    with pytest.raises(
        Fp8kitError, match=r"softmax: mask: got shape \(3,\), expected one that broadcasts to \(4, 40\)"
    ):
        fj.softmax(x, jnp.zeros(3, bool))
    with pytest.raises(Fp8kitError, match=r"quantize: no gradient rule for its input 'x'"):
        jax.grad(lambda x: fj.quantize(x).scale_inv.sum())(x)


@combinations(
    {"wrap": {"plain": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}}, usual=["plain", "remat"]
)
def test_straight_through_and_side_results(wrap):
    """A rounding that no gradient passes may stand in a loss that is differentiated; its result may be a side
    result."""
    x = draw(0, 3, 20)

    def loss(x):
        q = fj.quantize(x)
        return (x + jax.lax.stop_gradient(q.dequantize() - x)).sum(), q

    grad, q = jax.jit(jax.grad(wrap(loss), has_aux=True))(x)
    np.testing.assert_array_equal(np.asarray(grad), 1.0)
    with pytest.raises(AutogradError, match="dequantize: no gradient rule"):
        jax.grad(wrap(lambda x: fj.quantize(x).dequantize().sum()))(x)
    assert_same_bits("scale", np.asarray(q.scale_inv), np.asarray(fj.quantize(x).scale_inv))


@pytest.mark.parametrize("scaling", ["tensor", "row", "block_1x128", "block_128x128", "mx_1x32"])
def test_nothing_is_quantised_to_nothing(scaling):
    for shape in ((0, 32), (3, 0), (2, 0, 32)):
        q = fj.quantize(jnp.zeros(shape), scaling=scaling)
        assert q.data.shape == fj.dequantize(q, jnp.bfloat16).shape == shape
    if not scaling.startswith(("mx", "block_128")):
        empty, other = (fj.quantize(jnp.ones(shape), scaling=scaling) for shape in ((0, 32), (5, 32)))
        assert fj.gemm(empty, other).shape == (0, 5)
        none = fj.quantize(jnp.ones((3, 0)), scaling=scaling), fj.quantize(jnp.ones((5, 0)), scaling=scaling)
        np.testing.assert_array_equal(np.asarray(fj.gemm(*none)), np.zeros((3, 5)))


def test_a_recipe_that_is_not_on_is_said_once(caplog):
    scopes._say_off.cache_clear()
    for _ in range(2):
        with fj.autocast(recipe=fk.recipe.Float8CurrentScaling()):
            assert recipe_in_force() is None
    with fj.autocast(False, fk.recipe.Float8CurrentScaling()), fj.autocast():
        assert recipe_in_force() is None
    assert caplog.messages == [
        "autocast(recipe=...) without enabled=True leaves FP8 off: enabled is False by default"
    ]
