"""Optimisers in a captured graph: the step count and the learning rate are read on the device at each
replay."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import arrays
from fp8kit.autograd import tensor
from fp8kit.optim import SGD, AdamW
from fp8kit.testing import assert_close

RATES = (0.5, 0.5, 0.125, 0.0, 0.25)


def build(kind, dtype, device, lr):
    rng = np.random.default_rng(3)
    params = [
        tensor(rng.standard_normal(n).astype(np.float32), requires_grad=True, dtype=dtype, device=device)
        for n in (7, 1000)
    ]
    for p in params:
        p.grad = tensor(rng.standard_normal(p.shape).astype(np.float32), dtype=dtype, device=device).view
    return params, kind(params, lr=lr, **({"momentum": 0.5} if kind is SGD else {"weight_decay": 0.1}))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_replay_counts_and_takes_the_present_rate(kind, dtype):
    import cupy

    lr = cupy.full(1, RATES[0], cupy.float32)
    params, opt = build(kind, dtype, "cuda", lr)
    opt.step()  # the states are made, the kernels compiled
    arrays.synchronize(arrays.Device("cuda"))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        opt.step()
        graph = stream.end_capture()
        for rate in RATES[1:]:
            lr[...] = rate
            graph.launch(stream)
        got = [p.numpy().astype(np.float64) for p in params]
    host = np.zeros(1, np.float32)
    wanted, reference = build(kind, dtype, "cpu", host)
    for rate in RATES:
        host[...] = rate
        reference.step()
    assert opt.state_dict()["steps"].numpy().tolist() == [len(RATES)] * 2
    for p, value in zip(wanted, got, strict=True):
        want = p.numpy().astype(np.float64)
        # both engines round a dozen times a step, on values that moved by at most sum(lr) * 10
        assert_close(
            "parameter",
            value.astype(p.dtype.numpy),
            want,
            dtype,
            len(RATES) * 24 * 2.0**-24 * (np.abs(want) + 10 * sum(RATES)),
        )
