"""The contract of amaxes and scaling factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.protocol.spec import kernel


class Scales(Protocol):
    """Amaxes and scaling factors."""

    @kernel(updates="amax", exact=True)
    def amax(self, x: ArrayView, amax: ArrayView, tile: Tile, stream: int) -> None:
        """amax[i, j] = max(amax[i, j], max|x| over tile (i, j)). x: h or float64, as float32 (M, N). tile:
        (rows, columns) of a tile; (M, N) is per tensor, (1, N) per row. amax: float32, ceil(M / rows) *
        ceil(N / columns) elements."""

    @kernel(writes="scale scale_inv", exact=True)
    def scale_from_amax(
        self,
        amax: ArrayView,
        scale: ArrayView,
        scale_inv: ArrayView,
        fp8_max: float,
        power_2: bool,
        epsilon: float,
        value_for_inf: float,
        stream: int,
    ) -> None:
        """Current scaling's rule, element by element (Transformer Engine's compute_scale_from_amax). amax,
        scale, scale_inv: float32 [n].

        a = max(amax, epsilon); scale = 1 where a is 0, Inf or NaN, else fp8_max / a (correctly rounded),
        value_for_inf where that is Inf; power_2: the scale's mantissa bits are cleared (rounded down to a
        power of two). scale_inv = 1 / scale."""

    @kernel(updates="scales scale_invs histories", exact=True)
    def update_delayed_(
        self,
        scales: Sequence[ArrayView],
        scale_invs: Sequence[ArrayView],
        histories: Sequence[ArrayView],
        fp8_maxes: Sequence[float],
        margin: int,
        most_recent: bool,
        power_2: bool,
        growth: float | None,
        by_window: bool,
        stream: int,
    ) -> None:
        """Delayed scaling's update of many states at once. scales, scale_invs: float32 [n] each; histories:
        float32 [H, n].

        Per tensor: if history row 0 (the amax since the last update) is 0, nothing changes. Else amax = max
        over all rows, NaN ignored (``most_recent``: row 0); scale = fp8_max * 2**-margin / amax, brought into
        ``recipe.DELAYED_SCALES`` (2^-126 for less, FLT_MAX for more, Inf too), if amax is finite and
        positive, else unchanged, rounded down to a power of two with ``power_2``; scale_inv = 1 / scale; then
        the rows roll by -1, row 0's amax becomes row H - 1, and row 0 becomes 0.

        With ``growth``, at least 0, amax is a bound of the next one, in float32: where a row i > 0 holds a
        measure r, amax = max(r + growth * (H - i + 1)) over these, and row H - 1 becomes 0; else amax = row 0
        + growth, and row H - 1 becomes row 0, 0 where that is Inf or NaN.

        With ``by_window``, not beside ``growth``: where the oldest row (row 1; row 0 where H is 1) is more
        than ``recipe.UNFILLED`` the window is full: the scale changes, and the rows but row 0 become
        ``UNFILLED``, which stands for an amax that is still to come. Where it is 0, in the first window, the
        scale changes, too; else it does not."""
