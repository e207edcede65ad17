"""parallel_cross_entropy against torch's in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fp8kit_torch import parallel_cross_entropy

from fp8kit.errors import ArgumentError, Fp8kitError, ShapeError
from fp8kit.testing.compare import assert_close, sum_slack

B, S, V = 3, 5, 37


def f64(t):
    return t.detach().double().cpu().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce", [False, True], ids=["tokens", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_against_torch(dtype, reduce, smoothing):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(3 * rng.standard_normal((B, S, V))).to(dtype).requires_grad_()
    target = torch.from_numpy(rng.integers(0, V, (B, S)))
    target[0, 1] = target[2, 3] = -1
    loss = parallel_cross_entropy(x, target, smoothing, reduce, ignore_idx=-1)
    x64 = x.detach().double().requires_grad_()
    options = {"label_smoothing": smoothing, "ignore_index": -1, "reduction": "mean" if reduce else "none"}
    wanted = torch.nn.functional.cross_entropy(x64.reshape(-1, V), target.reshape(-1), **options)
    assert loss.shape == (() if reduce else target.shape)
    assert loss.dtype == torch.float32
    slack = sum_slack(np.abs(f64(x)).max() + 1, V)
    assert_close("loss", f64(loss).reshape(-1), f64(wanted).reshape(-1), "float32", slack)
    g = torch.from_numpy(rng.standard_normal(loss.shape)).float() if not reduce else torch.tensor(0.7)
    loss.backward(g)
    wanted.backward(g.double().reshape(wanted.shape))
    assert_close("dlogits", f64(x.grad), f64(x64.grad), str(dtype)[6:], sum_slack(np.abs(f64(g)).max(), V))
    assert not x.grad[0, 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", [False, True], ids=["tokens", "mean"])
def test_the_gradient_in_the_logits_memory(device, dtype, reduce):
    torch.manual_seed(0)
    h, w = (torch.randn(*shape, device=device).to(dtype) for shape in ((B, S, 16), (V, 16)))
    target = torch.randint(V, (B, S), device=device)
    target[0, 1] = -100
    found = []
    for overwrite in (False, True):
        leaf = h.clone().requires_grad_()
        logits = leaf @ w.t()
        before, seen = logits.detach().clone(), []
        logits.register_hook(lambda g, seen=seen: seen.append(g.data_ptr()))
        loss = parallel_cross_entropy(logits, target, 0.1, reduce, overwrite_input=overwrite)
        assert torch.equal(logits.detach(), before)
        loss.sum().backward(retain_graph=True)
        assert (seen == [logits.data_ptr()]) == overwrite
        assert torch.equal(logits.detach(), before) != overwrite
        found.append((loss.detach(), leaf.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_old_names_other_layouts_and_refusals():
    x, target = torch.randn(S, B, V), torch.zeros(S, B, dtype=torch.int32)
    with pytest.warns(DeprecationWarning, match="_input"):
        old = parallel_cross_entropy(target=target, _input=x)
    assert torch.equal(old, parallel_cross_entropy(x, target))
    assert torch.equal(parallel_cross_entropy(x.transpose(0, 1), target.t()), old.t())
    with pytest.raises(ShapeError, match="inp: got strides"):
        parallel_cross_entropy(x.transpose(0, 1), target.t(), overwrite_input=True)
    with pytest.raises(Fp8kitError, match="overwrite_input: got 'yes'"):
        parallel_cross_entropy(x, target, overwrite_input="yes")
    with pytest.raises(ShapeError, match="target"):
        parallel_cross_entropy(x, target[1:])
    with pytest.raises(Fp8kitError, match="label_smoothing"):
        parallel_cross_entropy(x, target, 1.5)
    with pytest.raises(ShapeError, match="inp"):
        parallel_cross_entropy(None, target)
    with pytest.raises(
        ArgumentError, match="dist_process_group: got 'all', expected None or a process group of torch"
    ):
        parallel_cross_entropy(x, target, dist_process_group="all")
