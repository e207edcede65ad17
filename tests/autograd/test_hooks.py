"""Hooks on gradients, graphs that are kept, and changes in place."""

from __future__ import annotations

import numpy as np
import pytest

from fp8kit import nn
from fp8kit.autograd import Tensor, no_grad, tensor
from fp8kit.errors import AutogradError, FormatError, ShapeError
from fp8kit.optim import SGD

X = np.arange(6, dtype=np.float32).reshape(2, 3)
ONE = np.ones_like(X)


def leaf() -> Tensor:
    return tensor(X.copy(), requires_grad=True)


def test_a_hook_sees_the_whole_gradient_once_and_may_replace_it() -> None:
    x, seen = leaf(), []
    middle = x + x
    inner = middle.register_hook(lambda g: seen.append(("middle", g.numpy().copy())))
    outer = x.register_hook(lambda g: (seen.append(("x", g.numpy().copy())), g.numpy() * 10)[1])
    y = middle + middle
    y.backward(ONE, retain_graph=True)
    assert [name for name, _ in seen] == ["middle", "x"]
    np.testing.assert_array_equal(seen[0][1], 2 * ONE)
    np.testing.assert_array_equal(seen[1][1], 4 * ONE)
    np.testing.assert_array_equal(x.grad.numpy(), 40 * ONE)
    inner.remove()
    inner.remove()
    y.backward(ONE, retain_graph=True)
    assert [name for name, _ in seen] == ["middle", "x", "x"]
    np.testing.assert_array_equal(x.grad.numpy(), 80 * ONE)
    outer.remove()
    middle.register_hook(lambda g: g.numpy() * 0)
    y.backward(ONE)
    np.testing.assert_array_equal(x.grad.numpy(), 80 * ONE)


def test_hooks_that_do_not_fit() -> None:
    x = leaf()
    with pytest.raises(AutogradError, match="register_hook"):
        tensor(X).register_hook(lambda g: None)
    handle = x.register_hook(lambda g: np.zeros(2, np.float32))
    with pytest.raises(ShapeError, match="hook's answer"):
        (x + x).backward(ONE)
    handle.remove()
    x.register_hook(lambda g: 2 * g.numpy())
    x.register_hook(lambda g: g.numpy() + 1)
    (x + x).backward(ONE)
    np.testing.assert_array_equal(x.grad.numpy(), 5 * ONE)


def test_a_saved_value_that_changed_is_an_error_that_names_the_operation() -> None:
    layer = nn.Linear(3, 4, bias=False, device="cpu")
    x, g = leaf(), np.ones((2, 4), np.float32)
    y = layer(x)
    with no_grad():
        x.add_(ONE)
    with pytest.raises(
        AutogradError,
        match=r"linear: inp: got a value changed in place .* \(version 1\), expected it .* \(version 0\)",
    ):
        y.backward(g)
    y = layer(x)
    with no_grad():
        x.detach().reshape(6).zero_()  # the same memory through another tensor
    with pytest.raises(AutogradError, match="linear: inp"):
        y.backward(g)
    y = layer(x)
    layer.weight.grad = tensor(np.ones((4, 3), np.float32)).view
    SGD([layer.weight], lr=0.1).step()
    with pytest.raises(AutogradError, match="linear: weight"):
        y.backward(g)
    y = layer(x)
    layer.load_state_dict({"weight": np.ones((4, 3), np.float32)})
    with pytest.raises(AutogradError, match="linear: weight"):
        y.backward(g)
    layer(x).backward(g)
    y = x + x  # saves nothing
    with no_grad():
        x.zero_()
    y.backward(ONE)


def test_an_output_that_backward_reads() -> None:
    attention = nn.DotProductAttention(2, 4)
    q, k, v = (
        tensor(np.random.default_rng(i).standard_normal((3, 1, 2, 4)).astype(np.float32), requires_grad=True)
        for i in range(3)
    )
    o = attention(q, k, v)
    with no_grad():
        o.zero_()
    with pytest.raises(AutogradError, match="attention: o"):
        o.backward(np.ones(o.shape, np.float32))


def test_changes_in_place_are_not_recorded_and_say_so() -> None:
    x, still = leaf(), tensor(X.copy())
    for change in (
        lambda: x.copy_(ONE),
        lambda: x.zero_(),
        lambda: (x + x).add_(ONE),
        lambda: still.copy_(x),
        lambda: still.add_(x),
    ):
        with pytest.raises(AutogradError, match="no_grad"):
            change()
    np.testing.assert_array_equal(still.numpy(), X)
    assert still.add_(ONE).copy_(still).version().count == 2
    np.testing.assert_array_equal(still.numpy(), X + 1)
    wide = tensor(np.array([1 + 2.0**-9], np.float32))
    assert tensor(np.zeros(1, np.float32), dtype="bfloat16").copy_(wide).item() == 1.0
    with pytest.raises(ShapeError, match="copy_"):
        still.copy_(np.zeros(2, np.float32))
    with pytest.raises(FormatError, match="copy_"):
        still.copy_(np.zeros((2, 3), np.int64))
