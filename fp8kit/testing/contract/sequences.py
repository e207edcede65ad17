"""Packing and unpacking, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fp8kit.testing.contract import Arguments, KernelTest, Options, Results, Sampler, typed
from fp8kit.testing.contract.running_sums import LENGTH, LENGTHS_AND_STARTS, TOKENS, bad_cases, running

Sums = tuple[int, ...]


def sequences(
    s: Sampler, m: int, n: int, lengths: Sums = (), starts: Sums = (), longest: int = 0, pack: bool = False
) -> Arguments:
    """``m`` tokens of ``n`` features, and a batch of at most ``longest`` of each sequence. The running sums
    are one array where nothing lies between the sequences. By default two of half of ``m`` tokens each."""
    lengths, longest = lengths or (0, m // 2, m // 2 * 2), longest or m // 2
    tokens, batch, sums = (m, n), (len(lengths) - 1, longest, n), s.sums(*lengths)
    given, made = (batch, tokens) if pack else (tokens, batch)
    return {
        "x": s.normal(*given),
        "y": s.output(*made),
        "lengths": sums,
        "starts": s.sums(*starts) if starts not in ((), lengths) else sums,
    }


def unpack_sequences_oracle(a: Any) -> Results:
    """Sequence by sequence."""
    y = np.zeros_like(a.y)
    for b, length in enumerate(np.diff(a.lengths)):
        part = a.x[a.starts[b] : a.starts[b] + min(length, y.shape[1])]
        y[b, : len(part)] = part
    return {"y": y}


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
        sequences,
        unpack_sequences_oracle,
        {**_CASES, **bad_cases(_BAD, LENGTHS_AND_STARTS)},
    ),
    KernelTest(
        "pack_sequences",
        functools.partial(sequences, pack=True),
        pack_sequences_oracle,
        {**_CASES, **bad_cases(_BAD, LENGTHS_AND_STARTS, "lost")},
    ),
)
