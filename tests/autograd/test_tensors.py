"""Tensors and user-defined functions: whose memory a gradient is, what leaves the tape, and what is
refused."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest

import fp8kit as fk
from fp8kit import arrays, captured, formats
from fp8kit.autograd import Context, Function, Tensor, tensor
from fp8kit.errors import AutogradError, FormatError, ShapeError

X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Double(Function):
    """Its gradient comes in Fortran order."""

    @staticmethod
    def forward(context: Context, *inputs: Any) -> Any:
        return inputs[0] * 2

    @staticmethod
    def backward(context: Context, *cotangents: Any) -> Any:
        return np.asfortranarray(cotangents[0] * 2)


def test_a_gradient_never_is_the_users_memory() -> None:
    given = np.ones_like(X)
    leaf = tensor(X.copy(), requires_grad=True)
    leaf.backward(given)
    a, b = (tensor(X.copy(), requires_grad=True) for _ in "ab")
    (a + b).backward(given)
    assert len({given.ctypes.data, *[t.grad.ptr for t in (leaf, a, b)]}) == 4
    for t in (leaf, a, b):
        np.testing.assert_array_equal(t.grad.numpy(), given)


def test_gradients_of_any_layout_reach_any_node() -> None:
    x = tensor(X.reshape(6).copy(), requires_grad=True)
    Double.apply(x.reshape(2, 3)).backward(X)
    np.testing.assert_array_equal(x.grad.numpy(), 2 * X.reshape(6))


def test_a_gradient_that_the_user_set_is_added_to() -> None:
    x = tensor(X.copy(), requires_grad=True)
    x.grad = X.copy()  # any array
    Double.apply(x).backward(X)
    np.testing.assert_array_equal(x.grad.numpy(), 3 * X)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_sum_with_an_array_stays_on_the_tape(swapped: bool) -> None:
    x = tensor(X.copy(), requires_grad=True)
    y = X + x if swapped else x + X
    assert isinstance(y, Tensor)
    np.testing.assert_array_equal(y, 2 * X)
    y.backward(X)
    np.testing.assert_array_equal(x.grad.numpy(), X)
    with pytest.raises(TypeError):
        _ = 1j + x if swapped else x + 1j


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("number", [3, -0.1, np.float64(0.1), np.float32(0.1), np.int64(2), 1e300, np.nan])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sum_with_a_number(number: Any, swapped: bool, dtype: str) -> None:
    """The number in the tensor's dtype, the sum rounded once; the gradient is what comes."""
    x = tensor(X.copy(), requires_grad=True, dtype=dtype)
    y = number + x if swapped else x + number
    kind = formats.dtype(dtype).numpy
    with np.errstate(over="ignore"):
        rounded = np.asarray(number, kind).astype(np.float32)
    want = (X.astype(kind).astype(np.float32) + rounded).astype(kind)
    np.testing.assert_array_equal(y.numpy().astype(np.float32), want.astype(np.float32))
    y.backward(X.astype(kind))
    np.testing.assert_array_equal(x.grad.numpy().astype(np.float32), X.astype(kind).astype(np.float32))


def test_a_number_that_no_float_is() -> None:
    with pytest.raises(FormatError, match=r"add: other: got 1000.*expected a number that a float can be"):
        _ = tensor(X.copy()) + 10**400


def test_one_element_is_a_float() -> None:
    assert float(tensor(np.float32([[1.5]]))) == 1.5
    with pytest.raises(ShapeError, match=r"item: tensor: got shape \(2, 3\), expected one element"):
        float(tensor(X.copy()))


def test_a_part_of_a_tensor_says_what_to_use() -> None:
    with pytest.raises(TypeError, match=r"^Tensor has no operator \[\]; .*\.numpy\(\)"):
        _ = tensor(X.copy())[0]


def test_copies_own_their_memory_and_pickling_is_refused() -> None:
    x = tensor(X.copy(), requires_grad=True)
    other = copy.deepcopy(x)
    x.data[...] = -1
    np.testing.assert_array_equal(other, X)
    assert other.requires_grad
    with pytest.raises(AutogradError, match="detach"):
        copy.deepcopy(x + X)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(x)


def test_a_missing_or_wrong_backward_is_named() -> None:
    class Silent(Function):
        @staticmethod
        def forward(context: Context, *inputs: Any) -> Any:
            raise AssertionError("must not run")

    class Wrong(Double):
        @staticmethod
        def backward(context: Context, *cotangents: Any) -> Any:
            return cotangents[0].T

    x = tensor(X.copy(), requires_grad=True)
    with pytest.raises(AutogradError, match="Silent: has no backward, but input 1"):
        Silent.apply(3, x)
    with pytest.raises(
        ShapeError,
        match=r"Wrong.backward: gradient 0: got float32 \(3, 2\) on cpu, expected float32 \(2, 3\)",
    ):
        Wrong.apply(x).backward(X)
    assert x.grad is None


def test_a_chain_of_many_nodes_is_walked_and_freed() -> None:
    x = tensor(np.ones(1, np.float32), requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y.reshape(1)
    y.backward(arrays.zeros((1,), x.dtype, x.device))
    del y
    np.testing.assert_array_equal(x.grad.numpy(), [0])


@pytest.mark.parametrize(
    ("symbol", "compute"),
    {
        "-": lambda t, x: t - x,
        "*": lambda t, x: t * x,
        "/": lambda t, x: t / x,
        "**": lambda t, x: t**x,
        "@": lambda t, x: t @ x,
    }.items(),
    ids=["minus", "times", "over", "power", "product"],
)
def test_operators_that_the_tape_does_not_have_say_what_to_use(symbol: str, compute: Any) -> None:
    """With numbers, arrays and tensors, on either side: nothing leaves the tape unseen."""
    t, array = tensor(np.ones((2, 2), np.float32), requires_grad=True), np.full((2, 2), 3, np.float32)
    for other in (2, array, t):
        for pair in ((t, other), (other, t)):
            with pytest.raises(
                TypeError,
                match=rf"^Tensor has no operator {re.escape(symbol)}; .*fk\.nn .*fk\.Function .*\.numpy\(\)",
            ):
                compute(*pair)
    quantized = fk.quantize(array, fk.E4M3)
    with pytest.raises(FormatError, match=r"matmul: self: got an fp8kit\.Tensor of float32"):
        _ = t @ quantized
    assert np.mean(t.numpy() @ array) == 6.0


def test_attributes_that_a_tensor_does_not_have_say_what_to_use() -> None:
    t = tensor(np.ones(2, np.float32))
    for name in ("mean", "T", "sum"):
        with pytest.raises(
            AttributeError, match=rf"^Tensor has no attribute '{name}'; the tape has what fk\.nn computes"
        ):
            getattr(t, name)
    with pytest.raises(AttributeError, match=r"^Tensor has no attribute '_nothing'$"):
        _ = t._nothing
    assert not hasattr(t, "__array_interface__")


@pytest.mark.gpu
def test_a_gpu_converts_what_goes_there():
    host = np.array([1.0, 2.0**-140, 3e38, 1e300, np.nan, 1 + 2.0**-9], np.float64)
    with np.errstate(over="ignore"):
        single = host.astype(np.float32)
    for dtype in ("float32", "bfloat16", "float16"):
        for values in (host, single):
            got = fk.tensor(values, dtype=dtype, device="cuda").numpy().astype(np.float32)
            np.testing.assert_array_equal(
                got, fk.tensor(values, dtype=dtype).numpy().astype(np.float32), dtype
            )


@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (40, 30), (4, 3, 200)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_repr_prints_the_values(shape, dtype, device):
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape) / 8
    made = fk.tensor(values.astype(formats.dtype(dtype).numpy), device=device)
    host = made.numpy() if dtype == "int64" else made.numpy().astype(np.float32)
    precision = 4 if "16" in dtype else 8
    text = np.array2string(host, separator=", ", prefix="fp8kit.Tensor(", precision=precision)
    assert repr(made) == f"fp8kit.Tensor({text}, shape={shape}, {dtype}, {made.device})"
    transposed = fk.Tensor(made.view.transpose(*reversed(range(len(shape)))))
    text = np.array2string(host.T, separator=", ", prefix="fp8kit.Tensor(", precision=precision)
    assert repr(transposed).startswith(f"fp8kit.Tensor({text}, shape=")
    with captured.capture():
        assert repr(made).startswith("fp8kit.Tensor(..., shape=")
    if dtype != "int64":
        made.requires_grad = True
        assert repr(made).endswith(", requires_grad=True)")
