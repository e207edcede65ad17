"""Tokens to rows and back, against float64: values, gradients, refusals, probabilities of other types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8kit import formats
from fp8kit.autograd import apply, tensor
from fp8kit.errors import ArgumentError, FormatError, ShapeError
from fp8kit.ops.permute import PermuteSpec, UnpermuteSpec, permute, unpermute
from fp8kit.testing import assert_close, assert_same_bits, check_grads, sum_slack

RNG = np.random.default_rng(3)
TOKENS, SLOTS, COLUMNS = 5, 3, 7
# token 1 has no row, row 3 no token; two tokens have several rows, not in the order of their slots
MAP = np.array([[4, 2], [0, 0], [4, 0], [-1, -1], [2, 1], [4, 1], [3, 2], [0, 2]], np.int32)
FILLED = [(r, token, slot) for r, (token, slot) in enumerate(MAP.tolist()) if token >= 0]


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def permuted(x: Any, probs: Any = None) -> dict[str, Any]:
    spec = PermuteSpec(probs is not None)
    return apply(permute, spec, {"x": x, "row_map": tensor(MAP), "probs": probs})


def unpermuted(x: Any, probs: Any = None) -> Any:
    spec = UnpermuteSpec(TOKENS if probs is None else -1)
    return apply(unpermute, spec, {"x": x, "row_map": tensor(MAP), "probs": probs})["y"]


def test_rows_and_probabilities_go_where_the_map_says() -> None:
    x, probs = normal(TOKENS, COLUMNS), normal(TOKENS, SLOTS)
    rows, row_probs = np.zeros((len(MAP), COLUMNS), np.float32), np.zeros(len(MAP), np.float32)
    for r, token, slot in FILLED:
        rows[r], row_probs[r] = x[token], probs[token, slot]
    got = permuted(tensor(x), tensor(probs))
    assert_same_bits("y", got["y"].numpy(), rows)
    assert_same_bits("row_probs", got["row_probs"].numpy(), row_probs)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("weights", [None, "float32", "bfloat16"])
def test_sums_of_rows_against_float64(kind: str, weights: str | None) -> None:
    x = tensor(normal(len(MAP), COLUMNS), requires_grad=True, dtype=kind)
    probs = None if weights is None else tensor(normal(TOKENS, SLOTS), requires_grad=True, dtype=weights)
    y, g = unpermuted(x, probs), tensor(normal(TOKENS, COLUMNS), dtype=kind)
    y.backward(g)
    rows, cotangent = x.numpy().astype(np.float64), g.numpy().astype(np.float64)
    factors = np.ones((TOKENS, SLOTS)) if probs is None else probs.numpy().astype(np.float64)
    total, size = np.zeros((2, TOKENS, COLUMNS))
    dx, dprobs, magnitude = np.zeros((len(MAP), COLUMNS)), *np.zeros((2, TOKENS, SLOTS))
    for r, token, slot in FILLED:
        total[token] += factors[token, slot] * rows[r]
        size[token] += np.abs(factors[token, slot] * rows[r])
        dx[r] = factors[token, slot] * cotangent[token]
        dprobs[token, slot] = rows[r] @ cotangent[token]
        magnitude[token, slot] = np.abs(rows[r]) @ np.abs(cotangent[token])
    assert_close("y", y.numpy(), total, formats.dtype(kind), sum_slack(size, SLOTS + 1))
    assert_close("dx", x.grad.numpy(), dx, formats.dtype(kind), 2.0**-24 * np.abs(dx))
    if probs is not None:
        slack = sum_slack(magnitude, COLUMNS + 1)
        assert_close("dprobs", probs.grad.numpy(), dprobs, formats.dtype(probs.dtype.name), slack)


def test_gradients_against_differences() -> None:
    x, rows, probs = normal(TOKENS, COLUMNS), normal(len(MAP), COLUMNS), normal(TOKENS, SLOTS)
    check_grads(lambda a: permuted(a)["y"], [x])
    check_grads(lambda a, p: permuted(a, p)["y"], [x, probs])  # nothing comes back to the probabilities
    check_grads(lambda a, p: permuted(a, p)["row_probs"], [x, probs])
    check_grads(unpermuted, [rows])
    check_grads(unpermuted, [rows, probs])


def test_a_sum_runs_in_the_order_of_the_rows() -> None:
    """1 + 2^24 - 2^24 is 0 in float32, and every other order gives 1."""
    x, row_map = np.array([[1.0], [2.0**24], [-(2.0**24)]], np.float32), np.array([[0, 2], [0, 0], [0, 1]])
    inputs = {"x": tensor(x), "row_map": tensor(row_map.astype(np.int32))}
    assert apply(unpermute, UnpermuteSpec(1), inputs)["y"].numpy().tolist() == [[0.0]]


def test_refusals() -> None:
    x, probs = tensor(normal(TOKENS, COLUMNS)), tensor(normal(TOKENS, SLOTS))
    far = MAP.copy()
    far[2, 0] = TOKENS
    beside = MAP.copy()
    beside[2, 1] = SLOTS
    rows = tensor(normal(len(MAP), COLUMNS))
    wrong: list[tuple[Any, str, Any, dict[str, Any]]] = [
        (ShapeError, "permute: x: got", permute, {"x": tensor(normal(3)), "row_map": tensor(MAP)}),
        (FormatError, "permute: x: got int32", permute, {"x": tensor(MAP), "row_map": tensor(MAP)}),
        (FormatError, "permute: row_map: got int64", permute, {"x": x, "row_map": tensor(MAP.astype(int))}),
        (ShapeError, "unpermute: row_map: got", unpermute, {"x": x, "row_map": tensor(MAP), "probs": probs}),
        (ShapeError, "unpermute: probs: missing", unpermute, {"x": rows, "row_map": tensor(MAP)}),
        (ArgumentError, "tokens from -1 to 5", permute, {"x": x, "row_map": tensor(far)}),
        (
            ArgumentError,
            r"slots from -1 to 3, expected slots in \[0, 3\), the columns of the probabilities, or -1",
            unpermute,
            {"x": rows, "row_map": tensor(beside), "probs": probs},
        ),
    ]
    for error, said, operation, inputs in wrong:
        with pytest.raises(error, match=said):
            apply(operation, PermuteSpec() if operation is permute else UnpermuteSpec(), inputs)


def test_no_tokens_and_no_rows() -> None:
    nothing = tensor(np.zeros((0, 2), np.int32))
    for tokens in (0, 2):
        x = tensor(normal(tokens, 3), requires_grad=True)
        y = apply(permute, PermuteSpec(), {"x": x, "row_map": nothing})["y"]
        back = apply(unpermute, UnpermuteSpec(tokens), {"x": y, "row_map": nothing})["y"]
        back.backward(normal(tokens, 3))
        assert not back.numpy().any()
        assert not x.grad.numpy().any()
        assert y.shape == (0, 3)
