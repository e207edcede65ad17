"""What ``collect`` leaves, on the host: counts and sums that are put together over micro-batches and ranks.

Counts are added as int64, sums as float64; means and sums of squared deviations by the rule of Chan, Golub
and LeVeque (1983, Algorithms for Computing the Sample Variance), which adds what the means are apart ::

    n = n1 + n2    d = mean2 - mean1    mean = mean1 + d n2 / n    M = M1 + M2 + d^2 n1 n2 / n
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit import arrays
from fp8kit.backends.protocol.statistics import BRIEF_COUNTS, EXPONENTS
from fp8kit.errors import ShapeError
from fp8kit.formats import float64, int64
from fp8kit.ops.statistics import StatisticsSpec

Array = np.ndarray[Any, Any]
Key = tuple[str, int, str]  # kernel, call, name
Sums = dict[Key, Array]
_WORDS = {int64: np.dtype(np.int64), float64: np.dtype(np.float64)}
_BYTES = np.dtype(np.uint8)


def unpacked(spec: StatisticsSpec, record: Any) -> Sums:
    """Returns the parts of a record by (kernel, call, name): int64 or float64 (n,), perhaps views of it.
    ``record``: the uint8 array of a spec, or bytes, on the host. ShapeError for another size, FormatError for
    no array."""
    raw = _words(spec, record)
    words = {dtype: raw.view(own) for dtype, own in _WORDS.items()}
    return {(s.kernel, s.call, s.name): words[s.dtype][s.start : s.start + s.many] for s in spec.sections}


def numbers(spec: StatisticsSpec, record: Any) -> dict[Key, list[Any]]:
    """``unpacked`` as lists of int and float."""
    raw = _words(spec, record)
    words = {dtype: raw.view(own).tolist() for dtype, own in _WORDS.items()}
    return {(s.kernel, s.call, s.name): words[s.dtype][s.start : s.start + s.many] for s in spec.sections}


def _words(spec: StatisticsSpec, record: Any) -> Array:
    """Returns the bytes of a record, as many as a spec's."""
    wanted = f"{spec.nbytes} bytes on the host, as collect gives them for these needs"
    if type(record) is np.ndarray and record.dtype == _BYTES and record.flags.c_contiguous:
        raw = record
    elif isinstance(record, bytes):
        raw = np.frombuffer(record, np.uint8)
    else:
        view = arrays.as_view(record, "statistics", "sums")
        if view.device.kind != "cpu":
            raise ShapeError("statistics", "sums", f"an array on {view.device}", wanted)
        if view.nbytes != spec.nbytes:  # before it is copied
            raise ShapeError("statistics", "sums", f"{view.nbytes} bytes", wanted)
        raw = np.array(view.numpy(), order="C")
    if raw.nbytes != spec.nbytes:
        raise ShapeError("statistics", "sums", f"{raw.nbytes} bytes", wanted)
    return raw.reshape(-1).view(np.uint8)


def elements(counts: Any) -> int:
    """Returns how many values a tensor's counts are of."""
    return int(counts[0] if len(counts) == BRIEF_COUNTS else sum(counts[:EXPONENTS]))


def finite(counts: Array) -> int:
    """Returns how many of them are finite; NaN, Inf and -Inf are counted last."""
    return elements(counts) - int(counts[-3:].sum())


def merged(spec: StatisticsSpec, a: Any, b: Any) -> Array:
    """Returns the record of two tensors together, uint8, of the records of each, on the host."""
    made = np.empty(spec.nbytes, np.uint8)
    out = unpacked(spec, made)
    first, second = unpacked(spec, a), unpacked(spec, b)
    for key, total in out.items():
        kernel, _, name = key
        one, other = first[key], second[key]
        if name == "moments":
            many = [finite(sums["tensor", 0, "counts"]) for sums in (first, second)]
            total[:] = _moments(one, other, *many)
        elif name == "ratios":
            total[:] = np.maximum(one, other)
        else:
            total[:] = one + other
            if (kernel, name) == ("cast", "sums"):
                total[-2:] = _scales(
                    one, other, *(int(s[(*key[:2], "counts")].sum()) for s in (first, second))
                )
    return made


def _scales(one: Array, other: Array, many: int, more: int) -> tuple[float, float]:
    """Returns the least and the largest scale_inv of two casts; of no elements there are none."""
    if not many or not more:
        return tuple((one if many else other)[-2:])
    return min(one[-2], other[-2]), max(one[-1], other[-1])


def _moments(one: Array, other: Array, many: int, more: int) -> Array:
    """Moments of two tensors together."""
    if not many or not more:
        return one if many else other
    total = one + other
    total[:3] = min(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2])
    apart, share = other[6] - one[6], more / (many + more)
    total[6] = one[6] + apart * share
    total[7] = one[7] + other[7] + apart * apart * many * share
    return total
