"""The contract of the embedding."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel


class Embeddings(Protocol):
    """Embedding and its gradient."""

    @kernel(writes="out", exact=True)
    def embedding_fwd(self, ids: ArrayView, table: ArrayView, out: ArrayView, stream: int) -> None:
        """out[i] = table[ids[i]]. ids: int32 or int64 (M,), in range (an id out of range gives a row of NaN);
        table: h (V, N); out: h (M, N)."""

    @kernel(writes="dtable", exact=True, ordered=True)
    def embedding_bwd(self, ids: ArrayView, dout: ArrayView, dtable: ArrayView, stream: int) -> None:
        """dtable[v] = sum of dout[i] over ids[i] == v, in the order of i, in float32; rows that no id names
        are written as 0."""
