"""The contract of sequences that lie one after the other, and the way to padded batches and back."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel


class Sequences(Protocol):
    """Sequences one after the other, and padded batches."""

    @kernel(writes="y", exact=True)
    def unpack_sequences(
        self, x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int
    ) -> None:
        """Sequences that lie one after the other, made a padded batch: y[b, i] = x[starts[b] + i] for i <
        lengths[b + 1] - lengths[b], 0 beyond. x: h (t, n); y: h (b, s, n); lengths, starts: int32 (b + 1,),
        running sums (of true and of padded lengths; the same array where nothing lies between the sequences).

        Here and in every kernel that reads running sums from a device: no value in them makes a kernel read
        or write outside the arrays; of values that are no running sums the results have no meaning."""

    @kernel(writes="y", exact=True)
    def pack_sequences(
        self, x: ArrayView, y: ArrayView, lengths: ArrayView, starts: ArrayView, stream: int
    ) -> None:
        """The way back: y[starts[b] + i] = x[b, i], 0 in rows that belong to no sequence, NaN in rows of a
        sequence beyond its first s. x: h (b, s, n); y: h (t, n)."""
