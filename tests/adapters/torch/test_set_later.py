"""What programs set on layers that are made: it holds from the next call on, as in a layer made so."""

from __future__ import annotations

import copy

import fp8kit_torch as ft
import pytest
import torch

from fp8kit.errors import ArgumentError, ShapeError
from tests.support.tensors import assert_tensor_close, largest

CURRENT = ft.Float8CurrentScaling()
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
NORMS = {
    "LayerNorm": lambda **more: ft.LayerNorm(64, device="cpu", **more),
    "RMSNorm": lambda **more: ft.RMSNorm(64, device="cpu", **more),
    "LayerNormLinear": lambda **more: ft.LayerNormLinear(64, 32, device="cpu", **more),
    "LayerNormMLP": lambda **more: ft.LayerNormMLP(64, 64, device="cpu", **more),
}
ATTENTIONS = {
    "MultiheadAttention": (
        lambda **more: ft.MultiheadAttention(64, 4, attention_dropout=0.0, device="cpu", **more),
        "attn_mask_type",
    ),
    "TransformerLayer": (
        lambda **more: ft.TransformerLayer(64, 64, 4, **NO_DROPOUT, device="cpu", **more),
        "self_attn_mask_type",
    ),
}


def small(*shape):
    torch.manual_seed(0)
    return torch.randn(shape) * 1e-2  # beside which epsilons count


def like(made, layer):
    made.load_state_dict(layer.state_dict())
    return made


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("options", [{"eps": 0.5}, {"zero_centered_gamma": True}], ids=repr)
@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind, options, fp8):
    layer, x = NORMS[kind](), small(32, 64)
    (name, value), wanted = *options.items(), like(NORMS[kind](**options), layer)
    more = {"is_first_microbatch": True} if fp8 and "Linear" in kind else {}
    with ft.autocast(enabled=fp8, recipe=CURRENT):
        before = layer(x, **more)
        setattr(layer, name, value)
        assert getattr(layer, name) == value
        assert torch.equal(layer(x), wanted(x))
        assert torch.equal(copy.deepcopy(layer)(x), wanted(x))
    assert not torch.equal(before, layer(x))
    assert str(layer) == str(wanted)


def test_an_activation():
    layer, x = NORMS["LayerNormMLP"](), small(32, 64)
    layer(x)
    layer.activation = "silu"
    assert torch.equal(layer(x), like(NORMS["LayerNormMLP"](activation="silu"), layer)(x))
    with pytest.raises(ShapeError, match="swiglu"):
        layer.activation = "swiglu"
    with pytest.raises(ArgumentError, match="activation"):
        layer.activation = "tanh"
    assert layer.activation == "silu"


def test_a_subclass_may_have_a_module_of_that_name():
    class Own(ft.LayerNormMLP):
        def __init__(self):
            super().__init__(64, 64, device="cpu")
            self.activation = torch.nn.Tanh()

        def forward(self, x):
            return self.activation(super().forward(x))

    layer, x = Own(), small(32, 64)
    assert type(layer.activation) is torch.nn.Tanh
    assert torch.equal(layer(x), like(NORMS["LayerNormMLP"](), layer)(x).tanh())


@pytest.mark.parametrize(
    "options", [{"mask": "no_mask"}, {"window_size": (1, 0)}, {"softcap": 1e-9}], ids=repr
)
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_masks_of_attention(kind, options):
    make, mask = ATTENTIONS[kind]
    layer, x = make(), small(8, 2, 64)
    options = {mask if name == "mask" else name: value for name, value in options.items()}
    (name, value), wanted = *options.items(), like(make(**options), layer)
    before = layer(x)
    setattr(layer, name, value)
    assert getattr(layer, name) == value
    assert torch.equal(layer(x), wanted(x))
    assert not torch.equal(layer(x), before)
    layer.window_size = None
    assert layer.window_size == (-1, -1)


def test_copies_of_a_layer_get_numbers_of_their_own():
    """By which a cache knows their keys and values."""
    options = {"attn_input_format": "bshd", "layer_number": 1}
    layers = [copy.deepcopy(ATTENTIONS["TransformerLayer"][0](**options).eval()) for _ in range(2)]
    for i, layer in enumerate(layers):
        layer.layer_number = i + 1
    assert [layer.self_attention.core_attention.layer_number for layer in layers] == [1, 2]
    cache = ft.InferenceParams(1, 4, qkv_format="bshd", device="cpu")
    x = small(1, 4, 64)
    with torch.no_grad():
        cache.pre_step({0: 4})
        y = layers[1](layers[0](x, inference_params=cache), inference_params=cache)
        assert torch.equal(y, layers[1](layers[0](x)))


def test_a_part_of_a_layer():
    """Whose products one operation may compute."""
    make, x = ATTENTIONS["TransformerLayer"][0], small(8, 2, 64)
    layer = make()
    layer(x)
    for part in layer.modules():
        if hasattr(part, "eps"):
            part.eps = 0.5
    assert torch.equal(layer(x), like(make(layernorm_epsilon=0.5), layer)(x))


def test_in_a_compiled_function():
    layer, x = NORMS["LayerNormLinear"](), small(32, 64)
    compiled = torch.compile(layer, backend="eager")
    compiled(x)
    layer.eps = 0.5
    assert torch.equal(compiled(x), layer(x))


def test_weights_in_fp8_stay_so():
    with ft.quantized_model_init(recipe=CURRENT):
        layer = NORMS["LayerNormMLP"]()
    layer.eps = 0.5
    layer.set_tensor_parallel_group(None)
    assert layer.primary_weights_in_fp8
    with ft.autocast(recipe=CURRENT):
        assert layer(small(32, 64)).shape == (32, 64)


def test_a_converted_norm_and_the_plain_one():
    plain, x = torch.nn.Sequential(torch.nn.LayerNorm(64)), small(32, 64)
    wanted = torch.nn.functional.layer_norm(x, (64,), eps=0.5)
    ft.convert(plain)
    plain[0].eps = 0.5
    # sums of 64 numbers in another order
    assert_tensor_close("y", plain(x), wanted, 64 * 2.0**-24 * largest(wanted))
    ft.revert(plain)
    assert torch.equal(plain(x), wanted)


def test_what_does_not_fit_is_refused():
    layer = NORMS["LayerNorm"]()
    with pytest.raises(ArgumentError, match="eps: got -1"):
        layer.eps = -1.0
    with pytest.raises(ArgumentError, match="attn_mask_type"):
        ATTENTIONS["MultiheadAttention"][0]().attn_mask_type = "diagonal"


def test_a_subclass_may_set_them_before_and_after_the_constructor():
    class Own(ft.LayerNorm):
        def __init__(self, eps):
            self.eps = eps
            super().__init__(64, eps, device="cpu")
            self.eps = eps

    assert Own(0.25).eps == 0.25
