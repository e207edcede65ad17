"""The contract of normalisation."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.cast import Cast
from fp8kit.backends.protocol.spec import kernel, measured, workspace_of

Normalization = Literal["LayerNorm", "RMSNorm", "L2Normalization"]
NORMALIZATIONS: tuple[str, ...] = get_args(Normalization)


class Norms(Protocol):
    """Normalisation over rows."""

    @kernel(writes="y mean rstd cast", updates="amax", casts="y")
    def norm_fwd(
        self,
        x: ArrayView,
        weight: ArrayView | None,
        bias: ArrayView | None,
        y: ArrayView | None,
        mean: ArrayView | None,
        rstd: ArrayView,
        amax: ArrayView | None,
        cast: Cast | None,
        normalization: Normalization,
        epsilon: float,
        zero_centered_gamma: bool,
        stream: int,
    ) -> None:
        """y = (x - mean) * rstd * g + bias per row (LayerNorm, Ba et al. 2016), or x * rstd * g (RMSNorm,
        Zhang & Sennrich 2019; mean and bias None); g = weight, or 1 + weight with zero_centered_gamma. x, y:
        h (M, N); weight, bias: h (N,); mean, rstd: float32 (M,), written, rstd = 1 / sqrt(var + epsilon). y,
        cast or both are given. amax: float32[1] or None, max-accumulated with max|y| (current scaling; with
        ``cast`` its own amax is used and this is None). The cast is by one scale.

        L2Normalization: y = x / sqrt(sum of x^2 + epsilon), which is RMSNorm with epsilon / N for epsilon (so
        is rstd) and g = 1 / sqrt(N) throughout; weight, bias and mean None."""

    @kernel(
        writes="dx dweight dbias",
        sums={"dbias": "dy"},
        ordered=True,
        workspace=measured("norm_bwd_workspace", "x"),
    )
    def norm_bwd(
        self,
        dy: ArrayView,
        x: ArrayView,
        weight: ArrayView | None,
        mean: ArrayView | None,
        rstd: ArrayView,
        residual: ArrayView | None,
        dx: ArrayView,
        dweight: ArrayView | None,
        dbias: ArrayView | None,
        normalization: Normalization,
        zero_centered_gamma: bool,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """Gradients of ``norm_fwd``. residual: h (M, N) or None, added to dx before rounding (a residual
        stream's fan-in); dx may be the same memory as dy or residual. dweight, dbias: h (N,), summed over
        rows in a fixed order; None where there is no such parameter."""

    @workspace_of("norm_bwd")
    def norm_bwd_workspace(self, rows: int, columns: int) -> int:
        """Bytes of ``norm_bwd``'s workspace."""
