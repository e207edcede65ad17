"""The contract of the small things: copies, sums, the state of dropout."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel, measured, workspace_of


class Elementwise(Protocol):
    """Copies, sums, the state of dropout."""

    @kernel(writes="y", exact=True)
    def copy(self, x: ArrayView, y: ArrayView, stream: int) -> None:
        """y = x converted to y's dtype (h, float64 through float32 to h, or uint8 to uint8). Equal shapes of
        at most 5 dimensions; both may be strided."""

    @kernel(writes="out", exact=True)
    def add(self, a: ArrayView, b: ArrayView, out: ArrayView, stream: int) -> None:
        """out = a + b. h, equal sizes; b may have fewer elements: then a's size is a multiple of b's, and b
        repeats (leading broadcast)."""

    @kernel(writes="out", sums={"out": "x"}, workspace=measured("column_sum_workspace", "x"))
    def sum_rows(self, x: ArrayView, out: ArrayView, workspace: ArrayView | None, stream: int) -> None:
        """out = column sums of x. x: h (M, N); out: h (N,). Workspace as ``column_sum_workspace``."""

    @workspace_of("dropout_bwd", "sum_rows")
    def column_sum_workspace(self, rows: int, columns: int) -> int:
        """Bytes of workspace of the column sums in ``dropout_bwd``."""

    @kernel(writes="out", updates="state", exact=True)
    def rng_next_(self, state: ArrayView, out: ArrayView, stream: int) -> None:
        """out = state; state[1] += 1. Both int64 [2]: hands one operation its own (seed, offset) without the
        host."""
