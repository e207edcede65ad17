"""The contract of casts by one scale, or by one for each tile."""

from __future__ import annotations

from typing import Any, Protocol

from fp8kit.arrays import ArrayView, Tile
from fp8kit.backends.protocol.cast import Cast
from fp8kit.backends.protocol.spec import kernel, workspace_of
from fp8kit.formats import Format


def _sums(kernels: Any, a: Any) -> int:
    return 0 if a.dbias is None else int(kernels.quantize_transpose_workspace(*a.x.shape))


class Quantization(Protocol):
    """Casts to and from FP8."""

    @kernel(writes="q scale_inv", updates="amax", exact=True)
    def quantize(
        self,
        x: ArrayView,
        q: ArrayView,
        scale: ArrayView,
        scale_inv: ArrayView,
        amax: ArrayView | None,
        format: Format,
        tile: Tile,
        saturate: bool,
        stochastic_bits: int,
        draw: int,
        rng: ArrayView | None,
        stream: int,
    ) -> None:
        """q = encode(float32(x) * scale): the plain cast. x: h or float64 (M, N); q: uint8 (M, N); scale,
        scale_inv and amax: float32, one element a tile (see ``amax``); scale is read, scale_inv written.
        stochastic_bits 0: nearest even, rng is None. n, at most 32: stochastic by word(i) of ``rng``, i =
        draw * 2**48 + row * N + column: up iff its top n bits are less than floor(fraction * 2**n) (n = 32:
        less than fraction * 2**32); casts of one operation have numbers ``draw`` of their own, 0 to 32767.
        saturate: |v| beyond the largest finite value, and Inf, become it; else they become Inf (or NaN where
        the format has none); overflow is judged after rounding. NaN becomes the positive NaN code (the
        largest value where there is none). Unsigned formats: a negative value becomes NaN, where there is
        none the smallest code. Two's complement: one code of zero, and the most negative code is never made.
        Ties between codes of no mantissa (E8M0) go to the even code. Any ``Format``."""

    @kernel(writes="x", exact=True)
    def dequantize(
        self, q: ArrayView, x: ArrayView, scale_inv: ArrayView, format: Format, tile: Tile, stream: int
    ) -> None:
        """x = decode(q) * scale_inv in float32, rounded to x's dtype. q: uint8 (M, N); x: h (M, N); scale_inv
        as in ``quantize``."""

    @kernel(writes="cast dbias", casts="x", sums={"dbias": "x"}, workspace=_sums)
    def quantize_transpose(
        self, x: ArrayView, cast: Cast, dbias: ArrayView | None, workspace: ArrayView | None, stream: int
    ) -> None:
        """The layers' cast: x, h (M, N), to both orientations with padding (see ``Cast``); E4M3 or E5M2.
        dbias: h (N,) or None, written with the sums of x's columns."""

    @kernel(writes="q q_t scale_inv", exact=True)
    def quantize_stack(
        self,
        x: ArrayView,
        q: ArrayView | None,
        q_t: ArrayView | None,
        amax: ArrayView,
        scale_inv: ArrayView,
        format: Format,
        power_2: bool,
        epsilon: float,
        stream: int,
    ) -> None:
        """``quantize_transpose`` of several matrices, each with a scale of its own: x: h (E, M, N), E > 0; q:
        uint8 (E, Mp, Np) and q_t: uint8 (E, Np, Mp), either may be None, zero codes beyond x; amax: float32
        (E,), read; scale_inv: float32 (E,). A scale is what ``Rule(power_2, epsilon)`` makes of the matrix's
        amax. E4M3 or E5M2."""

    @workspace_of("quantize_transpose")
    def quantize_transpose_workspace(self, rows: int, columns: int) -> int:
        """Bytes of ``quantize_transpose``'s workspace when it has a dbias."""
