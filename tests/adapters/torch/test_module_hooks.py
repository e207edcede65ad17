"""Hooks on the parts of a torch TransformerLayer: they run, and what they return is used."""

from __future__ import annotations

import copy

import fp8kit_torch as ft
import pytest
import torch

from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close, largest


@pytest.mark.parametrize(
    "options", [{}, {"parallel_attention_mlp": True}, {"layer_type": "decoder"}, {"output_layernorm": True}]
)
def test_hooks_of_the_parts_of_a_layer_run(device, options):
    """Forward, before and after, and backward; what one returns in place of an input or an output is used."""
    torch.manual_seed(3)
    layer = ft.TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device, **options
    )
    x, seen = torch.randn(6, 2, 64, device=device, requires_grad=True), []
    given = (
        {"encoder_output": torch.randn(5, 2, 64, device=device)}
        if options.get("layer_type") == "decoder"
        else {}
    )
    plain = layer(x, **given)
    for name, module in layer.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: seen.append(("before", name)))
        module.register_forward_hook(lambda module, args, out, name=name: seen.append(("after", name)))
        if "." not in name:
            module.register_full_backward_hook(
                lambda module, into, out, name=name: seen.append(("backward", name))
            )
    y = layer(x, **given)
    # the branch itself adds its last bias then: one rounding of the sum more
    assert_tensor_close("y", y, plain, sum_slack(1 + largest(plain), 12))
    y.sum().backward()
    names, whens = [name for name, _ in layer.named_modules()], ("before", "after", "backward")
    assert sorted(seen) == sorted(
        (when, n) for when in whens for n in names if when != "backward" or "." not in n
    )
    layer.layernorm_mlp.register_forward_hook(lambda module, args, out: out._replace(y=out.y * 0))
    layer.self_attention.proj.register_forward_hook(lambda module, args, out: out * 0)
    assert not torch.equal(layer(x, **given), plain)


def scaled_hook(part):
    part.register_forward_hook(lambda module, args, out: out * 0.5)


def scaled_forward(part):
    before = part.forward
    part.forward = lambda *given, **options: before(*given, **options) * 0.5


def scaled_class(part):
    class Scaled(type(part)):
        def forward(self, *given, **options):
            return super().forward(*given, **options) * 0.5

    part.__class__ = Scaled


def scaled_by_all(part):
    return torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 0.5 if module is part else None
    )


@pytest.mark.parametrize("scaled", [scaled_hook, scaled_forward, scaled_class, scaled_by_all])
def test_who_changes_a_branch_changes_no_residual(scaled, device):
    """A product adds the residual only where nobody has a hand in what it gives."""
    torch.manual_seed(3)
    layer = ft.TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, bias=False, device=device
    )
    half, x = copy.deepcopy(layer), torch.randn(6, 2, 64, device=device)
    with torch.no_grad():
        half.self_attention.proj.weight.mul_(0.5)  # a power of 2: the same bits
    handle = scaled(layer.self_attention.proj)
    try:
        got = layer(x)
    finally:
        if handle is not None:
            handle.remove()
    # float32 sums that a product adds to may round otherwise than an addition apart
    want = half(x)
    assert_tensor_close("y", got, want, sum_slack(1 + largest(want), 12))


def test_checks_wait_for_what_hooks_bring(device):
    """A part whose parameters come with its call, as with ``fully_shard`` and offloading."""
    torch.manual_seed(3)
    layer = ft.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device)
    x = torch.randn(6, 2, 64, device=device)
    plain, mlp, attention = layer(x), layer.layernorm_mlp, layer.self_attention
    own = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for parent, prefix in ((mlp, "layernorm_mlp."), (attention, "self_attention.")):

        def bring(module, args, prefix=prefix):
            for name, _ in list(module.named_parameters()):
                part, _, last = name.rpartition(".")
                module.get_submodule(part)._parameters[last] = torch.nn.Parameter(own[prefix + name])

        parent.to("meta")
        parent.register_forward_pre_hook(bring)
    # biases are added within the branches
    assert_tensor_close("y", layer(x), plain, sum_slack(1 + largest(plain), 12))
