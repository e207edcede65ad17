"""DotProductAttention against float64 with running error bounds; what layers made of it name and refuse."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import nn
from fp8kit.autograd import tensor
from fp8kit.errors import ArgumentError, Fp8kitError
from fp8kit.layers.unsupported import CONSTRUCTOR
from fp8kit.testing.compare import relative_error
from tests.support.layer_oracle import Head
from tests.support.layers import draw, make, step
from tests.support.products import f64
from tests.support.running_error import R, U, assert_within

S, B, H, HEADS = 7, 2, 32, 4
D = H // HEADS


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


CASES = [
    (dtype, form, mask, groups)
    for dtype in ("float32", "bfloat16")
    for form in ("sbhd", "bshd")
    for mask in MASKS
    for groups in (HEADS, 2)
]
CASES += [("float16", "sbhd", mask, 2) for mask in MASKS]


@pytest.mark.parametrize(("dtype", "form", "mask", "groups"), CASES)
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
