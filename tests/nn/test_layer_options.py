"""Options that MultiheadAttention and TransformerLayer hand down to their parts, and those they refuse."""

from __future__ import annotations

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import nn
from fp8kit.autograd import tensor
from fp8kit.errors import Fp8kitError
from fp8kit.testing.compare import assert_close, assert_same_bits
from tests.support.layers import draw, make
from tests.support.products import f64

S, OTHER, B, H, HEADS = 7, 9, 2, 32, 4
BASE = {"hidden_size": H, "num_attention_heads": HEADS, "attention_dropout": 0.0}
MASKS = ({}, {"self_attn_mask_type": "no_mask", "window_size": (2, 2)})
LAYER = BASE | {"ffn_hidden_size": 48, "hidden_dropout": 0.0, "activation": "silu"}


def test_stochastic_depth_keeps_the_mean(device):
    """Over many draws the factors 0 and 1 / (1 - q) have mean 1, within five standard errors."""
    rate, draws_made = 0.25, 64
    layer = make(
        nn.TransformerLayer, device, "float32", drop_path_rate=rate, parallel_attention_mlp=True, **LAYER
    )
    x = draw(1, (3, 32, H), "float32")
    whole = f64(layer.eval()(tensor(x, device=device))) - x
    factors = []
    for _ in range(draws_made):
        got = f64(layer.train()(tensor(x, device=device))) - x
        factors.append((got * whole).sum((0, 2)) / (whole * whole).sum((0, 2)))
    factors = np.stack(factors)
    assert_close("factors", factors, np.where(factors > 0.5, 1 / (1 - rate), 0), "float64", 1e-4)
    assert abs(factors.mean() - 1) < 5 * np.sqrt(rate / (1 - rate) / factors.size)


def test_a_decoder_hands_its_options_down(device):
    """Padded sources do not matter beyond their length, windows reach the cross-attention, and so does a
    bias of the scores."""
    layer = make(
        nn.TransformerLayer,
        device,
        "float32",
        layer_type="decoder",
        enc_dec_attn_mask_type="padding",
        **LAYER,
    ).eval()
    x, source = draw(1, (S, B, H), "float32"), draw(2, (OTHER, B, H), "float32")
    other = source.copy()
    other[5:, 1] = 99
    masks = tuple(
        np.arange(n) >= np.array(m)[:, None, None, None] for n, m in ((S, (S, S)), (OTHER, (OTHER, 5)))
    )

    def y(source, **options):
        return f64(layer(tensor(x, device=device), encoder_output=tensor(source, device=device), **options))

    np.testing.assert_array_equal(y(source, enc_dec_attn_mask=masks), y(other, enc_dec_attn_mask=masks))
    plain = y(source, enc_dec_attn_mask_type="no_mask")
    assert not np.array_equal(plain, y(other, enc_dec_attn_mask_type="no_mask"))
    near = {
        "enc_dec_attn_mask_type": "no_mask",
        "enc_dec_window_size": (1, 1),
        "enc_dec_bottom_right_diagonal": False,
    }
    other = source.copy()
    other[4:] = 9
    a, b = y(source, **near), y(other, **near)
    np.testing.assert_array_equal(a[:3], b[:3])
    assert not np.array_equal(a[3], b[3])
    slopes = np.full(HEADS, 0.5, np.float32)
    assert not np.array_equal(
        plain,
        y(source, enc_dec_attn_mask_type="no_mask", core_attention_bias_type="alibi", alibi_slopes=slopes),
    )


def test_the_bias_of_the_scores_is_differentiable_through_a_layer(device):
    """In both attentions of a decoder, recomputed or not."""
    found = []
    for again in (False, True):
        layer = make(
            nn.TransformerLayer,
            device,
            "float32",
            layer_type="decoder",
            self_attn_mask_type="no_mask",
            **LAYER,
        )
        bias = tensor(draw(4, (1, HEADS, S, S), "float32"), requires_grad=True, device=device)
        x, source = (tensor(draw(i, (S, B, H), "float32"), device=device) for i in (1, 2))
        with fk.deterministic(True):
            y = layer(
                x,
                encoder_output=source,
                core_attention_bias_type="post_scale_bias",
                core_attention_bias=bias,
                checkpoint_core_attention=again,
            )
            y.backward(draw(3, (S, B, H), "float32"))
        found.append(bias.grad.numpy())
    assert_same_bits("dbias", found[1], found[0])
    sums = np.abs(f64(bias.grad).sum(-1)).max()  # a softmax does not see what a row shares
    assert np.abs(found[0]).max() > 0
    assert sums < 64 * S * 2.0**-24 * np.abs(found[0]).max()


def test_what_a_layer_hands_to_its_norms_and_its_mlp():
    options = {"layer_type": "decoder", "output_layernorm": True, "qk_norm_type": "RMSNorm", "device": "cpu"}
    layer = nn.TransformerLayer(H, 48, HEADS, zero_centered_gamma=True, **options)
    values = {
        name: set(f64(parameter))
        for name, parameter in layer.named_parameters()
        if name.endswith(("norm_weight", "norm.weight"))
    }
    assert values == {name: {1.0} if "_norm.weight" in name else {0.0} for name in values}
    assert len(values) == 7
    for activation in ("gelu", "relu", "silu", "swiglu"):
        mlp = nn.TransformerLayer(
            H, 48, HEADS, activation=activation, activation_params=None, device="cpu"
        ).layernorm_mlp
        assert mlp.activation == activation
        assert mlp.fc1_weight.shape == (96 if activation == "swiglu" else 48, H)


X = np.ones((S, B, H), np.float32)


def layer(**options):
    return nn.TransformerLayer(H, 48, HEADS, device="cpu", **options)


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: layer(layer_type="decoder", parallel_attention_mlp=True), ["layer_type", "parallel"]),
        (lambda: layer(output_layernorm=True, parallel_attention_mlp=True), ["output_layernorm"]),
        (lambda: layer(drop_path_rate=1.5), ["drop_path_rate", "1.5"]),
        (lambda: layer(qk_norm_type="rms"), ["qk_norm_type", "RMSNorm"]),
        (lambda: layer(seq_length=0), ["seq_length", "0"]),
        (
            lambda: nn.LayerNormMLP(H, 48, device="cpu", micro_batch_size=0),
            ["LayerNormMLP: micro_batch_size", "0"],
        ),
        (lambda: layer(init_method=0), ["init_method", "0", "a function"]),
        (lambda: layer(bias="yes"), ["bias", "'yes'", "True or False"]),
        (lambda: layer(hidden_dropout=float("nan")), ["hidden_dropout", "nan"]),
        (
            lambda: layer()(X, rotary_pos_emb=np.zeros((S - 1, 8), np.float32)),
            ["TransformerLayer: rotary_pos_emb", f"at least {S} positions"],
        ),
        (
            lambda: nn.DotProductAttention(HEADS, 7, device="cpu")(X, X, X),
            ["DotProductAttention: query_layer", f"{X.shape}"],
        ),
        (
            lambda: nn.DotProductAttention(1, H, device="cpu")(X, X, X, core_attention_bias=X),
            ["DotProductAttention: core_attention_bias", "no_bias"],
        ),
        (lambda: layer()(X, encoder_output=X), ["encoder_output", "encoder"]),
        (lambda: layer(layer_type="decoder")(X), ["TransformerLayer: encoder_output", "decoder"]),
        (
            lambda: nn.MultiheadAttention(H, HEADS, device="cpu", return_layernorm_output=True),
            ["return_layernorm_output", "input_layernorm"],
        ),
        (lambda: nn.L2Normalization()(np.float32(1)), ["inp"]),
    ],
)
def test_refusals_name_the_argument(make_it, words):
    with pytest.raises(Fp8kitError) as caught:
        make_it()
    for word in words:
        assert word in str(caught.value)


def test_unknown_options_are_type_errors():
    for kind in (
        nn.MultiheadAttention(H, HEADS, device="cpu"),
        nn.TransformerLayer(H, 48, HEADS, device="cpu"),
    ):
        with pytest.raises(TypeError, match=f"{type(kind).__name__}.*window"):
            kind(X, window=(1, 1))


NORMED = {
    nn.LayerNorm: {"hidden_size": H},
    nn.RMSNorm: {"hidden_size": H},
    nn.LayerNormLinear: {"in_features": H, "out_features": H},
    nn.LayerNormMLP: {"hidden_size": H, "ffn_hidden_size": H},
}


@pytest.mark.parametrize("kind", NORMED)
def test_what_is_set_later_holds_from_the_next_call_on(kind, device):
    layer = make(kind, device, "float32", **NORMED[kind])
    made = make(kind, device, "float32", **NORMED[kind], eps=0.5)
    x = tensor(draw(1, (S, H), "float32"), device=device)
    layer(x)
    layer.eps = 0.5
    assert layer.eps == made.eps == 0.5
    assert_same_bits("y", f64(layer(x)), f64(made(x)))
    with pytest.raises(Fp8kitError, match="eps: got -1"):
        layer.eps = -1.0


def test_masks_that_are_set_later_are_the_core_attentions(device):
    layer, made = (make(nn.TransformerLayer, device, "float32", **LAYER, **more) for more in MASKS)
    x = tensor(draw(1, (S, B, H), "float32"), device=device)
    layer(x)
    layer.self_attn_mask_type, layer.window_size = "no_mask", (2, 2)
    assert layer.self_attention.attn_mask_type == "no_mask"
    assert_same_bits("y", f64(layer(x)), f64(made(x)))
