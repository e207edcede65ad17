"""Calls in the wrong order, with wrong gradients, and from two threads: a right result, or an error that says
what was wrong."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import nn, optim
from fp8kit.errors import AutogradError, Fp8kitError
from tests.support.junk import JUNK

X = np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16)


def layer():
    return nn.Linear(16, 16, device="cpu")


def test_a_graph_serves_once_and_only_as_it_was():
    y = layer()(X)
    y.backward(X)
    with pytest.raises(AutogradError, match="retain_graph"):
        y.backward(X)
    model, x = layer(), fk.tensor(X, requires_grad=True)
    y = model(x)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.view
    optimizer.step()
    with pytest.raises(AutogradError, match="changed in place"):
        y.backward(X)
    assert x.grad is None


@pytest.mark.parametrize("at", range(len(JUNK)))
def test_junk_as_a_gradient_a_parameter_or_a_hooks_answer(at):
    def hooked():
        x = fk.tensor(X, requires_grad=True)
        x.register_hook(lambda grad: JUNK[at])
        layer()(x).backward(X)

    def step():
        model = layer()
        before = model.weight.numpy().copy()
        try:
            model.weight.grad = JUNK[at]
            optim.AdamW(model.parameters(), lr=0.1).step()
        finally:
            np.testing.assert_array_equal(model.weight.numpy(), before)

    def assigned():
        model = layer()
        model.weight = JUNK[at]
        model(X)

    for call in (hooked, step, assigned, lambda: layer()(X).backward(JUNK[at]), lambda: layer()(JUNK[at])):
        if JUNK[at] is not None or call is not hooked:
            try:
                call()
            except Fp8kitError:
                continue
            assert JUNK[at] is None, f"{JUNK[at]!r} was taken"


def test_two_threads_train_two_models_as_one_thread_does():
    def train(model, losses):
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(4):
            with fk.autocast():
                y = model(X)
            y.backward(X)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(model.weight.numpy().copy())

    results = []
    for apart in (False, True):
        nn.manual_seed(0)
        models, found = [layer(), layer()], [[], []]
        threads = [threading.Thread(target=train, args=pair) for pair in zip(models, found, strict=True)]
        for thread in threads:
            thread.start()
            if not apart:
                thread.join(60)
        for thread in threads:
            thread.join(60)
        results.append(found)
    np.testing.assert_array_equal(results[0], results[1])
