"""The contract of activations with learned numbers."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel, measured, workspace_of


class LearnedActivations(Protocol):
    """xIELU and its gradients."""

    @kernel(writes="y")
    def xielu_fwd(
        self,
        x: ArrayView,
        bias: ArrayView | None,
        alpha_p: ArrayView,
        alpha_n: ArrayView,
        y: ArrayView,
        params: tuple[float, ...],
        stream: int,
    ) -> None:
        """y = xielu(x + bias), by the formula of ``backends.activation``. x, y: h (M, F); bias: h (F,);
        alpha_p, alpha_n: h (1,); params: beta and eps."""

    @kernel(writes="dx dalpha_p dalpha_n", workspace=measured("xielu_bwd_workspace", "x"))
    def xielu_bwd(
        self,
        dy: ArrayView,
        x: ArrayView,
        bias: ArrayView | None,
        alpha_p: ArrayView,
        alpha_n: ArrayView,
        dx: ArrayView,
        dalpha_p: ArrayView,
        dalpha_n: ArrayView,
        params: tuple[float, ...],
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """Gradients of ``xielu_fwd``: dx as x; dalpha_p, dalpha_n as the numbers, 0 for an x of no
        elements, summed such that no term goes through more than 64 + elements / 2^16 additions."""

    @workspace_of("xielu_bwd")
    def xielu_bwd_workspace(self, rows: int, columns: int) -> int:
        """Bytes of ``xielu_bwd``'s workspace for an x of (rows, columns)."""
