"""The contract of casts and scales, and ``Cast``: where a kernel of any family writes its result in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fp8kit.arrays import ArrayView, Shape
from fp8kit.errors import BackendError
from fp8kit.formats import Format


class Rule(NamedTuple):
    """Current scaling's rule: ``scale_from_amax`` with the largest value of a cast's format, and float32's
    for an Inf."""

    power_2: bool
    epsilon: float


class Cast:
    """Where and how a kernel writes a high-precision result in FP8 (per-tensor scaling).

    The kernel first rounds its result to the high-precision dtype that it would have stored, then takes the
    amax of that, then writes ``encode(result * scale)``, nearest even, saturating.

    * ``format``: target format.
    * ``q``: uint8 (Mp, Np) or None, row-major codes. ``q_t``: uint8 (Np, Mp) or None, the transposed codes.
      Mp >= M and Np >= N; what lies beyond the result is written as zero codes and enters no amax. At least
      one of the two is given. Both may be strided along rows (last stride 1): several weight segments are
      cast into one buffer.
    * ``scale``: float32[1], read. ``scale_inv``: float32[1], written ``1 / scale``.
    * ``amax``: float32[1] or None, max-accumulated with max|result|.
    * ``rule``: where there is one, the scale is what it makes of ``amax``, which is read and not changed, and
      ``scale`` is None. Not in ``quantize_transpose_many``.

    ValueError for a scale and a rule, for neither, and for a rule without an amax.
    """

    __slots__ = ("amax", "format", "q", "q_t", "rule", "scale", "scale_inv")

    def __init__(
        self,
        format: Format,
        q: ArrayView | None,
        q_t: ArrayView | None,
        scale: ArrayView | None,
        scale_inv: ArrayView,
        amax: ArrayView | None,
        rule: Rule | None = None,
    ) -> None:
        if (scale is None) is (rule is None) or (rule is not None and amax is None):
            raise ValueError(
                f"Cast: got scale {scale!r}, amax {amax!r} and rule {rule!r}, expected a scale, "
                "or an amax and a rule"
            )
        self.format = format
        self.q = q
        self.q_t = q_t
        self.scale = scale
        self.scale_inv = scale_inv
        self.amax = amax
        self.rule = rule


def want_scale(cast: Cast) -> None:
    """BackendError for a cast with a rule, which ``quantize_transpose_many`` does not take."""
    if cast.rule is not None:
        raise BackendError(
            "quantize_transpose_many", "cast", "a rule", "a scale, as scale_from_amax makes it"
        )


BLOCK = 128  # elements along the contraction that share a scale in ``block_quantize`` and ``block_gemm``


def block_shapes(rows: int, columns: int, tile: tuple[int, int]) -> tuple[Shape, Shape]:
    """Shapes of an operand of ``block_gemm`` for a matrix of (rows, columns): of its codes, uint8, and of its
    scale_inv, float32."""
    r, k = -(-rows // 16) * 16, -(-columns // BLOCK) * BLOCK
    scales = (k // BLOCK, r) if tile[0] == 1 else (-(-r // BLOCK), -(-k // (4 * BLOCK)) * 4)
    return (r, k), scales


class Quantization(Protocol):
    """Casts and scales."""

    def amax(self, x: ArrayView, amax: ArrayView, tile: tuple[int, int], stream: int) -> None:
        """amax[i, j] = max(amax[i, j], max|x| over tile (i, j)). x: h or float64, as float32 (M, N). tile:
        (rows, columns) of a tile; (M, N) is per tensor, (1, N) per row. amax: float32, ceil(M / rows) *
        ceil(N / columns) elements."""

    def amax_many(self, xs: Sequence[ArrayView], amaxes: Sequence[ArrayView], stream: int) -> None:
        """amaxes[i] = max(amaxes[i], max|xs[i]|) for every tensor. xs: h, of any shape; amaxes: float32 [1],
        which may repeat."""

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

    def update_delayed_(
        self,
        scales: Sequence[ArrayView],
        scale_invs: Sequence[ArrayView],
        histories: Sequence[ArrayView],
        fp8_maxes: Sequence[float],
        margin: int,
        most_recent: bool,
        stream: int,
    ) -> None:
        """Delayed scaling's update of many states at once. scales, scale_invs: float32 [n] each; histories:
        float32 [H, n].

        Per tensor: if history row 0 (the amax since the last update) is 0, nothing changes. Else amax = max
        over all rows, NaN ignored (``most_recent``: row 0); scale = fp8_max * 2**-margin / amax, brought into
        ``recipe.DELAYED_SCALES`` (2^-126 for less, FLT_MAX for more, Inf too), if amax is finite and
        positive, else unchanged; scale_inv = 1 / scale; then the rows roll by -1, row 0's amax becomes row H
        - 1, and row 0 becomes 0."""

    def quantize(
        self,
        x: ArrayView,
        q: ArrayView,
        scale: ArrayView,
        scale_inv: ArrayView,
        amax: ArrayView | None,
        format: Format,
        tile: tuple[int, int],
        saturate: bool,
        rng: ArrayView | None,
        stream: int,
    ) -> None:
        """q = encode(float32(x) * scale): the plain cast. x: h or float64 (M, N); q: uint8 (M, N); scale,
        scale_inv and amax: float32, one element a tile (see ``amax``); scale is read, scale_inv written.
        Nearest even, or stochastic where ``rng`` is given: up iff word(i) < fraction * 2**32, i = row * N +
        column. saturate: |v| beyond the largest finite value, and Inf, become it; else they become Inf (or
        NaN where the format has none); overflow is judged after rounding. NaN becomes the positive NaN code
        (the largest value where there is none). Unsigned formats: a negative value becomes NaN, where there
        is none the smallest code. Ties between codes of no mantissa (E8M0) go to the even code. Any
        ``Format``."""

    def dequantize(
        self,
        q: ArrayView,
        x: ArrayView,
        scale_inv: ArrayView,
        format: Format,
        tile: tuple[int, int],
        stream: int,
    ) -> None:
        """x = decode(q) * scale_inv in float32, rounded to x's dtype. q: uint8 (M, N); x: h (M, N); scale_inv
        as in ``quantize``."""

    def quantize_transpose(
        self, x: ArrayView, cast: Cast, dbias: ArrayView | None, workspace: ArrayView | None, stream: int
    ) -> None:
        """The layers' cast: x, h (M, N), to both orientations with padding (see ``Cast``); E4M3 or E5M2.
        dbias: h (N,) or None, written with the sums of x's columns."""

    def quantize_transpose_workspace(self, rows: int, columns: int) -> int:
        """Bytes of ``quantize_transpose``'s workspace when it has a dbias."""

    def quantize_transpose_many(self, xs: Sequence[ArrayView], casts: Sequence[Cast], stream: int) -> None:
        """``quantize_transpose``, without a dbias, of every x into the cast at its place. Casts may share
        scale, scale_inv and amax: those of the parts of one weight, whose codes lie in one buffer."""

    def block_quantize(
        self,
        x: ArrayView,
        q: ArrayView | None,
        scale_inv: ArrayView | None,
        q_t: ArrayView | None,
        scale_inv_t: ArrayView | None,
        format: Format,
        tile: tuple[int, int],
        power_2: bool,
        epsilon: float,
        stream: int,
    ) -> None:
        """Current scaling by blocks, x and its transpose each as an operand of ``block_gemm``; E4M3 or E5M2.
        x: h (M, N), rows of 1 x 128 or squares of 128 x 128 elements share a scale: ``tile``. q: uint8 (M up
        to 16, N up to 128: the next multiples), q_t: uint8 (N up to 16, M up to 128), either may be None;
        zero codes beyond x. A scale is ``scale_from_amax`` of its tile's amax with fp8_max = format.max and
        value_for_inf = the largest finite value of x's dtype; the code is ``encode(x * scale)``, saturating.

        Tile (1, 128) runs along the contraction: q has a scale for 128 neighbours of a row of x, q_t, cast
        from x as well, one for 128 neighbours of a column. Tile (128, 128): q_t is q transposed. Layouts
        (cuBLASLt's), of an operand (R, Kp): tile (1, 128): float32 (Kp / 128, R); tile (128, 128): float32
        (ceil(R / 128), Kp / 128 up to 4). Every element is written, 1 for a tile outside x."""

    def block_quantize_many(
        self,
        xs: Sequence[ArrayView],
        qs: Sequence[ArrayView | None],
        scale_invs: Sequence[ArrayView | None],
        q_ts: Sequence[ArrayView | None],
        scale_inv_ts: Sequence[ArrayView | None],
        format: Format,
        tile: tuple[int, int],
        power_2: bool,
        epsilon: float,
        stream: int,
    ) -> None:
        """``block_quantize`` of every x into the arrays at its place."""
