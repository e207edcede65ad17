"""Packing and unpacking, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8kit.testing.contract import Arguments, KernelTest, Options, Results, typed
from fp8kit.testing.contract.running_sums import LENGTH, LENGTHS_AND_STARTS, TOKENS, bad_cases, running
from fp8kit.testing.contract.sampler import Sampler

Sums = tuple[int, ...]


def _places(s: Sampler, m: int, lengths: Sums, starts: Sums) -> tuple[Arguments, int, int]:
    """The running sums, one array where nothing lies between the sequences; how many sequences there are, and
    how many places for the tokens of each. By default two of half of ``m`` tokens each."""
    lengths = lengths or (0, m // 2, m // 2 * 2)
    sums = s.sums(*lengths)
    return (
        {"lengths": sums, "starts": s.sums(*starts) if starts not in ((), lengths) else sums},
        len(lengths) - 1,
        m // 2,
    )


def unpack_sequences(
    s: Sampler, m: int, n: int, lengths: Sums = (), starts: Sums = (), longest: int = 0
) -> Arguments:
    """``m`` tokens of ``n`` features."""
    places, count, half = _places(s, m, lengths, starts)
    return {"x": s.normal(m, n), "y": s.output(count, longest or half, n), **places}


def unpack_sequences_oracle(a: Any) -> Results:
    """Sequence by sequence."""
    y = np.zeros_like(a.y)
    for b, length in enumerate(np.diff(a.lengths)):
        part = a.x[a.starts[b] : a.starts[b] + min(length, y.shape[1])]
        y[b, : len(part)] = part
    return {"y": y}


def pack_sequences(
    s: Sampler, m: int, n: int, lengths: Sums = (), starts: Sums = (), longest: int = 0
) -> Arguments:
    """The way back."""
    places, count, half = _places(s, m, lengths, starts)
    return {"x": s.normal(count, longest or half, n), "y": s.output(m, n), **places}


def pack_sequences_oracle(a: Any) -> Results:
    """Sequence by sequence; NaN for tokens that have no place in the batch."""
    y = np.zeros_like(a.y)
    for b, length in enumerate(np.diff(a.lengths)):
        first, kept = a.starts[b], min(length, a.x.shape[1])
        y[first : first + length] = np.nan
        y[first : first + kept] = a.x[b, :kept]
    return {"y": y}


def _case(lengths: Sums, gaps: Sums, rest: int, longest: int, features: int) -> Options:
    """True lengths, gaps after each sequence, tokens after the last one, padded length, features."""
    starts = running(length + gap for length, gap in zip(lengths, gaps, strict=True))
    sums = {"lengths": running(lengths), "starts": starts}
    return {"m": starts[-1] + rest, "n": features, "longest": longest, **sums}


_CASES = typed(
    {
        "plain": _case((5, 17, 3), (0, 0, 0), 0, 17, 24),
        "empty-sequences": _case((0, 4, 0, 9, 0), (0, 0, 0, 0, 0), 0, 12, 7),
        "gaps": _case((5, 1, 8), (3, 15, 0), 6, 8, 33),
        "one": _case((40,), (0,), 0, 64, 512),
        "too-long": _case((5, 9, 3), (0, 1, 0), 2, 6, 8),
        "nothing": _case((0, 0), (0, 2), 3, 4, 16),
    }
)
_BAD: Options = {"m": TOKENS, "n": 24, "longest": LENGTH}

TESTS = (
    KernelTest(
        "unpack_sequences",
        unpack_sequences,
        unpack_sequences_oracle,
        {**_CASES, **bad_cases(_BAD, LENGTHS_AND_STARTS)},
    ),
    KernelTest(
        "pack_sequences",
        pack_sequences,
        pack_sequences_oracle,
        {**_CASES, **bad_cases(_BAD, LENGTHS_AND_STARTS, "lost")},
    ),
)
