"""Converted norms: the dtype of their results, within torch's autocast too."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from fp8kit_torch import convert
from fp8kit_torch.converted import ConvertedNorm
from torch import nn

from fp8kit.testing.compare import assert_same_bits, relative_error
from tests.support.combinations import combinations
from tests.support.torch_norms import GemmaLikeRMSNorm, LlamaLikeRMSNorm

D = 32


def bits(t):
    return t.detach().float().cpu().numpy()


class InputsRMSNorm(LlamaLikeRMSNorm):
    """Its result has the input's dtype."""

    def forward(self, x):
        return (super().forward(x.float())).to(x.dtype)


class WeightsRMSNorm(LlamaLikeRMSNorm):
    """Its result has the weight's dtype where that is of 16 bits, as T5's."""

    def forward(self, x):
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (y if self.weight.dtype is torch.float32 else y.to(self.weight.dtype))


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NORMS = (nn.LayerNorm, nn.RMSNorm, LlamaLikeRMSNorm, InputsRMSNorm, WeightsRMSNorm)


@combinations(
    {"kind": NORMS, "compiled": {"eager": False, "compiled": True}},
    usual=[*(f"{kind.__name__}-eager" for kind in NORMS)],
)
# torch's own, of the plain module
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_norms_give_the_dtype_that_the_plain_ones_give(kind, compiled):
    """Libraries have three ways where the input's dtype is not the weight's; what runs at conversion runs
    past the user's hooks."""
    for weight in FLOATS:
        plain = kind(D).to(weight)
        hooked = []
        plain.register_forward_hook(lambda *args, hooked=hooked: hooked.append(1))
        net = nn.Sequential(plain)
        inputs = [torch.randn(3, D, dtype=dtype) for dtype in FLOATS]
        wanted = {}
        for x in inputs:
            try:
                wanted[x.dtype] = net(x)
            # torch's LayerNorm takes 16 bits with a weight in float32, and no other pair
            except RuntimeError:
                assert kind is nn.LayerNorm
        hooked.clear()
        convert(net)
        assert isinstance(net[0], ConvertedNorm)
        assert not hooked
        torch._dynamo.reset()
        call = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
        for x in inputs:
            y = call(x)
            if x.dtype in wanted:
                assert y.dtype is wanted[x.dtype].dtype, (weight, x.dtype)
                assert relative_error(bits(y), bits(wanted[x.dtype])) < 2.0**-6  # a few roundings to bfloat16


class AutocastRMSNorm(LlamaLikeRMSNorm):
    """Casts nothing itself: within ``torch.autocast`` it gives what its device's lists make of it.
    ``mse_loss`` is in the CPU's, too."""

    def forward(self, x):
        square = nn.functional.mse_loss(x, torch.zeros_like(x), reduction="none").mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(square + self.variance_epsilon))


BY_NAME = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "llama": LlamaLikeRMSNorm,
    "gemma": GemmaLikeRMSNorm,
    "lists": AutocastRMSNorm,
}


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BY_NAME)
# torch 2.11 says so of its own RMSNorm on a GPU, once in a process
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_within_torchs_autocast_a_norm_has_the_plain_ones_dtype(name, place):
    ran = 0
    for weight, x, cast in itertools.product(FLOATS, FLOATS, FLOATS[1:]):
        torch.manual_seed(0)
        plain = BY_NAME[name](D).to(weight)
        net = convert(nn.Sequential(copy.deepcopy(plain))).to(place)
        assert isinstance(net[0], ConvertedNorm)
        plain = plain.to(place)
        rows, g = torch.randn(7, D, dtype=x, device=place), torch.randn(7, D, device=place)
        with torch.autocast(place, cast):
            try:
                wanted = plain(rows)
            except RuntimeError:  # torch's LayerNorm takes few pairs outside of float32's list
                continue
            inputs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
            wanted, got = plain(inputs[0]), net(inputs[1])
        ran += 1
        assert got.dtype is wanted.dtype, (weight, x, cast)
        # roundings to the narrowest dtype on the way, of which each may differ
        limit = 4 * max(torch.finfo(dtype).eps for dtype in (weight, x, wanted.dtype))
        assert relative_error(bits(got), bits(wanted)) < limit
        for y in (wanted, got):
            y.backward(g.to(y.dtype))
        assert inputs[1].grad.dtype is x
        assert relative_error(bits(inputs[1].grad), bits(inputs[0].grad)) < 2 * limit
    assert ran >= 2 * 4
    if place == "cuda" and name == "layer":
        assert wanted.dtype is torch.float32
    if name == "lists":
        assert got.dtype is torch.float32


def test_within_torchs_autocast_and_compiled_too():
    net = convert(nn.Sequential(AutocastRMSNorm(D))).bfloat16()
    x = torch.randn(7, D, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = net(x)
        net[0]._found.clear()
        got = torch.compile(net, fullgraph=True, backend="aot_eager")(x)
    assert wanted.dtype is got.dtype is torch.float32
    assert_same_bits("y", bits(got), bits(wanted))
    assert net(x).dtype is torch.bfloat16
