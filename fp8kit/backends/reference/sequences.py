"""Between sequences that lie one after the other and a padded batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp8kit.arrays import ArrayView
from fp8kit.backends.reference._numpy import Array


def unpack_sequences(x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int) -> None:
    """``y[b, i] = x[starts[b] + i]`` within each sequence, 0 beyond; see
    ``protocol.Kernels.unpack_sequences``."""
    source, target = x.numpy(), y.numpy()
    target[...] = 0
    for batch, start, length in _sequences(lengths, starts, len(source)):
        kept = min(length, target.shape[1])
        target[batch, :kept] = source[start : start + kept]


def pack_sequences(x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int) -> None:
    """``y[starts[b] + i] = x[b, i]``, 0 in rows of no sequence; see ``protocol.Kernels.pack_sequences``."""
    source, target, longest = x.numpy(), y.numpy(), x.shape[1]
    target[...] = 0
    for batch, start, length in _sequences(lengths, starts, len(target)):
        target[start : start + length] = np.nan
        target[start : start + min(length, longest)] = source[batch, :length]


def lengths_of(sums: ArrayView) -> Array:
    """Lengths by running sums, at least 0 whatever those hold: int64 (b,)."""
    return np.diff(sums.numpy().astype(np.int64)).clip(0)


def _sequences(lengths: ArrayView, starts: ArrayView, tokens: int) -> Iterator[tuple[int, int, int]]:
    """(batch, first row, length) of each sequence, within the rows that there are."""
    first = starts.numpy().clip(0, tokens)
    for batch, length in enumerate(lengths_of(lengths)):
        yield batch, int(first[batch]), min(int(length), tokens - int(first[batch]))
