"""Between sequences that lie one after the other and a padded batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp8kit.arrays import ArrayView


def unpack_sequences(x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int) -> None:
    """``y[b, i] = x[starts[b] + i]`` within each sequence, 0 beyond; see ``protocol.Kernels.unpack_sequences``."""
    source, target = x.numpy(), y.numpy()
    target[...] = 0
    for batch, start, length in _sequences(lengths, starts):
        kept = min(length, target.shape[1])
        target[batch, :kept] = source[start : start + kept]


def pack_sequences(x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int) -> None:
    """``y[starts[b] + i] = x[b, i]``, 0 in rows of no sequence; see ``protocol.Kernels.pack_sequences``."""
    source, target, longest = x.numpy(), y.numpy(), x.shape[1]
    target[...] = 0
    for batch, start, length in _sequences(lengths, starts):
        target[start : start + length] = np.nan
        target[start : start + min(length, longest)] = source[batch, :length]


def _sequences(lengths: ArrayView, starts: ArrayView) -> Iterator[tuple[int, int, int]]:
    """(batch, first row, length) of each sequence."""
    sums, first = lengths.numpy(), starts.numpy()
    for batch in range(len(sums) - 1):
        yield batch, int(first[batch]), int(sums[batch + 1] - sums[batch])
