"""DotProductAttention, MultiheadAttention and TransformerLayer against float64 with running error bounds."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import nn
from fp8kit.autograd import tensor
from fp8kit.errors import ArgumentError, Fp8kitError
from fp8kit.layers.unsupported import CONSTRUCTOR
from fp8kit.testing.compare import relative_error
from tests.nn.products import Product, f64
from tests.nn.running_error import R, U, activation, assert_within, norm, norm_grad
from tests.nn.test_layers import draw, make, quantiser, step

S, B, H, HEADS = 7, 2, 32, 4
D = H // HEADS
# Gradients are small numbers, as in training; in float16 the loss is scaled, or else an attention's own
# gradients fall below its normal numbers, where a fused kernel that keeps them in float16 rounds them
# coarsely.
G_SCALE = {"float32": 2.0**-6, "bfloat16": 2.0**-6, "float16": 1.0}


def join(parts, axis):
    return R(np.concatenate([p.v for p in parts], axis), np.concatenate([p.e for p in parts], axis))


class Head:
    """One batch and head: o = softmax(scale q k^T) v; ``seen``: bool (s_q, s_kv). ``p_error``: relative
    rounding of P and dS."""

    def __init__(self, q, k, v, seen, scale, p_error):
        self.q, self.k, self.v, self.scale, self.p_error = q, k, v, scale, p_error
        scores = (q @ k.T) * scale
        masked = np.where(seen, scores.v, -np.inf)
        top = masked.max(1, keepdims=True)
        weights = np.exp(masked - top)
        total = weights.sum(1, keepdims=True)
        p = weights / total
        doubt = np.where(seen, scores.e + U * (np.abs(scores.v) + 16), 0)
        relative = 2 * doubt.max(1, keepdims=True) + (seen.shape[1] + 8) * U + p_error
        self.p = R(p, 1.1 * p * relative)
        self.o = self.p @ v

    def backward(self, do):
        dp = do @ self.v.T
        ds = self.p * (dp - (do * self.o).sum(1, True)) * self.scale
        ds = R(ds.v, ds.e + self.p_error * np.abs(ds.v))
        return ds @ self.k, ds.T @ self.q, self.p.T @ do


class Attention:
    """All heads; q R (s, b, h, d), k and v R (s, b, g, d), lengths per batch or None."""

    def __init__(self, q, k, v, causal, dtype, lengths=None):
        self.s, self.b, self.h, self.d = q.v.shape
        self.g = k.v.shape[2]
        self.lengths = [self.s] * self.b if lengths is None else lengths
        noise = 0.0 if dtype == "float32" else 2.0**-8
        seen = np.tril(np.ones((self.s, self.s), bool)) if causal else np.ones((self.s, self.s), bool)
        self.heads = {}
        for b, n in enumerate(self.lengths):
            for h in range(self.h):
                kv = h * self.g // self.h
                self.heads[b, h] = Head(
                    q[:n, b, h], k[:n, b, kv], v[:n, b, kv], seen[:n, :n], self.d**-0.5, noise
                )

    def _filled(self, parts, heads):
        out, doubt = np.zeros((self.s, self.b, heads, self.d)), np.zeros((self.s, self.b, heads, self.d))
        for (b, h), part in parts:
            kept = slice(0, self.lengths[b]), b, h * heads // self.h
            out[kept] += part.v
            doubt[kept] += part.e + 4 * U * np.abs(part.v)
        return R(out, doubt)

    def forward(self):
        return self._filled([(at, head.o) for at, head in self.heads.items()], self.h)

    def backward(self, do):
        grads = {
            at: head.backward(do[: self.lengths[at[0]], at[0], at[1]]) for at, head in self.heads.items()
        }
        return [
            self._filled([(at, g[i]) for at, g in grads.items()], heads)
            for i, heads in enumerate((self.h, self.g, self.g))
        ]


MASKS = ["no_mask", "causal", "padding", "padding_causal"]
LENGTHS = [S, 4]


def cu_seqlens():
    return np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dot_product_attention(device, dtype, form, mask, groups):
    module = nn.DotProductAttention(HEADS, D, groups, qkv_format=form, attn_mask_type=mask)
    raw = [draw(i, (S, B, n, D), dtype) for i, n in enumerate((HEADS, groups, groups))]
    swap = (1, 0, 2, 3) if form == "bshd" else (0, 1, 2, 3)
    inputs = [tensor(np.ascontiguousarray(a.transpose(swap)), requires_grad=True, device=device) for a in raw]
    padded = mask.startswith("padding")
    lengths = {"cu_seqlens_q": cu_seqlens(), "cu_seqlens_kv": cu_seqlens()} if padded else {}
    o = module(*inputs, **lengths)
    do = draw(9, (S, B, HEADS, D), dtype)
    o.backward(np.ascontiguousarray(do.transpose(swap)).reshape(o.shape))
    want = Attention(
        *[R(a.astype(np.float64)) for a in raw], "causal" in mask, dtype, LENGTHS if padded else None
    )
    got = f64(o).reshape(*[(S, B), (B, S)][form == "bshd"], HEADS, D).transpose(swap)
    assert_within("o", got, want.forward().rounded(dtype))
    for name, x, grad in zip(
        ("dq", "dk", "dv"), inputs, want.backward(R(do.astype(np.float64))), strict=True
    ):
        assert_within(name, f64(x.grad).transpose(swap), grad.rounded(dtype))


class Mha:
    """MultiheadAttention in float64, causal, sbhd: qkv product of ``x`` R (s b, H), attention, proj."""

    def __init__(self, module, x, p, prefix, mode, dtype):
        first = module.layernorm_qkv if module.input_layernorm else module.qkv
        child = f"{prefix}{'layernorm_qkv' if module.input_layernorm else 'qkv'}."
        fused = f"{child}weight" in p
        weight, bias = (
            p[f"{child}{k}"]
            if fused
            else np.concatenate([p[f"{child}{n}_{k}"] for n in ("query", "key", "value")])
            for k in ("weight", "bias")
        )
        self.dtype, self.groups = dtype, module.core_attention.num_gqa_groups
        self.qkv = Product(x, weight, quantiser(mode, first))
        packed = self.qkv.forward(bias).rounded(dtype).reshape(S, B, -1, D)
        edge = HEADS + self.groups
        self.attention = Attention(
            packed[:, :, :HEADS], packed[:, :, HEADS:edge], packed[:, :, edge:], True, dtype
        )
        o = self.attention.forward().rounded(dtype).reshape(S * B, H)
        self.proj = Product(o, p[f"{prefix}proj.weight"], quantiser(mode, module.proj))

    def forward(self, bias=None):
        return self.proj.forward(bias)

    def backward(self, g):
        """(dx, qkv's dW and db, proj's dW and db)."""
        do, dwp, dbp = self.proj.backward(g)
        parts = self.attention.backward(do.rounded(self.dtype).reshape(S, B, HEADS, D))
        packed = join([part.rounded(self.dtype) for part in parts], 2).reshape(S * B, -1)
        dx, dw, db = self.qkv.backward(packed)
        return dx, dw, db, dwp, dbp


@pytest.mark.parametrize(
    "options", [{}, {"num_gqa_groups": 2}, {"fuse_qkv_params": True, "qkv_weight_interleaved": False}]
)
@pytest.mark.parametrize("mode", ["high", "delayed", "current", "block"])
def test_multihead_attention(device, mode, options):
    dtype = "float32"
    module = make(
        nn.MultiheadAttention,
        device,
        dtype,
        hidden_size=H,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        **options,
    )
    shape_of = {"k": H, "n": H}
    p = warmed_at(module, mode, dtype, (S, B), **shape_of)
    x, g = draw(1, (S, B, H), dtype), draw(2, (S, B, H), dtype, G_SCALE[dtype])
    want = Mha(module, R(x.astype(np.float64).reshape(-1, H)), p, "", mode, dtype)
    y, dx, grads = step(module, mode, x, g)
    want_dx, dw, db, dwp, dbp = want.backward(R(g.astype(np.float64).reshape(-1, H)))
    assert_within("y", y, want.forward(p["proj.bias"]).rounded(dtype))
    assert_within("dx", dx, want_dx.rounded(dtype))
    assert_within("proj.weight", grads["proj.weight"], dwp.rounded(dtype))
    assert_within("proj.bias", grads["proj.bias"], dbp.rounded(dtype))
    names = ["qkv."] if "fuse_qkv_params" in options else [f"qkv.{n}_" for n in ("query", "key", "value")]
    assert_within("qkv.weight", np.concatenate([grads[f"{n}weight"] for n in names]), dw.rounded(dtype))
    assert_within("qkv.bias", np.concatenate([grads[f"{n}bias"] for n in names]), db.rounded(dtype))


def warmed_at(module, mode, dtype, leading, k, n):
    for seed in (10, 20):
        step(
            module,
            mode,
            draw(seed, (*leading, k), dtype, 2.0),
            draw(seed + 1, (*leading, n), dtype, G_SCALE[dtype]),
        )
    return {name: f64(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("form", ["pre", "post_residual", "output_norm"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("high", "float32"),
        ("high", "bfloat16"),
        ("delayed", "float32"),
        ("current", "float32"),
        ("block", "float32"),
    ],
)
def test_transformer_layer(device, mode, dtype, kind, form):
    options = {
        "pre": {},
        "post_residual": {"apply_residual_connection_post_layernorm": True},
        "output_norm": {"output_layernorm": True},
    }
    module = make(
        nn.TransformerLayer,
        device,
        dtype,
        hidden_size=H,
        ffn_hidden_size=48,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization=kind,
        activation="silu",
        **options[form],
    )
    p = warmed_at(module, mode, dtype, (S, B), H, H)
    x, g = draw(1, (S, B, H), dtype), draw(2, (S, B, H), dtype, G_SCALE[dtype])
    rx, rg = R(x.astype(np.float64).reshape(-1, H)), R(g.astype(np.float64).reshape(-1, H))
    attn, mlp = module.self_attention, module.layernorm_mlp
    a_pre, m_pre = "self_attention.layernorm_qkv.layer_norm_", "layernorm_mlp.layer_norm_"

    if form == "output_norm":
        normed = rx
    else:
        normed, ahat, arstd = norm(rx, p[f"{a_pre}weight"], p.get(f"{a_pre}bias"), kind, 1e-5)
        normed = normed.rounded(dtype)
    mha = Mha(attn, normed, p, "self_attention.", mode, dtype)
    a = (
        mha.forward().rounded(dtype)
        + p["self_attention.proj.bias"]
        + (normed if form == "post_residual" else rx)
    ).rounded(dtype)
    normed2, mhat, mrstd = norm(a, p[f"{m_pre}weight"], p.get(f"{m_pre}bias"), kind, 1e-5)
    normed2 = normed2.rounded(dtype)
    fc1 = Product(normed2, p["layernorm_mlp.fc1_weight"], quantiser(mode, mlp, 0))
    act, act_back = activation(fc1.forward().rounded(dtype) + p["layernorm_mlp.fc1_bias"], "silu")
    fc2 = Product(act.rounded(dtype), p["layernorm_mlp.fc2_weight"], quantiser(mode, mlp, 1))
    out = (
        fc2.forward().rounded(dtype)
        + p["layernorm_mlp.fc2_bias"]
        + (normed2 if form == "post_residual" else a)
    ).rounded(dtype)
    top = rg
    if form == "output_norm":
        final, fhat, frstd = norm(out, p["layernorm.weight"], p.get("layernorm.bias"), kind, 1e-5)
        out, top = (
            final.rounded(dtype),
            norm_grad(rg, fhat, frstd, p["layernorm.weight"], kind)[0].rounded(dtype),
        )

    dact, dw2, db2 = fc2.backward(top)
    dh = act_back(dact.rounded(dtype)).rounded(dtype)
    dnormed, dw1, _ = fc1.backward(dh)
    dnormed = dnormed.rounded(dtype)
    if form == "post_residual":
        dnormed = (dnormed + top).rounded(dtype)
    da, dgamma, _ = norm_grad(dnormed, mhat, mrstd, p[f"{m_pre}weight"], kind)
    da = (da if form == "post_residual" else da + top).rounded(dtype)
    dnormed, dw, _, dwp, dbp = mha.backward(da)
    dnormed = dnormed.rounded(dtype)
    if form == "output_norm":
        dx = dnormed + da
    else:
        dnormed = (dnormed + da).rounded(dtype) if form == "post_residual" else dnormed
        dx, _, _ = norm_grad(dnormed, ahat, arstd, p[f"{a_pre}weight"], kind)
        dx = dx if form == "post_residual" else dx + da

    y, got_dx, grads = step(module, mode, x, g)
    assert_within("y", y, out)
    named = {
        "layernorm_mlp.fc2_weight": dw2,
        "layernorm_mlp.fc2_bias": db2,
        "layernorm_mlp.fc1_weight": dw1,
        f"{m_pre}weight": dgamma,
        "self_attention.proj.weight": dwp,
        "self_attention.proj.bias": dbp,
    }
    for name, want in named.items():
        assert_within(name, grads[name], want.rounded(dtype))
    child = "qkv" if form == "output_norm" else "layernorm_qkv"
    got = np.concatenate([grads[f"self_attention.{child}.{n}_weight"] for n in ("query", "key", "value")])
    assert_within("qkv", got, dw.rounded(dtype))
    assert_within("dx", got_dx, dx.rounded(dtype))


def test_parameter_names_are_transformer_engines():
    layer = nn.TransformerLayer(H, 48, HEADS, device="cpu")
    assert [name for name, _ in layer.named_parameters()] == [
        "self_attention.layernorm_qkv.layer_norm_weight",
        "self_attention.layernorm_qkv.layer_norm_bias",
        *[
            f"self_attention.layernorm_qkv.{n}_{kind}"
            for kind in ("weight", "bias")
            for n in ("query", "key", "value")
        ],
        "self_attention.proj.weight",
        "self_attention.proj.bias",
        *[
            f"layernorm_mlp.{n}"
            for n in (
                "layer_norm_weight",
                "layer_norm_bias",
                "fc1_weight",
                "fc1_bias",
                "fc2_weight",
                "fc2_bias",
            )
        ],
    ]
    named = [(name, f64(p).ravel()) for name, p in layer.named_parameters()]
    weights = np.concatenate(
        [values for name, values in named if name.endswith("weight") and not name.endswith("norm_weight")]
    )
    # five standard errors of a standard deviation
    assert abs(weights.std() / 0.023 - 1) < 5 / np.sqrt(2 * weights.size)
    assert abs(weights.mean()) < 5 * 0.023 / np.sqrt(weights.size)
    assert layer.self_attention.core_attention.attention_dropout == layer.hidden_dropout == 0.1


def test_padding_masks_reach_the_layer(device):
    """What lies beyond a sequence's length does not change what lies within it."""
    layer = make(
        nn.TransformerLayer,
        device,
        "float32",
        hidden_size=H,
        ffn_hidden_size=48,
        num_attention_heads=HEADS,
        self_attn_mask_type="padding",
        attn_input_format="bshd",
    ).eval()
    x = draw(1, (B, S, H), "float32")
    other = x.copy()
    other[1, LENGTHS[1] :] = 99
    lengths = {"cu_seqlens_q": cu_seqlens(), "cu_seqlens_kv": cu_seqlens()}
    a, b = (f64(layer(tensor(v, device=device), **lengths)) for v in (x, other))
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(a[1, : LENGTHS[1]], b[1, : LENGTHS[1]])
    c = f64(layer(tensor(other, device=device), self_attn_mask_type="no_mask"))
    assert not np.array_equal(a[1, : LENGTHS[1]], c[1, : LENGTHS[1]])


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: nn.DotProductAttention(4, 8, window_size=(4, -2)), ["window_size", "(4, -2)"]),
        (lambda: nn.DotProductAttention(4, 8, softmax_type="off_by_one"), ["softmax_type", "off-by-one"]),
        (lambda: nn.DotProductAttention(4, 8, num_gqa_groups=3), ["num_gqa_groups", "3"]),
        (lambda: nn.DotProductAttention(4, 8, attn_mask_type="random"), ["attn_mask_type", "arbitrary"]),
        (lambda: nn.DotProductAttention(4, 8, qkv_format="bhsd"), ["qkv_format", "thd"]),
        (
            lambda: nn.MultiheadAttention(32, 4, device="cpu", attention_type="both"),
            ["attention_type", "cross"],
        ),
        (lambda: nn.MultiheadAttention(30, 4, device="cpu"), ["hidden_size", "30"]),
        (lambda: nn.TransformerLayer(32, 64, 4, device="cpu", layer_type="both"), ["layer_type", "decoder"]),
        (lambda: nn.TransformerLayer(32, 64, 4, device="cpu", hidden_dropout=1.0), ["hidden_dropout", "1.0"]),
        (
            lambda: nn.TransformerLayer(32, 64, 4, device="cpu")(
                np.ones((2, 1, 32), np.float32), attention_mask=1
            ),
            ["attention_mask"],
        ),
        (
            lambda: nn.LayerNormMLP(32, 64, activation="mish", device="cpu"),
            ["activation", "mish", "clamped_swiglu"],
        ),
        (lambda: nn.Linear(32, 0, device="cpu"), ["out_features", "0"]),
        (
            lambda: nn.Linear(32, 30, parameters_split=("a", "b", "c", "d"), device="cpu"),
            ["parameters_split", "30"],
        ),
    ],
)
def test_refusals_name_the_argument(make_it, words):
    with pytest.raises(Fp8kitError) as caught:
        make_it()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("enc_dec_attn_mask_type", "causal"),
        ("enc_dec_window_size", (2, 2)),
        ("enc_dec_bottom_right_diagonal", False),
    ],
)
def test_an_encoder_refuses_what_is_about_an_encoders_output(argument, wrong):
    nn.TransformerLayer(32, 64, 4, layer_type="decoder", device="cpu", **{argument: wrong})
    with pytest.raises(
        ArgumentError,
        match=f"TransformerLayer: {argument}: got .*expected (None|'no_mask') with layer_type 'encoder'",
    ):
        nn.TransformerLayer(32, 64, 4, device="cpu", **{argument: wrong})


@pytest.mark.parametrize("kind", CONSTRUCTOR)
def test_unsupported_arguments_are_known_by_name(kind):
    """Transformer Engine's further arguments pass at their defaults, and any other value is refused."""
    needed = {"LayerNorm": (32,), "RMSNorm": (32,), "TransformerLayer": (32, 64, 4)}.get(kind, (32, 4))
    where = {} if kind == "DotProductAttention" else {"device": "cpu"}
    getattr(nn, kind)(*needed, **where, **CONSTRUCTOR[kind])
    for name, usual in CONSTRUCTOR[kind].items():
        other = not usual if isinstance(usual, bool) else "other"
        with pytest.raises(Fp8kitError, match=f"{kind}: {name}: got {other!r}.* yet"):
            getattr(nn, kind)(*needed, **where, **{name: other})


def test_interleaved_weights_are_the_same_layer_with_its_rows_in_another_order(device):
    """Transformer Engine's fused weight: head after head, each with its rows of q, k and v."""
    options = {"fuse_qkv_params": True, "attention_dropout": 0.0, "device": device}
    layer = nn.MultiheadAttention(H, HEADS, **options)  # interleaved is the default
    other = nn.MultiheadAttention(H, HEADS, qkv_weight_interleaved=False, **options)
    rows = np.arange(3 * H).reshape(HEADS, 3, D).swapaxes(0, 1).reshape(-1)
    state = {name: np.array(f64(array), np.float32) for name, array in layer.named_parameters()}
    other.load_state_dict(state | {name: state[name][rows] for name in ("qkv.weight", "qkv.bias")})
    x, g = draw(1, (S, B, H), "float32"), draw(2, (S, B, H), "float32")
    y, dx, grads = step(layer, "high", x, g)
    y2, dx2, grads2 = step(other, "high", x, g)
    # sums of 3 H terms of random sign: their absolute values add up to about sqrt(3 H) times the sum
    rounding = (3 * H) ** 1.5 * 2.0**-24
    pairs = [
        ("y", y, y2),
        ("dx", dx, dx2),
        *[(n, grads[n][rows], grads2[n]) for n in ("qkv.weight", "qkv.bias")],
    ]
    for what, got, want in pairs:
        assert relative_error(got, want) < rounding, what


def test_unknown_arguments_are_type_errors():
    with pytest.raises(TypeError, match="hiden_dropout"):
        nn.TransformerLayer(32, 64, 4, device="cpu", hiden_dropout=0.0)
