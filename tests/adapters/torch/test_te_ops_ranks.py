"""``te.ops`` of several ranks, which are threads here, and of one."""

from __future__ import annotations

import pytest
import torch
from fp8kit_torch import fusible as ops

from fp8kit.collectives import FakeCollectives
from fp8kit.errors import ArgumentError
from fp8kit.testing import sum_slack
from tests.support.tensors import assert_tensor_close

ROWS, K, N = 8, 32, 64


def of_ranks(function):
    return FakeCollectives(2).run(function)


def test_one_rank_gives_its_input():
    x = torch.randn(ROWS, K)
    for operation in (ops.AllGather(), ops.AllReduce(), ops.AllReduce(None, False), ops.ReduceScatter()):
        assert operation(x) is x


def test_moves_and_their_gradients():
    def rank(ranks):
        x = torch.arange(4.0).view(2, 2) + 10 * ranks.rank
        x.requires_grad_()
        found = []
        for kind in (ops.AllGather, ops.ReduceScatter, ops.AllReduce):
            y = kind(ranks)(x)
            (grad,) = torch.autograd.grad(((1 + ranks.rank) * y).sum(), x)
            found.append((y.detach(), grad))
        return found

    first, second = of_ranks(rank)
    parts = [torch.arange(4.0).view(2, 2), torch.arange(4.0).view(2, 2) + 10]
    total, ones = parts[0] + parts[1], torch.ones(2, 2)
    for (gathered, scattered, summed), number in ((first, 0), (second, 1)):
        assert torch.equal(gathered[0], torch.cat(parts))
        assert torch.equal(gathered[1], 3 * ones)
        assert torch.equal(scattered[0], total[number : number + 1])
        assert torch.equal(scattered[1], torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
        assert torch.equal(summed[0], total)
        assert torch.equal(summed[1], 3 * ones)


def test_a_sum_whose_gradient_passes():
    def rank(ranks):
        x = torch.ones(2, 2, requires_grad=True)
        y = ops.AllReduce(ranks, reduce_in_backward=False)(x)
        return y.detach(), torch.autograd.grad(y.sum() * (1 + ranks.rank), x)[0]

    for number, (y, grad) in enumerate(of_ranks(rank)):
        assert torch.equal(y, 2 * torch.ones(2, 2))
        assert torch.equal(grad, (1 + number) * torch.ones(2, 2))


def test_what_is_no_group_is_refused():
    with pytest.raises(ArgumentError, match="AllGather: process_group"):
        ops.AllGather("all")


@pytest.mark.parametrize("sequence", [False, True])
def test_products_that_ranks_share(sequence):
    """A column-parallel product, its bias and a row-parallel one have the numbers of one rank."""
    draws = torch.Generator().manual_seed(0)
    w1, w2 = torch.randn(N, K, generator=draws), torch.randn(K, N, generator=draws)
    b1, x = torch.randn(N, generator=draws), torch.randn(ROWS, K, generator=draws)
    want = (x @ w1.t() + b1) @ w2.t()

    def rank(ranks):
        mine = slice(ranks.rank * N // 2, (ranks.rank + 1) * N // 2)
        shared = {"tensor_parallel_group": ranks, "sequence_parallel": sequence, "device": "cpu"}
        net = ops.Sequential(
            ops.BasicLinear(K, N, tensor_parallel_mode="column", **shared),
            ops.Bias(N, tensor_parallel=True, tensor_parallel_group=ranks, device="cpu"),
            ops.BasicLinear(N, K, tensor_parallel_mode="row", **shared),
        )
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), (w1[mine], b1[mine], w2[:, mine]), strict=True):
                parameter.copy_(value)
            return net(x.chunk(2)[ranks.rank] if sequence else x)

    found = of_ranks(rank)
    y = torch.cat(found) if sequence else found[0]
    size = (x.abs() @ w1.abs().t() + b1.abs()) @ w2.abs().t()
    assert_tensor_close("y", y, want, sum_slack(size, K + N))  # a sum of sums, in another order


def test_a_bias_that_ranks_do_not_divide():
    def rank(ranks):
        with pytest.raises(ArgumentError, match="size: got 7"):
            ops.Bias(7, tensor_parallel=True, tensor_parallel_group=ranks, device="cpu")

    of_ranks(rank)


def test_a_bounded_squared_relu():
    x = torch.tensor([[-1.0, 0.5, 2.0, 50.0]], requires_grad=True)
    scales = torch.tensor([2.0], requires_grad=True)
    y = ops.ScaledTanhSReLU(tanh_clamp_scale=3.0)(x, scales)
    want = 2.0 * (3.0 * torch.tanh(torch.relu(x) / 3.0)) ** 2
    assert_tensor_close("y", y, want, sum_slack(18, 8))  # of 18 at most, by 8 operations or so
    assert float(y.detach().max()) <= 18.0
    y.sum().backward()
    assert_tensor_close("dscales", scales.grad, y.sum(1) / 2.0, sum_slack(4 * 18, 4 + 8))
    for wrong in (0.0, float("inf")):
        with pytest.raises(ArgumentError, match="tanh_clamp_scale"):
            ops.ScaledTanhSReLU(tanh_clamp_scale=wrong)


def test_no_path_of_grouped_tensors():
    assert ops.is_op_fuser_grouped_tensor_path_supported(None, torch.bfloat16) is False
