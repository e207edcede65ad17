"""Parts of a layer within modules of a program's own, as adapters of low rank (LoRA) are."""

from __future__ import annotations

import copy

import fp8kit_torch as ft
import numpy as np
import pytest
import torch

from fp8kit.collectives import FakeCollectives
from fp8kit.errors import ArgumentError
from fp8kit.layers.parallel import Grouped, ParallelLayer
from fp8kit.testing import assert_close

RECIPES = {
    "none": None,
    "delayed": ft.DelayedScaling(amax_history_len=4),
    "current": ft.Float8CurrentScaling(),
}
LAYERS = {
    "encoder": {},
    "no bias": {"bias": False},
    "dropout": {"hidden_dropout": 0.2},
    "decoder": {"layer_type": "decoder"},
    "both branches of x": {"parallel_attention_mlp": True},
    "norm at the end": {"output_layernorm": True},
    "norms behind": {"norm_position": "after"},
    "few keys, packed": {"num_gqa_groups": 2, "fuse_qkv_params": True},
}
HIDDEN = 32


class LowRank(torch.nn.Module):
    """y + B A x, and the layer's arguments handed on: what PEFT makes of a layer."""

    def __init__(self, base, outs):
        super().__init__()
        self.base_layer = base
        self.a = torch.nn.Linear(HIDDEN, 4, bias=False)
        self.b = torch.nn.Linear(4, outs, bias=False)

    def forward(self, x, *args, **kwargs):
        y = self.base_layer(x, *args, **kwargs)
        return (y + self.b(self.a(x))).to(y.dtype)


def made(**options):
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **options}
    return ft.TransformerLayer(HIDDEN, 64, 4, params_dtype=torch.float32, device="cpu", **options)


def adapted(layer):
    """``layer`` in parts of which each is wrapped, and its wrappers."""
    found = []
    attentions = [each for each in (layer.self_attention, layer.inter_attention) if each is not None]
    owners = [(own, name) for own in attentions for name, part in own.named_children() if weighted(part)]
    for owner, name in [*owners, (layer, "layernorm_mlp")]:
        base = getattr(owner, name)
        found.append(LowRank(base, getattr(base, "out_features", HIDDEN)))
        setattr(owner, name, found[-1])
    return found


def same(mine, wanted, part=2.0**-16):
    """Sums of float32 in another order."""
    mine, wanted = (np.asarray(each.detach(), np.float64) for each in (mine, wanted))
    assert_close("sums", mine, wanted, "float32", part * np.abs(wanted).max())


def weighted(part):
    return isinstance(part, ft.Linear | ft.LayerNormLinear)


def passed(layer, recipe, x, **beside):
    x = x.clone().requires_grad_()
    with ft.autocast(enabled=recipe is not None, recipe=recipe):
        torch.manual_seed(1)
        y = layer(x, **beside)
    y.square().sum().backward()
    return y, x.grad


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_layer_of_wrapped_parts(options, recipe):
    """With B = 0 it computes the layer's bits; then what it adds is the adapter's."""
    plain = made(**options)
    layer = copy.deepcopy(plain)
    wrappers = adapted(layer)
    for wrapper in wrappers:
        torch.nn.init.zeros_(wrapper.b.weight)
    x = torch.randn(16, 2, HIDDEN)
    beside = {"encoder_output": torch.randn(8, 2, HIDDEN)} if plain.inter_attention is not None else {}
    for mine, wanted in zip(
        passed(layer, recipe, x, **beside), passed(plain, recipe, x, **beside), strict=True
    ):
        same(mine, wanted)
    assert all(wrapper.b.weight.grad.norm() > 0 for wrapper in wrappers)
    for wrapper in wrappers:
        torch.nn.init.normal_(wrapper.b.weight)
    mine, wanted = (passed(each, recipe, x, **beside)[0] for each in (layer, plain))
    assert (mine - wanted).norm() > 0.01 * wanted.norm()


def test_the_sum_is_that_of_merged_weights():
    layer = made(fuse_qkv_params=True, qkv_weight_interleaved=False, norm_position="after")
    merged = copy.deepcopy(layer)
    for wrapper, name in zip(adapted(layer), ("qkv", "proj"), strict=False):
        with torch.no_grad():
            getattr(merged.self_attention, name).weight += wrapper.b.weight @ wrapper.a.weight
    layer.layernorm_mlp = layer.layernorm_mlp.base_layer
    x = torch.randn(16, 2, HIDDEN)
    for mine, wanted in zip(passed(layer, None, x), passed(merged, None, x), strict=True):
        same(mine, wanted, 1e-4)


def test_a_checkpoint_wrapper_around_a_part():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = made()
    layer = copy.deepcopy(plain)
    layer.layernorm_mlp = checkpoint_wrapper(layer.layernorm_mlp)
    layer.self_attention.layernorm_qkv = torch.compile(layer.self_attention.layernorm_qkv, backend="eager")
    x = torch.randn(16, 2, HIDDEN)
    recipe = RECIPES["current"]
    for mine, wanted in zip(passed(layer, recipe, x), passed(plain, recipe, x), strict=True):
        same(mine, wanted)


def test_what_wraps_a_part_gives_no_norm():
    layer = made(apply_residual_connection_post_layernorm=True)
    adapted(layer)
    wanted = "MultiheadAttention: layernorm_qkv: got a LowRank, expected .* which gives its norm's output too"
    with pytest.raises(ArgumentError, match=wanted):
        layer(torch.randn(16, 2, HIDDEN))


def test_a_group_passes_through_what_wraps_parts():
    layer = made(tp_size=2, set_parallel_mode=True)
    adapted(layer)
    ranks = FakeCollectives(2).ranks[0]
    layer.set_tensor_parallel_group(ranks)
    parts = [each for each in layer.modules() if isinstance(each, Grouped)]
    assert sum(isinstance(each, ParallelLayer) for each in parts) == 3
    assert all(each.tp_group is ranks for each in parts)


def test_late_gradients_of_wrapped_parts():
    layer = made()
    mlp = ft.LayerNormMLP(HIDDEN, 64, params_dtype=torch.float32, device="cpu", delay_wgrad_compute=True)
    layer.layernorm_mlp = LowRank(mlp, HIDDEN)
    passed(layer, None, torch.randn(16, 2, HIDDEN))
    assert layer.need_backward_dw()
    assert mlp.fc1_weight.grad is None
    layer.backward_dw()
    assert all(each.grad is not None for each in layer.parameters())
