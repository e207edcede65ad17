"""``BasicLinear._functional_forward`` and ``_functional_backward``, by which fused operations multiply."""

from __future__ import annotations

import fp8kit_torch as ft
import pytest
import torch
from fp8kit_torch import fusible as ops
from fp8kit_torch import fusion

from fp8kit.collectives import FakeCollectives
from fp8kit.errors import ArgumentError
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close

ROWS, K, N = 32, 64, 96
RECIPES = {
    "none": None,
    "current": ft.Float8CurrentScaling(),
    "block": ft.Float8BlockScaling(),
    "mxfp8": ft.MXFP8BlockScaling(),
}
forward, backward = ops.BasicLinear._functional_forward, ops.BasicLinear._functional_backward


def quantizers(layer, recipe):
    """The arguments that say how operands are cast."""
    if recipe is None:
        return {}, {}
    with ft.autocast(recipe=recipe):
        x, w = (layer.get_quantizer("forward", i) for i in range(2))
        g = layer.get_quantizer("backward", 0)
    both = {"with_quantized_compute": True, "input_quantizer": x, "weight_quantizer": w}
    return both, both | {"grad_output_quantizer": g}


@pytest.mark.parametrize("name", RECIPES)
def test_a_layers_products(device, name):
    recipe = RECIPES[name]
    torch.manual_seed(0)
    layer = ops.BasicLinear(K, N, device=device)
    x = torch.randn(2, ROWS // 2, K, device=device, requires_grad=True)
    g = torch.randn(2, ROWS // 2, N, device=device)
    with ft.autocast(recipe is not None, recipe=recipe):
        y = layer(x)
    dx, dw = torch.autograd.grad(y, (x, layer.weight), g)
    casts, back = quantizers(layer, recipe)
    found, kept_x, kept_w = forward(x, layer.weight, **casts)
    assert not found.requires_grad
    found_dx, found_dw = backward(g, kept_x, kept_w, dtype=torch.float32, **back)
    for what, got, want in (("y", found, y), ("dx", found_dx, dx), ("dw", found_dw, dw)):
        assert torch.equal(got, want), what
    casts |= {"input_requires_grad": False, "weight_requires_grad": False}
    assert forward(x, layer.weight, **casts)[1:] == (None, None)
    wanted = {"input_requires_grad": False}, {"weight_requires_grad": False}
    assert backward(g, kept_x, None, dtype=torch.float32, **wanted[0], **back)[0] is None
    assert backward(g, None, kept_w, dtype=torch.float32, **wanted[1], **back)[1] is None


def test_factors_biases_and_buffers():
    torch.manual_seed(0)
    x, w, g, b = torch.randn(ROWS, K), torch.randn(N, K), torch.randn(ROWS, N), torch.randn(N)
    out, dx, dw = torch.randn(ROWS, N), torch.randn(ROWS, K), torch.randn(N, K)
    want = 0.5 * x @ w.t() + b + 2 * out, 3 * g @ w + dx, 0.25 * g.t() @ x + 0.5 * dw
    y, *_ = forward(x, w, alpha=0.5, bias=b, out=out, beta=2.0, accumulate_into_out=True)
    got = backward(
        g,
        x,
        w,
        grad_input_alpha=3.0,
        grad_input=dx,
        accumulate_into_grad_input=True,
        grad_weight_alpha=0.25,
        grad_weight=dw,
        grad_weight_beta=0.5,
        accumulate_into_grad_weight=True,
    )
    for found, buffer, wanted, terms in zip((y, *got), (out, dx, dw), want, (K, N, ROWS), strict=True):
        assert found is buffer
        # sums of products of magnitude below 16 times 4
        assert_tensor_close("sum", found, wanted, sum_slack(64 * terms, terms))
    held = ft.Float8CurrentScalingQuantizer(ft.DType.kFloat8E4M3)
    into = held(torch.zeros(ROWS, N))
    assert forward(x, w, out=into, dtype=torch.float32)[0] is into
    assert torch.equal(into.dequantize(), held(forward(x, w)[0]).dequantize())


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["none", "current"])
def test_products_that_ranks_share(name, sequence):
    """Values and gradients of two layers have the numbers of one rank; in FP8 each rank's casts are its own,
    as the layers' are with gathered inputs."""
    torch.manual_seed(0)
    w1, w2, x, g = torch.randn(N, K), torch.randn(K, N), torch.randn(ROWS, K), torch.randn(ROWS, K)
    recipe = RECIPES[name]

    def rank(ranks):
        mine = slice(ranks.rank * N // 2, (ranks.rank + 1) * N // 2)
        layers = [
            ops.BasicLinear(*sizes, tensor_parallel_mode=mode, tensor_parallel_group=ranks, device="cpu")
            for sizes, mode in (((K, N), "column"), ((N, K), "row"))
        ]
        assert [(each.tensor_parallel_mode, each.tensor_parallel_size) for each in layers] == [
            ("column", 2),
            ("row", 2),
        ]
        own, grad = (t.chunk(2)[ranks.rank] if sequence else t for t in (x, g))
        how = [
            {
                "tensor_parallel_mode": each.tensor_parallel_mode,
                "tensor_parallel_group": each.tensor_parallel_group,
                "sequence_parallel": sequence,
            }
            for each in layers
        ]
        casts = [quantizers(ops.BasicLinear(K, N, device="cpu"), recipe) for _ in layers]
        h, kept_x, kept_1 = forward(own, w1[mine].clone(), **how[0], **casts[0][0])
        y, kept_h, kept_2 = forward(h, w2[:, mine].contiguous(), **how[1], **casts[1][0])
        more = {"dtype": torch.float32}
        dh, dw2 = backward(grad, kept_h, kept_2, **how[1], **casts[1][1], **more)
        dx, dw1 = backward(dh, kept_x, kept_1, **how[0], **casts[0][1], **more)
        return y, dx, dw1, dw2

    first, second = FakeCollectives(2).run(rank)
    y, dx = (torch.cat(pair) if sequence else pair[0] for pair in zip(first[:2], second[:2], strict=True))
    dw1, dw2 = torch.cat((first[2], second[2])), torch.cat((first[3], second[3]), 1)
    h, dh = x @ w1.t(), g @ w2
    for what, got, want, size in (
        ("y", y, h @ w2.t(), x.abs() @ w1.abs().t() @ w2.abs().t()),
        ("dx", dx, dh @ w1, g.abs() @ w2.abs() @ w1.abs()),
        ("dw1", dw1, dh.t() @ x, (g.abs() @ w2.abs()).t() @ x.abs()),
        ("dw2", dw2, g.t() @ h, g.abs().t() @ (x.abs() @ w1.abs().t())),
    ):
        # a sum of sums in another order; E4M3 and E5M2 round each of four operands by 2^-3 at most
        slack = sum_slack(size, K + N) if recipe is None else 4 * 2.0**-3 * size
        assert_tensor_close(what, got, want, slack)


class LinearScale(ops.FusedOperation):
    """y = 0.5 x W^T in one product, both ways."""

    def fuser_forward(self, basic_op_ctxs, input_, **others):
        linear, scale = self.basic_ops
        y, x, w = linear._functional_forward(input_, linear.weight, alpha=scale.scale)
        basic_op_ctxs[0].save_for_backward(x, w)
        return y, [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **others):
        _, scale = self.basic_ops
        x, w = basic_op_ctxs[0].saved_tensors
        alphas = {"grad_input_alpha": scale.scale, "grad_weight_alpha": scale.scale}
        dx, dw = self.basic_ops[0]._functional_backward(grad_output, x, w, **alphas)
        return dx, [(dw,), ()], [(), ()]


def test_in_a_fusion_of_ones_own(monkeypatch):
    monkeypatch.setattr(fusion, "_BOTH", [lambda found, *, recipe: [LinearScale(found)]])
    torch.manual_seed(0)
    model = ops.Sequential(ops.BasicLinear(K, N, device="cpu"), ops.ConstantScale(0.5))
    x = torch.randn(ROWS, K, requires_grad=True)
    y = model(x)
    y.sum().backward()
    w = model[0].weight
    assert torch.equal(y, 0.5 * forward(x, w)[0])
    assert_tensor_close("dx", x.grad, 0.5 * w.sum(0).expand(ROWS, K), sum_slack(w.abs().sum(0), N))
    assert_tensor_close("dw", w.grad, 0.5 * x.sum(0).expand(N, K), sum_slack(x.abs().sum(0), ROWS))


def test_what_does_not_fit_is_said():
    x, w = torch.randn(ROWS, K), torch.randn(N, K)
    with pytest.raises(ArgumentError, match="_functional_forward: input_quantizer: missing"):
        forward(x, w, with_quantized_compute=True)
    with pytest.raises(ArgumentError, match="tensor_parallel_mode: got 'both'"):
        forward(x, w, tensor_parallel_mode="both")
    with pytest.raises(ArgumentError, match="accumulate_into_out"):
        forward(x, w, out=torch.zeros(ROWS, N), accumulate_into_out=True, tensor_parallel_mode="row")
    with pytest.raises(ArgumentError, match="_functional_backward: weight: "):
        backward(torch.randn(ROWS, N), x, None)
