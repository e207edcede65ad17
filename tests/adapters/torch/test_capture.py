"""``fp8kit_torch.capture``: the operands that the native frontend captures from the same model."""

from __future__ import annotations

import fp8kit_torch as te
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit import recipe
from fp8kit.errors import ArgumentError, UnsupportedError
from fp8kit.numerics import capture
from fp8kit.testing import assert_same_bits


def test_the_operands_of_the_native_layer():
    torch.manual_seed(0)
    layer = te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
    twin = fk.nn.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
    twin.load_state_dict({name: p.detach().numpy() for name, p in layer.named_parameters()})
    x = torch.randn(8, 2, 64)
    kept = torch.ones(64)
    next(p for p in layer.parameters() if p.shape == (64,)).grad = kept
    got = te.capture(layer, x, lambda y: te.cross_entropy(y.reshape(16, 64), torch.zeros(16).long()))
    assert next(p for p in layer.parameters() if p.shape == (64,)).grad is kept

    def loss(y):
        return fk.nn.cross_entropy(y.reshape(16, 64), fk.tensor(np.zeros(16, np.int64)))

    wanted = capture(twin, fk.tensor(x.numpy()), loss)
    assert list(got.gemms) == list(wanted.gemms)
    assert len(got.gemms) == 4
    for name, own in wanted.gemms.items():
        for operand, array in own._asdict().items():
            assert_same_bits(f"{name} {operand}", getattr(got.gemms[name], operand), array)


def test_main_grad_stays_as_it_was():
    torch.manual_seed(0)
    layer = te.Linear(16, 32, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    layer.weight.main_grad = torch.full((32, 16), 3.0)
    layer.weight.grad_added_to_main_grad = False
    x = torch.randn(8, 16)
    (found,) = te.capture(layer, x, lambda y: y.square().sum()).gemms.values()
    assert_same_bits("weight", found.weight, layer.weight.detach().numpy())
    assert torch.equal(layer.weight.main_grad, torch.full((32, 16), 3.0))
    assert layer.weight.grad_added_to_main_grad is False
    assert layer.weight.grad is None


def test_weights_that_are_held_in_fp8_are_refused():
    with te.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        layer = te.Linear(16, 16, device="cpu")
    with pytest.raises(
        UnsupportedError, match="weight: got a weight that is held in FP8, expected the model in"
    ):
        te.capture(layer, torch.randn(4, 16))


def test_refusals():
    layer = te.Linear(16, 16, device="cpu")
    with pytest.raises(ArgumentError, match=r"loss: got shape \(4, 16\)"):
        te.capture(layer, torch.randn(4, 16))
    with pytest.raises(ArgumentError, match="loss: got 5, expected a function"):
        te.capture(layer, torch.randn(4, 16), 5)
    with pytest.raises(ArgumentError, match="model: got a str"):
        te.capture("model", torch.randn(4, 16))
    with pytest.raises(ArgumentError, match="multiplied no parameter"):
        te.capture(torch.nn.Linear(16, 1), torch.randn(1, 16))


class Experts(torch.nn.Module):
    """A product, and those of groups whose sizes are on the device."""

    def __init__(self, whole=True):
        super().__init__()
        self.first = te.Linear(16, 16, device="cpu") if whole else torch.nn.Identity()
        self.experts = te.GroupedLinear(2, 16, 16, device="cpu", use_grouped_tensor=True)

    def forward(self, x):
        return self.experts(self.first(x), torch.tensor([3, 1])).square().sum()


def test_groups_with_sizes_on_the_device_are_left_out_with_a_warning(caplog):
    model = te.name_layers(Experts())
    assert list(te.capture(model, torch.randn(4, 16)).gemms) == ["first"]
    assert [record.message for record in caplog.records] == [
        "capture: layer experts is left out, since its numbers of rows stay on the device"
    ]
    with pytest.raises(ArgumentError, match=r"no GEMM but those of experts, .* m_splits as a list"):
        te.capture(te.name_layers(Experts(False)), torch.randn(4, 16))
