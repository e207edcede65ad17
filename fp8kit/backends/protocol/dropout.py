"""The contract of dropout with bias and residual."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel, measured


class Dropouts(Protocol):
    """Dropout with bias and residual."""

    @kernel(writes="y")
    def dropout_add(
        self,
        x: ArrayView,
        bias: ArrayView | None,
        residual: ArrayView | None,
        y: ArrayView,
        p: float,
        rng: ArrayView | None,
        stream: int,
    ) -> None:
        """y = residual + dropout(x + bias), rounded once. x, residual, y: h (M, N); bias: h (N,). p = 0 needs
        no rng. y may be x's memory."""

    @kernel(writes="dx dbias", workspace=measured("column_sum_workspace", "dy"))
    def dropout_bwd(
        self,
        dy: ArrayView,
        dx: ArrayView | None,
        dbias: ArrayView | None,
        p: float,
        rng: ArrayView | None,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """dx = dy * mask / (1 - p) with ``dropout_add``'s mask, and dbias = its column sums, taken before or
        after rounding. dx is None where only dbias is wanted."""
