"""The contract of permutations: rows of tokens to places of their own, and back.

``row_map``: int32 (R, 2), for each permuted row its (token, slot): the slot is the column of that row's
probability in ``probs``. A row with a token or a slot out of range, as (-1, -1), is empty. A (token, slot)
stands in at most one row.
"""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel


class Permutations(Protocol):
    """Gathers of rows, sums of rows, and the same of their probabilities."""

    @kernel(writes="out", exact=True)
    def permute_rows(
        self, x: ArrayView, row_map: ArrayView, probs: ArrayView | None, out: ArrayView, stream: int
    ) -> None:
        """out[r] = x[token] * probs[token, slot], without ``probs`` x[token]; 0 where row r is empty. x: h
        (T, N); probs: h (T, S), of any type; out: (R, N), of x's type. Without ``probs`` any slot will do."""

    @kernel(writes="out", exact=True, ordered=True)
    def unpermute_rows(
        self, x: ArrayView, row_map: ArrayView, probs: ArrayView | None, out: ArrayView, stream: int
    ) -> None:
        """out[token] = sum of x[r] * probs[token, slot], without ``probs`` of x[r], over the token's rows r,
        in their order: each product is rounded to float32, then added in float32. x: h (R, N); probs: h
        (T, S), of any type; out: (T, N), of x's type. Without ``probs`` any slot will do."""

    @kernel(writes="out", exact=True)
    def permute_probs(self, probs: ArrayView, row_map: ArrayView, out: ArrayView, stream: int) -> None:
        """out[r] = probs[token, slot]; 0 where row r is empty. probs: h (T, S); out: (R,), of its type."""

    @kernel(writes="out", ordered=True)
    def unpermute_probs(
        self, rows: ArrayView, x: ArrayView | None, row_map: ArrayView, out: ArrayView, stream: int
    ) -> None:
        """out[token, slot] = the sum over columns of rows[r] * x[token], without ``x`` rows[r]; 0 where there
        is no row. rows: h (R, N), without ``x`` (R, 1); x: (T, N), of its type; out: h (T, S), any type."""

    @kernel(writes="row_map sizes counts", exact=True)
    def expert_rows(
        self,
        routing: ArrayView,
        row_map: ArrayView,
        sizes: ArrayView,
        counts: ArrayView,
        align: int,
        stream: int,
    ) -> None:
        """The map of tokens to experts. routing: a mask, uint8 (T, E), 1 where the token goes to the expert,
        whose slot is the expert; or indices, int32 (T, k), of experts, whose slot is the column; one out of
        [0, E) is none. Rows lie expert after expert, and within one in the order of (token, slot); each
        expert begins at a multiple of ``align``. row_map: int32 (R, 2), rows in between and behind empty,
        those beyond R dropped. counts: int32 (E,), what was routed to each expert; sizes: int32 (E,), the
        rows of each in the map, padding with it, cut off at R."""
