"""The contract of softmax over rows."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel


class Softmaxes(Protocol):
    """Softmax, and its gradient."""

    @kernel(writes="y")
    def softmax_fwd(self, x: ArrayView, y: ArrayView, stream: int) -> None:
        """y[i] = exp(x[i] - max(x[i])) / their sum, over the last dimension, in float32. x, y: h (M, N); y
        may be x's memory. A row that holds NaN or +Inf, and one of -Inf alone, becomes NaN."""

    @kernel(writes="dx")
    def softmax_bwd(self, y: ArrayView, dy: ArrayView, dx: ArrayView, stream: int) -> None:
        """dx[i] = y[i] (dy[i] - sum(y[i] dy[i])), in float32. y, dy, dx: h (M, N); dx may be dy's memory."""
