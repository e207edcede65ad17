"""The contract of activations."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.cast import Cast
from fp8kit.backends.protocol.spec import kernel, measured, workspace_of


class Activations(Protocol):
    """Activations and their gradients."""

    @kernel(writes="y cast", updates="amax", casts="y")
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
        the amax is wanted. The cast may be by blocks (``Cast.tile``)."""

    @kernel(
        writes="dx dbias cast second",
        updates="amax",
        casts="dx",
        sums={"dbias": "dx"},
        workspace=measured("act_bwd_workspace", "x"),
    )
    def act_bwd(
        self,
        dy: ArrayView,
        x: ArrayView,
        bias: ArrayView | None,
        dx: ArrayView | None,
        dbias: ArrayView | None,
        amax: ArrayView | None,
        cast: Cast | None,
        second: Cast | None,
        activation: str,
        params: tuple[float, ...],
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """Gradients of ``act_fwd``: dx as x, dbias the column sums of dx (of dx rounded to h). dx, cast, amax
        as y there; dx of an activation that is not gated may be the same memory as dy. second: of a gated
        activation, beside a cast and without amax: cast is then of dx's first half of columns, and second of
        the second half, by a scale of its own; neither is by blocks.

        Without dx, second and padding, cast.q may begin in dy's memory, which is lost then: its first
        ``backends.activation.rows_in_dy`` rows are dy's last bytes, the others lie behind dy."""

    @workspace_of("act_bwd")
    def act_bwd_workspace(self, rows: int, columns: int) -> int:
        """Bytes of ``act_bwd``'s workspace for an x of (rows, columns)."""
