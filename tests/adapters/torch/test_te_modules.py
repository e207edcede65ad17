"""What Transformer Engine's programs do with modules beside calling them."""

from __future__ import annotations

import warnings

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch.module import TransformerEngineBaseModule

from fp8kit.errors import ArgumentError

WIDTH = 32


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_a_drop_path_rate_of_one_leaves_the_residual_stream(device, form):
    """Every sample's branches are dropped: y = x, and no parameter has a gradient but 0."""
    options = {"hidden_dropout": 0.0, "drop_path_rate": 1.0, "attn_input_format": form}
    layer = ft.TransformerLayer(WIDTH, 64, 4, device=device, **options)
    x = torch.randn(3, 2, WIDTH, device=device, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, x)
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters())
    assert not torch.equal(layer.eval()(x), x)


class Own(TransformerEngineBaseModule):
    """A module of a user's own, as Transformer Engine's base class is used."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, WIDTH))

    def forward(self, inp):
        with self.prepare_forward_ctx(inp, num_gemms=1) as x:
            assert x.is_contiguous()
            return torch.nn.functional.linear(x, self.weight)


def test_a_module_of_a_users_own_on_the_base_class():
    own, x = Own(), torch.randn(WIDTH, 4).T
    assert torch.equal(own(x), torch.nn.functional.linear(x.contiguous(), own.weight))
    with pytest.raises(ArgumentError, match="Own: inp: got 'x'"):
        own("x")


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_normalized_shape_of_several_dimensions(kind):
    layer, x = getattr(ft, kind)((4, 8), eps=1e-5, device="cpu"), torch.randn(3, 4, 8)
    want = getattr(torch.nn, kind)((4, 8), eps=1e-5)(x)
    assert layer.weight.shape == (4, 8)
    # float32's rounding of a sum of 32 terms, relative in the result
    assert (layer(x) - want).abs().max() <= 32 * 2.0**-23 * want.abs().max()


def test_the_speeds_of_rotary_embeddings_are_numbers_wherever_a_model_is_made(device):
    """They are in a state dict, as in Transformer Engine's, need not be in what is loaded, and are no
    parameters that somebody gives a model of the meta device later."""
    with torch.device("meta"):
        made = ft.RotaryPositionEmbedding(8, rotary_base=100.0)
    assert made.inv_freq.device.type != "meta"
    want = ft.RotaryPositionEmbedding(8, rotary_base=100.0, device=device)
    assert torch.equal(made(5).to(device), want(5))
    assert list(want.state_dict()) == ["inv_freq"]
    net = torch.nn.Sequential(ft.RotaryPositionEmbedding(8, device=device), torch.nn.Linear(2, 2))
    net.load_state_dict({"0.inv_freq": want.inv_freq, **net[1].state_dict(prefix="1.")})
    assert torch.equal(net[0](5), want(5))
    net.load_state_dict(net[1].state_dict(prefix="1."))
    assert torch.equal(net[0](5), want(5))


def test_weights_that_a_program_has_taken_out_are_its_own_to_start(device):
    """Experts of one parameter of the program's, whose parts GroupedLinear sees as attributes."""
    experts = ft.GroupedLinear(2, WIDTH, 16, bias=True, device=device)
    whole = torch.stack([experts._parameters.pop(f"weight{i}").detach() for i in range(2)])
    for i in range(2):
        object.__setattr__(experts, f"weight{i}", whole[i])
        torch.nn.init.ones_(getattr(experts, f"bias{i}"))
    before, x = whole.clone(), torch.randn(5, WIDTH, device=device)
    experts.reset_parameters()
    assert torch.equal(whole, before)
    same = ft.GroupedLinear(2, WIDTH, 16, bias=True, device=device)
    same.load_state_dict({f"weight{i}": whole[i] for i in range(2)}, strict=False)
    assert torch.equal(experts(x, [2, 3]), same(x, [2, 3]))


def test_the_old_autocast_is_compiled_without_a_warning():
    layer, x = ft.Linear(WIDTH, WIDTH, device="cpu"), torch.randn(4, WIDTH)

    def step(x):
        with ft.fp8_autocast(enabled=False):
            return layer(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(x), layer(x))


def test_angles_of_a_state_in_16_bits_are_made_anew():
    made = ft.RotaryPositionEmbedding(8, device="cpu")
    want = made.inv_freq.clone()
    made.load_state_dict({"inv_freq": want.bfloat16()})
    assert torch.equal(made.inv_freq, want)


def test_what_wraps_a_core_attention_of_a_decoder_is_told():
    layer = ft.TransformerLayer(32, 64, 4, layer_type="decoder", device="cpu")
    layer.inter_attention.core_attention = torch.nn.Sequential(layer.inter_attention.core_attention)
    x = torch.randn(4, 2, 32)
    with pytest.raises(ArgumentError, match="core_attention"):
        layer(x, encoder_output=x)
