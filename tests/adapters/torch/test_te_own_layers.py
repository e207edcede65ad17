"""Layers of a program's own, made of Transformer Engine's base class, quantizers and GEMM."""

from __future__ import annotations

import fp8kit_torch as te
import pytest
import torch
from fp8kit_torch.te_compat.gemms import general_gemm

from fp8kit.testing import assert_same_bits


class Product(torch.autograd.Function):
    """y = x W^T by the layer's quantizers."""

    @staticmethod
    def forward(ctx, x, weight, quantizers):
        x, weight = quantizers["scaling_fwd"][0](x), quantizers["scaling_fwd"][1](weight)
        ctx.save_for_backward(x.dequantize(), weight.dequantize())
        ctx.quantizer = quantizers["scaling_bwd"][0]
        return general_gemm(weight, x, out_dtype=torch.float32)[0]

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        g = ctx.quantizer(grad).dequantize()
        return g @ weight, g.T @ x, None


class Own(te.TransformerEngineBaseModule):
    def __init__(self, features, out, **named):
        super().__init__()
        weight = torch.nn.Parameter(torch.zeros(out, features))
        self.register_parameter("weight", weight, fp8_meta_index=1, **named)
        self.reset_parameters()

    def forward(self, inp):
        with self.prepare_forward_ctx(inp, num_gemms=1) as x:
            return Product.apply(x, self.weight, self.quantizers) if self.fp8 else x @ self.weight.T


def state_after_steps(layer):
    """y, and the scales and histories of input, weight and output gradient, after three steps."""
    torch.manual_seed(1)
    for step in range(3):
        x = (torch.randn(32, 64) * (step + 1)).requires_grad_()
        with te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
            y = layer(x)
        y.square().sum().backward()
    kept = layer.fp8_meta
    parts = [kept["scaling_fwd"].scale[:2], kept["scaling_bwd"].scale[:1]]
    parts += [kept["scaling_fwd"].amax_history[:, :2], kept["scaling_bwd"].amax_history[:, :1]]
    return y, torch.cat([part.flatten() for part in parts])


def test_delayed_scaling_of_an_own_layer_is_that_of_linear():
    own, linear = Own(64, 32), te.Linear(64, 32, bias=False, device="cpu")
    with torch.no_grad():
        linear.weight.copy_(own.weight)
    (y, state), (want, wanted) = state_after_steps(own), state_after_steps(linear)
    assert_same_bits("y", y.detach().numpy(), want.detach().numpy())
    assert_same_bits("state", state.numpy(), wanted.numpy())
    assert (state[:3] != 1).all()


def test_an_own_layers_state_is_saved_and_loaded():
    own, fresh = Own(64, 32), Own(64, 32)
    state_after_steps(own)
    fresh.load_state_dict(own.state_dict())
    assert torch.equal(fresh.fp8_meta["scaling_bwd"].scale, own.fp8_meta["scaling_bwd"].scale)


def test_parameters_start_by_their_function_within_the_tracker():
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    made = [Own(8, 8, init_fn=torch.nn.init.uniform_, get_rng_state_tracker=lambda: tracker)]
    tracker.reset()
    tracker.add("model-parallel-rng", 5)
    made.append(Own(8, 8, init_fn=torch.nn.init.uniform_, get_rng_state_tracker=lambda: tracker))
    assert torch.equal(made[0].weight, made[1].weight)
    assert 0 < made[0].weight.min() < made[0].weight.max() < 1
    assert made[0].weight.std() > 10 * 0.023
    assert Own(64, 64).weight.std().item() == pytest.approx(0.023, rel=0.1)  # of 4096 numbers
