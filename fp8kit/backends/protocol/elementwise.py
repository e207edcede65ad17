"""The contract of the small things: copies, sums, the state of dropout."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView


class Elementwise(Protocol):
    """Copies, sums, the state of dropout."""

    def copy(self, x: ArrayView, y: ArrayView, stream: int) -> None:
        """y = x converted to y's dtype (h, float64 through float32 to h, or uint8 to uint8). Equal shapes of
        at most 5 dimensions; both may be strided."""

    def add(self, a: ArrayView, b: ArrayView, out: ArrayView, stream: int) -> None:
        """out = a + b. h, equal sizes; b may have fewer elements: then a's size is a multiple of b's, and b
        repeats (leading broadcast)."""

    def sum_rows(self, x: ArrayView, out: ArrayView, workspace: ArrayView | None, stream: int) -> None:
        """out = column sums of x. x: h (M, N); out: h (N,). Workspace as ``column_sum_workspace``."""

    def rng_next_(self, state: ArrayView, out: ArrayView, stream: int) -> None:
        """out = state; state[1] += 1. Both int64 [2]: hands one operation its own (seed, offset) without the
        host."""
