"""The contract of activations, dropout and residuals."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.quantize import Cast


class Activations(Protocol):
    """Activations, dropout and residuals."""

    def act_fwd(
        self,
        x: ArrayView,
        bias: ArrayView | None,
        y: ArrayView | None,
        amax: ArrayView | None,
        cast: Cast | None,
        activation: str,
        params: tuple[float, ...],
        stream: int,
    ) -> None:
        """y = activation(x + bias), by the formulas of ``backends.activation``. x: h (M, F), or (M, 2F) where
        it is gated; y: h (M, F); bias: h, x's columns. params: the activation's numbers in the order of its
        row, empty where it has none. y, cast, amax as in ``norm_fwd``; neither y nor cast is given where only
        the amax is wanted."""

    def act_bwd(
        self,
        dy: ArrayView,
        x: ArrayView,
        bias: ArrayView | None,
        dx: ArrayView | None,
        dbias: ArrayView | None,
        amax: ArrayView | None,
        cast: Cast | None,
        activation: str,
        params: tuple[float, ...],
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """Gradients of ``act_fwd``: dx as x, dbias the column sums of dx (of dx rounded to h). dx, cast, amax
        as y there."""

    def act_bwd_workspace(self, rows: int, columns: int) -> int:
        """Bytes of ``act_bwd``'s workspace for an x of (rows, columns)."""

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

    def column_sum_workspace(self, rows: int, columns: int) -> int:
        """Bytes of workspace of the column sums in ``dropout_bwd``."""

    def drop_path(
        self,
        x: ArrayView,
        residual: ArrayView | None,
        y: ArrayView,
        starts: ArrayView | None,
        inner: int,
        count: int,
        p: float,
        rng: ArrayView,
        stream: int,
    ) -> None:
        """y = residual + x * factor of the row's sample: stochastic depth (Huang et al. 2016), and its
        gradient. x, residual, y: h (M, N); y may be x's memory. ``count`` samples; row i belongs to (i //
        inner) % count, or, with starts int32 (count + 1,), to the last sample s with starts[s] <= i. Factor:
        0 where word s of the stream is below int(p * 2^32), else float32(1 / (1 - p)); what is dropped is 0
        whatever it was. p in (0, 1)."""
