"""The contract of stochastic depth."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel


class DropPaths(Protocol):
    """Stochastic depth."""

    @kernel(writes="y")
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
