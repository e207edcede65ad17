"""Comparing results with an oracle, and saying where they differ first.

The tolerance is always a formula: one rounding to the stored dtype (``epsilon(dtype) * |reference|``, plus
the smallest subnormal) and ``slack``, the error that the arithmetic may have made, which the caller derives
from the number of terms and their magnitude. A slack of -Inf or NaN allows no error at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fp8kit import formats
from fp8kit.errors import FormatError
from fp8kit.formats import DType

Array = np.ndarray[Any, Any]
ROUNDOFF = 2.0**-24  # float32: the largest relative error of one operation
# distance from 1 to the next value, and the smallest positive value
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_TINY = {"float64": 2.0**-1074, "float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}


def epsilon(dtype: object) -> float:
    """Distance from 1 to the next larger number of a floating dtype; FormatError for another."""
    kind = formats.dtype(dtype)
    if not kind.floating:
        raise FormatError("epsilon", "dtype", kind.name, ", ".join(_EPSILON))
    return _EPSILON[kind.name]


def sum_slack(magnitude: Any, terms: Any) -> Any:
    """Bound on the float32 error of a sum of ``terms`` products whose absolute values add up to
    ``magnitude``.

    ``magnitude`` and ``terms``: numbers, or arrays, whose shape the bound then has too; there is no error to
    raise. The bound is ``terms * u * magnitude`` with u = 2**-24 (Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, eq. 3.5), with four further operations for what is done before and after.
    """
    return (terms + 4) * ROUNDOFF * magnitude


def assert_nowhere(what: str, wrong: Array, said: Callable[[tuple[int, ...]], str]) -> None:
    """AssertionError where ``wrong``, of any shape, is True: how often, the first coordinate, and what is
    ``said`` of it."""
    if wrong.any():
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
        count = f"{int(wrong.sum())} of {wrong.size} differ"
        raise AssertionError(f"{what}: {count}, first at {at}: {said(at)}")


def errors(got: Any, reference: Any, dtype: DType | str, slack: Any = 0.0) -> tuple[Array, Array]:
    """(error, the largest that is allowed) of every element, as ``assert_close`` takes them; the error is Inf
    where NaN or Inf do not agree. Integers, FP8 codes among them, are allowed the slack alone."""
    kind = formats.dtype(dtype)
    g, r = np.asarray(got).astype(np.float64), np.asarray(reference, np.float64)
    finite = np.isfinite(r)
    with np.errstate(invalid="ignore"):
        step, tiny = _EPSILON.get(kind.name, 0.0), _TINY.get(kind.name, 0.0)
        limit = step * np.abs(np.where(finite, r, 0)) + tiny + slack
        apart = np.where((g == r) | (np.isnan(g) & np.isnan(r)), 0, np.inf)
        found = np.where(finite, np.abs(g - np.where(finite, r, 0)), apart)
    return np.nan_to_num(found, nan=np.inf, posinf=np.inf), np.maximum(limit, 0)


def assert_close(what: str, got: Any, reference: Any, dtype: DType | str, slack: Any = 0.0) -> None:
    """AssertionError with the first coordinate where ``|got - reference| > epsilon(dtype) * |reference| +
    smallest(dtype) + slack``.

    ``got``: array on the host; ``reference``: float64 array of the same shape (AssertionError for another);
    ``slack``: number or array that broadcasts to it. NaN and Inf must agree exactly.
    """
    g, r = np.asarray(got), np.asarray(reference, np.float64)
    if g.shape != r.shape:
        raise AssertionError(f"{what}: shape {g.shape}, expected {r.shape}")
    error, limit = errors(g, r, dtype, slack)

    def said(at: tuple[int, ...]) -> str:
        allowed = np.broadcast_to(limit, r.shape)[at]
        return f"got {float(g[at])!r}, expected {float(r[at])!r} +- {allowed:.3g}"

    assert_nowhere(what, (error > 0) & ~(error <= limit), said)  # a slack of NaN allows nothing


def same_values(got: Array, expected: Array) -> Array:
    """Returns where two arrays of one dtype have the same bits; any NaN stands for any other."""
    bits = f"u{expected.dtype.itemsize}"
    same = np.ascontiguousarray(got).view(bits) == np.ascontiguousarray(expected).view(bits)
    if expected.dtype.kind not in "fV" and expected.dtype.name != "bfloat16":
        return np.asarray(same)
    with np.errstate(over="ignore"):  # float64 beyond float32 is no NaN
        return np.asarray(same | (np.isnan(got.astype(np.float32)) & np.isnan(expected.astype(np.float32))))


def assert_same_values(what: str, got: Array, expected: Array) -> None:
    """``assert_same_bits`` where any NaN stands for any other."""
    if got.shape == expected.shape and got.dtype == expected.dtype:
        got = np.where(same_values(got, expected), expected, got)
    assert_same_bits(what, got, expected)


def assert_same_bits(what: str, got: Any, expected: Any) -> None:
    """AssertionError with the first coordinate where ``got`` and ``expected``, arrays on the host, differ in
    any bit (NaN payloads count); also for another shape or dtype."""
    g, e = np.ascontiguousarray(got), np.ascontiguousarray(expected)
    if g.shape != e.shape or g.dtype != e.dtype:
        raise AssertionError(f"{what}: {g.dtype} {g.shape}, expected {e.dtype} {e.shape}")
    ours, right = (x.view(f"u{x.dtype.itemsize}") for x in (g, e))

    def said(at: tuple[int, ...]) -> str:
        return f"got {g[at]!r} ({ours[at]:#x}), expected {e[at]!r} ({right[at]:#x})"

    assert_nowhere(what, ours != right, said)


def relative_error(got: Any, reference: Any) -> float:
    """``||got - reference|| / ||reference||`` in float64 (NaN where either has one). Arrays of one shape on
    the host; NumPy's ValueError for shapes that do not broadcast."""
    r = np.asarray(reference, np.float64)
    return float(np.linalg.norm(np.asarray(got, np.float64) - r) / np.linalg.norm(r))
