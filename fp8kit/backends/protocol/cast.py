"""``Cast``: where a kernel of any family writes its result in FP8, by one scale or by those of blocks."""

from __future__ import annotations

from typing import NamedTuple

from fp8kit.arrays import ArrayView, Tile
from fp8kit.errors import BackendError
from fp8kit.formats import Format


class Rule(NamedTuple):
    """Current scaling's rule: ``scale_from_amax`` with the largest value of a cast's format, and float32's
    for an Inf; by blocks, that of the result's dtype."""

    power_2: bool
    epsilon: float


class Cast:
    """Where and how a kernel writes a high-precision result in FP8.

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
      ``scale`` is None.
    * ``tile``: None, one scale for the tensor; or (1, 128) or (128, 128), what ``block_quantize`` writes of
      the stored result, by the ``rule``'s numbers: q, q_t, ``scale_inv`` and ``scale_inv_t`` are of the
      shapes that it takes, C-contiguous, and there is no scale and no amax. Only the kernels of activations
      take such a cast.

    ValueError for a scale and a rule, for neither, for a rule without an amax, and for a tile with one.
    """

    __slots__ = ("amax", "format", "q", "q_t", "rule", "scale", "scale_inv", "scale_inv_t", "tile")

    def __init__(
        self,
        format: Format,
        q: ArrayView | None,
        q_t: ArrayView | None,
        scale: ArrayView | None,
        scale_inv: ArrayView | None,
        amax: ArrayView | None,
        rule: Rule | None = None,
        tile: Tile | None = None,
        scale_inv_t: ArrayView | None = None,
    ) -> None:
        if (scale is None) is (rule is None) or (rule is not None and (amax is None) is (tile is None)):
            raise ValueError(
                f"Cast: got scale {scale!r}, amax {amax!r}, rule {rule!r} and tile {tile!r}, expected a "
                "scale, or a rule with an amax or a tile"
            )
        self.format = format
        self.q = q
        self.q_t = q_t
        self.scale = scale
        self.scale_inv = scale_inv
        self.amax = amax
        self.rule = rule
        self.tile = tile
        self.scale_inv_t = scale_inv_t

    def by_tensor(self, operation: str) -> ArrayView:
        """Returns ``scale_inv`` of one scale. BackendError for a cast by blocks, which ``operation`` does not
        take."""
        if self.tile is not None or self.scale_inv is None:
            raise BackendError(operation, "cast.tile", self.tile, "None: one scale for the tensor")
        return self.scale_inv
